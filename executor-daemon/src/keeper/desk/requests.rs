//! What the engine asks for, and what is done about it here or passed on to a helper.

use std::{
    io,
    path::Path,
    rc::Rc,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    unistd::{Gid, Uid},
};

use super::{
    Command, Desk, Notice, Phase,
    helpers::{ANSWER_TIME, Dues},
};
use crate::{
    crash::Point,
    ids::ProcessHandle,
    keeper::{
        left::Search,
        protocol::{FromKeeper, SpawnSpec, Stage, Stream, ToKeeper},
        streams::Streams,
        wire::{Frame, Packet},
    },
};

impl Desk {
    pub(super) fn engine_says(&mut self, message: ToKeeper, packet: Packet) {
        match message {
            ToKeeper::Spawn { handle, spec } => self.spawn(handle, &spec, packet),
            ToKeeper::End { handle, grace_ms } => match self.alive(handle) {
                Some(command) => {
                    Point::EndTaken.pass();
                    command.owed_ends += 1;
                    self.pass_on(handle, packet);
                    self.expect_end(handle, Duration::from_millis(grace_ms));
                }
                None => self.tell(&FromKeeper::Ended { handle, survivors: Vec::new() }, Vec::new()),
            },
            ToKeeper::List { handle } => match self.alive(handle) {
                Some(command) => {
                    let due = Instant::now() + ANSWER_TIME;
                    command.owed_lists += 1;
                    command.dues.lists.push(due);
                    self.pass_on(handle, packet);
                    self.look_at(due);
                }
                None => self.tell(&FromKeeper::Processes { handle, processes: Vec::new() }, Vec::new()),
            },
            ToKeeper::KeepFile { handle, stream } => {
                if let Some(command) = self.commands.get_mut(&handle) {
                    // None, where too many are open here: then this stream does not outlive the engine's process.
                    let fds = if packet.cut { Vec::new() } else { packet.into_parts().1 };
                    command.files[stream as usize] = fds.into_iter().map(Rc::new).collect();
                    Point::FileHeld.pass();
                }
            }
            ToKeeper::OpenSpill { handle, stream, prefix } => self.open_spill(handle, stream, &prefix),
            ToKeeper::RemoveSpill { path } => self.spills.remove(&path),
            ToKeeper::SweepSpills { mut keep } => {
                // One may have been made for a command that runs after its engine had looked which there are.
                let held = self.commands.values().flat_map(|command| command.spills.iter().flatten());
                keep.extend(held.map(|(_, path)| path.clone()));
                self.spills.sweep(&keep);
            }
            // Said before it was the engine.
            ToKeeper::Standby => {}
            ToKeeper::Listening { helper } => self.pool.listened_to(helper),
            ToKeeper::Release { handle } => {
                Point::ReleaseTaken.pass();
                if let Some(command) = self.commands.get_mut(&handle) {
                    command.released = true;
                }
                self.forget_if_released(handle);
            }
            ToKeeper::Ready => self.notices.push(Notice::Ready),
            ToKeeper::Drained => self.notices.push(Notice::Drained),
            ToKeeper::EndLeft { shells, limit_ms } => {
                let users = self.pool.context().identities.clone();
                self.left = Some(Search::new(&shells, users, Duration::from_millis(limit_ms)));
            }
            ToKeeper::ReopenSpill { path } => self.reopen_spill(&path),
        }
    }

    /// To the command's helper, as it came; a bereaved command has none, and is answered when it is empty.
    fn pass_on(&mut self, handle: ProcessHandle, packet: Packet) {
        if let Some(token) = self.commands.get(&handle).and_then(|command| command.helper) {
            self.pool.send(&self.epoll, token, packet.into_parts().0);
        }
    }

    pub(super) fn instruct(&mut self, token: u64, message: &ToKeeper) {
        if let Ok(frame) = Frame::encode(message) {
            self.pool.send(&self.epoll, token, frame);
        }
    }

