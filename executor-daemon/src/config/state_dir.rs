//! The state directory: where it is, that it is private, and that only one daemon uses it.

use std::{
    env,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, Flock, FlockArg, OFlag, fcntl, open},
    sys::stat::{Mode, fchmod, fstat},
    unistd::{Gid, Uid, fchown},
};

use super::identity;
use crate::keeper::{ServerUser, protocol::Identity};

/// What root keeps its state in.
const ROOT_STATE_DIR: &str = "/var/lib/executor-daemon";

/// The file that is locked.
const LOCK: &str = "lock";

/// A daemon that was killed leaves children that hold its lock: a server that writes down what it knows before it ends, helpers
/// that have not begun. That long a new one waits for them, and looks that often.
const DEAD_HOLDERS_CHILDREN: Duration = Duration::from_secs(10);
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Mode of the directory where nobody but the daemon's user has business in it.
const PRIVATE: u32 = 0o700;

/// Mode where commands run under another uid: they cannot list it, but can reach the spill files that they were told of.
const TRAVERSABLE: u32 = 0o711;

/// Bits of a mode that let somebody else put files in a directory.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Why the state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateDirError {
    /// It cannot be made, or its mode not be set.
    #[error("state directory {}: {error}", .path.display())]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// What the system answered.
        error: io::Error,
    },
    /// It is somebody else's, who could then read or replace what is in it.
    #[error("state directory {}: belongs to uid {owner}, not to the daemon's uid {uid}", .path.display())]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
        /// The daemon's.
        uid: u32,
    },
    /// Others could put files of theirs in it.
    #[error(
        "state directory {}: others may write in it (mode {mode:04o}); use a directory of the daemon's own, or chmod go-w it",
        .path.display()
    )]
    Shared {
        /// The directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// What is locked is not a file that the daemon made.
    #[error("state directory {}: lock in it is not a regular file of uid {uid} with this one name; remove it", .path.display())]
    NotOurLock {
        /// The directory.
        path: PathBuf,
        /// The daemon's.
        uid: u32,
    },
    /// Commands run as another user, who cannot get to the spill files that they are told of.
    #[error(
        "state directory {}: user {user} cannot reach the spill files in it, since it or a directory above lets others not \
         through; use another --state-dir, or chmod o+x what does not",
        .path.display()
    )]
    OutOfReach {
        /// The directory.
        path: PathBuf,
        /// Who commands run as.
        user: String,
    },
    /// The server has a user of its own, who cannot get to what it keeps.
    #[error(
        "state directory {}: the server (uid {uid}) cannot reach it, since it or a directory above lets others not through; use \
         another --state-dir, or chmod o+x what does not",
        .path.display()
    )]
    OutOfServersReach {
        /// The directory.
        path: PathBuf,
        /// Who the server runs as.
        uid: u32,
    },
    /// The server was another user before, whose files it cannot use.
    #[error(
        "state directory {}: belongs to uid {owner}, not to the server's uid {uid}; chown -R it, or give --server-user {owner}",
        .path.display()
    )]
    OtherServer {
        /// The server's directory.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
        /// Who the server runs as.
        uid: u32,
    },
    /// Another daemon uses it.
    #[error("state directory {}: another daemon{holder} uses it; stop that one, or give this one its own --state-dir", .path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
        /// ` (pid N)`, where that is known.
        holder: String,
    },
}

/// The directory that is used when none is configured. The error is a whole sentence.
pub(super) fn default_path(root: bool) -> Result<PathBuf, String> {
    if root {
        return Ok(ROOT_STATE_DIR.into());
    }
    // As the base directory specification says, a relative XDG_STATE_HOME counts as none.
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    match (absolute("XDG_STATE_HOME"), absolute("HOME")) {
        (Some(state), _) => Ok(state.join("executor-daemon")),
        (None, Some(home)) => Ok(home.join(".local/state/executor-daemon")),
        (None, None) => Err("must be given where neither XDG_STATE_HOME nor HOME is set".to_owned()),
    }
}

/// A locked state directory. Dropped, it is free for the next daemon.
#[derive(Debug)]
pub struct StateDir {
    /// One line for the operator, where state is there that is not used: which, and how to take it along.
    pub left_aside: Option<String>,
    _lock: Flock<File>,
}

