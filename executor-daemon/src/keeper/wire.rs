//! Packets with descriptors over a `SOCK_SEQPACKET` pair: one implementation for the engine's end, the keeper and the
//! helpers.
//!
//! A packet is a byte that says where the message is, then the message. A message that is too long for a packet travels
//! in a memory file, which is then the packet's first descriptor.
#![expect(unsafe_code, reason = "receives descriptors and takes ownership of them")]

use std::{
    fs::File,
    io::{self, IoSlice},
    mem::{self, MaybeUninit},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::fs::FileExt,
    },
};

use nix::{
    errno::Errno,
    sys::{
        memfd::{MFdFlags, memfd_create},
        socket::{ControlMessage, MsgFlags, sendmsg},
    },
};
use serde::{Serialize, de::DeserializeOwned};

/// The message follows.
const INLINE: u8 = 0;
/// The message is in the first descriptor, a memory file.
const IN_FILE: u8 = 1;

/// Longest packet. Well under the default send buffer (about 200 KiB), so that several can wait.
const MAX_PACKET_BYTES: usize = 32 * 1024;

/// Longest message. The largest honest one is a spawn with the largest environment that the kernel takes (a quarter of
/// the stack's limit; with an unlimited stack 6 MiB).
const MAX_MESSAGE_BYTES: u64 = 16 * 1024 * 1024;

/// Most descriptors of one packet: listening sockets, or four and a message in a file.
pub(super) const MAX_DESCRIPTORS: usize = 64;

/// A message, ready to be sent: its packet, and the file that belongs in front of its descriptors.
#[derive(Debug)]
pub(super) struct Frame {
    packet: Vec<u8>,
    file: Option<OwnedFd>,
}

impl Frame {
    /// Encodes a message.
    ///
    /// # Errors
    /// When a memory file is needed and cannot be made.
    pub(super) fn encode<M: Serialize>(message: &M) -> io::Result<Self> {
        let packet = postcard::to_extend(message, vec![INLINE]).map_err(io::Error::other)?;
        if packet.len() <= MAX_PACKET_BYTES {
            return Ok(Self { packet, file: None });
        }
        let file = File::from(memfd_create(c"message", MFdFlags::MFD_CLOEXEC)?);
        file.write_all_at(&packet[1..], 0)?;
        Ok(Self { packet: vec![IN_FILE], file: Some(file.into()) })
    }

    /// Sends it. A packet is sent whole or not at all.
    ///
    /// # Errors
    /// `WouldBlock` when `flags` say not to wait and the other end is slow; `BrokenPipe` when it is gone.
    pub(super) fn send(&self, socket: BorrowedFd<'_>, fds: &[BorrowedFd<'_>], flags: MsgFlags) -> io::Result<()> {
        let raw: Vec<_> = self.file.iter().map(AsRawFd::as_raw_fd).chain(fds.iter().map(AsRawFd::as_raw_fd)).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &rights[..0] } else { &rights[..] };
        let packet = [IoSlice::new(&self.packet)];
        loop {
            match sendmsg::<()>(socket.as_raw_fd(), &packet, control, flags | MsgFlags::MSG_NOSIGNAL, None) {
                Ok(_whole) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// A received packet.
#[derive(Debug)]
pub(super) struct Packet {
    frame: Frame,
    /// The descriptors that belong to the message.
    pub(super) fds: Vec<OwnedFd>,
    /// Some of the descriptors are lost: this process has too many open. The message itself is whole.
    pub(super) cut: bool,
}

impl Packet {
    /// Decodes the message.
    ///
    /// # Errors
    /// `InvalidData` when it is not one.
    pub(super) fn decode<M: DeserializeOwned>(&self) -> io::Result<M> {
        let invalid = |error: postcard::Error| io::Error::new(io::ErrorKind::InvalidData, error);
        let Some(file) = &self.frame.file else {
            return postcard::from_bytes(&self.frame.packet[1..]).map_err(invalid);
        };
        let size = u64::try_from(nix::sys::stat::fstat(file)?.st_size).unwrap_or(u64::MAX);
        if size > MAX_MESSAGE_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "message too long"));
        }
        let mut message = vec![0; usize::try_from(size).map_err(io::Error::other)?];
        let file = File::from(file.as_fd().try_clone_to_owned()?);
        file.read_exact_at(&mut message, 0)?;
        postcard::from_bytes(&message).map_err(invalid)
    }

    /// The same message, to be sent on, and its descriptors.
    pub(super) fn into_parts(self) -> (Frame, Vec<OwnedFd>) {
        (self.frame, self.fds)
    }
}

