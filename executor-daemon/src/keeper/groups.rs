//! Control groups (version 2): one for each tenant, with what its processes may have together.
//!
//! ```text
//!   the daemon's own group, delegated      cgroup.subtree_control: +cpu +memory +pids
//!     ├── keeper                           the keeper, the server, idle helpers
//!     ├── tenant-0                         the processes of tenants without rules of their own
//!     └── tenant-1 …                       of each with its own
//! ```
//! They are made where the own group is delegated to this process and holds nobody else, since a group with controllers must hold
//! no process itself. A helper goes into its tenant's group before it starts a command, so no process of a command is ever outside.
//! What cannot be made is said, and does not keep the keeper from its work: the limits are less then, and it is known which.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use super::{protocol::GroupLimits, serve::log, share};

/// Where version 2 is mounted, alone or beside version 1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// The group that the keeper and the server move to.
const OWN: &str = "keeper";

/// The controllers that are used.
const CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];

/// The groups of the tenants, as far as there are some.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// The daemon's own group; `None`: there are no groups.
    root: Option<PathBuf>,
    /// `cgroup.procs` of each, open: whoever is confined later can still write to it.
    entries: Vec<File>,
    /// By the tenants' numbers.
    limits: Vec<GroupLimits>,
}

impl Groups {
    /// Makes them for a daemon. Where there can be none, that is said if a limit was asked for, and the rest of them holds.
    pub(super) fn of_daemon(wanted: &[GroupLimits]) -> Self {
        Self::make(wanted).unwrap_or_else(|reason| {
            if wanted.iter().any(|limits| *limits != GroupLimits::default()) {
                log(format_args!(
                    "no control group for each tenant ({reason}): max_memory_bytes does not hold, and max_processes only for users of their own"
                ));
            }
            Self { limits: wanted.to_vec(), ..Self::default() }
        })
    }

    /// Makes them. `wanted`: in the order of their numbers.
    ///
    /// # Errors
    /// Why there are none: version 2 is not mounted, or not delegated to this process, or lacks a controller.
    pub(super) fn make(wanted: &[GroupLimits]) -> io::Result<Self> {
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let path = own.lines().find_map(|line| line.strip_prefix("0::")).ok_or(io::ErrorKind::NotFound)?;
        let mount = MOUNTS.into_iter().map(Path::new).find(|mount| mount.join("cgroup.controllers").exists());
        let mount = mount.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "version 2 is not mounted"))?;
        Self::make_below(&mount.join(path.trim_start_matches('/')), wanted)
    }

    fn make_below(root: &Path, wanted: &[GroupLimits]) -> io::Result<Self> {
        // The keeper of a daemon that was started in the group of one before it.
        let root = if root.file_name().is_some_and(|name| name == OWN) { root.parent().unwrap_or(root) } else { root };
        let has = fs::read_to_string(root.join("cgroup.controllers"))?;
        if let Some(missing) = CONTROLLERS.into_iter().find(|one| !has.split_whitespace().any(|has| has == *one)) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, format!("no controller {missing:?}")));
        }
        make_directory(&root.join(OWN))?;
        write(&root.join(OWN).join("cgroup.procs"), "0")?;
        write(&root.join("cgroup.subtree_control"), "+cpu +memory +pids")?;
        write(&root.join(OWN).join("cpu.weight"), share::WEIGHT)?;
        let groups = Self { root: Some(root.to_owned()), entries: Vec::new(), limits: wanted.to_vec() };
        wanted.iter().enumerate().try_fold(groups, |mut groups, (number, limits)| {
            let path = path_of(root, number);
            make_directory(&path)?;
            let or_max = |limit: Option<u64>| limit.map_or_else(|| "max".to_owned(), |limit| limit.to_string());
            write(&path.join("pids.max"), &or_max(limits.max_processes))?;
            write(&path.join("memory.max"), &or_max(limits.max_memory_bytes))?;
            // All alike: whoever floods has no more of the processor than its part while others want theirs.
            write(&path.join("cpu.weight"), "100")?;
            groups.entries.push(File::options().write(true).open(path.join("cgroup.procs"))?);
            Ok(groups)
        })
    }

    /// Moves this process into the group of this number; false: there are no groups.
    ///
    /// # Errors
    /// What the kernel answers; there is no such group.
    pub(super) fn enter(&self, number: u32) -> io::Result<bool> {
        if self.root.is_none() {
            return Ok(false);
        }
        let entry = usize::try_from(number).ok().and_then(|number| self.entries.get(number));
        let mut entry = entry.ok_or(io::ErrorKind::NotFound)?;
        entry.write_all(b"0").map(|()| true)
    }

    /// The limit on processes that a user of this tenant has where there are no groups.
    pub(super) fn processes_of_user(&self, number: u32) -> Option<u64> {
        self.limits.get(usize::try_from(number).ok()?)?.max_processes
    }

    /// Removes them, at the end of the keeper; helpers that are in one go back to the keeper's.
    pub(super) fn remove(&self) {
        let Some(root) = &self.root else { return };
        for number in 0..self.entries.len() {
            let path = path_of(root, number);
            for pid in fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default().lines() {
                // It may have ended meanwhile.
                let _ = write(&root.join(OWN).join("cgroup.procs"), pid);
            }
            // One that cannot be removed stays, and the next keeper uses it again.
            let _ = fs::remove_dir(path);
        }
    }
}

