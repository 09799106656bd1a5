//! The keeper's end of a pair: never waits; what the other end does not take yet is kept, in order.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
};

use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollEvent, EpollFlags},
        socket::MsgFlags,
    },
};

use super::wire::{self, Frame, Packet};

/// A connection, registered with the keeper's epoll under its token.
#[derive(Debug)]
pub(super) struct Channel {
    socket: OwnedFd,
    token: u64,
    /// What could not be sent yet. Bounded by what the other end has asked for and the commands that there are.
    waiting: VecDeque<(Frame, Vec<Rc<OwnedFd>>)>,
    deaf: bool,
}

/// What a look at a channel gave.
#[derive(Debug)]
pub(super) enum Received {
    /// A packet.
    Packet(Packet),
    /// None just now.
    Nothing,
    /// The other end is gone, or talks nonsense.
    Closed,
}

impl Channel {
    /// Registers a connection for reading.
    pub(super) fn register(epoll: &Epoll, socket: OwnedFd, token: u64) -> io::Result<Self> {
        epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, token))?;
        Ok(Self { socket, token, waiting: VecDeque::new(), deaf: false })
    }

    /// Is known by another token from now on.
    pub(super) fn rename(&mut self, epoll: &Epoll, token: u64) -> io::Result<()> {
        self.token = token;
        let waiting = if self.waiting.is_empty() { EpollFlags::empty() } else { EpollFlags::EPOLLOUT };
        epoll.modify(&self.socket, &mut EpollEvent::new(EpollFlags::EPOLLIN | waiting, token))?;
        Ok(())
    }

    /// Whether the other end has not taken something: it is gone. What it had said can still be received.
    pub(super) fn is_deaf(&self) -> bool {
        self.deaf
    }

    /// Sends, or keeps for later.
    ///
    /// # Errors
    /// When the other end is gone.
    pub(super) fn send(&mut self, epoll: &Epoll, frame: Frame, fds: Vec<Rc<OwnedFd>>) -> io::Result<()> {
        if self.waiting.is_empty() {
            match self.try_send(&frame, &fds) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let both = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT;
                    epoll.modify(&self.socket, &mut EpollEvent::new(both, self.token))?;
                }
                sent => {
                    self.deaf |= sent.is_err();
                    return sent;
                }
            }
        }
        self.waiting.push_back((frame, fds));
        Ok(())
    }

    /// Sends what was kept, as far as it goes.
    ///
    /// # Errors
    /// When the other end is gone.
    pub(super) fn flush(&mut self, epoll: &Epoll) -> io::Result<()> {
        while let Some((frame, fds)) = self.waiting.front() {
            match self.try_send(frame, fds) {
                Ok(()) => self.waiting.pop_front(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => {
                    self.deaf = true;
                    return Err(error);
                }
            };
        }
        epoll.modify(&self.socket, &mut EpollEvent::new(EpollFlags::EPOLLIN, self.token))?;
        Ok(())
    }

    fn try_send(&self, frame: &Frame, fds: &[Rc<OwnedFd>]) -> io::Result<()> {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        match frame.send(self.socket.as_fd(), &fds, MsgFlags::MSG_DONTWAIT) {
            // Descriptors in flight are limited per user; those that are waiting are taken before long.
            Err(error) if error.raw_os_error() == Some(Errno::ETOOMANYREFS as i32) => {
                Err(io::ErrorKind::WouldBlock.into())
            }
            sent => sent,
        }
    }

    /// Takes one packet if there is one.
    pub(super) fn receive(&self) -> Received {
        match wire::receive(self.socket.as_fd(), MsgFlags::MSG_DONTWAIT) {
            Ok(Some(packet)) => Received::Packet(packet),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Received::Nothing,
            Ok(None) | Err(_) => Received::Closed,
        }
    }

    /// Takes it out of epoll and closes it. Other processes may hold copies of it for a moment, so closing alone does not
    /// do.
    pub(super) fn close(self, epoll: &Epoll) {
        // It was registered when it was made; that it cannot be deleted would mean it is gone already.
        let _ = epoll.delete(&self.socket);
    }
}
