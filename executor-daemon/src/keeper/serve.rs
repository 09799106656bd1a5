//! The daemon's keeper: listeners, the server and its restarts, signals, the ready line, the end.
//!
//! ```text
//!   start server ──> standby ──> running ── lost ──> back-off ──> start server, which takes over what runs
//!   SIGHUP: start another ──> standby ──> kill the old one ──> the other is running; not in standby in time: the old one stays
//!   SIGTERM: Drain ──> drained, lost, or out of time ──> kill what is left ──> exit 0
//! ```
//! Not here: what the server does, and everything about single commands ([`super::desk`]).

use std::{
    fmt, io,
    io::Write,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use nix::{
    fcntl::{OFlag, open},
    sys::{signal::Signal, stat::Mode},
};

use super::{
    KeeperOptions, Renewal, SERVER_ARGUMENT, ServerUser,
    desk::{Desk, Notice},
    groups::Groups,
    init::{self, Part},
    keyring, link,
    listen::{self, Listening},
    share,
    spill::Spills,
    tree, wire,
};
use crate::crash::Point;

/// The exit code for our own failures.
const FAILED: u8 = 125;
/// Wait before a server that was killed is started again. For one that ends by itself it is the first, doubled each time.
const FIRST_BACK_OFF: Duration = Duration::from_millis(100);
/// Longest wait before a server is started again.
const LONGEST_BACK_OFF: Duration = Duration::from_secs(30);
/// A server that was ready for so long has not ended at once.
const SERVED: Duration = Duration::from_secs(10);
/// How long a server may take until it could take over.
const STANDBY_LIMIT: Duration = Duration::from_secs(10);
/// How long the next step waits for what was killed. What is left then (in uninterruptible sleep) goes on being killed.
const KILL_LIMIT: Duration = Duration::from_secs(2);
/// How long a server whose link is closed may take to exit.
const EXIT_LIMIT: Duration = Duration::from_secs(2);

/// Runs the daemon: becomes its keeper, starts the server, and returns when a signal has ended it.
///
/// Must be called with one thread. It parses nothing but the files of [`Renewal`], on SIGHUP: what can be wrong with the options was
/// checked before.
#[must_use]
pub fn serve(options: KeeperOptions) -> ExitCode {
    let served = match init::split() {
        Ok(Part::Init(code)) => return code,
        Ok(Part::Keeper) => {
            keyring::leave();
            Daemon::open(options).and_then(Daemon::run)
        }
        Err(error) => Err(error),
    };
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log(format_args!("{error}"));
            ExitCode::from(FAILED)
        }
    }
}

struct Daemon {
    desk: Desk,
    listening: Vec<Listening>,
    /// What a server is told that is started now.
    server_settings: Vec<u8>,
    /// What it is told instead while a server is tried that was started on SIGHUP.
    newer_settings: Option<Vec<u8>>,
    renewal: Renewal,
    drain_limit: Duration,
    ready_line: Option<String>,
    /// While one serves: since when it has been ready.
    ready_since: Option<Instant>,
    /// While one is on its way to be the server: by when it must be there.
    next_by: Option<Instant>,
    /// It is there.
    standby: bool,
    /// Those that closed their links, and by when they must have ended.
    leaving: Vec<(i32, Instant)>,
    /// The program that servers are started from.
    program: Program,
    back_off: Duration,
    was_ready: bool,
}

impl Daemon {
    fn open(options: KeeperOptions) -> io::Result<Self> {
        let KeeperOptions {
            identities,
            groups,
            listeners,
            server_user,
            server_settings,
            renewal,
            spill_dir,
            hidden,
            drain_limit,
            unprotected,
        } = options;
        if identities.is_empty() {
            return Err(io::Error::other("no identity to run commands as"));
        }
        let server = server_user.map(|user| format!(", the server as uid {}", user.uid)).unwrap_or_default();
        let mut users: Vec<_> = identities.iter().map(user).collect();
        users.dedup();
        let run_as = format!("commands run as {}{server}", users.join(", "));
        let listening: Vec<_> = listeners.into_iter().map(listen::open).collect::<io::Result<_>>()?;
        let spills = Spills::open(&spill_dir, &identities).map_err(|error| {
            io::Error::new(error.kind(), format!("spill directory {}: {error}", spill_dir.display()))
        })?;
        let names: Vec<_> = listening.iter().map(|one| one.name.as_str()).collect();
        let ready_line = format!(
            "executor-daemon {} ready: listening on {}; {run_as}{}",
            env!("CARGO_PKG_VERSION"),
            names.join(", "),
            unprotected.map(|what| format!("; unprotected: {what}")).unwrap_or_default(),
        );
        link::null_stdin()?;
        share::raise();
        let groups = Groups::of_daemon(&groups);
        let desk = Desk::open(identities, hidden, groups, spills, &[Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP])?;
        Ok(Self {
            desk,
            listening,
            server_settings,
            newer_settings: None,
            renewal,
            drain_limit,
            ready_line: Some(ready_line),
            ready_since: None,
            next_by: None,
            standby: false,
            leaving: Vec::new(),
            program: Program::open(server_user)?,
            back_off: Duration::ZERO,
            was_ready: false,
        })
    }

