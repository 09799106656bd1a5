//! The stream file and its header page: where the bytes of one output stream lie, and how far they go, in memory that
//! outlives the process that moves them.
//!
//! A stream file is a memory file of [`PAGE_BYTES`] + `ring_bytes`, sealed against growing and shrinking (so that a mapping
//! of it can never fault); where its ring lies in a file on a disk, `ring_bytes` is 0, and the page is all that is in memory. The engine's process makes it when the first byte is there, has the keeper hold it too, maps the
//! header and splices the pipe into the ring. The kernel itself stores the new position through `off_out`, on the way back to user mode, after it has taken
//! the bytes: a kill between the two is not possible, so no byte is lost or doubled.
#![expect(unsafe_code, reason = "maps shared memory and hands its address to splice")]

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::{AtomicI64, AtomicU64, Ordering},
};

/// Bytes of the header; the ring begins here.
pub const PAGE_BYTES: u64 = MAPPED_BYTES as u64;

/// The same, as a length of memory.
const MAPPED_BYTES: usize = 4096;

/// What the header page holds. Zeroed by the kernel when the file is made, except for the offset.
#[repr(C)]
struct Header {
    /// Position in the file where the next byte goes: `PAGE_BYTES` to `PAGE_BYTES + ring_bytes`. `splice` advances it.
    offset: AtomicI64,
    /// Offset in the stream of the byte that lies at the ring's start.
    base: AtomicU64,
    /// Not zero: the ring is being wrapped; see [`SharedPage::set_pending`].
    pending: AtomicU64,
}

/// The header page of a stream file, mapped shared. The only mapping of memory that other processes write.
#[derive(Debug)]
pub struct SharedPage {
    header: NonNull<Header>,
}

// SAFETY: the mapping belongs to the value and stays until it is dropped; it is only accessed through atomics and by the
// kernel.
unsafe impl Send for SharedPage {}
// SAFETY: as above; all methods that take `&self` go through atomics.
unsafe impl Sync for SharedPage {}

impl SharedPage {
    /// Maps the header of a stream file.
    ///
    /// # Errors
    /// When the file is shorter than a page (`InvalidInput`), is not sealed against shrinking (`InvalidInput`: a mapping
    /// could fault), or cannot be mapped.
    pub fn map(file: BorrowedFd<'_>) -> io::Result<Self> {
        // SAFETY: F_GET_SEALS takes no argument and only reads.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not sealed against shrinking"));
        }
        let size = nix::sys::stat::fstat(file)?.st_size;
        if u64::try_from(size).is_ok_and(|size| size < PAGE_BYTES) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "shorter than its header"));
        }
        // SAFETY: a fresh shared mapping of a file that holds at least the page and cannot shrink; nobody else knows its
        // address.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                MAPPED_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let header = NonNull::new(address.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { header })
    }

    fn header(&self) -> &Header {
        // SAFETY: points to a live mapping of a whole page, aligned to it, made of atomics (valid for any bytes).
        unsafe { self.header.as_ref() }
    }

    /// Position in the file where the next byte goes: [`PAGE_BYTES`] at first.
    #[must_use]
    pub fn offset(&self) -> i64 {
        self.header().offset.load(Ordering::Acquire)
    }

    /// Moves that position. Only while nobody splices.
    pub fn set_offset(&self, offset: i64) {
        self.header().offset.store(offset, Ordering::Release);
    }

    /// Offset in the stream of the byte at the ring's start.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.header().base.load(Ordering::Acquire)
    }

    /// Moves the base.
    pub fn set_base(&self, base: u64) {
        self.header().base.store(base, Ordering::Release);
    }

    /// What [`SharedPage::set_pending`] stored; 0 at first.
    #[must_use]
    pub fn pending(&self) -> u64 {
        self.header().pending.load(Ordering::Acquire)
    }

    /// Says that a wrap is in progress (the new base), or with 0 that none is. It is stored before the base and the offset
    /// are moved, so that a successor can redo a wrap that was cut short.
    pub fn set_pending(&self, pending: u64) {
        self.header().pending.store(pending, Ordering::Release);
    }

    /// Moves up to `max` bytes from a pipe into a file at [`SharedPage::offset`], which the kernel advances; never waits.
    /// `file` has its ring behind as many bytes as this page, in the file of this page or in another. `Ok(0)`: no writer is left and the pipe is empty.
    ///
    /// # Errors
    /// `WouldBlock` when the pipe is empty and somebody can still write to it; what `splice` answers.
    pub fn splice_into(&self, pipe: BorrowedFd<'_>, file: BorrowedFd<'_>, max: usize) -> io::Result<usize> {
        // SAFETY: `off_out` points into the live mapping, to a 64-bit atomic with the layout of `loff_t`; the kernel reads
        // and writes only these 8 bytes.
        let moved = unsafe {
            libc::splice(
                pipe.as_raw_fd(),
                std::ptr::null_mut(),
                file.as_raw_fd(),
                self.header().offset.as_ptr(),
                max,
                libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MOVE,
            )
        };
        usize::try_from(moved).map_err(|_negative| io::Error::last_os_error())
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly what `map` has mapped; nothing that borrowed from it can be alive.
        unsafe { libc::munmap(self.header.as_ptr().cast(), MAPPED_BYTES) };
    }
}

