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
    fcntl::{Flock, FlockArg, OFlag, open},
    sys::stat::{Mode, fchmod, fstat},
    unistd::{Gid, Uid, fchown},
};

use super::identity;
use crate::keeper::{ServerUser, protocol::Identity};

/// What root keeps its state in.
const ROOT_S: &str = "/var/lib/executor-daemon";

/// The file that is locked.
const LOCK: &str = "lock";

/// A daemon that was killed leaves children that hold its lock until they have ended what they had started. That long
/// a new one waits for them, and looks that often.
const DEAD_HOLDER_S_CHILDREN: Duration = Duration::from_secs(10);
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Mode of the directory where nobody but the daemon's user has business in it.
const PRIVATE: u32 = 0o700;

/// Mode where commands run under another uid: they cannot list it, but can reach the spill files that they were told of.
const TRAVERSABLE: u32 = 0o711;

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
    /// Commands run as another user, who cannot get to the spill files that they are told of.
    #[error(
        "state directory {}: user {user} cannot reach the spill files in it, since a directory above lets others not \
         through; use another --state-dir, or chmod o+x what is above",
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
        "state directory {}: the server (uid {uid}) cannot reach it, since a directory above lets others not through; use \
         another --state-dir, or chmod o+x what is above",
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
        return Ok(ROOT_S.into());
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
    _lock: Flock<File>,
}

impl StateDir {
    /// Where the server keeps what it writes: a directory of its own where it has a user of its own, else the state directory
    /// itself.
    #[must_use]
    pub fn server_s(path: &Path, server: Option<ServerUser>) -> PathBuf {
        if server.is_some() { path.join("server") } else { path.to_owned() }
    }

    /// Makes the directory if it is missing, sets its mode and takes it for this process.
    ///
    /// # Errors
    /// When it cannot be used, is somebody else's or out of the commands' reach, or another daemon uses it.
    pub fn take(path: &Path, commands: &Identity, server: Option<ServerUser>) -> Result<Self, StateDirError> {
        let unusable = |error| StateDirError::Unusable { path: path.to_owned(), error };
        let mode = if commands.change || server.is_some() { TRAVERSABLE } else { PRIVATE };
        fs::DirBuilder::new().recursive(true).mode(mode).create(path).map_err(unusable)?;
        let metadata = fs::metadata(path).map_err(unusable)?;
        let uid = nix::unistd::geteuid().as_raw();
        if metadata.uid() != uid {
            return Err(StateDirError::Foreign { path: path.to_owned(), owner: metadata.uid(), uid });
        }
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(unusable)?;
        if !identity::can_enter(commands, path) {
            return Err(StateDirError::OutOfReach { path: path.to_owned(), user: commands.name.clone() });
        }
        if let Some(server) = server {
            if !identity::server_can_enter(server, path) {
                return Err(StateDirError::OutOfServersReach { path: path.to_owned(), uid: server.uid });
            }
            give_to_server(&Self::server_s(path, Some(server)), server)?;
        }
        let given_up = Instant::now() + DEAD_HOLDER_S_CHILDREN;
        let mut lock = loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            let file = options.open(path.join(LOCK)).map_err(unusable)?;
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
        lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id())).map_err(unusable)?;
        Ok(Self { _lock: lock })
    }
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
        Identity { name: "x".into(), uid, gid: uid, groups: Vec::new(), home: "/".into(), change }
    }

    #[test]
    fn a_state_directory_is_private_and_has_one_daemon() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("a/b");
        let first = StateDir::take(&path, &commands(false), None).expect("the first takes it");
        let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o7777;
        assert_eq!(mode(&path), 0o700);
        let second = StateDir::take(&path, &commands(false), None).expect_err("the second is refused").to_string();
        let own = std::process::id();
        assert!(second.contains(&format!("another daemon (pid {own}) uses it")), "{second}");
        drop(first);

        let set = |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).expect("a mode");
        set(0o711);
        let path = dir.path().join("c/d");
        let _again = StateDir::take(&path, &commands(true), None).expect("another user's commands can reach it");
        assert_eq!(mode(&path), 0o711);
        set(0o700);
        let path = dir.path().join("e");
        let error = StateDir::take(&path, &commands(true), None).expect_err("out of reach").to_string();
        assert!(error.contains("user x cannot reach the spill files in it"), "{error}");
    }

    #[test]
    fn the_server_gets_a_directory_of_its_own() {
        let server = ServerUser { uid: 3_999_998, gid: 3_999_997 };
        let dir = tempfile::tempdir().expect("a temporary directory");
        let set = |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).expect("a mode");
        let path = dir.path().join("state");
        set(0o700);
        let error = StateDir::take(&path, &commands(false), Some(server)).expect_err("out of reach").to_string();
        assert!(error.contains("the server (uid 3999998) cannot reach it"), "{error}");
        set(0o755);
        let taken = StateDir::take(&path, &commands(false), Some(server));
        if !nix::unistd::geteuid().is_root() {
            eprintln!("not root: the rest would need another user");
            return;
        }
        drop(taken.expect("it can be reached now"));
        let own = StateDir::server_s(&path, Some(server));
        let metadata = fs::metadata(&own).expect("it is there");
        assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o7777), (3_999_998, 3_999_997, 0o700));
        assert_eq!(fs::metadata(&path).expect("there").uid(), 0);
        drop(StateDir::take(&path, &commands(false), Some(server)).expect("taken again"));
        let other = ServerUser { uid: 3_999_996, ..server };
        let error = StateDir::take(&path, &commands(false), Some(other)).expect_err("another one's").to_string();
        assert!(error.contains("belongs to uid 3999998, not to the server's uid 3999996"), "{error}");
        // A link in its place is not followed.
        fs::remove_dir(&own).expect("empty");
        std::os::unix::fs::symlink(dir.path(), &own).expect("a link");
        StateDir::take(&path, &commands(false), Some(server)).expect_err("refused");
        assert_eq!(fs::metadata(dir.path()).expect("there").uid(), 0);
    }

    #[test]
    fn what_is_no_directory_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let error = StateDir::take(file.path(), &commands(false), None).expect_err("refused").to_string();
        assert!(error.starts_with(&format!("state directory {}: ", file.path().display())), "{error}");
    }
}