    fn run(mut self) -> io::Result<()> {
        let mut start_at = Instant::now();
        loop {
            let waits = self.desk.server.is_none() && self.desk.next_server.is_none();
            if waits && Instant::now() >= start_at {
                start_at = self.start_server()?;
            }
            if self.next_by.is_some_and(|by| !self.standby && by <= Instant::now()) {
                log(format_args!("the new server was not ready in {STANDBY_LIMIT:?} and is ended"));
                self.next_by = None;
                kill(self.desk.next_server);
            }
            for (pid, _) in self.leaving.extract_if(.., |(_, by)| *by <= Instant::now()) {
                kill(Some(pid));
            }
            let waits = self.desk.server.is_none() && self.desk.next_server.is_none();
            let mut stop = None;
            let next_step = self.next_by.filter(|_| !self.standby).or(waits.then_some(start_at));
            let notices = self.desk.turn(next_step.into_iter().chain(self.leaving.iter().map(|(_, by)| *by)).min())?;
            self.leaving.retain(|(pid, _)| {
                !notices.iter().any(|one| matches!(one, Notice::Child { pid: reaped, .. } if reaped == pid))
            });
            // The id of one that has been reaped is not its own any more.
            let reaped =
                |pid| notices.iter().any(|one| matches!(one, Notice::Child { pid: reaped, .. } if *reaped == pid));
            let unreaped = |server: Option<i32>| server.filter(|pid| !reaped(*pid));
            for notice in &notices {
                match *notice {
                    Notice::Ready => self.say_ready(),
                    Notice::Signal(Signal::SIGHUP) => self.replace_server(),
                    // After the rest of what is known by now: a server that has ended is not waited for, nor killed.
                    Notice::Signal(signal) => stop = Some(signal),
                    Notice::Standby => {
                        Point::StandbyHeard.pass();
                        self.standby = true;
                        // Nothing of what runs is its alone: the other one takes over all of it.
                        kill(unreaped(self.desk.server));
                        self.promote_if_free()?;
                    }
                    // It is over with one that closes the link: it gets time to say why, and its exit code is its own.
                    Notice::LinkLost { understood: true } => self.let_end(unreaped(self.desk.server)),
                    Notice::NextLost { understood: true } => self.let_end(unreaped(self.desk.next_server)),
                    Notice::LinkLost { understood: false } | Notice::Drained => kill(unreaped(self.desk.server)),
                    Notice::NextLost { understood: false } => {
                        log(format_args!("the new server does not speak this keeper's language and is ended"));
                        kill(unreaped(self.desk.next_server));
                    }
                    Notice::Child { pid, status } if self.desk.server == Some(pid) => {
                        start_at = self.server_ended(status)?;
                        self.promote_if_free()?;
                    }
                    Notice::Child { pid, status } if self.desk.next_server == Some(pid) => {
                        start_at = self.next_ended(status)?;
                    }
                    Notice::Child { .. } => {}
                }
            }
            if let Some(signal) = stop {
                return self.stop(signal);
            }
        }
    }

    /// Starts a server.
    ///
    /// Returns when to try again, if it could not be started just now.
    fn start_server(&mut self) -> io::Result<Instant> {
        match self.greet_server() {
            Ok(()) => Ok(Instant::now()),
            Err(error) if self.was_ready => {
                self.back_off = next_back_off(self.back_off);
                log(format_args!("cannot start a server ({error}); trying again in {:?}", self.back_off));
                Ok(Instant::now() + self.back_off)
            }
            Err(error) => Err(io::Error::new(error.kind(), format!("cannot start the server: {error}"))),
        }
    }

