//! What becomes of a command whose helper has died: its processes have come to this process, which ends them, and tells what
//! the helper cannot tell any more. And what a keeper before this one has left ([`super::super::left`]).

use std::time::{Duration, Instant};

use super::{Command, Desk, Notice, Phase};
use crate::{
    ids::ProcessHandle,
    keeper::{
        helper::MAX_REAPED_AT_ONCE,
        pool::{self, Lost},
        protocol::{FromKeeper, Stage},
        tree::{self, Reaped},
    },
};

/// Most orphans whose statuses are remembered, and for how long.
const MAX_ORPHANS: usize = 1024;
const ORPHAN_TIME: Duration = Duration::from_secs(1);

/// A child that nobody was known to miss when it was reaped.
#[derive(Debug)]
pub(super) struct Orphan {
    pid: i32,
    status: i32,
    reaped_at: Instant,
}

/// The search for the processes of helpers that died.
#[derive(Debug)]
pub(super) struct Hunt {
    bereaved: Vec<Lost>,
    answer_at: Instant,
    /// When the next look is due.
    pub(super) pass_at: Instant,
    passes: u32,
}

impl Desk {
    /// Forgets a helper that is dead. What it owes is answered within this time.
    pub(super) fn lose_helper(&mut self, token: u64, answer_in: Duration) {
        let Some(lost) = self.pool.remove(&self.epoll, token) else { return };
        self.prepare_soon();
        let Some(handle) = lost.job else { return };
        if lost.pid == 0 && self.commands.get(&handle).is_some_and(|command| command.phase == Phase::Starting) {
            // There never was one, so nothing ran.
            return self.start_failed(handle);
        }
        if let Some(command) = self.commands.get_mut(&handle) {
            command.helper = None;
            let untold = command.phase == Phase::Starting && lost.shell != 0;
            if untold {
                (command.phase, command.shell) = (Phase::Running, lost.shell);
            }
            let told = (untold && !command.abandoned).then(|| command.pipes.clone());
            if command.phase == Phase::Running {
                // Once the helper is dead, either of them may be reaped first.
                let shell = self
                    .orphans
                    .iter()
                    .find(|orphan| orphan.pid == command.shell && orphan.reaped_at.elapsed() <= ORPHAN_TIME);
                command.status = command.status.or(shell.map(|orphan| orphan.status));
            }
            let now = Instant::now();
            let hunt = Hunt { bereaved: Vec::new(), answer_at: now + answer_in, pass_at: now, passes: 0 };
            let hunt = self.hunt.get_or_insert(hunt);
            hunt.bereaved.push(lost);
            hunt.answer_at = hunt.answer_at.min(now + answer_in);
            if let Some(pipes) = told {
                let pid = lost.shell.unsigned_abs();
                self.tell(&FromKeeper::Spawned { handle, pid, helper: 0 }, pipes);
            }
        }
    }

    /// Takes children that have ended: helpers, the server, and what came from helpers that died.
    pub(super) fn reap(&mut self) {
        self.reap_more = true;
        self.resume_helpers();
        for _ in 0..MAX_REAPED_AT_ONCE {
            let Reaped::Child(pid, status) = tree::reap() else {
                self.reap_more = false;
                return;
            };
            let of_the_pool = self.pool.reaped(pid);
            if let Some(pool::Reaped::Helper(token)) = of_the_pool {
                // What it said last is still in its channel; then its end is.
                self.helper_event(token, false);
            } else if of_the_pool.is_some() {
                // The next helper within that fence is made by another one.
            } else if let Some(command) = self.bereaved_shell(pid) {
                command.status = Some(status);
            } else {
                if self.server == Some(pid) {
                    self.hear_out();
                }
                self.remember_orphan(pid, status);
                self.notices.push(Notice::Child { pid, status });
            }
        }
    }

    fn bereaved_shell(&mut self, pid: i32) -> Option<&mut Command> {
        let of_it = |command: &&mut Command| {
            command.phase == Phase::Running && command.helper.is_none() && command.shell == pid
        };
        self.commands.values_mut().find(of_it)
    }

    /// That its helper is dead may not have been seen yet.
    fn remember_orphan(&mut self, pid: i32, status: i32) {
        let reaped_at = Instant::now();
        let old = |orphan: &Orphan| reaped_at.duration_since(orphan.reaped_at) > ORPHAN_TIME;
        while self.orphans.front().is_some_and(old) || self.orphans.len() >= MAX_ORPHANS {
            self.orphans.pop_front();
        }
        // Ids are used again: the newest counts.
        self.orphans.retain(|orphan| orphan.pid != pid);
        self.orphans.push_back(Orphan { pid, status, reaped_at });
    }

