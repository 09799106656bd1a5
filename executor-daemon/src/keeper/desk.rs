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
    unistd::{Gid, Uid},
};

use super::{
    channel::{Channel, Received},
    helper::{Context, KILL_TIME, MAX_REAPED_AT_ONCE},
    pool::{Lost, Pool},
    protocol::{FromKeeper, Identity, Life, SpawnSpec, Stage, Stream, ToKeeper},
    spill::Spills,
    streams::{Streams, StreamsAhead},
    tree::{self, Reaped},
    wire::{Frame, Packet},
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
/// Longest that a helper may take to start a command or to list its processes.
const ANSWER_TIME: Duration = Duration::from_secs(2);
/// How much later than it should a helper may answer an `End`, before it is taken for one that its command stopped.
const END_SLACK: Duration = Duration::from_millis(600);
/// How long after such a helper was killed its `End`s are answered with what is still alive. With [`KILL_TIME`] and
/// [`END_SLACK`] it stays within two seconds after the grace.
const OVERDUE_KILL_TIME: Duration = Duration::from_millis(400);
/// A grace beyond this is for ever, and must not overflow.
const LONGEST_GRACE: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Most orphans whose statuses are remembered, and for how long.
const MAX_ORPHANS: usize = 1024;
const ORPHAN_TIME: Duration = Duration::from_secs(1);

/// What the loop leaves to its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Notice {
    /// A server could take over.
    Standby,
    /// The server takes calls.
    Ready,
    /// The server has drained.
    Drained,
    /// The engine's process is gone or talks nonsense.
    LinkLost,
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
    /// Held until the engine releases them: the read ends of its pipes, in the order of their streams.
    pipes: Vec<Rc<OwnedFd>>,
    /// And its stream files.
    files: [Option<Rc<OwnedFd>>; 2],
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

/// When the helper must have answered what it was told. A command can stop the helper that runs as its own user, and then
/// nothing but its death helps; it is a direct child, so that its id is its own.
#[derive(Debug, Default)]
struct Dues {
    /// Until the command has started.
    start: Option<Instant>,
    /// One for each `End`, of the engine or of the keeper, that has no answer.
    ends: Vec<Instant>,
    /// One for each `List`.
    lists: Vec<Instant>,
}

impl Dues {
    fn first(&self) -> Option<Instant> {
        self.start.iter().chain(&self.ends).chain(&self.lists).min().copied()
    }
}

/// A child that nobody was known to miss when it was reaped.
#[derive(Debug)]
struct Orphan {
    pid: i32,
    status: i32,
    reaped_at: Instant,
}

/// The search for the processes of helpers that died.
#[derive(Debug)]
struct Hunt {
    bereaved: Vec<Lost>,
    answer_at: Instant,
    pass_at: Instant,
    passes: u32,
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
    pub(super) fn open(identities: Vec<Identity>, spills: Spills, watched: &[Signal]) -> io::Result<Self> {
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
            pool: Pool::new(Context { identities, open_files }),
            commands: HashMap::new(),
            next_handle: 1,
            spills,
            ahead: StreamsAhead::default(),
            hunt: None,
            due_at: None,
            orphans: VecDeque::new(),
            server: None,
            next_server: None,
            notices: Vec::new(),
            reap_more: false,
            prepare_at: Some(Instant::now()),
        })
    }

    /// Takes a new engine's end and greets it. It says [`Notice::Standby`] when it could take over.
    pub(super) fn greet(
        &mut self,
        socket: OwnedFd,
        listeners: Vec<(String, Rc<OwnedFd>)>,
        server_settings: Vec<u8>,
    ) -> io::Result<()> {
        let (names, fds) = listeners.into_iter().unzip();
        let hello = FromKeeper::Hello {
            version: super::protocol::VERSION,
            keeper: self.name,
            identities: self.pool.context().identities.clone(),
            listeners: names,
            server_settings,
        };
        let mut next = Channel::register(&self.epoll, socket, NEXT)?;
        next.send(&self.epoll, Frame::encode(&hello)?, fds)?;
        self.next = Some(next);
        Ok(())
    }

    /// Makes the engine that was greeted last the engine, and hands it everything. Nobody else is the engine any more.
    pub(super) fn promote(&mut self) -> io::Result<()> {
        let Some(mut link) = self.next.take() else { return Ok(()) };
        link.rename(&self.epoll, LINK)?;
        self.link = Some(link);
        let mut handles: Vec<_> = self.commands.keys().copied().collect();
        handles.sort_unstable();
        let carried = u32::try_from(handles.len()).unwrap_or(u32::MAX);
        self.tell(&FromKeeper::Go { first_handle: self.next_handle, carried }, Vec::new());
        for handle in handles {
            self.carry(handle);
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
            files: command.files.each_ref().map(Option::is_some),
            spills: command.spills.each_ref().map(|spill| spill.as_ref().map(|(_, path)| path.clone())),
        };
        let files = command.files.iter().flatten().chain(command.spills.iter().flatten().map(|(file, _)| file));
        let mut fds: Vec<_> = command.pipes.iter().chain(files).map(Rc::clone).collect();
        fds.extend(command.helper.and_then(|token| self.pool.give_news(token)));
        self.tell(&message, fds);
    }

    /// Drops an engine that was greeted and cannot take over.
    pub(super) fn drop_next(&mut self) {
        if let Some(next) = self.next.take() {
            next.close(&self.epoll);
        }
    }

    /// The engine is gone. What it had started goes on, for the next one.
    pub(super) fn detach(&mut self) {
        if let Some(link) = self.link.take() {
            link.close(&self.epoll);
        }
        self.pool.forget_listener();
        for command in self.commands.values_mut() {
            (command.owed_ends, command.owed_lists) = (0, 0);
        }
    }

    /// Tells the engine to drain. False: there is nobody to tell.
    pub(super) fn ask_for_drain(&mut self) -> bool {
        self.tell(&FromKeeper::Drain, Vec::new());
        self.link.is_some()
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

    /// Whether nothing that was started is alive.
    pub(super) fn quiet(&self) -> bool {
        self.commands.values().all(|command| command.phase == Phase::Empty)
    }

    /// Drops the engine's end, if there is one still, and kills everything of it: there will be no other.
    pub(super) fn disconnect(&mut self) {
        self.detach();
        self.kill_everything();
        self.commands.retain(|_, command| command.phase != Phase::Empty);
        for command in self.commands.values_mut() {
            command.abandoned = true;
            command.pipes.clear();
            command.files = [None, None];
            command.spills = [None, None];
        }
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
        let Some(until) = until.into_iter().chain(hunt).chain(self.due_at).chain(self.prepare_at).min() else {
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

    // ---- the engine's process ----

    /// Takes messages, not so many that nobody else has a turn; whether there may be more.
    fn link_event(&mut self, writable: bool) -> bool {
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
                    Ok(_) | Err(_) => {}
                },
                Received::Closed => {}
            }
            self.lose_link();
            return false;
        }
        true
    }

    /// Takes all that an engine has said that is no more: files that it gave to hold are part of it. Then gives it up.
    fn hear_out(&mut self) {
        while self.link_event(false) {}
        if self.link.is_some() {
            self.lose_link();
        }
    }

    fn lose_link(&mut self) {
        if let Some(link) = self.link.take() {
            link.close(&self.epoll);
        }
        self.notices.push(Notice::LinkLost);
    }

    /// One that is greeted has one thing to say.
    fn next_event(&mut self, writable: bool) {
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

    fn engine_says(&mut self, message: ToKeeper, packet: Packet) {
        match message {
            ToKeeper::Spawn { handle, spec } => self.spawn(handle, &spec, packet),
            ToKeeper::End { handle, grace_ms } => match self.alive(handle) {
                Some(command) => {
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
                    command.files[stream as usize] = packet.into_parts().1.into_iter().next().map(Rc::new);
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
                if let Some(command) = self.commands.get_mut(&handle) {
                    command.released = true;
                }
                self.forget_if_released(handle);
            }
            ToKeeper::Ready => self.notices.push(Notice::Ready),
            ToKeeper::Drained => self.notices.push(Notice::Drained),
        }
    }

    fn alive(&mut self, handle: ProcessHandle) -> Option<&mut Command> {
        self.commands.get_mut(&handle).filter(|command| command.phase != Phase::Empty)
    }

    /// To the command's helper, as it came; a bereaved command has none, and is answered when it is empty.
    fn pass_on(&mut self, handle: ProcessHandle, packet: Packet) {
        if let Some(token) = self.commands.get(&handle).and_then(|command| command.helper) {
            self.pool.send(&self.epoll, token, packet.into_parts().0);
        }
    }

    fn tell(&mut self, message: &FromKeeper, fds: Vec<Rc<OwnedFd>>) {
        let Some(link) = &mut self.link else { return };
        match Frame::encode(message) {
            Ok(frame) => {
                // If it is gone, the channel knows.
                let _ = link.send(&self.epoll, frame, fds);
            }
            Err(_no_memory_for_it) => self.lose_link(),
        }
    }

    fn instruct(&mut self, token: u64, message: &ToKeeper) {
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
                let owner = (Some(Uid::from_raw(identity.uid)), Some(Gid::from_raw(identity.gid)));
                nix::unistd::fchown(pipe, owner.0, owner.1).map_err(refused)?;
            }
        }
        let fds = write_ends.into_iter().chain(given).map(Rc::new).collect();
        let helper = self.pool.assign(&self.epoll, handle, frame, fds).map_err(failed(Stage::Clone))?;
        let pipes = read_ends.into_iter().map(Rc::new).collect();
        let due = Instant::now() + ANSWER_TIME;
        let command = Command {
            phase: Phase::Starting,
            helper: Some(helper),
            shell: 0,
            identity: index,
            pipes,
            files: [None, None],
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
                self.tell(&FromKeeper::SpillOpened { handle, stream, path }, vec![file]);
            }
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                self.tell(&FromKeeper::SpillFailed { handle, stream, errno }, Vec::new());
            }
        }
    }

    // ---- helpers ----

    fn helper_event(&mut self, token: u64, writable: bool) {
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
            | FromKeeper::Drain => return,
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
            }
            FromKeeper::Exited { told, status, .. } => {
                (command.phase, command.status) = (Phase::Leftovers, *status);
                wanted = !(*told && heard);
            }
            FromKeeper::Empty { told, .. } => wanted = !(*told && heard),
            FromKeeper::Ended { .. } => {
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

    /// To the engine, as it came.
    fn pass_up(&mut self, packet: Packet, fds: Vec<Rc<OwnedFd>>) {
        let Some(link) = &mut self.link else { return };
        // If it is gone, the channel knows.
        let _ = link.send(&self.epoll, packet.into_parts().0, fds);
    }

    /// Forgets a helper that is dead. What it owes is answered within this time.
    fn lose_helper(&mut self, token: u64, answer_in: Duration) {
        let Some(lost) = self.pool.remove(&self.epoll, token) else { return };
        self.prepare_soon();
        let Some(handle) = lost.job else { return };
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

    fn expect_end(&mut self, handle: ProcessHandle, grace: Duration) {
        let due = Instant::now() + grace.min(LONGEST_GRACE) + KILL_TIME + END_SLACK;
        if let Some(command) = self.commands.get_mut(&handle) {
            command.dues.ends.push(due);
            self.look_at(due);
        }
    }

    /// Makes what the next command needs, when there is time: what has just been asked for comes first.
    fn prepare_soon(&mut self) {
        self.prepare_at = Some(Instant::now() + PREPARE_AFTER);
    }

    fn look_at(&mut self, due: Instant) {
        self.due_at = Some(self.due_at.map_or(due, |due_at| due_at.min(due)));
    }

    /// Kills helpers that have not answered in time; their commands are bereaved then.
    fn pursue_overdue(&mut self) {
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

    /// Takes children that have ended: helpers, the server, and what came from helpers that died.
    fn reap(&mut self) {
        self.reap_more = true;
        self.resume_helpers();
        for _ in 0..MAX_REAPED_AT_ONCE {
            let Reaped::Child(pid, status) = tree::reap() else {
                self.reap_more = false;
                return;
            };
            if let Some(token) = self.pool.reaped(pid) {
                // What it said last is still in its channel; then its end is.
                self.helper_event(token, false);
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

    /// Lets helpers go on that a command has stopped, at work or idle. One that is stopped again and again is killed when
    /// it is late with an answer.
    fn resume_helpers(&self) {
        for _ in 0..MAX_REAPED_AT_ONCE {
            let Some(pid) = tree::stopped_child() else { return };
            if self.pool.is_unreaped(pid) {
                tree::signal_child(pid, libc::SIGCONT);
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
    fn pursue_hunt(&mut self) {
        let Some(hunt) = &mut self.hunt else { return };
        let now = Instant::now();
        if now < hunt.pass_at {
            return;
        }
        hunt.passes = hunt.passes.saturating_add(1);
        hunt.pass_at = now + Duration::from_millis(if hunt.passes < 500 { 2 } else { 200 });
        let answer = now >= hunt.answer_at;
        // Until a dead helper is reaped its children are not ours yet.
        let unreaped = hunt.bereaved.iter().any(|lost| self.pool.is_unreaped(lost.pid));
        let (pool, servers) = (&self.pool, [self.server, self.next_server]);
        let strangers = tree::direct_children().into_iter();
        let strangers: Vec<_> =
            strangers.filter(|pid| !pool.is_unreaped(*pid) && !servers.contains(&Some(*pid))).collect();
        strangers.iter().for_each(|pid| tree::signal_child(*pid, libc::SIGKILL));
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

    fn forget_if_released(&mut self, handle: ProcessHandle) {
        if self.commands.get(&handle).is_some_and(|command| command.released && command.phase == Phase::Empty) {
            self.commands.remove(&handle);
        }
    }

    fn answer_owed(&mut self, handle: ProcessHandle, survivors: &[u32]) {
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

/// Raises this process's own limit on descriptors to what it may have; returns the one that commands get.
fn raise_open_files() -> Option<(u64, u64)> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).ok()?;
    Some((soft, hard))
}
