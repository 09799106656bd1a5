//! Either kind of socket, and how it is closed.

use std::{io, net::SocketAddr, os::fd::AsRawFd, path::PathBuf};

use anyhow::Context;
use nix::sys::socket::{Shutdown, shutdown};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// Where something listens.
#[derive(Debug, Clone)]
pub(super) enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl Address {
    /// Reads what clients are given: `unix:PATH` or `http://127.0.0.1:PORT`.
    pub(super) fn of_endpoint(endpoint: &str) -> anyhow::Result<Self> {
        if let Some(path) = endpoint.strip_prefix("unix:") {
            return Ok(Self::Unix(path.into()));
        }
        let address = endpoint.strip_prefix("http://").unwrap_or(endpoint);
        Ok(Self::Tcp(address.parse().with_context(|| format!("the endpoint {endpoint}"))?))
    }

    /// As clients name it.
    pub(super) fn endpoint(&self) -> String {
        match self {
            Self::Unix(path) => format!("unix:{}", path.display()),
            Self::Tcp(address) => format!("http://{address}"),
        }
    }

    /// Listens, and says where: the kernel picks the port where it is 0. A socket of before at this path is replaced.
    pub(super) async fn listen(&self) -> io::Result<(Listener, Self)> {
        match self {
            Self::Unix(path) => {
                self.forget()?;
                Ok((Listener::Unix(UnixListener::bind(path)?), self.clone()))
            }
            Self::Tcp(address) => {
                let listener = TcpListener::bind(address).await?;
                let address = Self::Tcp(listener.local_addr()?);
                Ok((Listener::Tcp(listener), address))
            }
        }
    }

    /// Removes what a listener leaves behind.
    pub(super) fn forget(&self) -> io::Result<()> {
        match self {
            Self::Unix(path) => match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                Ok(()) | Err(_) => Ok(()),
            },
            Self::Tcp(_) => Ok(()),
        }
    }

    pub(super) async fn connect(&self) -> io::Result<Socket> {
        match self {
            Self::Unix(path) => UnixStream::connect(path).await.map(Socket::Unix),
            Self::Tcp(address) => TcpStream::connect(address).await.and_then(Socket::tcp),
        }
    }
}

#[derive(Debug)]
pub(super) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    /// The next connection. Cancel-safe.
    pub(super) async fn accept(&self) -> io::Result<Socket> {
        match self {
            Self::Unix(listener) => listener.accept().await.map(|(stream, _)| Socket::Unix(stream)),
            Self::Tcp(listener) => listener.accept().await.and_then(|(stream, _)| Socket::tcp(stream)),
        }
    }
}

#[derive(Debug)]
pub(super) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Socket {
    fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream))
    }

    /// Reads what is there, or waits for it; 0 at the end. Cancel-safe.
    pub(super) async fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = match self {
                Self::Unix(stream) => {
                    stream.readable().await?;
                    stream.try_read(bytes)
                }
                Self::Tcp(stream) => {
                    stream.readable().await?;
                    stream.try_read(bytes)
                }
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
    }

    pub(super) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = match self {
                Self::Unix(stream) => {
                    stream.writable().await?;
                    stream.try_write(bytes)
                }
                Self::Tcp(stream) => {
                    stream.writable().await?;
                    stream.try_write(bytes)
                }
            };
            match written {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Says that nothing more will be written.
    pub(super) fn end(&self) -> io::Result<()> {
        let descriptor = match self {
            Self::Unix(stream) => stream.as_raw_fd(),
            Self::Tcp(stream) => stream.as_raw_fd(),
        };
        shutdown(descriptor, Shutdown::Write).map_err(Into::into)
    }

    /// Closes it so that the other side sees a reset where its kind of socket has one. A Unix socket has one where something
    /// was not read; else it ends.
    pub(super) fn reset(self) {
        if let Self::Tcp(stream) = &self
            && stream.set_zero_linger().is_err()
        {
            // It is gone already, which the other side sees as well.
        }
    }
}