/// Receives one packet; `Ok(None)` when the other end is closed.
///
/// A packet that has lost descriptors because this process has too many open is [`Packet::cut`]: what that means, its
/// receiver knows.
///
/// # Errors
/// `WouldBlock` when `flags` say not to wait and there is none; `InvalidData` for what no peer of ours sends, and for a
/// message in a file that was lost.
pub(super) fn receive(socket: BorrowedFd<'_>, flags: MsgFlags) -> io::Result<Option<Packet>> {
    // Not cleared before: most packets are a few bytes.
    let mut buffer = [MaybeUninit::uninit(); MAX_PACKET_BYTES];
    let (bytes, answered, mut fds) = loop {
        match receive_raw(socket, &mut buffer, flags | MsgFlags::MSG_CMSG_CLOEXEC) {
            Ok(received) => break received,
            Err(Errno::EINTR) => {}
            Err(Errno::ECONNRESET) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
    };
    if bytes.is_empty() {
        return Ok(None);
    }
    let packet = bytes.to_vec();
    let invalid = |problem| Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    if answered.contains(MsgFlags::MSG_TRUNC) {
        return invalid("packet cut");
    }
    let file = match packet[0] {
        INLINE => None,
        IN_FILE if !fds.is_empty() => Some(fds.remove(0)),
        _ => return invalid("not a packet of ours"),
    };
    let cut = answered.contains(MsgFlags::MSG_CTRUNC);
    Ok(Some(Packet { frame: Frame { packet, file }, fds, cut }))
}

/// `recvmsg`: bytes, flags, descriptors. By hand, because the wrapper gives none of the descriptors of a packet that has
/// lost some, which would then stay open for good.
fn receive_raw<'a>(
    socket: BorrowedFd<'_>,
    packet: &'a mut [MaybeUninit<u8>],
    flags: MsgFlags,
) -> Result<(&'a [u8], MsgFlags, Vec<OwnedFd>), Errno> {
    // More than the header's size, and words, so that it is aligned.
    let mut control = [0_u64; 2 + MAX_DESCRIPTORS * size_of::<RawFd>() / size_of::<u64>()];
    let mut slice = libc::iovec { iov_base: packet.as_mut_ptr().cast(), iov_len: packet.len() };
    // SAFETY: all zeroes is a message header without anything.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut slice;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = size_of_val(&control);
    // SAFETY: the header names two buffers that are ours for the whole call, with their sizes.
    let bytes = Errno::result(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags.bits()) })?;
    let mut fds = Vec::new();
    // SAFETY: the kernel has filled in the header and the control buffer, which is aligned; its messages are whole, and
    // the descriptors in them have just been put into this process's table for us.
    unsafe {
        let mut part = libc::CMSG_FIRSTHDR(&raw const header);
        while let Some(message) = part.as_ref() {
            if (message.cmsg_level, message.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let data = libc::CMSG_DATA(part).cast::<RawFd>();
                let bytes = message.cmsg_len - (data.addr() - part.addr());
                fds.extend((0..bytes / size_of::<RawFd>()).map(|n| OwnedFd::from_raw_fd(data.add(n).read_unaligned())));
            }
            part = libc::CMSG_NXTHDR(&raw const header, part);
        }
    }
    // A length is not negative.
    let received = &packet[..usize::try_from(bytes).unwrap_or(0)];
    // SAFETY: the kernel has written so many bytes, of a slice that holds at least as many.
    let received = unsafe { std::slice::from_raw_parts(received.as_ptr().cast(), received.len()) };
    Ok((received, MsgFlags::from_bits_truncate(header.msg_flags), fds))
}

/// A pair of connected sockets, closed on exec.
///
/// # Errors
/// What the kernel answers.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_travel_in_a_file_and_keep_their_descriptors() {
        let (one, two) = pair().expect("socket pair");
        let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).expect("pipe");
        for bytes in [0, 10, MAX_PACKET_BYTES - 1, MAX_PACKET_BYTES, 3_000_000] {
            let message = vec![7_u8; bytes];
            let frame = Frame::encode(&message).expect("encodes");
            frame.send(one.as_fd(), &[read.as_fd(), write.as_fd()], MsgFlags::MSG_DONTWAIT).expect("fits");
            let packet = receive(two.as_fd(), MsgFlags::MSG_DONTWAIT).expect("arrived").expect("open");
            assert_eq!(packet.fds.len(), 2);
            assert_eq!(packet.decode::<Vec<u8>>().expect("decodes"), message);
            let (frame, fds) = packet.into_parts();
            frame.send(two.as_fd(), &[fds[1].as_fd()], MsgFlags::MSG_DONTWAIT).expect("sent on");
            let packet = receive(one.as_fd(), MsgFlags::MSG_DONTWAIT).expect("arrived").expect("open");
            assert_eq!((packet.fds.len(), packet.decode::<Vec<u8>>().expect("decodes").len()), (1, bytes));
        }
        drop(two);
        assert!(receive(one.as_fd(), MsgFlags::MSG_DONTWAIT).expect("closed, not failed").is_none());
    }
}
