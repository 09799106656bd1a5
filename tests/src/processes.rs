//! Looking for processes by marks that nothing else carries.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::{ffi::OsStringExt, fs::OpenOptionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    fcntl::OFlag,
    sys::stat::Mode,
    unistd::{SysconfVar, mkfifo, sysconf},
};

/// A living process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its id.
    pub pid: i32,
    /// Its parent's id.
    pub parent: i32,
    /// When it was started, in ticks since boot: with the pid, what makes it itself.
    pub started: u64,
    /// One letter: `R`, `S`, `Z` and so on.
    pub state: char,
    /// Its arguments joined by spaces.
    pub command_line: String,
    /// Its program, by the path that it was started from: another may lie there by now. `None`: it may not be seen.
    pub program: Option<PathBuf>,
}

impl Found {
    /// Whether this very process is still alive (a zombie is not).
    #[must_use]
    pub fn is_alive(&self) -> bool {
        look(self.pid).is_some_and(|now| now.started == self.started && !now.is_dead())
    }

    /// Whether it has ended and only waits for its parent.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

/// What the kernel says of a process, from its state on.
fn stat(pid: i32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything, also spaces and parentheses.
    let (_, fields) = stat.rsplit_once(") ")?;
    Some(fields.split(' ').map(ToOwned::to_owned).collect())
}

/// What a process has computed so far, in the kernel and outside, without its children.
fn cpu_time(pid: i32) -> Option<Duration> {
    let fields = stat(pid)?;
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    let per_second = u64::try_from(sysconf(SysconfVar::CLK_TCK).ok()??).ok()?;
    Some(Duration::from_millis(ticks * 1_000 / per_second))
}

/// What each of some processes has computed so far.
#[must_use]
pub fn cpu_times(of: &[Found]) -> BTreeMap<(i32, u64), Duration> {
    of.iter().filter_map(|one| Some(((one.pid, one.started), cpu_time(one.pid)?))).collect()
}

/// One process; `None`: there is none with this id.
#[must_use]
pub fn look(pid: i32) -> Option<Found> {
    let fields = stat(pid)?;
    let command_line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    Some(Found {
        pid,
        state: fields.first()?.chars().next()?,
        parent: fields.get(1)?.parse().ok()?,
        started: fields.get(19)?.parse().ok()?,
        command_line: String::from_utf8_lossy(&command_line).replace('\0', " ").trim_end().to_owned(),
        program: program(pid),
    })
}

fn program(pid: i32) -> Option<PathBuf> {
    let path = fs::read_link(format!("/proc/{pid}/exe")).ok()?.into_os_string().into_vec();
    Some(OsString::from_vec(path.strip_suffix(b" (deleted)").unwrap_or(&path).to_vec()).into())
}

/// All processes that there are, by id.
#[must_use]
pub fn all() -> BTreeMap<i32, Found> {
    let Ok(entries) = fs::read_dir("/proc") else { return BTreeMap::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, look(pid)?)))
        .collect()
}

/// All that descend from a process, itself included, living or dead.
#[must_use]
pub fn tree(root: i32) -> Vec<Found> {
    let all = all();
    let mut members: Vec<i32> = vec![root];
    let mut next = 0;
    while let Some(parent) = members.get(next).copied() {
        members.extend(all.values().filter(|one| one.parent == parent).map(|one| one.pid));
        next += 1;
    }
    members.iter().filter_map(|pid| all.get(pid).cloned()).collect()
}

/// The living processes that carry one of the marks in their arguments or environment, or work below the directory, and
/// that do not run `except`. A mark must be one that no other process on the machine can carry by chance.
#[must_use]
pub fn marked(marks: &[&str], directory: &Path, except: &Path) -> Vec<Found> {
    let carries =
        |bytes: &[u8]| marks.iter().any(|mark| bytes.windows(mark.len()).any(|window| window == mark.as_bytes()));
    let own = i32::try_from(std::process::id()).expect("process ids are small");
    all()
        .into_values()
        .filter(|one| one.pid != own && !one.is_dead() && one.program.as_deref() != Some(except))
        .filter(|one| {
            let file = |name: &str| format!("/proc/{}/{name}", one.pid);
            carries(&fs::read(file("cmdline")).unwrap_or_default())
                || carries(&fs::read(file("environ")).unwrap_or_default())
                || fs::read_link(file("cwd")).is_ok_and(|cwd| cwd.starts_with(directory))
        })
        .collect()
}

/// Knows without looking for processes whether one is left: a FIFO that a command opens for writing (`exec 9>witness`) and
/// that everything which comes from it inherits. A list of processes misses those that are replaced while it is made; this
/// misses only who closes the descriptor.
#[derive(Debug)]
pub struct Witness(File);

impl Witness {
    /// The file's name in its directory.
    pub const NAME: &str = "witness";

    /// Makes one in a directory, in place of an earlier one.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new(directory: &Path) -> io::Result<Self> {
        let path = directory.join(Self::NAME);
        if path.exists() {
            fs::remove_file(&path)?;
        }
        mkfifo(&path, Mode::from_bits_truncate(0o666))?;
        OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path).map(Self)
    }

    /// Whether some process holds it, now.
    ///
    /// # Panics
    /// When somebody has written to it.
    #[must_use]
    pub fn is_held(&mut self) -> bool {
        match self.0.read(&mut [0]) {
            Ok(0) => false,
            Ok(_) => panic!("nobody writes to it"),
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        }
    }
}
