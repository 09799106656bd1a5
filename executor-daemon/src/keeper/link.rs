//! The engine's end of the pair: asks the keeper and hands its answers and events to whoever waits for them.
//!
//! Messages are sent from where they are asked for, in order; what the socket does not take yet is sent by the one task
//! that also receives. The keeper answers questions about one command in the order in which they were asked, so who waits
//! for what is a queue per command and kind of question.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use executor_proto::{
    error::ExecutorError,
    types::{Process, SandboxMode, StreamName},
};
use nix::sys::socket::MsgFlags;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{mpsc, oneshot, watch},
};

use super::{
    protocol::{FromKeeper, Identity, LeftShell, SpawnSpec, ToKeeper, VERSION, Verdict},
    wire::{self, Frame, Packet},
};
use crate::{crash::Point, ids::ProcessHandle};

pub(crate) mod server;
mod state;
use state::{NotStarted, Shared};

/// How long a keeper may take to say hello.
const HELLO_LIMIT: Duration = Duration::from_secs(10);

/// A connection to the keeper. Cheap to clone; dropped last, it lets an embedded keeper end.
#[derive(Debug, Clone)]
pub struct KeeperLink {
    inner: Arc<Inner>,
}

/// A [`KeeperLink`] that does not keep the link open.
#[derive(Debug)]
pub(crate) struct WeakLink {
    inner: Weak<Inner>,
}

impl WeakLink {
    /// The link, as long as somebody else keeps it open.
    pub(crate) fn upgrade(&self) -> Option<KeeperLink> {
        Some(KeeperLink { inner: self.inner.upgrade()? })
    }
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    keeper: [u8; 16],
    identities: Vec<Identity>,
    task: tokio::task::AbortHandle,
}

/// What the keeper says of one command after it was started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    /// The shell was reaped: its raw wait status (`None`: it could not be learned), and whether nothing else of the
    /// command is alive either (then no [`ProcessEvent::Empty`] follows).
    Exited {
        /// As `waitpid` gives it.
        status: Option<i32>,
        /// Nothing is left.
        empty: bool,
    },
    /// Nothing of the command is alive any more. Last.
    Empty,
}

/// A started command.
#[derive(Debug)]
pub struct Spawned {
    /// The keeper's name for it.
    pub handle: ProcessHandle,
    /// The shell's pid. 0: not known, because its helper was killed in that moment; [`ProcessEvent::Exited`] follows.
    pub pid: u32,
    /// Read end of stdout's pipe, non-blocking.
    pub stdout: OwnedFd,
    /// Read end of stderr's pipe, non-blocking.
    pub stderr: OwnedFd,
    /// What happens to it. Closed without [`ProcessEvent::Empty`] only when the keeper is lost.
    pub events: mpsc::UnboundedReceiver<ProcessEvent>,
}

/// A command of an engine before that was not released.
#[derive(Debug)]
pub struct Carried {
    /// As if it had just been started. What has happened before comes as the first event.
    pub spawned: Spawned,
    /// Whether nothing of it is alive.
    pub empty: bool,
    /// The descriptors of the stream files of stdout and stderr, as [`KeeperLink::keep_file`] was given them; none where no
    /// bytes have come.
    pub files: [Vec<OwnedFd>; 2],
    /// Their spill files, where there are some.
    pub spills: [Option<(OwnedFd, PathBuf)>; 2],
    /// The sandbox mode that it was started in.
    pub mode: SandboxMode,
}

/// A keeper that has said hello: what can be wrong is tried before the engine takes over.
#[derive(Debug)]
pub(crate) struct Greeted {
    socket: AsyncFd<OwnedFd>,
    keeper: [u8; 16],
    identities: Vec<Identity>,
    /// The listening sockets, in the order of the configuration.
    pub(crate) listeners: Vec<OwnedFd>,
    /// What main handed over for the server.
    pub(crate) server_settings: Vec<u8>,
}

