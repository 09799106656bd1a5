//! The pipes of one command, made ahead of need.

use std::{io, os::fd::OwnedFd};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    unistd::pipe2,
};

/// Stdout's and stderr's, in this order.
#[derive(Debug)]
pub(super) struct Streams {
    /// For the engine: non-blocking.
    pub(super) read_ends: [OwnedFd; 2],
    /// For the command.
    pub(super) write_ends: [OwnedFd; 2],
}

impl Streams {
    fn make() -> io::Result<Self> {
        let pipe = || -> io::Result<_> {
            let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
            // Of this end only: the command's must wait when the pipe is full.
            fcntl(&read, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
            Ok((read, write))
        };
        let ((out_read, out_write), (err_read, err_write)) = (pipe()?, pipe()?);
        Ok(Self { read_ends: [out_read, err_read], write_ends: [out_write, err_write] })
    }
}

/// One set of streams that waits for the next command.
#[derive(Debug, Default)]
pub(super) struct StreamsAhead {
    waiting: Option<Streams>,
}

impl StreamsAhead {
    /// The streams for a command.
    ///
    /// # Errors
    /// When descriptors or memory run out.
    pub(super) fn take(&mut self) -> io::Result<Streams> {
        self.waiting.take().map_or_else(Streams::make, Ok)
    }

    /// Makes the next set; that it fails shows when it is needed.
    pub(super) fn prepare(&mut self) {
        if self.waiting.is_none() {
            self.waiting = Streams::make().ok();
        }
    }
}
