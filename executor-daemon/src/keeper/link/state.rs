//! Who waits for what, and the task that receives.

use std::{
    collections::{HashMap, VecDeque},
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, Shutdown, shutdown},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{Notify, mpsc, oneshot, watch},
};

use super::{Carried, ProcessEvent, Spawned, receive, watched};
use crate::{
    ids::ProcessHandle,
    keeper::{
        protocol::{FromKeeper, Life, ProcessEntry, Stage, Stream, ToKeeper, Verdict},
        wire::{Frame, Packet},
    },
};

type Waiting<K, T> = HashMap<K, VecDeque<oneshot::Sender<T>>>;

/// What a start comes to.
type Started = Result<Spawned, NotStarted>;

/// Why there is no command.
#[derive(Debug)]
pub(super) enum NotStarted {
    /// The stage that failed and the kernel's answer.
    Failed(Stage, i32),
    /// It runs, but its descriptors are lost: this process has too many open. It is being killed.
    Cut,
}

/// A spill file, open for writing, and its path.
type SpillFile = io::Result<(OwnedFd, PathBuf)>;

/// Everything that the link's clones and its task have in common.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) socket: AsyncFd<OwnedFd>,
    state: Mutex<State>,
    /// Something waits to be sent.
    unsent: Notify,
    pub(super) drain: watch::Sender<bool>,
    pub(super) lost: watch::Sender<bool>,
}

/// Where the events of one command go.
#[derive(Debug)]
struct Events {
    sender: mpsc::UnboundedSender<ProcessEvent>,
    /// Its exit was sent: the helper and the keeper may both tell it.
    exited: bool,
}

/// Who waits for what.
#[derive(Debug)]
pub(super) struct State {
    next_handle: u64,
    lost: bool,
    /// Bounded by what was asked and not answered yet.
    unsent: VecDeque<(Frame, Vec<OwnedFd>)>,
    pub(super) spawning: HashMap<ProcessHandle, oneshot::Sender<Started>>,
    pub(super) ending: Waiting<ProcessHandle, Vec<u32>>,
    pub(super) listing: Waiting<ProcessHandle, Vec<ProcessEntry>>,
    pub(super) spilling: Waiting<(ProcessHandle, Stream), SpillFile>,
    pub(super) reopening: Waiting<(), io::Result<OwnedFd>>,
    /// The one question of its kind that was asked last.
    pub(super) left: Option<oneshot::Sender<Vec<(i64, Verdict)>>>,
    events: HashMap<ProcessHandle, Events>,
    /// Ends that a helper has told before the keeper's word of the start was here, in order.
    early: HashMap<ProcessHandle, Vec<(ProcessEvent, bool)>>,
    /// The shells of commands that are not known to be empty.
    pub(super) alive: HashMap<ProcessHandle, u32>,
    /// Commands whose starter went away; they are killed, and released when they are empty.
    abandoned: Vec<ProcessHandle>,
}

impl State {
    /// A name that was never used.
    pub(super) fn new_handle(&mut self) -> ProcessHandle {
        let handle = ProcessHandle(self.next_handle);
        self.next_handle += 1;
        handle
    }

    /// Lets everybody know that no answer will come.
    fn lose(&mut self) {
        self.lost = true;
        self.unsent.clear();
        self.spawning.clear();
        self.ending.clear();
        self.listing.clear();
        self.spilling.clear();
        self.reopening.clear();
        self.left = None;
        self.events.clear();
        self.early.clear();
    }
}

impl Shared {
    pub(super) fn new(socket: AsyncFd<OwnedFd>, next_handle: u64) -> Self {
        let state = State {
            next_handle,
            lost: false,
            unsent: VecDeque::new(),
            spawning: HashMap::new(),
            ending: HashMap::new(),
            listing: HashMap::new(),
            spilling: HashMap::new(),
            reopening: HashMap::new(),
            left: None,
            events: HashMap::new(),
            early: HashMap::new(),
            alive: HashMap::new(),
            abandoned: Vec::new(),
        };
        Self {
            socket,
            state: Mutex::new(state),
            unsent: Notify::new(),
            drain: watch::Sender::new(false),
            lost: watch::Sender::new(false),
        }
    }

