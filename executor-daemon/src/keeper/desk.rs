//! The keeper's loop, the same for the daemon and embedded: takes the engine's messages and the helpers' reports, and
//! keeps of every command what must outlive the engine's process.
//!
//! ```text
//!   starting ── Spawned ──> running ── Exited ──> leftovers ── Empty ──> empty ── Release ──> forgotten
//!      └─ SpawnFailed ─> forgotten        └────── Exited{empty} ───────────┘
//! ```
//! A command whose helper died is *bereaved*: its processes have come to this process, which kills its children that are
//! nobody else's until there are none, and then reports the end. A command whose engine died goes on, whatever its state, and
//! is handed to the next engine; when there will be none (the daemon stops, the program that embeds it is gone) it is
//! *abandoned*: killed, and forgotten when it is empty. Neither changes the states above.
//!
//! Read in this order: here the state and the loop, `engine` (the engines' ends and how one takes over from another), `requests`
//! (what the engine asks for), `helpers` (what they say, and by when), `bereaved` (what is done without one).

mod bereaved;
mod engine;
mod helpers;
mod requests;

use std::{
    collections::{HashMap, VecDeque},
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    rc::Rc,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};

use self::{
    bereaved::{Hunt, Orphan},
    helpers::Dues,
};
use super::{
    channel::Channel,
    groups::Groups,
    helper::Context,
    left::Search,
    pool::Pool,
    protocol::{Identity, Mode, ToKeeper},
    spill::Spills,
    streams::StreamsAhead,
};
use crate::ids::ProcessHandle;

const LINK: u64 = 0;
const SIGNALS: u64 = 1;
/// An engine that is not the engine yet.
const NEXT: u64 = 2;

/// Most messages taken from one connection before the others have their turn.
const MAX_MESSAGES_AT_ONCE: usize = 64;
/// Silence after which the next command's helper and pipes are made.
const PREPARE_AFTER: Duration = Duration::from_millis(5);

/// What the loop leaves to its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Notice {
    /// A server could take over.
    Standby,
    /// The server takes calls.
    Ready,
    /// The server has drained.
    Drained,
    /// The engine's end of the link is gone.
    LinkLost {
        /// It was closed. False: it talked nonsense, and was given up.
        understood: bool,
    },
    /// The same of one that could not take over yet.
    NextLost {
        /// It is gone. False: it talks nonsense.
        understood: bool,
    },
    /// A child that is no helper has ended.
    Child {
        /// Its id.
        pid: i32,
        /// Its raw wait status.
        status: i32,
    },
    /// A signal came.
    Signal(Signal),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Starting,
    Running,
    Leftovers,
    Empty,
}

#[derive(Debug)]
struct Command {
    phase: Phase,
    /// `None`: bereaved or empty.
    helper: Option<u64>,
    /// 0: not known.
    shell: i32,
    identity: usize,
    /// Only to be told again.
    mode: Mode,
    /// Held until the engine releases them: the read ends of its pipes, in the order of their streams.
    pipes: Vec<Rc<OwnedFd>>,
    /// And its stream files.
    files: [Vec<Rc<OwnedFd>>; 2],
    /// And its spill files.
    spills: [Option<(Rc<OwnedFd>, PathBuf)>; 2],
    owed_ends: u32,
    owed_lists: u32,
    dues: Dues,
    abandoned: bool,
    /// The engine needs nothing more of it.
    released: bool,
    /// The shell's status, when it was reaped: by its helper, or by this process after the helper's death.
    status: Option<i32>,
}

/// The keeper's state.
#[derive(Debug)]
pub(super) struct Desk {
    epoll: Epoll,
    signals: SignalFd,
    link: Option<Channel>,
    /// An engine that has been greeted.
    next: Option<Channel>,
    /// The random name of this keeper's life.
    name: [u8; 16],
    pool: Pool,
    commands: HashMap<ProcessHandle, Command>,
    next_handle: u64,
    spills: Spills,
    ahead: StreamsAhead,
    hunt: Option<Hunt>,
    /// What a keeper before this one has left is being ended.
    left: Option<Search>,
    /// Not after the first of all dues.
    due_at: Option<Instant>,
    orphans: VecDeque<Orphan>,
    /// The server, a child that is neither helper nor orphan.
    pub(super) server: Option<i32>,
    /// The same that is to take over from it.
    pub(super) next_server: Option<i32>,
    notices: Vec<Notice>,
    reap_more: bool,
    /// When the next command's helper and pipes are made, if nothing else is to be done then.
    prepare_at: Option<Instant>,
}