    fn greet_server(&mut self) -> io::Result<()> {
        let (pid, link) = self.program.spawn_server()?;
        self.desk.next_server = Some(pid);
        (self.next_by, self.standby) = (Some(Instant::now() + STANDBY_LIMIT), false);
        let listeners = self.listening.iter().filter_map(Listening::passed_on).collect();
        let settings = self.newer_settings.as_ref().unwrap_or(&self.server_settings);
        self.desk.greet(link, listeners, settings.clone())
    }

    /// SIGHUP: another server, from the program that lies at this one's path now, told who may call by the files as they are
    /// now. Where one of those is not good, all of them stay as they were.
    fn replace_server(&mut self) {
        if self.next_by.is_some() {
            log(format_args!("SIGHUP: a server is being started already"));
            return;
        }
        log(format_args!("SIGHUP: starting a new server"));
        match (self.renewal.0)() {
            Ok(settings) => self.newer_settings = Some(settings),
            Err(problems) => {
                for problem in problems {
                    log(format_args!("{problem}"));
                }
                log(format_args!("tokens and certificates stay as they were"));
            }
        }
        if let Err(error) = self.program.renew().and_then(|()| self.greet_server()) {
            self.keep_old();
            log(format_args!("the new server cannot be started ({error}); the old one stays"));
        }
    }

    /// Leaves a server, if it still lives, to its end for a while.
    fn let_end(&mut self, server: Option<i32>) {
        self.leaving.extend(server.map(|pid| (pid, Instant::now() + EXIT_LIMIT)));
    }

    /// Makes the server that stands by the server, once there is no other.
    fn promote_if_free(&mut self) -> io::Result<()> {
        if self.standby && self.desk.server.is_none() {
            self.desk.server = self.desk.next_server.take();
            (self.ready_since, self.next_by, self.standby) = (None, None, false);
            self.desk.promote()?;
        }
        Ok(())
    }

    /// One that was to take over has ended before it could. Returns when the next one may be started.
    ///
    /// # Errors
    /// As [`Self::may_start_again`].
    fn next_ended(&mut self, status: i32) -> io::Result<Instant> {
        self.desk.next_server = None;
        self.desk.drop_next();
        (self.next_by, self.standby) = (None, false);
        self.keep_old();
        if self.desk.server.is_some() {
            log(format_args!("the new server {} before it was ready; the old one stays", Ended(status)));
            return Ok(Instant::now());
        }
        self.may_start_again(status)?;
        self.back_off = next_back_off(self.back_off);
        log(format_args!("the server {}; starting it again in {:?}", Ended(status), self.back_off));
        Ok(Instant::now() + self.back_off)
    }

    /// Whether another server is to be started after one that ended so.
    ///
    /// # Errors
    /// When it was the first one and gave up by itself: it has said why, and would do so again.
    fn may_start_again(&self, status: i32) -> io::Result<()> {
        if self.was_ready || !libc::WIFEXITED(status) {
            return Ok(());
        }
        self.listening.iter().for_each(Listening::remove_file);
        Err(io::Error::other(format!("the server {} before it was ready", Ended(status))))
    }

    /// The next server is the one that has proven itself, told what that one was told.
    fn keep_old(&mut self) {
        self.program.keep_old();
        self.newer_settings = None;
    }

    fn say_ready(&mut self) {
        Point::ReadyHeard.pass();
        self.was_ready = true;
        self.program.keep();
        if let Some(settings) = self.newer_settings.take() {
            self.server_settings = settings;
        }
        self.ready_since = Some(Instant::now());
        if let Some(line) = self.ready_line.take() {
            let mut out = io::stdout().lock();
            // Whoever started the daemon may not listen.
            let _ = writeln!(out, "{line}").and_then(|()| out.flush());
        } else {
            log(format_args!("the new server is ready"));
        }
    }