/// Bytes that a pipe holds.
///
/// # Errors
/// What the kernel answers.
pub fn bytes_waiting(pipe: BorrowedFd<'_>) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int.
    if unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut bytes) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u64::try_from(bytes).unwrap_or(0))
}

/// Makes a stream file: header page, then a ring of `ring_bytes` (0: none), with [`SharedPage::offset`] at the ring's start.
///
/// # Errors
/// What the kernel answers; `InvalidInput` when the size is out of range.
pub fn create_stream_file(ring_bytes: u64) -> io::Result<OwnedFd> {
    let size = PAGE_BYTES.checked_add(ring_bytes).and_then(|size| i64::try_from(size).ok());
    let size = size.ok_or(io::ErrorKind::InvalidInput)?;
    // SAFETY: a constant C string and flags.
    let fd = unsafe { libc::memfd_create(c"stream".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, owned by nobody else.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    nix::unistd::ftruncate(&file, size)?;
    let start = PAGE_BYTES.to_ne_bytes();
    nix::sys::uio::pwrite(&file, &start, 0)?;
    // SAFETY: integer arguments only.
    if unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_GROW | libc::F_SEAL_SHRINK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn splice_advances_the_shared_offset() {
        let file = create_stream_file(8192).expect("memory file");
        let page = SharedPage::map(file.as_fd()).expect("mapped");
        let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).expect("pipe");
        nix::unistd::write(&write, b"hello").expect("fits into the pipe");

        assert_eq!(page.splice_into(read.as_fd(), file.as_fd(), 3).expect("bytes wait"), 3);
        assert_eq!(page.offset(), 4099);
        assert_eq!(page.splice_into(read.as_fd(), file.as_fd(), 4096).expect("bytes wait"), 2);
        let mut got = [0; 5];
        nix::sys::uio::pread(&file, &mut got, 4096).expect("inside the file");
        assert_eq!(&got, b"hello");

        let empty = page.splice_into(read.as_fd(), file.as_fd(), 4096).expect_err("nothing to move");
        assert_eq!(empty.kind(), io::ErrorKind::WouldBlock);
        drop(write);
        assert_eq!(page.splice_into(read.as_fd(), file.as_fd(), 4096).expect("end of the pipe"), 0);
    }

    #[test]
    fn a_second_mapping_sees_what_the_first_stored() {
        let file = create_stream_file(4096).expect("memory file");
        let (one, two) =
            (SharedPage::map(file.as_fd()).expect("mapped"), SharedPage::map(file.as_fd()).expect("mapped"));
        assert_eq!((two.offset(), two.base(), two.pending()), (4096, 0, 0));
        one.set_offset(5000);
        one.set_base(77);
        one.set_pending(78);
        assert_eq!((two.offset(), two.base(), two.pending()), (5000, 77, 78));
    }

    #[test]
    fn a_file_that_may_shrink_is_refused() {
        let file = tempfile::tempfile().expect("temporary file");
        file.set_len(8192).expect("grows");
        let refused = SharedPage::map(file.as_fd()).expect_err("no seals");
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
    }
}