    /// The state. What a panic elsewhere left of it is whole: nothing here panics between two changes that belong together.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks something: registers who waits and sends, in one step, so that answers come in the order of the questions.
    pub(super) fn ask<T>(
        &self,
        fds: Vec<OwnedFd>,
        question: impl FnOnce(&mut State) -> (ToKeeper, oneshot::Receiver<T>),
    ) -> oneshot::Receiver<T> {
        let mut state = self.state();
        let (message, answered) = question(&mut state);
        self.send(&mut state, &message, fds);
        answered
    }

    /// Says something that has no answer.
    pub(super) fn tell(&self, message: ToKeeper) {
        self.send(&mut self.state(), &message, Vec::new());
    }

    fn send(&self, state: &mut State, message: &ToKeeper, fds: Vec<OwnedFd>) {
        if state.lost {
            // Whoever has just been registered learns it.
            return state.lose();
        }
        let frame = match Frame::encode(message) {
            Ok(frame) => frame,
            Err(error) => return self.unsaid(state, message, &error),
        };
        if state.unsent.is_empty() {
            match self.try_send(&frame, &fds) {
                Ok(()) => return,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_gone) => return self.lose(state),
            }
        }
        state.unsent.push_back((frame, fds));
        self.unsent.notify_one();
    }

    /// What does not fit into a packet could not be put into a file. Only a start is so long: that one start has failed.
    fn unsaid(&self, state: &mut State, message: &ToKeeper, error: &io::Error) {
        let ToKeeper::Spawn { handle, .. } = message else { return self.lose(state) };
        if let Some(answer) = state.spawning.remove(handle) {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            // Whoever asked may be gone.
            let _ = answer.send(Err(NotStarted::Failed(Stage::Prepare, errno)));
        }
    }

    fn try_send(&self, frame: &Frame, fds: &[OwnedFd]) -> io::Result<()> {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        frame.send(self.socket.as_fd(), &fds, MsgFlags::MSG_DONTWAIT)
    }

    fn lose(&self, state: &mut State) {
        state.lose();
        self.lost.send_replace(true);
    }

    /// Closes the connection for both ends, whoever still holds a copy.
    pub(super) fn shut(&self) {
        // It may be closed already.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
        self.state().lose();
    }

    fn flush(&self) -> io::Result<()> {
        let mut state = self.state();
        while let Some((frame, fds)) = state.unsent.front() {
            self.try_send(frame, fds)?;
            state.unsent.pop_front();
        }
        Ok(())
    }

    async fn send_unsent(&self) -> io::Result<()> {
        loop {
            self.unsent.notified().await;
            self.socket.async_io(Interest::WRITABLE, |_| self.flush()).await?;
        }
    }

    async fn receive_all(self: &Arc<Self>) -> io::Result<()> {
        while let Some(packet) = receive(&self.socket).await? {
            let message = packet.decode()?;
            self.keeper_says(message, packet);
        }
        Ok(())
    }

    fn keeper_says(self: &Arc<Self>, message: FromKeeper, packet: Packet) {
        let mut guard = self.state();
        let state = &mut *guard;
        match message {
            FromKeeper::Spawned { handle, pid, helper } => self.spawned(state, handle, pid, helper, packet),
            FromKeeper::SpawnFailed { handle, stage, errno } => {
                if let Some(answer) = state.spawning.remove(&handle) {
                    // Whoever asked may be gone.
                    let _ = answer.send(Err(NotStarted::Failed(stage, errno)));
                } else {
                    // An engine before had asked for it: it is over without ever having been.
                    self.event(state, handle, ProcessEvent::Exited { status: None, empty: true }, true);
                }
            }
            FromKeeper::Exited { handle, status, empty, told: _ } => {
                self.event(state, handle, ProcessEvent::Exited { status, empty }, empty);
            }
            FromKeeper::Empty { handle, told: _ } => self.event(state, handle, ProcessEvent::Empty, true),
            FromKeeper::Ended { handle, survivors } => answer(&mut state.ending, handle, survivors),
            FromKeeper::Processes { handle, processes } => answer(&mut state.listing, handle, processes),
            FromKeeper::SpillOpened { handle, stream, path } => {
                let opened = match packet.into_parts().1.into_iter().next() {
                    Some(file) => Ok((file, path)),
                    None => {
                        // It was lost on the way: too many are open here. Nobody will write to it.
                        self.send(state, &ToKeeper::RemoveSpill { path }, Vec::new());
                        Err(Errno::EMFILE.into())
                    }
                };
                answer(&mut state.spilling, (handle, stream), opened);
            }
            FromKeeper::SpillFailed { handle, stream, errno } => {
                answer(&mut state.spilling, (handle, stream), Err(io::Error::from_raw_os_error(errno)));
            }
            FromKeeper::LeftEnded { verdicts } => {
                if let Some(answer) = state.left.take() {
                    // Whoever asked may be gone.
                    let _ = answer.send(verdicts);
                }
            }
            FromKeeper::SpillReopened { errno } => {
                let opened = match (errno, packet.into_parts().1.into_iter().next()) {
                    (Some(errno), _) => Err(io::Error::from_raw_os_error(errno)),
                    (None, Some(file)) => Ok(file),
                    // It was lost on the way: too many are open here.
                    (None, None) => Err(Errno::EMFILE.into()),
                };
                answer(&mut state.reopening, (), opened);
            }
            FromKeeper::Drain => {
                self.drain.send_replace(true);
            }
            // Only ever the first ones.
            FromKeeper::Hello { .. } | FromKeeper::Go { .. } | FromKeeper::Carried { .. } => {}
        }
    }

    #[expect(clippy::disallowed_methods, reason = "a command has at most two events")]
    fn spawned(self: &Arc<Self>, state: &mut State, handle: ProcessHandle, pid: u32, helper: u64, mut packet: Packet) {
        if packet.fds.len() == 3
            && let Some(news) = packet.fds.pop()
            && let Ok(news) = watched(news, Interest::READABLE)
        {
            self.send(state, &ToKeeper::Listening { helper }, Vec::new());
            tokio::spawn(hear(Arc::clone(self), news));
        }
        let Some(answer) = state.spawning.remove(&handle) else { return };
        state.alive.insert(handle, pid);
        let cut = packet.cut;
        let fds: Result<[OwnedFd; 2], _> = packet.into_parts().1.try_into();
        let refused = match fds {
            Ok([stdout, stderr]) => {
                let (sender, events) = mpsc::unbounded_channel();
                state.events.insert(handle, Events { sender, exited: false });
                let spawned = Spawned { handle, pid, stdout, stderr, events };
                answer.send(Ok(spawned)).is_err()
            }
            // Other commands are not to pay for it: this one alone is ended.
            Err(_) if cut => {
                // Whoever asked may be gone.
                let _ = answer.send(Err(NotStarted::Cut));
                true
            }
            Err(_) => return self.lose(state),
        };
        if refused {
            self.abandon(state, handle);
        }
        for (event, last) in state.early.remove(&handle).unwrap_or_default() {
            self.event(state, handle, event, last);
        }
    }

    /// Takes a command of an engine before; `None` when descriptors of it were lost, because too many are open here. It is
    /// killed then.
    #[expect(clippy::disallowed_methods, reason = "a command has at most two events")]
    pub(super) fn carried(self: &Arc<Self>, packet: Packet) -> io::Result<Option<Carried>> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "the keeper does not hand over");
        let FromKeeper::Carried { handle, life, pid, helper, files, spills, mode } = packet.decode()? else {
            return Err(invalid());
        };
        let mut guard = self.state();
        let state = &mut *guard;
        let (sender, events) = mpsc::unbounded_channel();
        let (first, empty) = match life {
            Life::Running => (None, false),
            Life::Leftovers(status) => (Some(status), false),
            Life::Empty(status) => (Some(status), true),
        };
        if let Some(status) = first {
            // The receiver is here.
            let _ = sender.send(ProcessEvent::Exited { status, empty });
        }
        if !empty {
            state.alive.insert(handle, pid);
            state.events.insert(handle, Events { sender, exited: first.is_some() });
        }
        let cut = packet.cut;
        let mut fds = packet.into_parts().1.into_iter();
        let mut take = |there: bool| if there { fds.next() } else { None };
        let pipes = (take(true), take(true));
        let files = files.map(|count| (0..count).filter_map(|_| take(true)).collect());
        let spills = spills.map(|path| path.and_then(|path| Some((take(true)?, path))));
        if let Some(news) = take(helper != 0)
            && let Ok(news) = watched(news, Interest::READABLE)
        {
            self.send(state, &ToKeeper::Listening { helper }, Vec::new());
            tokio::spawn(hear(Arc::clone(self), news));
        }
        let (Some(stdout), Some(stderr), false) = (pipes.0, pipes.1, cut) else {
            if empty {
                self.send(state, &ToKeeper::Release { handle }, Vec::new());
            } else {
                self.abandon(state, handle);
            }
            return Ok(None);
        };
        Ok(Some(Carried {
            spawned: Spawned { handle, pid, stdout, stderr, events },
            empty,
            files,
            spills,
            mode: mode.into(),
        }))
    }

    /// Ends a command that nobody here can look after.
    fn abandon(&self, state: &mut State, handle: ProcessHandle) {
        state.abandoned.push(handle);
        self.send(state, &ToKeeper::End { handle, grace_ms: 0 }, Vec::new());
        // Its answer is nobody's, but has to be taken in its turn.
        state.ending.entry(handle).or_default().push_back(oneshot::channel().0);
    }

    fn event(&self, state: &mut State, handle: ProcessHandle, event: ProcessEvent, last: bool) {
        if state.spawning.contains_key(&handle) {
            return state.early.entry(handle).or_default().push((event, last));
        }
        if let Some(events) = state.events.get_mut(&handle) {
            let exit = matches!(event, ProcessEvent::Exited { .. });
            if !(exit && events.exited) {
                events.exited |= exit;
                // Whoever listened may have lost interest.
                let _ = events.sender.send(event);
            }
        }
        if last {
            state.events.remove(&handle);
            state.alive.remove(&handle);
            if let Some(index) = state.abandoned.iter().position(|abandoned| *abandoned == handle) {
                state.abandoned.swap_remove(index);
                self.send(state, &ToKeeper::Release { handle }, Vec::new());
            }
        }
    }
}

fn answer<K: Eq + std::hash::Hash, T>(waiting: &mut Waiting<K, T>, key: K, value: T) {
    if let Some(queue) = waiting.get_mut(&key) {
        if let Some(first) = queue.pop_front() {
            // Whoever asked may be gone.
            let _ = first.send(value);
        }
        if queue.is_empty() {
            waiting.remove(&key);
        }
    }
}

/// Takes what a helper says of the ends of its commands, until the helper is gone. Should it end earlier, the helper notices
/// with its next news, and the keeper passes them on.
async fn hear(shared: Arc<Shared>, news: AsyncFd<OwnedFd>) {
    while let Ok(Some(packet)) = receive(&news).await {
        if let Ok(message @ (FromKeeper::Exited { .. } | FromKeeper::Empty { .. })) = packet.decode() {
            shared.keeper_says(message, packet);
        }
    }
}

/// Receives and sends until the keeper is lost or the link is dropped.
pub(super) async fn drive(shared: Arc<Shared>) {
    tokio::select! {
        _ = shared.receive_all() => {}
        _ = shared.send_unsent() => {}
    }
    shared.lose(&mut shared.state());
}
