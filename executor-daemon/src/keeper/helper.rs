//! A helper: parent and sub-reaper of one command at a time, so that `waitpid` saying ECHILD proves that nothing of the
//! command is left, however it forked, daemonised or changed its environment.
//!
//! ```text
//!   idle ── Spawn ──> running ── shell reaped ──> leftovers ── ECHILD ──> idle
//!                        └────── shell reaped and ECHILD ────────────────> idle
//!   End, in running and leftovers: SIGTERM ── grace ──> SIGKILL, pass after pass, until ECHILD
//! ```
//!
//! It is forked from the keeper, has one thread, all signals blocked and default dispositions, and speaks the keeper's
//! messages: `Spawn`, `End` and `List` come as the engine wrote them, answers go up as the engine will read them. When its
//! socket closes the keeper is gone: it kills what it has and exits.
#![expect(unsafe_code, reason = "signal dispositions and the scheduler")]

use std::{
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
        socket::MsgFlags,
    },
};

use super::{
    confine,
    groups::Groups,
    keyring,
    protocol::{FromKeeper, Identity, ProcessEntry, Stage, ToKeeper},
    spawn::{self, Descriptors, Limits, SharedPids, Stack},
    tree::{self, Reaped},
    victims::Score,
    wire::{self, Frame, Packet},
};
use crate::ids::ProcessHandle;

/// How long after the grace an `End` is answered with what is still alive. Together with the ways of the messages it
/// stays within the second that the protocol gives.
pub(super) const KILL_TIME: Duration = Duration::from_millis(900);
/// Most ended children taken in one go, before the socket is looked at again.
pub(super) const MAX_REAPED_AT_ONCE: usize = 256;
/// How long they are taken in one go while everything is being ended: until they are, a bomb's living are hard to see among them.
const MAX_REAPING: Duration = Duration::from_millis(50);
/// Longest look at who descends from whom in a pass that does not stop anything, and one of how many looks. What a look does not
/// reach becomes a direct child when its parents die.
const SHORT_WALK: Duration = Duration::from_millis(50);
const WALK_EVERY: u32 = 4;
/// From this pass on everything is stopped before it is killed, so that it cannot fork meanwhile. The passes before it only kill
/// direct children, and each takes a few milliseconds with thousands of them; with the looks that stopping takes one can take tens.
const STOP_FROM_PASS: u32 = 16;
/// From this pass on the helper asks for a real-time priority, so that a bomb cannot outrun it.
const REAL_TIME_FROM_PASS: u32 = 8;
/// Longest that stopping goes on in one pass.
const MAX_STOPPING: Duration = Duration::from_millis(500);
/// Most rounds of looking for what is not stopped yet in one pass.
const MAX_STOP_ROUNDS: usize = 8;
/// Most entries in a list for people, and of survivors.
const MAX_LISTED: usize = 256;

/// What a wait has found.
struct Ready {
    message: bool,
    ended_child: bool,
}

/// What a helper inherits from the keeper's memory.
#[derive(Debug)]
pub(super) struct Context {
    /// Who commands may run as.
    pub(super) identities: Vec<Identity>,
    /// What the processes of each tenant may have together.
    pub(super) groups: Groups,
    /// The limit on descriptors that commands get (soft, hard).
    pub(super) open_files: Option<(u64, u64)>,
    /// Real paths that a fence hides.
    pub(super) hidden: Vec<PathBuf>,
    /// The directory that it hides nothing of, but lets nobody write.
    pub(super) spills: PathBuf,
}

impl Context {
    /// The capabilities that any command may have, a bit for each.
    fn capabilities(&self) -> u64 {
        self.identities.iter().fold(0, |all, identity| all | identity.capabilities.unwrap_or(u64::MAX))
    }
}

struct Helper<'a> {
    context: &'a Context,
    socket: OwnedFd,
    /// Where the engine may listen.
    news: OwnedFd,
    /// Its name at the keeper.
    name: u64,
    signals: SignalFd,
    stack: Stack,
    /// What commands get.
    score: Option<Score>,
    pids: &'a SharedPids,
    running: Option<Running>,
    keeper_gone: bool,
    real_time: bool,
}

struct Running {
    handle: ProcessHandle,
    /// While it is not reaped.
    shell: Option<i32>,
    ending: Option<Ending>,
}