impl StateDir {
    /// Where the server keeps what it writes: a directory of its own where it has a user of its own, else the state directory
    /// itself.
    #[must_use]
    pub fn of_server(path: &Path, server: Option<ServerUser>) -> PathBuf {
        if server.is_some() { path.join("server") } else { path.to_owned() }
    }

    /// Makes the directory if it is missing and takes it for this process. One that was there keeps its mode, but for one of
    /// a daemon that others have to pass through now.
    ///
    /// # Errors
    /// When it cannot be used, is somebody else's, open to others or out of the commands' reach, or another daemon uses it.
    pub fn take(path: &Path, commands: &[Identity], server: Option<ServerUser>) -> Result<Self, StateDirError> {
        let unusable = |error| StateDirError::Unusable { path: path.to_owned(), error };
        let mode =
            if commands.iter().any(|commands| commands.change) || server.is_some() { TRAVERSABLE } else { PRIVATE };
        let made = make(path, mode).map_err(unusable)?;
        let metadata = fs::metadata(path).map_err(unusable)?;
        let uid = nix::unistd::geteuid().as_raw();
        if metadata.uid() != uid {
            return Err(StateDirError::Foreign { path: path.to_owned(), owner: metadata.uid(), uid });
        }
        if !made && metadata.mode() & WRITABLE_BY_OTHERS != 0 {
            return Err(StateDirError::Shared { path: path.to_owned(), mode: metadata.mode() & 0o7777 });
        }
        // A private one with a lock in it is a daemon's, whose commands ran as its own user until now.
        let was_private = metadata.mode() & 0o7777 == PRIVATE && fs::symlink_metadata(path.join(LOCK)).is_ok();
        if made || was_private {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(unusable)?;
        }
        if let Some(commands) = commands.iter().find(|commands| !identity::can_enter(commands, path)) {
            return Err(StateDirError::OutOfReach { path: path.to_owned(), user: commands.name.clone() });
        }
        if let Some(server) = server {
            if !identity::server_can_enter(server, path) {
                return Err(StateDirError::OutOfServersReach { path: path.to_owned(), uid: server.uid });
            }
            give_to_server(&Self::of_server(path, Some(server)), server)?;
        }
        let given_up = Instant::now() + DEAD_HOLDERS_CHILDREN;
        let mut lock = loop {
            let file = open_lock(path, uid)?;
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => break lock,
                Err((file, Errno::EWOULDBLOCK)) => {
                    let holder = holder(file);
                    let dead = holder.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists());
                    if !dead || Instant::now() >= given_up {
                        let holder = holder.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
                        return Err(StateDirError::InUse { path: path.to_owned(), holder });
                    }
                    thread::sleep(LOCK_PAUSE);
                }
                Err((_, errno)) => return Err(unusable(errno.into())),
            }
        };
        // The server that the keeper starts inherits it: one that outlives its keeper for a moment still writes down what it knows.
        fcntl(&*lock, FcntlArg::F_SETFD(FdFlag::empty())).map_err(|errno| unusable(errno.into()))?;
        lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id())).map_err(unusable)?;
        Ok(Self { left_aside: left_aside(path, server), _lock: lock })
    }
}

/// What to say of state that another way to run commands has left and that the server would not use; `None` where there is
/// none, or where the server has begun its own.
fn left_aside(path: &Path, server: Option<ServerUser>) -> Option<String> {
    let (root_s, users) = (path.to_owned(), path.join("server"));
    let (from, to) = if server.is_some() { (root_s, users) } else { (users, root_s) };
    let has_journal = |directory: &Path| directory.join("journal.sqlite").exists();
    (has_journal(&from) && !has_journal(&to)).then(|| {
        let uid = server.map_or_else(|| nix::unistd::geteuid().as_raw(), |server| server.uid);
        format!(
            "the state in {from} is not used, and another is begun in {to}, since --run-as or --server-user changed; to take it \
             along, stop the daemon, move journal.sqlite*, instance-id, *-counter-*, rings and streams from {from} to {to} in place of \
             what is there, and chown -R them to uid {uid}",
            from = from.display(),
            to = to.display()
        )
    })
}

