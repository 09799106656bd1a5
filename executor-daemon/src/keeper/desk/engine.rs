//! The engines' ends: the one that is the engine, and one that has been greeted and is not yet. What is said to them, and how
//! one takes over from the other.

use std::{io, os::fd::OwnedFd, rc::Rc};

use super::{Desk, LINK, MAX_MESSAGES_AT_ONCE, NEXT, Notice, Phase};
use crate::{
    crash::Point,
    ids::ProcessHandle,
    keeper::{
        channel::{Channel, Received},
        protocol::{self, FromKeeper, Life, ToKeeper},
        wire::{Frame, Packet},
    },
};

impl Desk {
    /// Takes a new engine's end and greets it. It says [`Notice::Standby`] when it could take over.
    pub(in crate::keeper) fn greet(
        &mut self,
        socket: OwnedFd,
        listeners: Vec<(String, Rc<OwnedFd>)>,
        server_settings: Vec<u8>,
    ) -> io::Result<()> {
        let (names, fds) = listeners.into_iter().unzip();
        let hello = FromKeeper::Hello {
            version: protocol::VERSION,
            keeper: self.name,
            identities: self.pool.context().identities.clone(),
            listeners: names,
            server_settings,
        };
        let mut next = Channel::register(&self.epoll, socket, NEXT)?;
        next.send(&self.epoll, Frame::encode(&hello)?, fds)?;
        Point::HelloSaid.pass();
        self.next = Some(next);
        Ok(())
    }

    /// Makes the engine that was greeted last the engine, and hands it everything. Nobody else is the engine any more.
    pub(in crate::keeper) fn promote(&mut self) -> io::Result<()> {
        let Some(mut link) = self.next.take() else { return Ok(()) };
        link.rename(&self.epoll, LINK)?;
        self.link = Some(link);
        let mut handles: Vec<_> = self.commands.keys().copied().collect();
        handles.sort_unstable();
        let carried = u32::try_from(handles.len()).unwrap_or(u32::MAX);
        self.tell(&FromKeeper::Go { first_handle: self.next_handle, carried }, Vec::new());
        Point::GoSaid.pass();
        for handle in handles {
            self.carry(handle);
            Point::CommandCarried.pass();
        }
        Ok(())
    }

    fn carry(&mut self, handle: ProcessHandle) {
        let Some(command) = self.commands.get(&handle) else { return };
        let life = match command.phase {
            Phase::Starting | Phase::Running => Life::Running,
            Phase::Leftovers => Life::Leftovers(command.status),
            Phase::Empty => Life::Empty(command.status),
        };
        let message = FromKeeper::Carried {
            handle,
            life,
            pid: command.shell.unsigned_abs(),
            helper: command.helper.unwrap_or(0),
            files: command.files.each_ref().map(|fds| u8::try_from(fds.len()).unwrap_or(u8::MAX)),
            spills: command.spills.each_ref().map(|spill| spill.as_ref().map(|(_, path)| path.clone())),
            mode: command.mode,
        };
        let files = command.files.iter().flatten().chain(command.spills.iter().flatten().map(|(file, _)| file));
        let mut fds: Vec<_> = command.pipes.iter().chain(files).map(Rc::clone).collect();
        fds.extend(command.helper.and_then(|token| self.pool.give_news(token)));
        self.tell(&message, fds);
    }

    /// Drops an engine that was greeted and cannot take over.
    pub(in crate::keeper) fn drop_next(&mut self) {
        if let Some(next) = self.next.take() {
            next.close(&self.epoll);
        }
    }

    /// The engine is gone. What it had started goes on, for the next one.
    pub(in crate::keeper) fn detach(&mut self) {
        if let Some(link) = self.link.take() {
            link.close(&self.epoll);
        }
        self.pool.forget_listener();
        self.left = None;
        for command in self.commands.values_mut() {
            (command.owed_ends, command.owed_lists) = (0, 0);
        }
    }

    /// Tells the engine to drain. False: there is nobody to tell.
    pub(in crate::keeper) fn ask_for_drain(&mut self) -> bool {
        self.tell(&FromKeeper::Drain, Vec::new());
        self.link.is_some()
    }

    /// Drops the engine's end, if there is one still, and kills everything of it: there will be no other.
    pub(in crate::keeper) fn disconnect(&mut self) {
        self.detach();
        self.kill_everything();
        self.commands.retain(|_, command| command.phase != Phase::Empty);
        for command in self.commands.values_mut() {
            command.abandoned = true;
            command.pipes.clear();
            command.files = Default::default();
            command.spills = [None, None];
        }
    }

    /// Takes messages, not so many that nobody else has a turn; whether there may be more.
    pub(super) fn link_event(&mut self, writable: bool) -> bool {
        for _ in 0..MAX_MESSAGES_AT_ONCE {
            let Some(link) = &mut self.link else { return false };
            if writable {
                // If it is gone, the channel knows.
                let _ = link.flush(&self.epoll);
            }
            match link.receive() {
                Received::Nothing => return false,
                Received::Packet(packet) => match packet.decode() {
                    // What belongs to the message is lost, here as on a broken socket.
                    Ok(message) if !packet.cut || matches!(message, ToKeeper::KeepFile { .. }) => {
                        self.engine_says(message, packet);
                        continue;
                    }
                    Ok(_) | Err(_) => self.lose_link(false),
                },
                Received::Closed => self.lose_link(true),
            }
            return false;
        }
        true
    }

    /// Takes all that an engine has said that is no more: files that it gave to hold are part of it. Then gives it up.
    pub(super) fn hear_out(&mut self) {
        while self.link_event(false) {}
        if self.link.is_some() {
            self.lose_link(true);
        }
    }

    fn lose_link(&mut self, understood: bool) {
        if let Some(link) = self.link.take() {
            link.close(&self.epoll);
        }
        self.notices.push(Notice::LinkLost { understood });
    }

    /// One that is greeted has one thing to say.
    pub(super) fn next_event(&mut self, writable: bool) {
        let Some(next) = &mut self.next else { return };
        let flushed = if writable { next.flush(&self.epoll) } else { Ok(()) };
        let notice = match (flushed, next.receive()) {
            (Ok(()), Received::Nothing) => return,
            (Ok(()), Received::Packet(packet)) if matches!(packet.decode(), Ok(ToKeeper::Standby)) => Notice::Standby,
            (_, received) => {
                self.drop_next();
                Notice::NextLost { understood: !matches!(received, Received::Packet(_)) }
            }
        };
        self.notices.push(notice);
    }

    pub(super) fn tell(&mut self, message: &FromKeeper, fds: Vec<Rc<OwnedFd>>) {
        let Some(link) = &mut self.link else { return };
        match Frame::encode(message) {
            Ok(frame) => {
                // If it is gone, the channel knows.
                let _ = link.send(&self.epoll, frame, fds);
            }
            Err(_no_memory_for_it) => self.lose_link(false),
        }
    }

    /// To the engine, as it came.
    pub(super) fn pass_up(&mut self, packet: Packet, fds: Vec<Rc<OwnedFd>>) {
        let Some(link) = &mut self.link else { return };
        // If it is gone, the channel knows.
        let _ = link.send(&self.epoll, packet.into_parts().0, fds);
    }
}