struct Ending {
    kill_at: Instant,
    answer_at: Instant,
    /// `End`s that wait for their answer.
    owed: u32,
    passes: u32,
    pass_at: Instant,
}

/// Becomes a helper; returns when the keeper is gone and nothing is left, or when the helper cannot work.
///
/// Called right after the fork: everything that the keeper holds is closed here, except for these sockets: the keeper's, and
/// the one where the engine may listen.
pub(super) fn run(sockets: [OwnedFd; 2], name: u64, context: &Context, pids: &SharedPids) -> std::io::Result<()> {
    let [socket, news] = keep_only(sockets)?;
    let _ = nix::sys::prctl::set_name(c"command-helper");
    nix::sys::prctl::set_child_subreaper(true)?;
    // One that its command has stopped goes on when the keeper is gone, and then ends what it has.
    nix::sys::prctl::set_pdeathsig(Signal::SIGCONT)?;
    default_dispositions();
    SigSet::all().thread_block()?;
    spawn::bound_capabilities(context.capabilities());
    keyring::separate();
    let mut ended = SigSet::empty();
    ended.add(Signal::SIGCHLD);
    let signals = SignalFd::with_flags(&ended, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
    let stack = Stack::new()?;
    let score = Score::of_commands();
    let (running, keeper_gone, real_time) = (None, false, false);
    Helper { context, socket, news, name, signals, stack, score, pids, running, keeper_gone, real_time }.work();
    Ok(())
}

/// Moves the sockets to descriptors 3 and up and closes all others above 2.
pub(super) fn keep_only<const N: usize>(sockets: [OwnedFd; N]) -> std::io::Result<[OwnedFd; N]> {
    use std::os::fd::FromRawFd;
    /// The first place.
    const FIRST: i32 = 3;
    let end = FIRST + i32::try_from(N).unwrap_or(i32::MAX - FIRST);
    // Above what they are moved to, so that no move hits another.
    let moved: Vec<i32> =
        sockets.into_iter().map(|socket| fcntl(socket, FcntlArg::F_DUPFD_CLOEXEC(end))).collect::<Result<_, _>>()?;
    // SAFETY: whoever owned the descriptors that are replaced or closed here is the code of the process that this one was forked
    // from, which it never runs again; the new ones from 3 on have one owner, which is returned.
    unsafe {
        for (raw, place) in moved.into_iter().zip(FIRST..) {
            if libc::dup3(raw, place, libc::O_CLOEXEC) < 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        if libc::syscall(libc::SYS_close_range, end, libc::c_int::MAX, 0) < 0 {
            let open_max = nix::unistd::sysconf(nix::unistd::SysconfVar::OPEN_MAX)?.unwrap_or(1024);
            for fd in end..i32::try_from(open_max).unwrap_or(i32::MAX) {
                libc::close(fd);
            }
        }
        let mut places = FIRST..;
        Ok([(); N].map(|()| OwnedFd::from_raw_fd(places.next().unwrap_or(FIRST))))
    }
}

/// Every signal does what it does by default: commands inherit that, and the helper itself blocks all of them.
fn default_dispositions() {
    // The kernel's own structure (handler, flags, restorer, mask), all zero: SIG_DFL. Its call rather than the C library's,
    // which would refuse 32 and 33.
    let default = [0_u64; 4];
    for signal in 1..=64 {
        let (action, no_old) = (default.as_ptr(), std::ptr::null::<u64>());
        // SAFETY: installs no handler; SIGKILL and SIGSTOP are refused, which is as good.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, action, no_old, size_of::<u64>()) };
    }
}

impl Helper<'_> {
    fn work(&mut self) {
        let mut more = false;
        loop {
            if self.keeper_gone && self.running.is_none() {
                return;
            }
            let ready = self.wait(more);
            if ready.message {
                self.receive();
            }
            if ready.ended_child {
                // Several ends are one signal.
                let _ = self.signals.read_signal();
            }
            if ready.ended_child || more {
                more = self.reap();
            }
            self.pursue();
        }
    }

    /// Waits for a message, an ended child, or the next step of an ending.
    fn wait(&self, at_once: bool) -> Ready {
        let due = self.running.as_ref().and_then(|running| running.ending.as_ref()).map(Ending::due);
        let timeout = match due {
            _ if at_once => PollTimeout::ZERO,
            None => PollTimeout::NONE,
            // A millisecond more than the whole ones, so that a wait never ends just before its moment.
            Some(due) => {
                let wait = due.saturating_duration_since(Instant::now());
                let ms = if wait.is_zero() { 0 } else { wait.as_millis() + 1 };
                PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX)
            }
        };
        let socket = if self.keeper_gone { PollFlags::empty() } else { PollFlags::POLLIN };
        let mut polled =
            [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN), PollFd::new(self.socket.as_fd(), socket)];
        let waited_for = if self.keeper_gone { &mut polled[..1] } else { &mut polled[..] };
        if poll(waited_for, timeout).is_err() {
            // No signal interrupts it, so this is no memory: whatever may be there is looked for.
            return Ready { message: !self.keeper_gone, ended_child: true };
        }
        let [ended_child, message] = polled.map(|polled| polled.any().unwrap_or(true));
        Ready { message: message && !self.keeper_gone, ended_child }
    }

    /// Takes one message; what else waits shows at the next look.
    fn receive(&mut self) {
        match wire::receive(self.socket.as_fd(), MsgFlags::MSG_DONTWAIT) {
            Ok(Some(packet)) if packet.cut => self.keeper_gone(),
            Ok(Some(packet)) => self.message(packet),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Ok(None) | Err(_) => self.keeper_gone(),
        }
    }

    fn message(&mut self, packet: Packet) {
        match packet.decode() {
            Ok(ToKeeper::Spawn { handle, spec }) => {
                let (_, fds) = packet.into_parts();
                let answer = self.spawn(handle, spec, fds);
                self.send(&answer);
                // After the answer, which then does not wait for it.
                if let (Some(score), Some(Running { shell: Some(pid), .. })) = (&self.score, &self.running) {
                    score.give(*pid);
                }
            }
            Ok(ToKeeper::End { handle, grace_ms }) => self.end(handle, Duration::from_millis(grace_ms), 1),
            Ok(ToKeeper::List { handle }) => self.list(handle),
            Ok(
                ToKeeper::KeepFile { .. }
                | ToKeeper::Standby
                | ToKeeper::SweepSpills { .. }
                | ToKeeper::OpenSpill { .. }
                | ToKeeper::Listening { .. }
                | ToKeeper::RemoveSpill { .. }
                | ToKeeper::Release { .. }
                | ToKeeper::Ready
                | ToKeeper::Drained
                | ToKeeper::EndLeft { .. }
                | ToKeeper::ReopenSpill { .. },
            )
            | Err(_) => self.keeper_gone(),
        }
    }

    fn spawn(&mut self, handle: ProcessHandle, spec: super::protocol::SpawnSpec, fds: Vec<OwnedFd>) -> FromKeeper {
        let failed = |(stage, errno)| FromKeeper::SpawnFailed { handle, stage, errno };
        let mut fds = fds.into_iter();
        let (Some(stdout), Some(stderr)) = (fds.next(), fds.next()) else {
            return failed((Stage::Prepare, libc::EBADF));
        };
        let stdin = if spec.stdin { fds.next() } else { None };
        let script = if spec.script { fds.next() } else { None };
        let identity = usize::try_from(spec.identity).ok().and_then(|index| self.context.identities.get(index));
        let Some(identity) = identity else { return failed((Stage::Identity, libc::EINVAL)) };
        if !identity.has_uid(spec.uid) {
            return failed((Stage::Identity, libc::EPERM));
        }
        let descriptors = Descriptors { stdin, stdout, stderr, script };
        let Context { groups, open_files, .. } = self.context;
        // Before there is a process of the command, so that none is ever outside.
        let processes = match groups.enter(spec.group) {
            Ok(true) => None,
            Ok(false) => groups.processes_of_user(spec.group),
            Err(error) => return failed((Stage::Limits, error.raw_os_error().unwrap_or(libc::EIO))),
        };
        let confined = match confine::prepare(&spec.confinement) {
            Ok(confined) => confined,
            Err(failure) => return failed(failure),
        };
        let limits = Limits { open_files: *open_files, processes, capabilities: self.context.capabilities(), confined };
        match spawn::start(&self.stack, self.pids, spec, identity, &descriptors, &limits) {
            Ok(pid) => {
                self.running = Some(Running { handle, shell: Some(pid), ending: None });
                FromKeeper::Spawned { handle, pid: pid.unsigned_abs(), helper: self.name }
            }
            Err(failure) => failed(failure),
        }
    }

    /// The command that a message is about; `None` when all of it has ended meanwhile.
    fn running(&mut self, handle: ProcessHandle) -> Option<&mut Running> {
        self.running.as_mut().filter(|running| running.handle == handle)
    }

    fn end(&mut self, handle: ProcessHandle, grace: Duration, owed: u32) {
        let now = Instant::now();
        // A grace beyond this is for ever, and must not overflow.
        let kill_at = now + grace.min(Duration::from_secs(365 * 24 * 60 * 60));
        let Some(running) = self.running(handle) else {
            self.send(&FromKeeper::Ended { handle, survivors: Vec::new() });
            return;
        };
        if let Some(ending) = &mut running.ending {
            ending.kill_at = ending.kill_at.min(kill_at);
            let answer_at = ending.kill_at.max(now) + KILL_TIME;
            ending.answer_at = if ending.owed == 0 { answer_at } else { ending.answer_at.min(answer_at) };
            ending.pass_at = ending.pass_at.min(ending.kill_at);
            ending.owed += owed;
            return;
        }
        running.ending = Some(Ending { kill_at, answer_at: kill_at + KILL_TIME, owed, passes: 0, pass_at: kill_at });
        if !grace.is_zero() {
            terminate(running.shell);
        }
    }

    fn list(&mut self, handle: ProcessHandle) {
        let mut processes = Vec::new();
        if self.running(handle).is_some() {
            let alive = tree::walk().into_iter().filter(|one| !one.zombie()).take(MAX_LISTED);
            processes = alive.map(|one| entry(&one)).collect();
            processes.sort_by_key(|entry: &ProcessEntry| entry.pid);
        }
        self.send(&FromKeeper::Processes { handle, processes });
    }

    /// Takes children that have ended; says what that means. True: there may be more.
    fn reap(&mut self) -> bool {
        let mut shell_status = None;
        let mut outcome = None;
        let ending = self.running.as_ref().is_some_and(|running| running.ending.is_some());
        let until = Instant::now() + MAX_REAPING;
        for taken in 0.. {
            if taken >= MAX_REAPED_AT_ONCE && (!ending || Instant::now() >= until) {
                break;
            }
            match tree::reap() {
                Reaped::Child(pid, status) => {
                    if let Some(running) = &mut self.running
                        && running.shell == Some(pid)
                    {
                        running.shell = None;
                        shell_status = Some(status);
                    }
                }
                end @ (Reaped::NoneEnded | Reaped::NoChildren) => {
                    outcome = Some(end);
                    break;
                }
            }
        }
        let empty = outcome == Some(Reaped::NoChildren);
        let Some(handle) = self.running.as_ref().map(|running| running.handle) else { return outcome.is_none() };
        if let Some(status) = shell_status {
            self.report(|told| FromKeeper::Exited { handle, status: Some(status), empty, told });
        } else if empty {
            self.report(|told| FromKeeper::Empty { handle, told });
        }
        if empty {
            let owed = self.running.take().and_then(|running| running.ending).map_or(0, |ending| ending.owed);
            for _ in 0..owed {
                self.send(&FromKeeper::Ended { handle, survivors: Vec::new() });
            }
            self.set_real_time(false);
        }
        outcome.is_none()
    }

    /// The next steps of an ending, as far as their moment has come.
    fn pursue(&mut self) {
        let now = Instant::now();
        let Some(running) = &mut self.running else { return };
        let Some(ending) = &mut running.ending else { return };
        if now >= ending.kill_at && now >= ending.pass_at {
            let pass = ending.passes;
            ending.passes = pass.saturating_add(1);
            // With nobody who waits there is no hurry.
            let until = if ending.owed > 0 { ending.answer_at } else { now + MAX_STOPPING };
            kill_pass(pass, running.shell, until);
            ending.pass_at = Instant::now() + ending.pause();
            if pass == REAL_TIME_FROM_PASS {
                self.set_real_time(true);
            }
        }
        self.answer_if_due();
    }

    fn answer_if_due(&mut self) {
        let Some(running) = &mut self.running else { return };
        let handle = running.handle;
        let Some(ending) = &mut running.ending else { return };
        if ending.owed == 0 || Instant::now() < ending.answer_at {
            return;
        }
        let owed = std::mem::take(&mut ending.owed);
        // A direct child that was not reaped just now is not dead, whatever its state says (its threads may live on).
        let mut survivors: Vec<u32> = tree::walk()
            .into_iter()
            .filter(|one| one.direct() || !one.zombie())
            .map(|one| one.pid.unsigned_abs())
            .take(MAX_LISTED)
            .collect();
        survivors.sort_unstable();
        for _ in 0..owed {
            self.send(&FromKeeper::Ended { handle, survivors: survivors.clone() });
        }
        // From here on it goes on calmly; the processor belongs to others.
        self.set_real_time(false);
    }

    fn keeper_gone(&mut self) {
        self.keeper_gone = true;
        if let Some(handle) = self.running.as_ref().map(|running| running.handle) {
            self.end(handle, Duration::ZERO, 0);
        }
    }

    /// Says an end to the engine first, which a caller is waiting behind, then to the keeper.
    fn report(&self, message: impl Fn(bool) -> FromKeeper) {
        // Without the keeper it is this process that ends the command, and how that went is no outcome of it.
        if self.keeper_gone {
            return;
        }
        let said =
            Frame::encode(&message(true)).and_then(|frame| frame.send(self.news.as_fd(), &[], MsgFlags::MSG_DONTWAIT));
        // Nobody listens, or not fast enough: the keeper passes it on.
        self.send(&message(said.is_ok()));
    }

    /// Says something to the keeper, which always listens. That it is gone shows on the socket.
    fn send(&self, message: &FromKeeper) {
        if let Ok(frame) = Frame::encode(message) {
            let _ = frame.send(self.socket.as_fd(), &[], MsgFlags::empty());
        }
    }

    /// Asks for the lowest real-time priority, or gives it back; without the privilege nothing happens.
    fn set_real_time(&mut self, on: bool) {
        if self.real_time == on {
            return;
        }
        let policy = if on { libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK } else { libc::SCHED_OTHER };
        let parameters = libc::sched_param { sched_priority: i32::from(on) };
        // SAFETY: this process, a valid policy, and parameters that live through the call.
        if unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) } == 0 {
            self.real_time = on;
        }
    }
}

