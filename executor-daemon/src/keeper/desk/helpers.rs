//! What helpers say, and by when they must have said it.

use std::time::{Duration, Instant};

use super::{Command, Desk, MAX_MESSAGES_AT_ONCE, Phase};
use crate::{
    crash::Point,
    ids::ProcessHandle,
    keeper::{
        channel::Received,
        helper::{KILL_TIME, MAX_REAPED_AT_ONCE},
        protocol::FromKeeper,
        tree,
        wire::Packet,
    },
};

/// Longest that a helper may take to start a command or to list its processes.
pub(super) const ANSWER_TIME: Duration = Duration::from_secs(2);
/// How much later than it should a helper may answer an `End`, before it is taken for one that its command stopped.
const END_SLACK: Duration = Duration::from_millis(600);
/// How long after such a helper was killed its `End`s are answered with what is still alive. With [`KILL_TIME`] and
/// [`END_SLACK`] it stays within two seconds after the grace.
const OVERDUE_KILL_TIME: Duration = Duration::from_millis(400);
/// A grace beyond this is for ever, and must not overflow.
const LONGEST_GRACE: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// When the helper must have answered what it was told. A command can stop the helper that runs as its own user, and then
/// nothing but its death helps; it is a direct child, so that its id is its own.
#[derive(Debug, Default)]
pub(super) struct Dues {
    /// Until the command has started.
    pub(super) start: Option<Instant>,
    /// One for each `End`, of the engine or of the keeper, that has no answer.
    pub(super) ends: Vec<Instant>,
    /// One for each `List`.
    pub(super) lists: Vec<Instant>,
}

impl Dues {
    pub(super) fn first(&self) -> Option<Instant> {
        self.start.iter().chain(&self.ends).chain(&self.lists).min().copied()
    }
}

impl Desk {
    pub(super) fn helper_event(&mut self, token: u64, writable: bool) {
        if writable {
            self.pool.flush(&self.epoll, token);
        }
        for _ in 0..MAX_MESSAGES_AT_ONCE {
            match self.pool.receive(token) {
                Received::Nothing => return,
                Received::Closed => return self.lose_helper(token, KILL_TIME),
                Received::Packet(packet) => match packet.decode() {
                    Ok(message) if !packet.cut => self.helper_says(token, message, packet),
                    // Not ours any more, whatever it is; its orphans come here.
                    Ok(_) | Err(_) => return self.lose_helper(token, KILL_TIME),
                },
            }
        }
    }

    fn helper_says(&mut self, token: u64, message: FromKeeper, packet: Packet) {
        let (handle, over) = match &message {
            FromKeeper::Spawned { handle, .. }
            | FromKeeper::Ended { handle, .. }
            | FromKeeper::Processes { handle, .. } => (*handle, false),
            FromKeeper::SpawnFailed { handle, .. } | FromKeeper::Empty { handle, .. } => (*handle, true),
            FromKeeper::Exited { handle, empty, .. } => (*handle, *empty),
            FromKeeper::Hello { .. }
            | FromKeeper::Go { .. }
            | FromKeeper::Carried { .. }
            | FromKeeper::SpillOpened { .. }
            | FromKeeper::SpillFailed { .. }
            | FromKeeper::Drain
            | FromKeeper::LeftEnded { .. }
            | FromKeeper::SpillReopened { .. } => return,
        };
        let heard = self.pool.is_listened_to(token);
        if over {
            self.pool.idle(&self.epoll, token);
        }
        let Some(command) = self.commands.get_mut(&handle) else { return };
        let (mut fds, mut wanted) = (Vec::new(), true);
        match &message {
            FromKeeper::Spawned { pid, .. } => {
                (command.phase, command.shell) = (Phase::Running, i32::try_from(*pid).unwrap_or(0));
                command.dues.start = None;
                fds.clone_from(&command.pipes);
                Point::StartHeard.pass();
            }
            FromKeeper::Exited { told, status, .. } => {
                (command.phase, command.status) = (Phase::Leftovers, *status);
                wanted = !(*told && heard);
                Point::ExitHeard.pass();
            }
            FromKeeper::Empty { told, .. } => {
                wanted = !(*told && heard);
                Point::EmptyHeard.pass();
            }
            FromKeeper::Ended { .. } => {
                Point::EndHeard.pass();
                take_first(&mut command.dues.ends);
                wanted = take_one(&mut command.owed_ends);
            }
            FromKeeper::Processes { .. } => {
                take_first(&mut command.dues.lists);
                wanted = take_one(&mut command.owed_lists);
            }
            _ => {}
        }
        if over {
            (command.phase, command.helper) = (Phase::Empty, None);
        }
        let abandoned = command.abandoned;
        if over && (abandoned || matches!(message, FromKeeper::SpawnFailed { .. })) {
            self.commands.remove(&handle);
        }
        if matches!(message, FromKeeper::Spawned { .. }) && !abandoned {
            fds.extend(self.pool.give_news(token));
        }
        if wanted && !abandoned {
            self.pass_up(packet, fds);
        }
        if over {
            // The helper may answer these too, but one that is not needed any more is let go before it is heard.
            self.answer_owed(handle, &[]);
            self.forget_if_released(handle);
        }
    }

    pub(super) fn expect_end(&mut self, handle: ProcessHandle, grace: Duration) {
        let due = Instant::now() + grace.min(LONGEST_GRACE) + KILL_TIME + END_SLACK;
        if let Some(command) = self.commands.get_mut(&handle) {
            command.dues.ends.push(due);
            self.look_at(due);
        }
    }

    pub(super) fn look_at(&mut self, due: Instant) {
        self.due_at = Some(self.due_at.map_or(due, |due_at| due_at.min(due)));
    }

    /// Kills helpers that have not answered in time; their commands are bereaved then.
    pub(super) fn pursue_overdue(&mut self) {
        let now = Instant::now();
        if self.due_at.is_none_or(|due_at| now < due_at) {
            return;
        }
        let overdue = |command: &Command| command.helper.filter(|_| command.dues.first().is_some_and(|due| due <= now));
        let late: Vec<_> = self.commands.iter().filter_map(|(handle, one)| Some((*handle, overdue(one)?))).collect();
        for (handle, token) in late {
            // It may be this process that is late.
            self.helper_event(token, false);
            if self.commands.get(&handle).and_then(overdue) == Some(token) {
                self.pool.kill(token);
                self.lose_helper(token, OVERDUE_KILL_TIME);
            }
        }
        let waiting = self.commands.values().filter(|command| command.helper.is_some());
        self.due_at = waiting.filter_map(|command| command.dues.first()).min();
    }

    /// Lets helpers go on that a command has stopped, at work or idle. One that is stopped again and again is killed when
    /// it is late with an answer.
    pub(super) fn resume_helpers(&mut self) {
        self.pool.learn();
        for _ in 0..MAX_REAPED_AT_ONCE {
            let Some(pid) = tree::stopped_child() else { return };
            if self.pool.is_unreaped(pid) {
                tree::signal_child(pid, libc::SIGCONT);
            }
        }
    }
}

/// The answers come in the order of the dues.
fn take_first(dues: &mut Vec<Instant>) {
    if let Some((first, _)) = dues.iter().enumerate().min_by_key(|(_, due)| **due) {
        dues.swap_remove(first);
    }
}

fn take_one(owed: &mut u32) -> bool {
    let any = *owed > 0;
    *owed = owed.saturating_sub(1);
    any
}
