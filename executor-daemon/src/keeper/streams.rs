//! The pipes and stream files of one command, made ahead of need.

use std::{io, os::fd::OwnedFd};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    unistd::pipe2,
};

use super::page::create_stream_file;

/// Largest ring that the engine may ask for.
const MAX_RING_BYTES: u64 = 64 * 1024 * 1024;

/// Stdout's and stderr's, in this order.
#[derive(Debug)]
pub(super) struct Streams {
    /// For the engine: non-blocking.
    pub(super) read_ends: [OwnedFd; 2],
    /// For the command.
    pub(super) write_ends: [OwnedFd; 2],
    /// For the engine.
    pub(super) files: [OwnedFd; 2],
}

impl Streams {
    fn make(ring_bytes: u64) -> io::Result<Self> {
        if ring_bytes == 0 || ring_bytes > MAX_RING_BYTES {
            return Err(nix::errno::Errno::EINVAL.into());
        }
        let pipe = || -> io::Result<_> {
            let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
            // Of this end only: the command's must wait when the pipe is full.
            fcntl(&read, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
            Ok((read, write))
        };
        let ((out_read, out_write), (err_read, err_write)) = (pipe()?, pipe()?);
        Ok(Self {
            read_ends: [out_read, err_read],
            write_ends: [out_write, err_write],
            files: [create_stream_file(ring_bytes)?, create_stream_file(ring_bytes)?],
        })
    }
}

/// One set of streams that waits for the next command, of the size that the last one had.
#[derive(Debug, Default)]
pub(super) struct StreamsAhead {
    ring_bytes: Option<u64>,
    waiting: Option<Streams>,
}

impl StreamsAhead {
    /// The streams for a command.
    ///
    /// # Errors
    /// When descriptors or memory run out, or the size is out of range.
    pub(super) fn take(&mut self, ring_bytes: u64) -> io::Result<Streams> {
        let waiting = self.waiting.take().filter(|_| self.ring_bytes == Some(ring_bytes));
        self.ring_bytes = Some(ring_bytes);
        waiting.map_or_else(|| Streams::make(ring_bytes), Ok)
    }

    /// Makes the next set; that it fails shows when it is needed.
    pub(super) fn prepare(&mut self) {
        if self.waiting.is_none()
            && let Some(ring_bytes) = self.ring_bytes
        {
            self.waiting = Streams::make(ring_bytes).ok();
        }
    }
}