/// Whether the processes of the tenant of this number are in a group of its own: whether this process, the server, is in the
/// keeper's beside it.
pub(crate) fn are_made(number: u32) -> bool {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some(path) = own.lines().find_map(|line| line.strip_prefix("0::")?.strip_suffix(&format!("/{OWN}"))) else {
        return false;
    };
    let number = usize::try_from(number).unwrap_or(usize::MAX);
    let root = |mount: &str| Path::new(mount).join(path.trim_start_matches('/'));
    MOUNTS.into_iter().any(|mount| path_of(&root(mount), number).join("memory.max").exists())
}

fn path_of(root: &Path, number: usize) -> PathBuf {
    root.join(format!("tenant-{number}"))
}

fn make_directory(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(of(path, &error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn write(path: &Path, value: &str) -> io::Result<()> {
    // These files are there; none is made.
    let written = File::options().write(true).open(path).and_then(|mut file| file.write_all(value.as_bytes()));
    written.map_err(|error| of(path, &error))
}

fn of(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree as the kernel shows it, as far as it is used.
    fn tree(controllers: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in ["cgroup.procs", "cgroup.subtree_control"] {
            fs::write(root.path().join(file), "").unwrap();
        }
        fs::write(root.path().join("cgroup.controllers"), controllers).unwrap();
        for group in [OWN, "tenant-0", "tenant-1"] {
            fs::create_dir(root.path().join(group)).unwrap();
            for file in ["cgroup.procs", "pids.max", "memory.max", "cpu.weight"] {
                fs::write(root.path().join(group).join(file), "").unwrap();
            }
        }
        root
    }

    fn read(root: &tempfile::TempDir, path: &str) -> String {
        fs::read_to_string(root.path().join(path)).unwrap()
    }

    fn wanted() -> [GroupLimits; 2] {
        [
            GroupLimits { max_processes: None, max_memory_bytes: None },
            GroupLimits { max_processes: Some(64), max_memory_bytes: Some(1 << 20) },
        ]
    }

    #[test]
    fn every_tenant_has_a_group_with_its_limits_and_helpers_go_there() {
        let root = tree("cpuset cpu io memory pids\n");
        let groups = Groups::make_below(root.path(), &wanted()).unwrap();
        assert_eq!(read(&root, "keeper/cgroup.procs"), "0");
        assert_eq!(read(&root, "cgroup.subtree_control"), "+cpu +memory +pids");
        let limits = |group: &str| ["pids.max", "memory.max"].map(|file| read(&root, &format!("{group}/{file}")));
        assert_eq!(
            (limits("tenant-0"), limits("tenant-1")),
            (["max", "max"].map(str::to_owned), ["64".to_owned(), "1048576".to_owned()])
        );
        assert_eq!(["keeper", "tenant-1"].map(|group| read(&root, &format!("{group}/cpu.weight"))), ["1000", "100"]);
        assert!(groups.enter(1).unwrap());
        assert_eq!(
            (read(&root, "tenant-0/cgroup.procs"), read(&root, "tenant-1/cgroup.procs")),
            (String::new(), "0".to_owned())
        );
        groups.enter(2).unwrap_err();
    }

    #[test]
    fn a_keeper_that_is_started_in_the_group_of_another_uses_the_same() {
        let root = tree("cpu memory pids");
        let groups = Groups::make_below(&root.path().join(OWN), &wanted()).unwrap();
        assert_eq!(groups.root.as_deref(), Some(root.path()));
    }

    #[test]
    fn what_is_missing_is_named_and_nothing_is_entered_without_groups() {
        let root = tree("cpu pids");
        let error = Groups::make_below(root.path(), &wanted()).unwrap_err();
        assert_eq!(error.to_string(), r#"no controller "memory""#);
        assert!(!Groups::default().enter(7).unwrap());
        let nothing = tempfile::tempdir().unwrap();
        Groups::make_below(nothing.path(), &wanted()).unwrap_err();
    }

    #[test]
    fn this_host_has_groups_or_says_why_not() {
        // Not made here: this process would leave its own group for good.
        match fs::read_to_string("/sys/fs/cgroup/cgroup.controllers") {
            Ok(has) if CONTROLLERS.iter().all(|one| has.split_whitespace().any(|has| has == *one)) => {
                println!("version 2 with all controllers: {has}");
            }
            other => println!("not tried on this host's own tree: {other:?}"),
        }
    }
}