impl KeeperLink {
    /// Waits for the keeper's hello on a new pair.
    pub(super) async fn greeted(socket: OwnedFd) -> io::Result<Greeted> {
        let socket = watched(socket, Interest::READABLE | Interest::WRITABLE)?;
        let hello = tokio::time::timeout(HELLO_LIMIT, receive(&socket)).await;
        let hello =
            hello.map_err(|_elapsed| io::Error::new(io::ErrorKind::TimedOut, "no answer from the keeper"))??;
        let gone = || io::Error::new(io::ErrorKind::UnexpectedEof, "the keeper ended before it answered");
        let hello = hello.ok_or_else(gone)?;
        if hello.cut {
            return Err(nix::errno::Errno::EMFILE.into());
        }
        let FromKeeper::Hello { version, keeper, identities, listeners: _, server_settings } = hello.decode()? else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the keeper does not say hello"));
        };
        if version != VERSION {
            let problem = format!("the keeper speaks version {version} of the link, this program {VERSION}");
            return Err(io::Error::new(io::ErrorKind::Unsupported, problem));
        }
        Ok(Greeted { socket, keeper, identities, listeners: hello.fds, server_settings })
    }

    /// The same, not keeping it open.
    pub(crate) fn downgrade(&self) -> WeakLink {
        WeakLink { inner: Arc::downgrade(&self.inner) }
    }

    /// Who commands may run as; index 0 is the default.
    #[must_use]
    pub fn identities(&self) -> &[Identity] {
        &self.inner.identities
    }

    /// The random name of the keeper's life: handles mean something within it only.
    #[must_use]
    pub fn keeper(&self) -> [u8; 16] {
        self.inner.keeper
    }

    /// Removes all spill files but these.
    pub fn sweep_spills(&self, keep: Vec<PathBuf>) {
        self.shared().tell(ToKeeper::SweepSpills { keep });
    }

    /// A name for a command that is to be started, never used before.
    #[must_use]
    pub fn new_handle(&self) -> ProcessHandle {
        self.shared().state().new_handle()
    }

    /// Starts a command under a name of [`KeeperLink::new_handle`]. `stdin` and `script` must be given exactly where the spec says so.
    ///
    /// Not cancel-safe: the command of a future that is dropped may have run; it is killed then.
    ///
    /// # Errors
    /// [`ExecutorError::Spawn`] when it could not be started; nothing ran then. [`ExecutorError::OutcomeUnknown`] when the
    /// keeper is lost meanwhile, or when this process has too many descriptors open to take the command's: it may have run, and
    /// is killed.
    pub async fn spawn(
        &self,
        handle: ProcessHandle,
        spec: SpawnSpec,
        stdin: Option<OwnedFd>,
        script: Option<OwnedFd>,
    ) -> Result<Spawned, ExecutorError> {
        let workdir = spec.workdir.clone();
        let fds = stdin.into_iter().chain(script).collect();
        let answer = self.shared().ask(fds, |state| {
            let (answer, answered) = oneshot::channel();
            state.spawning.insert(handle, answer);
            (ToKeeper::Spawn { handle, spec }, answered)
        });
        Point::StartAsked.pass();
        let lost = || ExecutorError::OutcomeUnknown { reason: "the keeper is lost".to_owned() };
        match answer.await {
            Ok(Ok(spawned)) => Ok(spawned),
            Ok(Err(NotStarted::Cut)) => {
                let reason = "too many open files: its streams could not be taken";
                Err(ExecutorError::OutcomeUnknown { reason: reason.to_owned() })
            }
            Ok(Err(NotStarted::Failed(stage, errno))) => {
                let stage = stage.into();
                let path = (stage == executor_proto::error::SpawnStage::Chdir).then(|| workdir.into());
                Err(ExecutorError::Spawn { stage, errno, path })
            }
            Err(_dropped) => Err(lost()),
        }
    }

    /// Ends everything that comes from a command: SIGTERM, after the grace SIGKILL. Returns when nothing is alive (an
    /// empty list) or, at the latest about 1 s after the grace, with what is; the keeper goes on trying. Cancel-safe.
    /// Several may wait for the same end; the shortest grace counts.
    ///
    /// When the keeper is lost there is no proof any more: the shell is named, unless its end was reported before.
    pub async fn end(&self, handle: ProcessHandle, grace: Duration) -> Vec<u32> {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let answer = self.shared().ask(Vec::new(), |state| {
            let (answer, answered) = oneshot::channel();
            state.ending.entry(handle).or_default().push_back(answer);
            (ToKeeper::End { handle, grace_ms }, answered)
        });
        Point::KillAsked.pass();
        answer.await.unwrap_or_else(|_lost| self.shared().state().alive.get(&handle).copied().into_iter().collect())
    }

    /// What is alive of a command, the shell included, ordered by pid. Empty when the keeper does not know it.
    pub async fn processes(&self, handle: ProcessHandle) -> Vec<Process> {
        let answer = self.shared().ask(Vec::new(), |state| {
            let (answer, answered) = oneshot::channel();
            state.listing.entry(handle).or_default().push_back(answer);
            (ToKeeper::List { handle }, answered)
        });
        let entries = answer.await.unwrap_or_default().into_iter();
        entries.map(|entry| Process { pid: entry.pid, command_line: entry.command_line.into() }).collect()
    }

    /// Has the keeper hold a stream file (one descriptor or two) for as long as the command is not released, in place of the
    /// one that it holds for that stream. When this returns, it does so whatever becomes of this process.
    ///
    /// # Errors
    /// When the keeper is lost.
    pub async fn keep_file(
        &self,
        handle: ProcessHandle,
        stream: StreamName,
        file: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        // Nothing of what waits is about a file of this stream.
        self.overtake(&ToKeeper::KeepFile { handle, stream: stream.into() }, file).await
    }

    /// Sends past what waits to be sent. When it returns, the keeper gets it whatever becomes of this process.
    async fn overtake(&self, message: &ToKeeper, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let frame = Frame::encode(message)?;
        let send = |socket: &OwnedFd| frame.send(socket.as_fd(), fds, MsgFlags::MSG_DONTWAIT);
        self.shared().socket.async_io(Interest::WRITABLE, send).await
    }

    /// Makes a spill file and returns it, open for writing, with its path in the world of the commands.
    ///
    /// # Errors
    /// What the file system answered; EMFILE when this process has too many descriptors open to take the file.
    pub async fn open_spill(
        &self,
        handle: ProcessHandle,
        stream: StreamName,
        prefix: String,
    ) -> io::Result<(OwnedFd, PathBuf)> {
        let stream = stream.into();
        let answer = self.shared().ask(Vec::new(), |state| {
            let (answer, answered) = oneshot::channel();
            state.spilling.entry((handle, stream)).or_default().push_back(answer);
            (ToKeeper::OpenSpill { handle, stream, prefix }, answered)
        });
        let lost = |_dropped| io::Error::new(io::ErrorKind::BrokenPipe, "the keeper is lost");
        answer.await.map_err(lost)?
    }

    /// Opens a spill file that [`KeeperLink::open_spill`] named for reading; its directory may be closed to this process.
    ///
    /// # Errors
    /// ENOENT for a path that is none of the keeper's; what the file system answered; EMFILE when this process has too many
    /// descriptors open to take the file.
    pub async fn reopen_spill(&self, path: PathBuf) -> io::Result<OwnedFd> {
        let answer = self.shared().ask(Vec::new(), |state| {
            let (answer, answered) = oneshot::channel();
            state.reopening.entry(()).or_default().push_back(answer);
            (ToKeeper::ReopenSpill { path }, answered)
        });
        let lost = |_dropped| io::Error::new(io::ErrorKind::BrokenPipe, "the keeper is lost");
        answer.await.map_err(lost)?
    }

    /// Ends what is alive of the sessions of shells that a keeper before this one started, as far as it is proven to be
    /// theirs, and says what became of each, by its number. Takes about as long as `limit` at most. Nothing is known when the
    /// keeper is lost meanwhile: the answer is empty then. One question at a time: the answer to one before is empty, too.
    pub async fn end_left(&self, shells: Vec<LeftShell>, limit: Duration) -> Vec<(i64, Verdict)> {
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let answer = self.shared().ask(Vec::new(), |state| {
            let (answer, answered) = oneshot::channel();
            state.left = Some(answer);
            (ToKeeper::EndLeft { shells, limit_ms }, answered)
        });
        answer.await.unwrap_or_default()
    }

    /// Removes a spill file.
    pub fn remove_spill(&self, path: PathBuf) {
        self.shared().tell(ToKeeper::RemoveSpill { path });
    }

    /// Lets the keeper forget a command of which nothing is alive and everything has been read.
    pub fn release(&self, handle: ProcessHandle) {
        self.shared().tell(ToKeeper::Release { handle });
    }

    /// Resolves when the keeper asks for a drain, or is lost. Cancel-safe.
    pub async fn over(&self) -> Over {
        let mut drain = self.shared().drain.subscribe();
        let mut lost = self.shared().lost.subscribe();
        // The senders live as long as this link.
        tokio::select! {
            _ = drain.wait_for(|asked| *asked) => Over::DrainRequested,
            _ = lost.wait_for(|lost| *lost) => Over::KeeperLost,
        }
    }

    /// Tells the keeper that calls are taken. It knows when this returns, whatever becomes of this process.
    pub async fn ready(&self) {
        // A keeper that is lost shows elsewhere.
        let _ = self.overtake(&ToKeeper::Ready, &[]).await;
    }

    /// Tells the keeper that everything has ended and this process will exit.
    pub fn drained(&self) {
        self.shared().tell(ToKeeper::Drained);
    }

    /// Something that sees the keeper's loss and does not keep the link open.
    #[must_use]
    pub(super) fn watcher(&self) -> Watcher {
        Watcher { lost: self.shared().lost.subscribe() }
    }

    fn shared(&self) -> &Shared {
        &self.inner.shared
    }
}

