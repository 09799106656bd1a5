//! The keeper's helpers: made ahead of need, reused, and missed when one dies.
#![expect(unsafe_code, reason = "forks helpers")]

use std::{collections::HashMap, io, os::fd::OwnedFd, rc::Rc, sync::atomic::Ordering};

use nix::{
    errno::Errno,
    sys::epoll::Epoll,
    unistd::{ForkResult, fork},
};

use super::{
    channel::{Channel, Received},
    fence::Zygote,
    helper::{self, Context},
    spawn::SharedPids,
    tree,
    wire::{self, Frame},
};
use crate::ids::ProcessHandle;

/// Most helpers that wait for work within one fence, and within all; those above it are let go.
const MAX_IDLE: usize = 8;
const MAX_IDLE_IN_ALL: usize = 64;
/// Most fences. There is one for each tenant that has run something.
const MAX_FENCES: usize = 4096;
/// What the kernel answers a process that can have nothing more.
const SHORTAGES: [i32; 5] = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS, libc::ETOOMANYREFS];
/// Tokens below this one are the keeper's own.
pub(super) const FIRST_HELPER_TOKEN: u64 = 16;

/// The name of a fence; `None`: none.
type Fence = Option<Rc<str>>;

#[derive(Debug)]
struct Helper {
    channel: Channel,
    /// 0: it is being made, by a zygote.
    pid: i32,
    job: Option<ProcessHandle>,
    pids: SharedPids,
    fence: Fence,
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
    /// Those that wait for work, by their fence, and for which one was asked for last.
    idle: HashMap<Fence, Vec<u64>>,
    last: Fence,
    /// What makes the helpers within a fence.
    zygotes: HashMap<Rc<str>, Zygote>,
    /// Those that another has taken the place of, until they are reaped.
    old_zygotes: Vec<i32>,
    /// Helpers whose ids are not known yet.
    unnamed: Vec<u64>,
    /// Every helper that has not been reaped, dead or alive.
    unreaped: HashMap<i32, u64>,
    next_token: u64,
}

/// A helper that died, with what it had.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lost {
    /// Its id; its orphans are this process's children only once it has been reaped. 0: it was never made.
    pub(super) pid: i32,
    /// Its command.
    pub(super) job: Option<ProcessHandle>,
    /// The shell that it started last for it; 0: none.
    pub(super) shell: i32,
}

/// What a child was that has been reaped.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reaped {
    /// The helper of this token.
    Helper(u64),
    /// What makes helpers within a fence.
    Zygote,
}

impl Pool {
    /// No helpers yet.
    pub(super) fn new(context: Context) -> Self {
        Self {
            context,
            helpers: HashMap::new(),
            idle: HashMap::new(),
            last: None,
            zygotes: HashMap::new(),
            old_zygotes: Vec::new(),
            unnamed: Vec::new(),
            unreaped: HashMap::new(),
            next_token: FIRST_HELPER_TOKEN,
        }
    }

    /// Who commands may run as.
    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// Makes a helper ahead of need if none waits where one was needed last. That it fails shows when one is needed.
    pub(super) fn make_spare(&mut self, epoll: &Epoll) {
        let fence = self.last.clone();
        if self.idle.get(&fence).is_none_or(Vec::is_empty)
            && let Ok(token) = self.make(epoll, &fence)
        {
            self.idle.entry(fence).or_default().push(token);
        }
    }

    fn make(&mut self, epoll: &Epoll, fence: &Fence) -> io::Result<u64> {
        let (ours, theirs) = wire::pair()?;
        let (news, told) = wire::pair()?;
        let token = self.next_token;
        let (pid, pids) = match fence {
            Some(fence) => (0, self.make_within(fence, token, [theirs, told])?),
            None => self.make_without(token, [theirs, told])?,
        };
        self.next_token += 1;
        if pid == 0 {
            self.unnamed.push(token);
        } else {
            self.unreaped.insert(pid, token);
        }
        let channel = Channel::register(epoll, ours, token)?;
        let (news, fence) = (Rc::new(news), fence.clone());
        let helper = Helper { channel, pid, job: None, pids, fence, news, news_given: false, listened_to: false };
        self.helpers.insert(token, helper);
        Ok(token)
    }

    fn make_without(&self, token: u64, sockets: [OwnedFd; 2]) -> io::Result<(i32, SharedPids)> {
        let pids = SharedPids::new()?;
        // SAFETY: this process has one thread, so the child may go on as an ordinary program.
        match unsafe { fork() }? {
            ForkResult::Child => {
                let code = i32::from(helper::run(sockets, token, &self.context, &pids).is_err());
                // SAFETY: ends this process at once: the keeper's destructors and exit handlers are not the helper's.
                unsafe { libc::_exit(code) }
            }
            ForkResult::Parent { child } => Ok((child.as_raw(), pids)),
        }
    }