/// Makes a directory, and what is missing above it; false: it was there.
fn make(path: &Path, mode: u32) -> io::Result<bool> {
    let create = || fs::DirBuilder::new().mode(mode).create(path);
    let made = match (create(), path.parent()) {
        (Err(error), Some(above)) if error.kind() == io::ErrorKind::NotFound => {
            fs::DirBuilder::new().recursive(true).mode(mode).create(above).and_then(|()| create())
        }
        (made, _) => made,
    };
    match made {
        Ok(()) => Ok(true),
        Err(_) if path.is_dir() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Opens the file that is locked; makes it if it is missing. Nobody else's file, and nothing behind a link, is written to.
fn open_lock(path: &Path, uid: u32) -> Result<File, StateDirError> {
    let not_ours = || StateDirError::NotOurLock { path: path.to_owned(), uid };
    let unusable = |error| StateDirError::Unusable { path: path.to_owned(), error };
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits());
    let file = options.open(path.join(LOCK)).map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP | libc::EISDIR) => not_ours(),
        _ => unusable(error),
    })?;
    let metadata = file.metadata().map_err(unusable)?;
    let ours = metadata.is_file() && metadata.uid() == uid && metadata.nlink() == 1;
    if ours { Ok(file) } else { Err(not_ours()) }
}

/// Makes the server's directory, which nobody else has a way into.
fn give_to_server(path: &Path, server: ServerUser) -> Result<(), StateDirError> {
    let unusable = |error| StateDirError::Unusable { path: path.to_owned(), error };
    fs::DirBuilder::new().recursive(true).mode(PRIVATE).create(path).map_err(unusable)?;
    // What lies in it is the server's to name, the directory itself is not: it is in one of the daemon's.
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let held = open(path, flags, Mode::empty()).map_err(|errno| unusable(errno.into()))?;
    let owner = fstat(&held).map_err(|errno| unusable(errno.into()))?.st_uid;
    let made_just_now = owner == nix::unistd::geteuid().as_raw();
    if !made_just_now && owner != server.uid {
        return Err(StateDirError::OtherServer { path: path.to_owned(), owner, uid: server.uid });
    }
    fchmod(&held, Mode::from_bits_truncate(PRIVATE)).map_err(|errno| unusable(errno.into()))?;
    let (uid, gid) = (Uid::from_raw(server.uid), Gid::from_raw(server.gid));
    fchown(&held, Some(uid), Some(gid)).map_err(|errno| unusable(errno.into()))
}