impl Greeted {
    /// Becomes the engine, as soon as nobody else is.
    pub(crate) async fn take_over(self) -> io::Result<(KeeperLink, Vec<Carried>)> {
        let Self { socket, keeper, identities, .. } = self;
        let standby = Frame::encode(&ToKeeper::Standby)?;
        let send = |socket: &OwnedFd| standby.send(socket.as_fd(), &[], MsgFlags::MSG_DONTWAIT);
        socket.async_io(Interest::WRITABLE, send).await?;
        Point::StandingBy.pass();
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let gone = || io::Error::new(io::ErrorKind::UnexpectedEof, "the keeper ended before it handed over");
        // However long it takes: the one before may have to be ended first.
        let go = receive(&socket).await?.ok_or_else(gone)?;
        let FromKeeper::Go { first_handle, carried: count } = go.decode()? else {
            return Err(invalid("the keeper does not hand over"));
        };
        let shared = Arc::new(Shared::new(socket, first_handle));
        let mut carried = Vec::new();
        for _ in 0..count {
            let packet = receive(&shared.socket).await?.ok_or_else(gone)?;
            carried.extend(shared.carried(packet)?);
        }
        Point::HandedOver.pass();
        let task = tokio::spawn(state::drive(shared.clone())).abort_handle();
        Ok((KeeperLink { inner: Arc::new(Inner { shared, keeper, identities, task }) }, carried))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.task.abort();
        self.shared.shut();
    }
}

