//! The daemon's listening sockets. They belong to the keeper, so that clients wait instead of being refused while no
//! server lives.

use std::{
    fs, io,
    net::TcpListener,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    rc::Rc,
};

use nix::{
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    sys::{
        socket::{Backlog, SockaddrLike, SockaddrStorage, getsockname, listen},
        stat::{Mode, umask},
    },
};

use super::Listener;

/// Connections that may wait for a server (the kernel cuts it to its own limit).
const BACKLOG: i32 = 4096;

/// What a socket's mode is without: it is 0600, or 0666.
const PRIVATE: Mode = Mode::from_bits_truncate(0o177);
const SHARED: Mode = Mode::from_bits_truncate(0o111);

/// An open listening socket.
#[derive(Debug)]
pub(super) struct Listening {
    /// As people write it, with the real port.
    pub(super) name: String,
    /// Non-blocking. `None`: closed.
    socket: Option<Rc<OwnedFd>>,
    /// The file to remove at the end, by path and identity.
    file: Option<(PathBuf, u64, u64)>,
}

/// Opens a listener.
///
/// # Errors
/// One line that says which address and why.
pub(super) fn open(listener: Listener) -> io::Result<Listening> {
    let name = match &listener {
        Listener::Unix(path) | Listener::SharedUnix(path) => format!("unix:{}", path.display()),
        Listener::Tcp(address) => format!("tcp:{address}"),
        Listener::Open(_) => "the socket that was passed in".to_owned(),
    };
    let explain = |error: io::Error| io::Error::new(error.kind(), format!("cannot listen on {name}: {error}"));
    match listener {
        Listener::Unix(path) => open_unix(&path, PRIVATE),
        Listener::SharedUnix(path) => open_unix(&path, SHARED),
        Listener::Tcp(address) => match TcpListener::bind(address) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(held()),
            bound => bound.map(OwnedFd::from).and_then(|socket| finish(socket, None)),
        },
        Listener::Open(socket) => finish(socket, None),
    }
    .map_err(explain)
}

fn open_unix(path: &Path, withheld: Mode) -> io::Result<Listening> {
    let path = std::path::absolute(path)?;
    let socket = match bind(&path, withheld) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            remove_dead(&path)?;
            bind(&path, withheld)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let directory = path.parent().unwrap_or(&path).display();
            Err(io::Error::new(error.kind(), format!("there is no directory {directory}; make it first")))
        }
        bound => bound,
    }?;
    let made = fs::symlink_metadata(&path)?;
    finish(socket.into(), Some((path, made.dev(), made.ino())))
}

/// Binds with its mode from the first moment on.
fn bind(path: &Path, withheld: Mode) -> io::Result<UnixListener> {
    let before = umask(withheld);
    let bound = UnixListener::bind(path);
    umask(before);
    bound
}

/// Removes a socket that nobody listens on any more; refuses everything else.
fn remove_dead(path: &Path) -> io::Result<()> {
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "something that is not a socket lies there"));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        // Also when it is only busy, or not ours to connect to: somebody holds it.
        Ok(_) | Err(_) => Err(held()),
    }
}

fn held() -> io::Error {
    io::Error::new(io::ErrorKind::AddrInUse, "another process is listening there")
}

fn finish(socket: OwnedFd, file: Option<(PathBuf, u64, u64)>) -> io::Result<Listening> {
    listen(&socket, Backlog::new(BACKLOG)?)?;
    fcntl(&socket, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    fcntl(&socket, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    let name = name(socket.as_fd())?;
    Ok(Listening { name, socket: Some(Rc::new(socket)), file })
}

fn name(socket: std::os::fd::BorrowedFd<'_>) -> io::Result<String> {
    use std::os::fd::AsRawFd;
    let address: SockaddrStorage = getsockname(socket.as_raw_fd())?;
    if let Some(unix) = address.as_unix_addr() {
        let path = unix.path().map_or_else(|| "(unnamed)".into(), |path| path.display().to_string());
        return Ok(format!("unix:{path}"));
    }
    let family = address.family();
    Ok(match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
        (Some(v4), _) => format!("tcp:{v4}"),
        (None, Some(v6)) => format!("tcp:{v6}"),
        (None, None) => format!("{family:?}"),
    })
}

impl Listening {
    /// What a server gets of it.
    pub(super) fn passed_on(&self) -> Option<(String, Rc<OwnedFd>)> {
        Some((self.name.clone(), self.socket.clone()?))
    }

    /// Closes this process's copy.
    pub(super) fn close(&mut self) {
        self.socket = None;
    }

    /// Removes the socket's file, if it is still the one that was made here.
    pub(super) fn remove_file(&self) {
        if let Some((path, device, inode)) = &self.file
            && fs::symlink_metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (*device, *inode))
        {
            // Nothing is lost when it stays: a dead socket is replaced at the next start.
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_dead_socket_is_replaced_a_live_one_and_a_file_are_not() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let path = directory.path().join("s");
        drop(UnixListener::bind(&path).expect("bound"));
        let live = open(Listener::Unix(path.clone())).expect("the dead one is replaced");
        assert_eq!(fs::metadata(&path).expect("exists").permissions().mode() & 0o777, 0o600);
        assert_eq!(live.name, format!("unix:{}", path.display()));

        let refused = open(Listener::Unix(path.clone())).expect_err("a live one is kept").to_string();
        assert!(refused.contains("another process is listening there"), "{refused}");
        live.remove_file();
        assert!(!path.exists());
        fs::write(&path, "data").expect("written");
        open(Listener::Unix(path.clone())).expect_err("a file is kept");
        live.remove_file();
        assert_eq!(fs::read(&path).expect("still there"), b"data");
    }

    #[test]
    fn what_stands_in_the_way_is_said() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let below = directory.path().join("none");
        let refused = open(Listener::Unix(below.join("s"))).expect_err("nothing to make it in").to_string();
        assert!(refused.ends_with(&format!("there is no directory {}; make it first", below.display())), "{refused}");

        let held = TcpListener::bind("127.0.0.1:0").expect("a socket");
        let address = held.local_addr().expect("an address");
        let refused = open(Listener::Tcp(address)).expect_err("taken").to_string();
        assert_eq!(refused, format!("cannot listen on tcp:{address}: another process is listening there"));
    }

    #[test]
    fn a_socket_is_open_to_others_only_where_that_was_asked_for() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let path = directory.path().join("s");
        let mode = |listener| {
            let listening = open(listener).expect("bound");
            let mode = fs::metadata(&path).expect("exists").permissions().mode() & 0o777;
            listening.remove_file();
            mode
        };
        assert_eq!(mode(Listener::Unix(path.clone())), 0o600);
        assert_eq!(mode(Listener::SharedUnix(path.clone())), 0o666);
    }

    #[test]
    fn a_tcp_listener_names_its_real_port() {
        let listening = open(Listener::Tcp("127.0.0.1:0".parse().expect("an address"))).expect("bound");
        let port = listening.name.strip_prefix("tcp:127.0.0.1:").and_then(|port| port.parse::<u16>().ok());
        assert_ne!(port.expect("a port"), 0);
    }
}