impl Ending {
    /// When something has to be done next.
    fn due(&self) -> Instant {
        let pass = self.pass_at.max(self.kill_at);
        if self.owed == 0 { pass } else { pass.min(self.answer_at) }
    }

    /// Between two passes; an ended child wakes the helper earlier, but does not make it run one.
    fn pause(&self) -> Duration {
        Duration::from_millis(match self.passes {
            0..=4 => 1,
            5..=40 => 3,
            _ if self.owed > 0 => 10,
            41..=100 => 100,
            _ => 1000,
        })
    }
}

/// SIGTERM to the shell's group and to every descendant outside of it, once each. One that is stopped stays so: the signal
/// waits for it, and SIGKILL after the grace does not.
fn terminate(shell: Option<i32>) {
    let descendants = tree::walk();
    if let Some(shell) = shell {
        tree::signal_group_of(shell, libc::SIGTERM);
    }
    for one in descendants.iter().filter(|one| !one.zombie()) {
        if shell != Some(one.group) {
            one.signal(libc::SIGTERM);
        }
    }
}

/// One pass of killing. Whatever loses its parent by it becomes a direct child, for the next pass.
fn kill_pass(pass: u32, shell: Option<i32>, until: Instant) {
    if pass == 0
        && let Some(shell) = shell
    {
        tree::signal_group_of(shell, libc::SIGKILL);
    }
    if pass < STOP_FROM_PASS && pass.is_multiple_of(WALK_EVERY) {
        tree::walk_until(Instant::now() + SHORT_WALK).iter().for_each(|one| one.signal(libc::SIGKILL));
        return;
    }
    if pass >= STOP_FROM_PASS {
        for _ in 0..MAX_STOP_ROUNDS {
            tree::direct_children().into_iter().for_each(|pid| tree::signal_child(pid, libc::SIGSTOP));
            let walked = tree::walk_until(until);
            let running = walked.iter().filter(|one| !one.stopped() && !one.zombie());
            if running.map(|one| one.signal(libc::SIGSTOP)).count() == 0 || Instant::now() >= until {
                break;
            }
        }
        tree::walk_until(until).iter().for_each(|one| one.signal(libc::SIGKILL));
    }
    tree::direct_children().into_iter().for_each(|pid| tree::signal_child(pid, libc::SIGKILL));
}

fn entry(one: &tree::Descendant) -> ProcessEntry {
    ProcessEntry { pid: one.pid.unsigned_abs(), command_line: one.command_line() }
}