    /// Kills what came from helpers that died; when nothing of it is left, says so.
    pub(super) fn pursue_hunt(&mut self) {
        let Some(hunt) = &mut self.hunt else { return };
        let now = Instant::now();
        if now < hunt.pass_at {
            return;
        }
        hunt.passes = hunt.passes.saturating_add(1);
        hunt.pass_at = now + Duration::from_millis(if hunt.passes < 500 { 2 } else { 200 });
        let answer = now >= hunt.answer_at;
        let strangers = tree::direct_children().into_iter();
        // After the look: one that has just been made is no stranger. While it is not known which it is, nobody is taken for one.
        self.pool.learn();
        let expecting = self.pool.is_expecting();
        // Until a dead helper is reaped its children are not ours yet.
        let unreaped = hunt.bereaved.iter().any(|lost| self.pool.is_unreaped(lost.pid));
        let (pool, servers) = (&self.pool, [self.server, self.next_server]);
        let strangers: Vec<_> =
            strangers.filter(|pid| !pool.is_unreaped(*pid) && !servers.contains(&Some(*pid))).collect();
        if !expecting {
            strangers.iter().for_each(|pid| tree::signal_child(*pid, libc::SIGKILL));
        }
        self.reap_more = true;
        let bereaved: Vec<_> = hunt.bereaved.iter().filter_map(|lost| lost.job).collect();
        if strangers.is_empty() && !unreaped {
            self.hunt = None;
            bereaved.into_iter().for_each(|handle| self.conclude(handle));
        } else if answer {
            let survivors: Vec<u32> = strangers.iter().map(|pid| pid.unsigned_abs()).collect();
            bereaved.into_iter().for_each(|handle| self.answer_owed(handle, &survivors));
        }
    }

    /// Ends what a keeper before this one has left; says what became of it when that is known.
    pub(super) fn pursue_left(&mut self) {
        let Some(left) = self.left.as_mut().filter(|left| left.pass_at <= Instant::now()) else { return };
        if let Some(verdicts) = left.pass() {
            self.left = None;
            self.tell(&FromKeeper::LeftEnded { verdicts }, Vec::new());
        }
    }

    /// Reports that a command could not be started: no helper could be made for it.
    fn start_failed(&mut self, handle: ProcessHandle) {
        let Some(command) = self.commands.remove(&handle) else { return };
        if !command.abandoned {
            let message = FromKeeper::SpawnFailed { handle, stage: Stage::Clone, errno: libc::EAGAIN };
            self.tell(&message, Vec::new());
            (0..command.owed_ends)
                .for_each(|_| self.tell(&FromKeeper::Ended { handle, survivors: Vec::new() }, Vec::new()));
            (0..command.owed_lists)
                .for_each(|_| self.tell(&FromKeeper::Processes { handle, processes: Vec::new() }, Vec::new()));
        }
    }

    /// Reports the end of a bereaved command of which nothing is left.
    fn conclude(&mut self, handle: ProcessHandle) {
        let Some(command) = self.commands.get_mut(&handle) else { return };
        let (phase, status) = (std::mem::replace(&mut command.phase, Phase::Empty), command.status);
        if command.abandoned {
            self.commands.remove(&handle);
            return;
        }
        let pipes = command.pipes.clone();
        match phase {
            Phase::Starting => {
                // The helper died before it had made a process for the command, as far as can be known.
                self.tell(&FromKeeper::Spawned { handle, pid: 0, helper: 0 }, pipes);
                self.tell(&FromKeeper::Exited { handle, status: None, empty: true, told: false }, Vec::new());
            }
            Phase::Running => {
                self.tell(&FromKeeper::Exited { handle, status, empty: true, told: false }, Vec::new());
            }
            Phase::Leftovers => self.tell(&FromKeeper::Empty { handle, told: false }, Vec::new()),
            Phase::Empty => {}
        }
        self.answer_owed(handle, &[]);
        self.forget_if_released(handle);
    }

    pub(super) fn answer_owed(&mut self, handle: ProcessHandle, survivors: &[u32]) {
        let Some(command) = self.commands.get_mut(&handle) else { return };
        let (ends, lists) = (std::mem::take(&mut command.owed_ends), std::mem::take(&mut command.owed_lists));
        for _ in 0..ends {
            self.tell(&FromKeeper::Ended { handle, survivors: survivors.to_vec() }, Vec::new());
        }
        for _ in 0..lists {
            self.tell(&FromKeeper::Processes { handle, processes: Vec::new() }, Vec::new());
        }
    }
}