    /// The server has ended. What it had started goes on. Returns when the next one may be started.
    ///
    /// # Errors
    /// As [`Self::may_start_again`].
    fn server_ended(&mut self, status: i32) -> io::Result<Instant> {
        self.desk.server = None;
        self.desk.detach();
        let served = self.ready_since.take().map(|since| since.elapsed());
        if self.standby {
            return Ok(Instant::now());
        }
        self.may_start_again(status)?;
        // If it was the newer program that could not take over, the one before can.
        self.keep_old();
        self.back_off = back_off_after(self.back_off, status, served);
        let again = if self.back_off.is_zero() { "at once".to_owned() } else { format!("in {:?}", self.back_off) };
        log(format_args!("the server {}; starting it again {again}", Ended(status)));
        Ok(Instant::now() + self.back_off)
    }

    /// SIGTERM or SIGINT: drain, then end what is left, then exit.
    fn stop(mut self, signal: Signal) -> io::Result<()> {
        log(format_args!("{signal}: draining"));
        kill(self.desk.next_server);
        self.desk.drop_next();
        // New clients are refused from here on; a server that still listens closes its own copies.
        self.listening.iter_mut().for_each(Listening::close);
        if self.desk.ask_for_drain() {
            // A second signal is for those who do not want to wait.
            self.wait(self.drain_limit, |desk, notice| match notice {
                Some(Notice::Drained | Notice::LinkLost { .. } | Notice::Signal(Signal::SIGTERM | Signal::SIGINT)) => {
                    true
                }
                Some(Notice::Child { pid, .. }) => desk.server == Some(pid),
                Some(Notice::Ready | Notice::Standby | Notice::NextLost { .. } | Notice::Signal(_)) | None => false,
            })?;
        }
        self.desk.kill_everything();
        self.wait(KILL_LIMIT, |desk, _| desk.quiet())?;
        if !self.desk.quiet() {
            log(format_args!("some processes could not be ended and stay behind"));
        }
        self.desk.disconnect();
        self.wait(EXIT_LIMIT, |desk, _| desk.server.is_none())?;
        kill(self.desk.server);
        self.listening.iter().for_each(Listening::remove_file);
        self.desk.remove_groups();
        Ok(())
    }

    /// Turns until something is so, at most so long.
    fn wait(&mut self, limit: Duration, mut done: impl FnMut(&Desk, Option<Notice>) -> bool) -> io::Result<()> {
        let until = Instant::now() + limit;
        while !done(&self.desk, None) && Instant::now() < until {
            let mut over = false;
            for notice in self.desk.turn(Some(until))? {
                over |= done(&self.desk, Some(notice));
                if let Notice::Child { pid, .. } = notice
                    && self.desk.server == Some(pid)
                {
                    self.desk.server = None;
                }
            }
            if over {
                break;
            }
        }
        Ok(())
    }
}

/// An identity, for people.
fn user(identity: &super::protocol::Identity) -> String {
    match identity.uids {
        1 => format!("{} (uid {})", identity.name, identity.uid),
        _ => format!("uids {}", identity.name),
    }
}

/// How long to wait before the next server, after one that ended so and had been ready for so long (`None`: it never was).
/// One that ends by itself again and again, or never becomes ready, is started later each time. To have been killed says nothing
/// about a server that was ready: clients are answered again as soon after the tenth kill as after the first.
fn back_off_after(last: Duration, status: i32, served: Option<Duration>) -> Duration {
    match served {
        Some(served) if served >= SERVED => Duration::ZERO,
        Some(_) if was_killed(status) => FIRST_BACK_OFF,
        Some(_) | None => next_back_off(last),
    }
}

fn next_back_off(last: Duration) -> Duration {
    (last * 2).clamp(FIRST_BACK_OFF, LONGEST_BACK_OFF)
}

/// Whether it was ended by a signal of somebody else: not by an exit, nor by a signal that faults of a program's own end in.
fn was_killed(status: i32) -> bool {
    const OWN_FAULTS: [i32; 7] =
        [libc::SIGABRT, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGSEGV, libc::SIGSYS, libc::SIGTRAP];
    libc::WIFSIGNALED(status) && !OWN_FAULTS.contains(&libc::WTERMSIG(status))
}

/// Ends a server that was started here and is not reaped.
fn kill(server: Option<i32>) {
    if let Some(pid) = server {
        tree::signal_child(pid, libc::SIGKILL);
    }
}