/// Who holds the lock, as far as it has said so.
fn holder(file: File) -> Option<u32> {
    /// A pid and a newline are shorter.
    const MAX_BYTES: u64 = 32;

    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commands(change: bool) -> Identity {
        let uid = if change { 3_999_999 } else { nix::unistd::geteuid().as_raw() };
        Identity {
            name: "x".into(),
            uid,
            uids: 1,
            gid: uid,
            groups: Vec::new(),
            home: "/".into(),
            change,
            capabilities: None,
            allow_setuid: true,
        }
    }

    #[test]
    fn a_state_directory_is_private_and_has_one_daemon() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("a/b");
        let first = StateDir::take(&path, &[commands(false)], None).expect("the first takes it");
        let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o7777;
        assert_eq!(mode(&path), 0o700);
        let second = StateDir::take(&path, &[commands(false)], None).expect_err("the second is refused").to_string();
        let own = std::process::id();
        assert!(second.contains(&format!("another daemon (pid {own}) uses it")), "{second}");
        drop(first);

        let set = |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).expect("a mode");
        set(0o711);
        let path = dir.path().join("c/d");
        let _again = StateDir::take(&path, &[commands(true)], None).expect("another user's commands can reach it");
        assert_eq!(mode(&path), 0o711);
        set(0o700);
        let path = dir.path().join("e");
        let error = StateDir::take(&path, &[commands(true)], None).expect_err("out of reach").to_string();
        assert!(error.contains("user x cannot reach the spill files in it"), "{error}");
    }

    #[test]
    fn what_others_may_write_in_is_refused_and_keeps_its_mode() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let set = |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).expect("a mode");
        let mode = || fs::metadata(dir.path()).expect("it is there").mode() & 0o7777;
        let link = dir.path().with_extension("link");
        std::os::unix::fs::symlink(dir.path(), &link).expect("a link");
        for open in [0o1777, 0o777, 0o775, 0o757] {
            set(open);
            for path in [dir.path(), &link] {
                let error = StateDir::take(path, &[commands(false)], None).expect_err("refused").to_string();
                assert!(error.contains(&format!("others may write in it (mode {open:04o})")), "{error}");
                assert!(error.contains("chmod go-w"), "{error}");
                assert_eq!(mode(), open);
            }
        }
        fs::remove_file(&link).expect("ours");
        assert_eq!(fs::read_dir(dir.path()).expect("there").count(), 0);
        // One that is there and was not made by a daemon keeps its mode.
        set(0o755);
        for _ in 0..2 {
            drop(StateDir::take(dir.path(), &[commands(false)], None).expect("taken"));
            assert_eq!(mode(), 0o755);
        }
    }

    #[test]
    fn a_planted_lock_is_not_written_to() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (path, victim) = (dir.path().join("state"), dir.path().join("victim"));
        fs::write(&victim, "precious").expect("written");
        drop(StateDir::take(&path, &[commands(false)], None).expect("taken"));
        let lock = path.join(LOCK);
        let plants: [fn(&Path, &Path) -> io::Result<()>; 3] = [
            |victim, lock| std::os::unix::fs::symlink(victim, lock),
            |victim, lock| fs::hard_link(victim, lock),
            |_, lock| fs::create_dir(lock),
        ];
        for plant in plants {
            fs::remove_file(&lock).expect("there");
            plant(&victim, &lock).expect("planted");
            let error = StateDir::take(&path, &[commands(false)], None).expect_err("refused").to_string();
            assert!(error.contains("lock in it is not a regular file"), "{error}");
            assert_eq!(fs::read_to_string(&victim).expect("there"), "precious");
        }
    }

    #[test]
    fn the_server_gets_a_directory_of_its_own() {
        let server = ServerUser { uid: 3_999_998, gid: 3_999_997 };
        let dir = tempfile::tempdir().expect("a temporary directory");
        let set = |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).expect("a mode");
        let path = dir.path().join("state");
        set(0o700);
        let error = StateDir::take(&path, &[commands(false)], Some(server)).expect_err("out of reach").to_string();
        assert!(error.contains("the server (uid 3999998) cannot reach it"), "{error}");
        set(0o755);
        let taken = StateDir::take(&path, &[commands(false)], Some(server));
        if !nix::unistd::geteuid().is_root() {
            eprintln!("not root: the rest would need another user");
            return;
        }
        drop(taken.expect("it can be reached now"));
        let own = StateDir::of_server(&path, Some(server));
        let metadata = fs::metadata(&own).expect("it is there");
        assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o7777), (3_999_998, 3_999_997, 0o700));
        assert_eq!(fs::metadata(&path).expect("there").uid(), 0);
        drop(StateDir::take(&path, &[commands(false)], Some(server)).expect("taken again"));
        let other = ServerUser { uid: 3_999_996, ..server };
        let error = StateDir::take(&path, &[commands(false)], Some(other)).expect_err("another one's").to_string();
        assert!(error.contains("belongs to uid 3999998, not to the server's uid 3999996"), "{error}");
        // A link in its place is not followed.
        fs::remove_dir(&own).expect("empty");
        std::os::unix::fs::symlink(dir.path(), &own).expect("a link");
        StateDir::take(&path, &[commands(false)], Some(server)).expect_err("refused");
        assert_eq!(fs::metadata(dir.path()).expect("there").uid(), 0);
    }

    #[test]
    fn state_that_is_not_used_is_spoken_of_until_another_is_begun() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let server = Some(ServerUser { uid: 3_999_998, gid: 3_999_997 });
        let (own, other) = (dir.path().join("journal.sqlite"), dir.path().join("server/journal.sqlite"));
        fs::create_dir(dir.path().join("server")).expect("made");
        assert_eq!((left_aside(dir.path(), server), left_aside(dir.path(), None)), (None, None));
        fs::write(&own, "").expect("written");
        let line = left_aside(dir.path(), server).expect("one is there");
        assert!(line.starts_with(&format!("the state in {} is not used", dir.path().display())), "{line}");
        assert!(line.contains("chown -R them to uid 3999998"), "{line}");
        assert_eq!(left_aside(dir.path(), None), None);
        fs::rename(&own, &other).expect("moved");
        let line = left_aside(dir.path(), None).expect("one is there");
        assert!(line.starts_with(&format!("the state in {}/server is not used", dir.path().display())), "{line}");
        fs::write(&own, "").expect("written");
        assert_eq!((left_aside(dir.path(), server), left_aside(dir.path(), None)), (None, None));
    }

    #[test]
    fn what_is_no_directory_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let error = StateDir::take(file.path(), &[commands(false)], None).expect_err("refused").to_string();
        assert!(error.starts_with(&format!("state directory {}: ", file.path().display())), "{error}");
    }
}