/// Why an engine's process has nothing more to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// The keeper asks it to end everything and to exit.
    DrainRequested,
    /// The keeper is gone, and everything that it had started ends with it.
    KeeperLost,
}

/// Sees the keeper's loss.
#[derive(Debug)]
pub(super) struct Watcher {
    lost: watch::Receiver<bool>,
}

impl Watcher {
    /// Resolves when the keeper is lost; never, when the link was dropped before.
    pub(super) async fn lost(mut self) {
        if self.lost.wait_for(|lost| *lost).await.is_err() {
            std::future::pending().await
        }
    }
}

/// Registers a descriptor with the runtime that this is called in.
///
/// # Errors
/// What the kernel answers, e.g. for a plain file.
#[expect(unsafe_code, reason = "the runtime asks for a promise that this type keeps")]
pub(crate) fn watched(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open and answers with the same descriptor for as long as it lives, and it moves in.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// Receives one packet; `None` when the other end is closed. Cancel-safe.
async fn receive(socket: &AsyncFd<OwnedFd>) -> io::Result<Option<Packet>> {
    socket.async_io(Interest::READABLE, |socket| wire::receive(socket.as_fd(), MsgFlags::MSG_DONTWAIT)).await
}

/// Takes the link from descriptor 0, where a new keeper or server finds it, and puts `/dev/null` there.
pub(super) fn take_from_stdin() -> io::Result<OwnedFd> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let (socket, kind) = (io::stdin(), nix::sys::socket::sockopt::SockType);
    if TAKEN.swap(true, Ordering::Relaxed)
        || nix::sys::socket::getsockopt(&socket, kind) != Ok(nix::sys::socket::SockType::SeqPacket)
    {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "descriptor 0 is not a keeper's link"));
    }
    let socket = socket.as_fd().try_clone_to_owned()?;
    null_stdin()?;
    Ok(socket)
}

/// Puts `/dev/null` at descriptor 0.
pub(super) fn null_stdin() -> io::Result<()> {
    let null = std::fs::File::open("/dev/null")?;
    Ok(nix::unistd::dup2_stdin(null)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_keeper_of_another_version_is_not_taken_over_from() {
        let (ours, theirs) = wire::pair().expect("a pair");
        let hello = FromKeeper::Hello {
            version: VERSION + 1,
            keeper: [7; 16],
            identities: Vec::new(),
            listeners: Vec::new(),
            server_settings: Vec::new(),
        };
        Frame::encode(&hello).expect("small").send(theirs.as_fd(), &[], MsgFlags::empty()).expect("it is taken");
        let error = KeeperLink::greeted(ours).await.expect_err("it cannot know what the messages mean");
        let expected = format!("the keeper speaks version {} of the link, this program {VERSION}", VERSION + 1);
        assert_eq!((error.kind(), error.to_string()), (io::ErrorKind::Unsupported, expected));
        // Nothing was said: to a keeper of any version it is one that has gone.
        assert!(matches!(wire::receive(theirs.as_fd(), MsgFlags::MSG_DONTWAIT), Ok(None)));
    }
}