/// The program that servers are started from: held open, so that it stays the same whatever lies at its path.
struct Program {
    path: PathBuf,
    file: OwnedFd,
    user: Option<ServerUser>,
    /// Tried by the server that is being started.
    newer: Option<OwnedFd>,
}

impl Program {
    /// This program, by the file that this process runs.
    fn open(user: Option<ServerUser>) -> io::Result<Self> {
        let path = std::env::current_exe()?;
        Ok(Self { path, file: open_program(Path::new("/proc/self/exe"))?, user, newer: None })
    }

    /// Takes what lies at the path now for the next server.
    fn renew(&mut self) -> io::Result<()> {
        self.newer = Some(open_program(&self.path)?);
        Ok(())
    }

    /// The newer one has proven itself.
    fn keep(&mut self) {
        if let Some(newer) = self.newer.take() {
            self.file = newer;
        }
    }

    /// The newer one, if there is one, is not used again.
    fn keep_old(&mut self) {
        self.newer = None;
    }

    /// Starts a server; returns its id and the keeper's end of its link.
    #[expect(clippy::disallowed_methods, reason = "the keeper starts programs")]
    fn spawn_server(&self) -> io::Result<(i32, OwnedFd)> {
        let (ours, theirs) = wire::pair()?;
        let file = self.newer.as_ref().unwrap_or(&self.file).as_raw_fd();
        let mut command = Command::new(format!("/proc/self/fd/{file}"));
        command.arg0("executor-daemon").arg(SERVER_ARGUMENT);
        if let Some(ServerUser { uid, gid }) = self.user {
            command.arg(uid.to_string()).arg(gid.to_string());
        }
        let server = command.stdin(theirs).spawn()?;
        Ok((i32::try_from(server.id()).map_err(io::Error::other)?, ours))
    }
}

fn open_program(path: &Path) -> io::Result<OwnedFd> {
    Ok(open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?)
}

/// How a process ended, for people.
struct Ended(i32);

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if libc::WIFEXITED(self.0) {
            write!(f, "exited with code {}", libc::WEXITSTATUS(self.0))
        } else {
            write!(f, "was ended by signal {}", libc::WTERMSIG(self.0))
        }
    }
}

/// One line for the operator.
pub(super) fn log(line: fmt::Arguments<'_>) {
    // In one write: the server's lines go the same way. Whoever started the daemon may have closed it.
    let _ = io::stderr().write_all(format!("executor-daemon: {line}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A raw wait status.
    const fn exited(code: i32) -> i32 {
        code << 8
    }

    /// The waits after servers that ended so one after the other, in milliseconds.
    fn waits(ends: impl IntoIterator<Item = (i32, Option<Duration>)>) -> Vec<u128> {
        let mut last = Duration::ZERO;
        let next = |(status, served)| {
            last = back_off_after(last, status, served);
            last.as_millis()
        };
        ends.into_iter().map(next).collect()
    }

    const AT_ONCE: Option<Duration> = Some(Duration::from_millis(1));

    #[test]
    fn a_server_that_was_ready_and_is_killed_is_back_at_once_each_time() {
        assert_eq!(waits([(libc::SIGKILL, AT_ONCE); 20]), [100; 20]);
        assert_eq!(waits([(libc::SIGTERM, AT_ONCE); 20]), [100; 20]);
    }

    #[test]
    fn a_server_that_ends_by_itself_is_started_later_each_time() {
        const LATER: [u128; 11] = [100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 25_600, 30_000, 30_000];
        for own in [exited(0), exited(1), exited(101), libc::SIGABRT, libc::SIGSEGV | 0x80] {
            assert_eq!(waits([(own, AT_ONCE); 11]), LATER, "status {own}");
        }
        // Whatever ends it before it was ready.
        for status in [exited(125), libc::SIGKILL] {
            assert_eq!(waits([(status, None); 11]), LATER, "status {status}");
        }
    }

    #[test]
    fn a_server_that_has_served_begins_anew() {
        let (crash, served) = (libc::SIGSEGV, Some(SERVED));
        assert_eq!(waits([(crash, AT_ONCE), (crash, AT_ONCE), (crash, served), (crash, AT_ONCE)]), [100, 200, 0, 100]);
        assert_eq!(
            waits([(crash, None), (crash, None), (libc::SIGKILL, AT_ONCE), (crash, None)]),
            [100, 200, 100, 200]
        );
    }
}
