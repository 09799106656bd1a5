//! Larger pipes for commands that flood, and only for those.
//!
//! A pipe of 256 KiB lets a flood run about a third faster than one of 64 KiB (docs/adr/0003-moving-bytes.md). But the kernel
//! counts the pages of all pipes of a user, and above its soft limit (16 384 pages) every new pipe silently gets 8 KiB. So
//! only some pipes are grown at a time, together at most a quarter of that, and each shrinks again when its flood is over.

use std::{io, os::fd::AsFd};

use nix::fcntl::{FcntlArg, fcntl};
use tokio::sync::{Semaphore, SemaphorePermit};

/// What a grown pipe holds.
const GROWN_BYTES: i32 = 256 * 1024;

/// Grown pipes of this process at a time, of 64 pages each. For the process and not for an engine, as is the kernel's limit.
static GROWN: Semaphore = Semaphore::const_new(64);

/// So many times in a row half of the pipe or more was moved at once: that is a flood.
const FULL_IN_A_ROW: u32 = 8;

/// The size of one pipe.
#[derive(Debug)]
pub(super) struct Growth {
    /// As it came.
    original: i32,
    full_in_a_row: u32,
    /// Held while it is grown.
    permit: Option<SemaphorePermit<'static>>,
    /// The kernel has refused; it is not asked again.
    refused: bool,
}

impl Growth {
    pub(super) fn of(pipe: &impl AsFd) -> io::Result<Self> {
        let original = fcntl(pipe, FcntlArg::F_GETPIPE_SZ)?;
        Ok(Self { original, full_in_a_row: 0, permit: None, refused: original >= GROWN_BYTES })
    }

    /// Bytes that the pipe can hold.
    pub(super) fn pipe_bytes(&self) -> u64 {
        u64::try_from(if self.is_grown() { GROWN_BYTES } else { self.original }).unwrap_or(u64::MAX)
    }

    pub(super) fn is_grown(&self) -> bool {
        self.permit.is_some()
    }

    /// So many bytes were moved at once. The new size where that made the pipe grow.
    pub(super) fn seen(&mut self, pipe: &impl AsFd, moved: u64) -> Option<u64> {
        if self.is_grown() || self.refused {
            return None;
        }
        self.full_in_a_row = if moved * 2 >= self.pipe_bytes() { self.full_in_a_row + 1 } else { 0 };
        if self.full_in_a_row < FULL_IN_A_ROW {
            return None;
        }
        self.full_in_a_row = 0;
        let permit = GROWN.try_acquire().ok()?;
        self.refused = fcntl(pipe, FcntlArg::F_SETPIPE_SZ(GROWN_BYTES)).is_err();
        if self.refused {
            return None;
        }
        self.permit = Some(permit);
        Some(self.pipe_bytes())
    }

    /// Shrinks the pipe again. Where bytes have just come that would not fit, it stays as it is.
    pub(super) fn undo(&mut self, pipe: &impl AsFd) {
        if fcntl(pipe, FcntlArg::F_SETPIPE_SZ(self.original)).is_ok() {
            self.permit = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(pipe: &impl AsFd) -> i32 {
        fcntl(pipe, FcntlArg::F_GETPIPE_SZ).unwrap()
    }

    #[test]
    fn a_flood_grows_the_pipe_and_calm_shrinks_it() {
        let (pipe, _write) = io::pipe().unwrap();
        let mut growth = Growth::of(&pipe).unwrap();
        let original = growth.pipe_bytes();
        for _ in 0..100 {
            assert_eq!(growth.seen(&pipe, original), None);
            for _ in 2..FULL_IN_A_ROW {
                assert_eq!(growth.seen(&pipe, original), None);
            }
            // One small step: no flood.
            assert_eq!(growth.seen(&pipe, 10), None);
        }
        let grown = (0..FULL_IN_A_ROW).filter_map(|_| growth.seen(&pipe, original)).last();
        assert_eq!((grown, size(&pipe), growth.is_grown()), (Some(256 * 1024), GROWN_BYTES, true));
        growth.undo(&pipe);
        assert_eq!((u64::try_from(size(&pipe)).unwrap(), growth.is_grown()), (original, false));
    }

    #[test]
    fn what_has_just_come_keeps_the_pipe_large() {
        use std::io::Write;
        let (pipe, mut write) = io::pipe().unwrap();
        let mut growth = Growth::of(&pipe).unwrap();
        let original = growth.pipe_bytes();
        for _ in 0..FULL_IN_A_ROW {
            growth.seen(&pipe, original);
        }
        write.write_all(&vec![0; usize::try_from(original).unwrap() + 4096]).unwrap();
        growth.undo(&pipe);
        assert_eq!((size(&pipe), growth.is_grown()), (GROWN_BYTES, true));
    }
}
