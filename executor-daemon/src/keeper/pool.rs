//! The keeper's helpers: made ahead of need, reused, and missed when one dies.
#![expect(unsafe_code, reason = "forks helpers")]

use std::{collections::HashMap, io, os::fd::OwnedFd, rc::Rc, sync::atomic::Ordering};

use nix::{
    sys::epoll::Epoll,
    unistd::{ForkResult, fork},
};

use super::{
    channel::{Channel, Received},
    helper::{self, Context},
    spawn::SharedPid,
    tree,
    wire::{self, Frame},
};
use crate::ids::ProcessHandle;

/// Most helpers that wait for work; those above it are let go.
const MAX_IDLE: usize = 8;
/// Tokens below this one are the keeper's own.
pub(super) const FIRST_HELPER_TOKEN: u64 = 16;

#[derive(Debug)]
struct Helper {
    channel: Channel,
    pid: i32,
    job: Option<ProcessHandle>,
    shell: SharedPid,
    /// The engine's end of what this helper tells it.
    news: Rc<OwnedFd>,
    news_given: bool,
    listened_to: bool,
}

/// All helpers.
#[derive(Debug)]
pub(super) struct Pool {
    context: Context,
    helpers: HashMap<u64, Helper>,
    idle: Vec<u64>,
    /// Every helper that has not been reaped, dead or alive.
    unreaped: HashMap<i32, u64>,
    next_token: u64,
}

/// A helper that died, with what it had.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lost {
    /// Its id; its orphans are this process's children only once it has been reaped.
    pub(super) pid: i32,
    /// Its command.
    pub(super) job: Option<ProcessHandle>,
    /// The shell that it started last for it; 0: none.
    pub(super) shell: i32,
}

impl Pool {
    /// No helpers yet.
    pub(super) fn new(context: Context) -> Self {
        Self {
            context,
            helpers: HashMap::new(),
            idle: Vec::new(),
            unreaped: HashMap::new(),
            next_token: FIRST_HELPER_TOKEN,
        }
    }

    /// Who commands may run as.
    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// Makes a helper ahead of need if none waits. That it fails shows when one is needed.
    pub(super) fn make_spare(&mut self, epoll: &Epoll) {
        if self.idle.is_empty()
            && let Ok(token) = self.make(epoll)
        {
            self.idle.push(token);
        }
    }

    fn make(&mut self, epoll: &Epoll) -> io::Result<u64> {
        let (ours, theirs) = wire::pair()?;
        let (news, told) = wire::pair()?;
        let token = self.next_token;
        let shell = SharedPid::new()?;
        // SAFETY: this process has one thread, so the child may go on as an ordinary program.
        match unsafe { fork() }? {
            ForkResult::Child => {
                let code = i32::from(helper::run([theirs, told], token, &self.context, &shell).is_err());
                // SAFETY: ends this process at once: the keeper's destructors and exit handlers are not the helper's.
                unsafe { libc::_exit(code) }
            }
            ForkResult::Parent { child } => {
                self.next_token += 1;
                self.unreaped.insert(child.as_raw(), token);
                let channel = Channel::register(epoll, ours, token)?;
                let (pid, news) = (child.as_raw(), Rc::new(news));
                let helper = Helper { channel, pid, job: None, shell, news, news_given: false, listened_to: false };
                self.helpers.insert(token, helper);
                Ok(token)
            }
        }
    }

    /// Hands a command to a helper.
    ///
    /// # Errors
    /// When there is none and none can be made. No helper has the command then.
    pub(super) fn assign(
        &mut self,
        epoll: &Epoll,
        job: ProcessHandle,
        frame: Frame,
        fds: Vec<Rc<OwnedFd>>,
    ) -> io::Result<u64> {
        let token = match self.idle.pop() {
            Some(token) => token,
            None => self.make(epoll)?,
        };
        let helper = self.helpers.get_mut(&token).ok_or(io::ErrorKind::NotFound)?;
        helper.job = Some(job);
        helper.shell.word().store(0, Ordering::Release);
        // If it is dead, that shows on its channel, and its command is missed then.
        let _ = helper.channel.send(epoll, frame, fds);
        Ok(token)
    }

    /// Says something to a helper; if it is dead, that shows on its channel.
    pub(super) fn send(&mut self, epoll: &Epoll, token: u64, frame: Frame) {
        if let Some(helper) = self.helpers.get_mut(&token) {
            let _ = helper.channel.send(epoll, frame, Vec::new());
        }
    }

    /// Sends what a helper did not take before.
    pub(super) fn flush(&mut self, epoll: &Epoll, token: u64) {
        if let Some(helper) = self.helpers.get_mut(&token) {
            let _ = helper.channel.flush(epoll);
        }
    }

    /// Takes one message of a helper.
    pub(super) fn receive(&self, token: u64) -> Received {
        self.helpers.get(&token).map_or(Received::Nothing, |helper| helper.channel.receive())
    }

    /// The socket on which an engine hears a helper's news, once for each engine.
    pub(super) fn give_news(&mut self, token: u64) -> Option<Rc<OwnedFd>> {
        let helper = self.helpers.get_mut(&token).filter(|helper| !helper.news_given)?;
        helper.news_given = true;
        Some(Rc::clone(&helper.news))
    }

    /// The engine hears a helper's news.
    pub(super) fn listened_to(&mut self, token: u64) {
        if let Some(helper) = self.helpers.get_mut(&token) {
            helper.listened_to = true;
        }
    }

    /// Whether the engine hears a helper's news.
    pub(super) fn is_listened_to(&self, token: u64) -> bool {
        self.helpers.get(&token).is_some_and(|helper| helper.listened_to)
    }

    /// The engine is gone; the next one has to be given the news again.
    pub(super) fn forget_listener(&mut self) {
        for helper in self.helpers.values_mut() {
            (helper.news_given, helper.listened_to) = (false, false);
        }
    }

    /// A helper has nothing left of its command and waits for the next one.
    pub(super) fn idle(&mut self, epoll: &Epoll, token: u64) {
        if self.idle.len() >= MAX_IDLE {
            // It exits when its socket closes.
            self.remove(epoll, token);
        } else if let Some(helper) = self.helpers.get_mut(&token) {
            helper.job = None;
            self.idle.push(token);
        }
    }

    /// Kills a helper; works while it is stopped, too. What it had comes to this process once it is reaped.
    pub(super) fn kill(&self, token: u64) {
        if let Some(helper) = self.helpers.get(&token)
            && self.is_unreaped(helper.pid)
        {
            tree::signal_child(helper.pid, libc::SIGKILL);
        }
    }

    /// Forgets a helper whose channel is closed.
    pub(super) fn remove(&mut self, epoll: &Epoll, token: u64) -> Option<Lost> {
        self.idle.retain(|idle| *idle != token);
        let Helper { channel, pid, job, shell, .. } = self.helpers.remove(&token)?;
        channel.close(epoll);
        Some(Lost { pid, job, shell: shell.word().load(Ordering::Acquire) })
    }

    /// A child was reaped: the token of the helper that it was.
    pub(super) fn reaped(&mut self, pid: i32) -> Option<u64> {
        self.unreaped.remove(&pid)
    }

    /// Whether this child is a helper, dead or alive.
    pub(super) fn is_unreaped(&self, pid: i32) -> bool {
        self.unreaped.contains_key(&pid)
    }
}