impl Desk {
    /// Makes this process a keeper: sub-reaper, working in `/`, all signals blocked, `watched` (and SIGCHLD) taken as
    /// notices.
    pub(super) fn open(
        identities: Vec<Identity>,
        hidden: Vec<PathBuf>,
        groups: Groups,
        spills: Spills,
        watched: &[Signal],
    ) -> io::Result<Self> {
        std::env::set_current_dir("/")?;
        nix::sys::prctl::set_child_subreaper(true)?;
        // Commands of the same user shall not read the environment or memory of this process.
        nix::sys::prctl::set_dumpable(false)?;
        let open_files = raise_open_files();
        SigSet::all().thread_block()?;
        let mut taken: SigSet = watched.iter().copied().collect();
        taken.add(Signal::SIGCHLD);
        let signals = SignalFd::with_flags(&taken, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let mut name = [0; 16];
        getrandom::fill(&mut name).map_err(|error| io::Error::other(error.to_string()))?;
        epoll.add(&signals, EpollEvent::new(EpollFlags::EPOLLIN, SIGNALS))?;
        Ok(Self {
            epoll,
            signals,
            link: None,
            next: None,
            name,
            pool: Pool::new(Context { identities, groups, open_files, hidden, spills: spills.path().to_owned() }),
            commands: HashMap::new(),
            next_handle: 1,
            spills,
            ahead: StreamsAhead::default(),
            hunt: None,
            left: None,
            due_at: None,
            orphans: VecDeque::new(),
            server: None,
            next_server: None,
            notices: Vec::new(),
            reap_more: false,
            prepare_at: Some(Instant::now()),
        })
    }

    /// Kills everything that was started and is alive, and lets nobody wait for it.
    pub(super) fn kill_everything(&mut self) {
        let alive = self.commands.iter().filter(|(_, command)| command.phase != Phase::Empty);
        let alive: Vec<_> = alive.map(|(handle, command)| (*handle, command.helper)).collect();
        for (handle, helper) in alive {
            if let Some(token) = helper {
                self.instruct(token, &ToKeeper::End { handle, grace_ms: 0 });
                self.expect_end(handle, Duration::ZERO);
            }
        }
    }

    /// At the end: nobody is in a tenant's group any more but helpers without work.
    pub(super) fn remove_groups(&self) {
        self.pool.context().groups.remove();
    }

    /// Whether nothing that was started is alive.
    pub(super) fn quiet(&self) -> bool {
        self.commands.values().all(|command| command.phase == Phase::Empty)
    }

    /// Waits until something happens, at most until `until`, and does it.
    pub(super) fn turn(&mut self, until: Option<Instant>) -> io::Result<Vec<Notice>> {
        let mut events = [EpollEvent::empty(); 64];
        let count = match self.epoll.wait(&mut events, self.timeout(until)) {
            Ok(count) => count,
            Err(Errno::EINTR) => 0,
            Err(errno) => return Err(errno.into()),
        };
        for event in &events[..count] {
            let writable = event.events().contains(EpollFlags::EPOLLOUT);
            match event.data() {
                LINK => {
                    self.link_event(writable);
                }
                NEXT => self.next_event(writable),
                SIGNALS => self.signal_event(),
                token => self.helper_event(token, writable),
            }
        }
        if self.reap_more {
            self.reap();
        }
        if self.link.as_ref().is_some_and(Channel::is_deaf) {
            self.hear_out();
        }
        self.pursue_overdue();
        self.pursue_hunt();
        self.pursue_left();
        if count == 0 && self.prepare_at.is_some_and(|at| at <= Instant::now()) {
            self.prepare_at = None;
            self.pool.make_spare(&self.epoll);
            self.ahead.prepare();
        }
        Ok(std::mem::take(&mut self.notices))
    }

    fn timeout(&self, until: Option<Instant>) -> EpollTimeout {
        if self.reap_more {
            return EpollTimeout::ZERO;
        }
        let hunt = self.hunt.as_ref().map(|hunt| hunt.pass_at);
        let left = self.left.as_ref().map(|left| left.pass_at);
        let Some(until) = until.into_iter().chain(hunt).chain(left).chain(self.due_at).chain(self.prepare_at).min()
        else {
            return EpollTimeout::NONE;
        };
        let wait = until.saturating_duration_since(Instant::now());
        // Rounded up, so that a wait never ends just before its moment.
        let ms = if wait.is_zero() { 0 } else { wait.as_millis() + 1 };
        EpollTimeout::try_from(ms).unwrap_or(EpollTimeout::MAX)
    }

    fn signal_event(&mut self) {
        while let Ok(Some(info)) = self.signals.read_signal() {
            let signal = i32::try_from(info.ssi_signo).ok().and_then(|number| Signal::try_from(number).ok());
            match signal {
                Some(Signal::SIGCHLD) => self.reap_more = true,
                Some(signal) => self.notices.push(Notice::Signal(signal)),
                None => {}
            }
        }
    }

    fn alive(&mut self, handle: ProcessHandle) -> Option<&mut Command> {
        self.commands.get_mut(&handle).filter(|command| command.phase != Phase::Empty)
    }

    fn forget_if_released(&mut self, handle: ProcessHandle) {
        if self.commands.get(&handle).is_some_and(|command| command.released && command.phase == Phase::Empty) {
            self.commands.remove(&handle);
        }
    }

    /// Makes what the next command needs, when there is time: what has just been asked for comes first.
    fn prepare_soon(&mut self) {
        self.prepare_at = Some(Instant::now() + PREPARE_AFTER);
    }
}

/// Raises this process's own limit on descriptors to what it may have; returns the one that commands get.
fn raise_open_files() -> Option<(u64, u64)> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).ok()?;
    Some((soft, hard))
}
