//! The files in which the rings of running tasks lie: one per stream that has had a byte, `rings/<number of the start>.<stream>`.
//! What is in them is `output`'s.
//!
//! ```text
//!   made at the first byte ─► the task has ended, its tail is kept ─► removed
//!                        └──► its keeper or host died ─► read by the next engine ─► its tail is kept ─► removed
//! ```
//! A start's number is never used twice, so no file is taken for another's; those of starts that are not known go when the
//! journal is opened. All files together have a cap, by their full sizes, which they take on the disk only as far as they were
//! written. Where a file cannot be had or filled the ring is in memory, and one line says so until one can be had again; an empty
//! file then says that there was output.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use executor_proto::types::StreamName;
use nix::fcntl::OFlag;

use super::record::StartNumber;
use crate::output;

/// Bytes that all files may have together: 2,047 rings of the usual size.
const MAX_BYTES: u64 = 2 * 1024 * 1024 * 1024;

/// The directory of ring files.
#[derive(Debug)]
pub(super) struct Rings {
    directory: PathBuf,
    max_bytes: u64,
    files: Mutex<HashMap<(StartNumber, StreamName), Known>>,
    /// That none can be had was logged.
    failing: AtomicBool,
}

/// A file that is there.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// Its full size.
    bytes: u64,
    /// By this process. Else it was found.
    made: bool,
}

fn name_of(number: StartNumber, stream: StreamName) -> String {
    format!("{}.{}", number.0, stream.as_str())
}

fn parse(name: &str) -> Option<(StartNumber, StreamName)> {
    let (number, stream) = name.split_once('.')?;
    let number = StartNumber(number.parse().ok()?);
    let stream = StreamName::BOTH.into_iter().find(|name| name.as_str() == stream)?;
    // Written as we write it.
    (name_of(number, stream) == name).then_some((number, stream))
}

impl Rings {
    pub(super) fn open(state_dir: &Path) -> Self {
        let directory = state_dir.join("rings");
        // Where there is none yet, it is made with the first file.
        let _ = fs::set_permissions(&directory, fs::Permissions::from_mode(0o700));
        Self { directory, max_bytes: MAX_BYTES, files: Mutex::default(), failing: AtomicBool::new(false) }
    }

    /// For tests of the rules: no file can be had.
    #[cfg(any(test, fuzzing))]
    pub(super) fn nowhere() -> Self {
        Self::open(Path::new("/dev/null"))
    }

    #[cfg(test)]
    pub(super) fn with_cap(state_dir: &Path, max_bytes: u64) -> Self {
        Self { max_bytes, ..Self::open(state_dir) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(StartNumber, StreamName), Known>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes every file whose start is not known, and learns what the others take.
    pub(super) fn keep_only(&self, known: &HashSet<StartNumber>) {
        for file in fs::read_dir(&self.directory).into_iter().flatten().filter_map(Result::ok) {
            let size = file.metadata().ok().filter(fs::Metadata::is_file).map(|metadata| metadata.len());
            match file.file_name().to_str().and_then(parse).filter(|(number, _)| known.contains(number)).zip(size) {
                Some((name, bytes)) => {
                    self.lock().insert(name, Known { bytes, made: false });
                }
                None => self.delete(&file.path()),
            }
        }
    }

    /// Makes a file for a ring of so many bytes; `None`: there can be none.
    pub(super) fn make(&self, number: StartNumber, stream: StreamName, ring_bytes: u64) -> Option<File> {
        let made = self.try_make(number, stream, ring_bytes);
        match &made {
            Ok(_) => self.failing.store(false, Ordering::Relaxed),
            Err(error) if !self.failing.swap(true, Ordering::Relaxed) => {
                let directory = self.directory.display();
                tracing::warn!(
                    %error, %directory,
                    "there is no file for a task's output: until there can be, what tasks write does not outlive the daemon"
                );
            }
            Err(_) => {}
        }
        made.ok()
    }

    fn try_make(&self, number: StartNumber, stream: StreamName, ring_bytes: u64) -> io::Result<File> {
        let path = self.path((number, stream));
        let file = match create(&path) {
            // Of a process that was killed before the keeper held it: nothing that counts can be in it, since this one is asked
            // for a file. What was planted goes too.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && !self.has_made((number, stream)) => {
                fs::remove_file(&path)?;
                create(&path)?
            }
            // The first one, or somebody has tidied up.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.make_directory()?;
                create(&path)?
            }
            made => made?,
        };
        let fits = {
            let mut files = self.lock();
            let fits =
                files.values().map(|known| known.bytes).sum::<u64>().saturating_add(ring_bytes) <= self.max_bytes;
            files.insert((number, stream), Known { bytes: if fits { ring_bytes } else { 0 }, made: true });
            fits
        };
        // From here on the file stays: empty, it says that there was output.
        if !fits {
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, "the files of all tasks have too many bytes"));
        }
        output::prepare_ring_file(&file, ring_bytes)?;
        Ok(file)
    }

    fn has_made(&self, name: (StartNumber, StreamName)) -> bool {
        self.lock().get(&name).is_some_and(|known| known.made)
    }

    fn make_directory(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        // Whatever the umask has left of it.
        fs::set_permissions(&self.directory, fs::Permissions::from_mode(0o700))
    }

    /// A file that was left, open for reading; `None`: there is none.
    pub(super) fn left(&self, number: StartNumber, stream: StreamName) -> Option<io::Result<File>> {
        let name = (number, stream);
        let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
        let known = self.lock().contains_key(&name);
        known.then(|| OpenOptions::new().read(true).custom_flags(flags).open(self.path(name)))
    }

    /// Removes the files of a start.
    pub(super) fn remove(&self, number: StartNumber) {
        for stream in StreamName::BOTH {
            let name = (number, stream);
            let known = self.lock().remove(&name).is_some();
            if known {
                self.delete(&self.path(name));
            }
        }
    }

    fn path(&self, (number, stream): (StartNumber, StreamName)) -> PathBuf {
        self.directory.join(name_of(number, stream))
    }

    fn delete(&self, path: &Path) {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, file = %path.display(), "a ring file could not be removed");
            }
            Ok(()) | Err(_) => {}
        }
    }
}

fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600).custom_flags(OFlag::O_NOFOLLOW.bits()).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const RING: u64 = 8192;
    const OUT: StreamName = StreamName::Stdout;

    fn make(rings: &Rings, number: i64) -> Option<File> {
        rings.make(StartNumber(number), OUT, RING)
    }

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory.join("rings")).into_iter().flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn files_are_private_and_go_with_their_start() {
        let directory = tempfile::tempdir().unwrap();
        let rings = Rings::open(directory.path());
        assert!(!directory.path().join("rings").exists());
        let file = make(&rings, 7).expect("made");
        assert!(rings.make(StartNumber(7), StreamName::Stderr, RING).is_some() && make(&rings, 8).is_some());
        let mode = |name: &str| fs::metadata(directory.path().join(name)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("rings"), mode("rings/7.stdout")), (0o700, 0o600));
        assert_eq!(file.metadata().unwrap().len(), 4096 + RING);
        assert_eq!(names(directory.path()), ["7.stderr", "7.stdout", "8.stdout"]);
        assert!(matches!(rings.left(StartNumber(7), OUT), Some(Ok(_))));
        rings.remove(StartNumber(7));
        assert_eq!(names(directory.path()), ["8.stdout"]);
        assert!(rings.left(StartNumber(7), OUT).is_none());
    }

    #[test]
    fn what_nobody_knows_goes_at_the_start() {
        let directory = tempfile::tempdir().unwrap();
        let before = Rings::open(directory.path());
        assert!(make(&before, 1).is_some() && make(&before, 2).is_some());
        let victim = directory.path().join("victim");
        fs::write(&victim, "safe").unwrap();
        symlink(&victim, directory.path().join("rings/3.stdout")).unwrap();
        for name in ["01.stdout", "1.stdin", "x", "1.stdout.x"] {
            fs::write(directory.path().join("rings").join(name), "").unwrap();
        }
        let rings = Rings::open(directory.path());
        rings.keep_only(&[StartNumber(2), StartNumber(3)].into());
        assert_eq!(names(directory.path()), ["2.stdout"]);
        assert_eq!(fs::read(&victim).unwrap(), b"safe");
        assert!(matches!(rings.left(StartNumber(2), OUT), Some(Ok(_))));
    }

    #[test]
    fn what_is_in_the_way_is_not_used_but_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let before = Rings::open(directory.path());
        assert!(make(&before, 1).is_some());
        assert!(make(&before, 1).is_none(), "its own is none that is in the way");
        // A process that was killed before it had handed its file over.
        let rings = Rings::open(directory.path());
        rings.keep_only(&[StartNumber(1)].into());
        assert!(make(&rings, 1).is_some());
        let victim = directory.path().join("victim");
        fs::write(&victim, "safe").unwrap();
        symlink(&victim, directory.path().join("rings/2.stdout")).unwrap();
        fs::write(directory.path().join("rings/3.stdout"), "planted").unwrap();
        for number in [2, 3] {
            let file = make(&rings, number).expect("made");
            let path = directory.path().join(format!("rings/{number}.stdout"));
            assert!(fs::symlink_metadata(path).unwrap().is_file());
            assert_eq!(file.metadata().unwrap().len(), 4096 + RING);
        }
        assert_eq!(fs::read(&victim).unwrap(), b"safe");
    }

    #[test]
    fn all_files_together_have_a_cap() {
        let directory = tempfile::tempdir().unwrap();
        let rings = Rings::with_cap(directory.path(), 2 * RING);
        assert!(make(&rings, 1).is_some() && make(&rings, 2).is_some() && make(&rings, 3).is_none());
        // Empty, it says that there was output.
        assert_eq!(fs::metadata(directory.path().join("rings/3.stdout")).unwrap().len(), 0);
        rings.remove(StartNumber(1));
        rings.remove(StartNumber(3));
        assert!(make(&rings, 4).is_some());
        assert_eq!(names(directory.path()), ["2.stdout", "4.stdout"]);
    }

    #[test]
    fn a_directory_that_was_removed_is_made_again_and_one_that_cannot_be_made_costs_the_files() {
        let directory = tempfile::tempdir().unwrap();
        let rings = Rings::open(directory.path());
        assert!(make(&rings, 1).is_some());
        fs::remove_dir_all(directory.path().join("rings")).unwrap();
        assert!(make(&rings, 2).is_some());
        fs::remove_dir_all(directory.path().join("rings")).unwrap();
        fs::write(directory.path().join("rings"), "in the way").unwrap();
        assert!(make(&rings, 3).is_none());
        // Nothing of it is expected to be there.
        rings.remove(StartNumber(2));
        assert!(rings.left(StartNumber(3), OUT).is_none());
    }
}