    fn spawn(&mut self, handle: ProcessHandle, spec: &SpawnSpec, packet: Packet) {
        self.prepare_soon();
        if let Err((stage, errno)) = self.try_spawn(handle, spec, packet) {
            self.tell(&FromKeeper::SpawnFailed { handle, stage, errno }, Vec::new());
        }
    }

    fn try_spawn(&mut self, handle: ProcessHandle, spec: &SpawnSpec, packet: Packet) -> Result<(), (Stage, i32)> {
        let refused = |errno: Errno| (Stage::Prepare, errno as i32);
        let index = usize::try_from(spec.identity).map_err(|_too_large| refused(Errno::EINVAL))?;
        let identity = self.pool.context().identities.get(index).ok_or(refused(Errno::EPERM))?;
        if !identity.has_uid(spec.uid) {
            return Err(refused(Errno::EPERM));
        }
        let (frame, given) = packet.into_parts();
        if self.commands.contains_key(&handle) || given.len() != usize::from(spec.stdin) + usize::from(spec.script) {
            return Err(refused(Errno::EINVAL));
        }
        self.next_handle = self.next_handle.max(handle.0.saturating_add(1));
        let failed = |stage| move |error: io::Error| (stage, error.raw_os_error().unwrap_or(libc::EIO));
        let streams = self.ahead.take().map_err(failed(Stage::Prepare))?;
        let Streams { read_ends, write_ends } = streams;
        if identity.change {
            // `> /dev/stderr` opens the pipe anew, as the command's user.
            for pipe in &write_ends {
                let owner = (Some(Uid::from_raw(spec.uid)), Some(Gid::from_raw(identity.gid)));
                nix::unistd::fchown(pipe, owner.0, owner.1).map_err(refused)?;
            }
        }
        let fds = write_ends.into_iter().chain(given).map(Rc::new).collect();
        let fence = spec.fence.as_deref();
        let helper = self.pool.assign(&self.epoll, handle, fence, frame, fds).map_err(failed(Stage::Clone))?;
        Point::HelperAssigned.pass();
        let pipes = read_ends.into_iter().map(Rc::new).collect();
        let due = Instant::now() + ANSWER_TIME;
        let command = Command {
            phase: Phase::Starting,
            helper: Some(helper),
            shell: 0,
            identity: index,
            mode: spec.confinement.mode,
            pipes,
            files: Default::default(),
            spills: [None, None],
            owed_ends: 0,
            owed_lists: 0,
            dues: Dues { start: Some(due), ..Dues::default() },
            abandoned: false,
            released: false,
            status: None,
        };
        self.commands.insert(handle, command);
        self.look_at(due);
        Ok(())
    }

    fn reopen_spill(&mut self, path: &Path) {
        match self.spills.reopen(path) {
            Ok(file) => self.tell(&FromKeeper::SpillReopened { errno: None }, vec![Rc::new(file)]),
            Err(error) => {
                let errno = Some(error.raw_os_error().unwrap_or(libc::EIO));
                self.tell(&FromKeeper::SpillReopened { errno }, Vec::new());
            }
        }
    }

    fn open_spill(&mut self, handle: ProcessHandle, stream: Stream, prefix: &str) {
        let identity = self.commands.get(&handle).map(|command| command.identity);
        let identity = identity.and_then(|index| self.pool.context().identities.get(index));
        let opened = identity.ok_or(Errno::ESRCH.into()).and_then(|identity| self.spills.open_file(identity, prefix));
        match opened {
            Ok((file, path)) => {
                let file = Rc::new(file);
                if let Some(command) = self.commands.get_mut(&handle) {
                    command.spills[stream as usize] = Some((Rc::clone(&file), path.clone()));
                }
                Point::SpillMade.pass();
                self.tell(&FromKeeper::SpillOpened { handle, stream, path }, vec![file]);
            }
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                self.tell(&FromKeeper::SpillFailed { handle, stream, errno }, Vec::new());
            }
        }
    }
}