    fn make_within(&mut self, fence: &Rc<str>, token: u64, sockets: [OwnedFd; 2]) -> io::Result<SharedPids> {
        if let Some(zygote) = self.zygotes.get(fence) {
            match zygote.make_helper(token, [sockets[0].try_clone()?, sockets[1].try_clone()?]) {
                Ok(pids) => return Ok(pids),
                // This process has no room for more, which says nothing of the zygote.
                Err(error) if error.raw_os_error().is_some_and(|errno| SHORTAGES.contains(&errno)) => {
                    return Err(error);
                }
                // It is dead, or was stopped for so long that it may as well be.
                Err(_) => tree::signal_child(zygote.pid, libc::SIGKILL),
            }
        } else if self.zygotes.len() >= MAX_FENCES {
            return Err(Errno::EAGAIN.into());
        }
        let zygote = Zygote::start(&self.context)?;
        let made = zygote.make_helper(token, sockets);
        if let Some(old) = self.zygotes.insert(Rc::clone(fence), zygote) {
            self.old_zygotes.push(old.pid);
        }
        made
    }

    /// Learns the ids of helpers that zygotes have made.
    pub(super) fn learn(&mut self) {
        let (helpers, unreaped) = (&mut self.helpers, &mut self.unreaped);
        self.unnamed.retain(|token| {
            let Some(helper) = helpers.get_mut(token) else { return false };
            helper.pid = helper.pids.helper().load(Ordering::Acquire);
            if helper.pid != 0 {
                unreaped.insert(helper.pid, *token);
            }
            helper.pid == 0
        });
    }

    /// Whether helpers are being made whose ids are not known yet.
    pub(super) fn is_expecting(&self) -> bool {
        !self.unnamed.is_empty()
    }

    /// Hands a command to a helper within this fence.
    ///
    /// # Errors
    /// When there is none and none can be made. No helper has the command then.
    pub(super) fn assign(
        &mut self,
        epoll: &Epoll,
        job: ProcessHandle,
        fence: Option<&str>,
        frame: Frame,
        fds: Vec<Rc<OwnedFd>>,
    ) -> io::Result<u64> {
        if self.last.as_deref() != fence {
            self.last = fence.map(Rc::from);
        }
        let fence = self.last.clone();
        let token = match self.idle.get_mut(&fence).and_then(Vec::pop) {
            Some(token) => token,
            None => self.make(epoll, &fence)?,
        };
        let helper = self.helpers.get_mut(&token).ok_or(io::ErrorKind::NotFound)?;
        helper.job = Some(job);
        helper.pids.shell().store(0, Ordering::Release);
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
        let in_all: usize = self.idle.values().map(Vec::len).sum();
        let Some(helper) = self.helpers.get_mut(&token) else { return };
        let idle = self.idle.entry(helper.fence.clone()).or_default();
        if idle.len() >= MAX_IDLE || in_all >= MAX_IDLE_IN_ALL {
            // It exits when its socket closes.
            self.remove(epoll, token);
        } else {
            helper.job = None;
            idle.push(token);
        }
    }

    /// Kills a helper; works while it is stopped, too. What it had comes to this process once it is reaped.
    pub(super) fn kill(&mut self, token: u64) {
        self.learn();
        if let Some(helper) = self.helpers.get(&token)
            && self.is_unreaped(helper.pid)
        {
            tree::signal_child(helper.pid, libc::SIGKILL);
        }
    }

    /// Forgets a helper whose channel is closed.
    pub(super) fn remove(&mut self, epoll: &Epoll, token: u64) -> Option<Lost> {
        self.learn();
        self.unnamed.retain(|unnamed| *unnamed != token);
        let Helper { channel, pid, job, pids, fence, .. } = self.helpers.remove(&token)?;
        if let Some(idle) = self.idle.get_mut(&fence) {
            idle.retain(|idle| *idle != token);
        }
        channel.close(epoll);
        Some(Lost { pid, job, shell: pids.shell().load(Ordering::Acquire) })
    }

    /// A child was reaped: what it was to the pool.
    pub(super) fn reaped(&mut self, pid: i32) -> Option<Reaped> {
        self.learn();
        if let Some(token) = self.unreaped.remove(&pid) {
            return Some(Reaped::Helper(token));
        }
        let (zygotes, old) = (self.zygotes.len(), self.old_zygotes.len());
        self.zygotes.retain(|_, zygote| zygote.pid != pid);
        self.old_zygotes.retain(|old| *old != pid);
        let was_zygote = self.zygotes.len() < zygotes || self.old_zygotes.len() < old;
        was_zygote.then_some(Reaped::Zygote)
    }

    /// Whether this child is a helper or makes some, dead or alive.
    pub(super) fn is_unreaped(&self, pid: i32) -> bool {
        let zygotes = self.zygotes.values().map(|zygote| zygote.pid).chain(self.old_zygotes.iter().copied());
        self.unreaped.contains_key(&pid) || zygotes.into_iter().any(|zygote| zygote == pid)
    }
}
