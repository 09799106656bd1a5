//! What a dead keeper left: processes of commands that an engine has recorded and nobody owns any more. They are ended where
//! they are proven to be ours, and named where they are not.
//!
//! The proof, for a shell: its pid and its start time in the same boot and pid namespace, looked at again after a pidfd
//! was opened; the signal goes through that. For others: they are in the session of a shell that is proven and has not been
//! reaped, whose number therefore names that session only. The shell is stopped first and killed last, so that this
//! stays true. Of a shell that is gone, the session's number proves it only if no number was given out twice since the boot:
//! fewer processes were started than there are numbers. What has left the session (`setsid`) is not found here.
//!
//! What was recorded is the engine's word, and the engine faces the network. So nothing is signalled whose user is not one that
//! commands run as: an engine that lies reaches nothing here that a command of its could not.
//!
//! ```text
//!   shell proven ─► stopped ─► the others killed, until there are none ─► killed ─► ended
//!   shell gone ──► others: killed where the number proves them, else unverified
//!   number is somebody else's by now ─► gone
//! ```

use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

use super::protocol::{Identity, LeftShell, Verdict};

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(10);

/// A process as `/proc` shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    pid: i32,
    session: i32,
    started: u64,
    zombie: bool,
}

/// The start time of a process that exists, as field 22 of its stat: ticks since the boot.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    look(i32::try_from(pid).ok().filter(|pid| *pid > 0)?).map(|seen| seen.started)
}

fn look(pid: i32) -> Option<Seen> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse(pid, &stat)
}

/// A name may hold anything, also `)`: what counts comes after the last one.
fn parse(pid: i32, stat: &[u8]) -> Option<Seen> {
    let after = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let fields: Vec<&str> = std::str::from_utf8(&stat[after..]).ok()?.split_ascii_whitespace().collect();
    // The first of them is field 3.
    let field = |number: usize| fields.get(number - 3).copied();
    Some(Seen {
        pid,
        session: field(6)?.parse().ok()?,
        started: field(22)?.parse().ok()?,
        zombie: matches!(field(3)?, "Z" | "X"),
    })
}

/// One look at all processes, by session.
fn walk() -> HashMap<i32, Vec<Seen>> {
    let mut sessions: HashMap<i32, Vec<Seen>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok) {
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(seen) = pid.and_then(look) {
            sessions.entry(seen.session).or_default().push(seen);
        }
    }
    sessions
}

/// Whether no pid can have been given out twice since the boot. Numbers are given out in a circle.
fn numbers_are_unique() -> bool {
    let started = fs::read_to_string("/proc/stat").ok().and_then(|stat| {
        let line = stat.lines().find_map(|line| line.strip_prefix("processes "))?;
        line.trim().parse::<u64>().ok()
    });
    let numbers = fs::read_to_string("/proc/sys/kernel/pid_max").ok().and_then(|max| max.trim().parse::<u64>().ok());
    started.zip(numbers).is_some_and(|(started, numbers)| started < numbers)
}

/// The user that a process was started by.
fn user(pid: i32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_ascii_whitespace().next()?.parse().ok()
}

/// What is asked of the host; tests answer otherwise.
#[derive(Debug, Clone, Copy)]
struct Host {
    open: fn(Pid) -> io::Result<OwnedFd>,
    numbers_are_unique: fn() -> bool,
}

/// A search for what was left, made in passes between which the keeper does its other work.
#[derive(Debug)]
pub(super) struct Search {
    cases: Vec<Case>,
    /// Who commands run as.
    users: Vec<Identity>,
    host: Host,
    until: Instant,
    /// When the next pass is due.
    pub(super) pass_at: Instant,
}

/// One shell whose processes are looked after.
#[derive(Debug)]
struct Case {
    number: i64,
    shell: i32,
    /// `None`: not recorded, so nothing can be proven.
    started: Option<u64>,
    stopped: bool,
    killed: BTreeSet<u32>,
    verdict: Option<Verdict>,
}

impl Search {
    /// Begins to end what is alive of these shells' sessions, of processes of these users; for about `limit`.
    pub(super) fn new(shells: &[LeftShell], users: Vec<Identity>, limit: Duration) -> Self {
        let host = Host { open: |pid| Ok(pidfd_open(pid, PidfdFlags::empty())?), numbers_are_unique };
        let now = Instant::now();
        Self { cases: shells.iter().filter_map(Case::new).collect(), users, host, until: now + limit, pass_at: now }
    }

    /// One pass. Returns what became of each shell's processes, by its number, when that is known of all.
    pub(super) fn pass(&mut self) -> Option<Vec<(i64, Verdict)>> {
        let sessions = if self.cases.is_empty() { HashMap::new() } else { walk() };
        let late = Instant::now() >= self.until;
        for case in self.cases.iter_mut().filter(|case| case.verdict.is_none()) {
            let session = sessions.get(&case.shell).map_or(&[][..], Vec::as_slice);
            case.step(session, &self.users, self.host);
            if late {
                case.give_up();
            }
        }
        if self.cases.iter().any(|case| case.verdict.is_none()) {
            self.pass_at = Instant::now() + PAUSE;
            return None;
        }
        Some(self.cases.drain(..).filter_map(|case| Some((case.number, case.verdict?))).collect())
    }
}

impl Case {
    fn new(left: &LeftShell) -> Option<Self> {
        let shell = i32::try_from(left.pid).ok().filter(|pid| *pid > 1)?;
        let (number, started) = (left.number, left.started);
        Some(Self { number, shell, started, stopped: false, killed: BTreeSet::new(), verdict: None })
    }

    /// One look at the session and what follows from it.
    fn step(&mut self, session: &[Seen], users: &[Identity], host: Host) {
        // Whoever has the number now, in whatever session.
        let shell = look(self.shell);
        let others: Vec<Seen> = session.iter().filter(|seen| seen.pid != self.shell && !seen.zombie).copied().collect();
        let Some(started) = self.started else {
            let pids: Vec<u32> =
                shell.iter().filter(|seen| !seen.zombie).chain(&others).map(|seen| pid_of(*seen)).collect();
            self.verdict = Some(match pids.is_empty() {
                true => Verdict::Gone,
                false => Verdict::Unverified { pids, why: "no start time was recorded".to_owned() },
            });
            return;
        };
        let shell = match shell {
            Some(shell) if shell.started != started => return self.over(),
            shell => shell,
        };
        let others: Vec<Seen> = others.into_iter().filter(|seen| seen.started >= started).collect();
        if own_session() == Some(self.shell) {
            return self.unverified(&others, "this process is in their session".to_owned());
        }
        match shell {
            None if others.is_empty() => self.over(),
            None if (host.numbers_are_unique)() => self.kill(&others, users, host),
            None => self.unverified(&others, "their shell is gone, and its number may have been used again".to_owned()),
            Some(shell) if shell.session != self.shell => {
                self.unverified(&[shell], "the shell does not lead a session".to_owned());
            }
            Some(shell) if others.is_empty() && shell.zombie => self.over(),
            Some(shell) if others.is_empty() => self.kill(&[shell], users, host),
            Some(shell) => {
                if !shell.zombie && !self.stopped {
                    self.stopped = true;
                    if let Err(why) = signal(shell, Signal::STOP, users, host) {
                        return self.unverified(&[shell], why);
                    }
                }
                self.kill(&others, users, host);
            }
        }
    }

    fn kill(&mut self, all: &[Seen], users: &[Identity], host: Host) {
        for seen in all {
            match signal(*seen, Signal::KILL, users, host) {
                Ok(true) => {
                    self.killed.insert(pid_of(*seen));
                }
                Ok(false) => {}
                Err(why) => return self.unverified(all, why),
            }
        }
    }

    fn over(&mut self) {
        let killed: Vec<u32> = std::mem::take(&mut self.killed).into_iter().collect();
        self.verdict = Some(if killed.is_empty() { Verdict::Gone } else { Verdict::Ended(killed) });
    }

    fn unverified(&mut self, pids: &[Seen], why: String) {
        self.verdict = Some(Verdict::Unverified { pids: pids.iter().map(|seen| pid_of(*seen)).collect(), why });
    }

    /// The time is over.
    fn give_up(&mut self) {
        if self.verdict.is_none() {
            let survivors = self.killed.iter().copied();
            self.verdict = Some(Verdict::Survive(survivors.filter(|pid| start_time(*pid).is_some()).collect()));
        }
    }
}

/// The session of this process: 0 where its leader lives outside of this pid namespace, as after `docker exec`.
fn own_session() -> Option<i32> {
    Some(look(getpid().as_raw_nonzero().get())?.session)
}

fn pid_of(seen: Seen) -> u32 {
    seen.pid.unsigned_abs()
}

/// Signals the process that was seen, if it is still the same one behind an open pidfd, and of one of these users. False: it
/// is gone.
fn signal(seen: Seen, signal: Signal, users: &[Identity], host: Host) -> Result<bool, String> {
    let Some(pid) = Pid::from_raw(seen.pid).filter(|pid| seen.pid > 1 && *pid != getpid()) else {
        return Err(format!("pid {} is never signalled", seen.pid));
    };
    let gone = |error: &io::Error| error.raw_os_error() == Some(libc::ESRCH);
    let pidfd = match (host.open)(pid) {
        Ok(pidfd) => pidfd,
        Err(error) if gone(&error) => return Ok(false),
        Err(error) => return Err(format!("pid {} could not be opened: {error}", seen.pid)),
    };
    let user = user(seen.pid);
    // The number could have changed hands before it was opened; behind the descriptor it cannot any more.
    if look(seen.pid).is_none_or(|now| (now.started, now.session) != (seen.started, seen.session)) {
        return Ok(false);
    }
    match user {
        Some(user) if users.iter().any(|one| one.has_uid(user)) => {}
        Some(user) => return Err(format!("pid {} is of uid {user}, as which no command runs", seen.pid)),
        None => return Err(format!("it cannot be told whose pid {} is", seen.pid)),
    }
    match pidfd_send_signal(&pidfd, signal).map_err(io::Error::from) {
        Ok(()) => Ok(true),
        Err(error) if gone(&error) => Ok(false),
        Err(error) => Err(format!("pid {} could not be signalled: {error}", seen.pid)),
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "processes that no keeper owns are what is tested")]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        process::{Child, Command, Stdio},
    };

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    /// A shell that leads a session of its own, whose script has printed a line, and that line.
    fn shell(script: &str) -> (Child, u32, String) {
        // `setsid` forks only where it leads a group already, which a child of this does not.
        let mut child = Command::new("setsid")
            .args(["bash", "-c", script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("it prints");
        let pid = child.id();
        (child, pid, line.trim().to_owned())
    }

    fn left(number: i64, pid: u32, started: Option<u64>) -> LeftShell {
        LeftShell { number, pid, started }
    }

    fn own_user() -> Vec<Identity> {
        vec![Identity {
            name: String::new(),
            uid: nix::unistd::getuid().as_raw(),
            uids: 1,
            gid: 0,
            groups: Vec::new(),
            home: "/".into(),
            change: false,
            capabilities: None,
            allow_setuid: true,
        }]
    }

    fn end(shells: &[LeftShell]) -> Vec<(i64, Verdict)> {
        end_by(Search::new(shells, own_user(), LIMIT))
    }

    fn end_by(mut search: Search) -> Vec<(i64, Verdict)> {
        loop {
            if let Some(verdicts) = search.pass() {
                return verdicts;
            }
            std::thread::sleep(search.pass_at.saturating_duration_since(Instant::now()));
        }
    }

    fn runs(pid: u32) -> bool {
        look(i32::try_from(pid).unwrap()).is_some_and(|seen| !seen.zombie)
    }

    #[test]
    fn a_recorded_shell_and_its_session_are_ended_and_nobody_else() {
        let (mut ours, pid, other) = shell("sleep 300 & echo $!; while :; do sleep 300; done");
        let (mut stranger, stranger_pid, _) = shell("echo; while :; do sleep 300; done");
        let other: u32 = other.parse().unwrap();
        let start = start_time(pid).unwrap();
        let verdicts = end(&[left(1, pid, Some(start))]);
        let [(1, Verdict::Ended(killed))] = &verdicts[..] else { panic!("{verdicts:?}") };
        assert!(killed.contains(&pid) && killed.contains(&other), "{killed:?}");
        assert!(!runs(pid) && !runs(other));
        assert!(runs(stranger_pid));
        ours.wait().unwrap();
        // Nothing of it is there the second time.
        assert_eq!(end(&[left(1, pid, Some(start))]), [(1, Verdict::Gone)]);
        // A number that somebody else has by now.
        let wrong = start_time(stranger_pid).unwrap() - 1;
        assert_eq!(end(&[left(2, stranger_pid, Some(wrong))]), [(2, Verdict::Gone)]);
        assert!(runs(stranger_pid));
        stranger.kill().unwrap();
        stranger.wait().unwrap();
    }

    #[test]
    fn what_outlived_its_shell_is_ended_only_if_its_number_proves_it() {
        let (mut ours, pid, other) = shell("sleep 300 >/dev/null & echo $!");
        let start = start_time(pid).unwrap();
        let other: u32 = other.parse().unwrap();
        ours.wait().unwrap();
        let search = |unique| {
            let search = Search::new(&[left(1, pid, Some(start))], own_user(), LIMIT);
            Search { host: Host { numbers_are_unique: unique, ..search.host }, ..search }
        };
        let verdicts = end_by(search(|| false));
        let [(_, Verdict::Unverified { pids, .. })] = &verdicts[..] else { panic!("it is not proven: {verdicts:?}") };
        assert_eq!((&pids[..], runs(other)), (&[other][..], true));
        assert_eq!(end_by(search(|| true)), [(1, Verdict::Ended(vec![other]))]);
        assert!(!runs(other));
    }

    #[test]
    fn what_cannot_be_proven_or_opened_is_left_alone_and_said() {
        let (mut child, pid, _) = shell("echo; exec sleep 300");
        let [(_, Verdict::Unverified { pids, why })] = &end(&[left(1, pid, None)])[..] else {
            panic!("no start time proves nothing")
        };
        assert_eq!((&pids[..], why.as_str()), (&[pid][..], "no start time was recorded"));
        let search = Search::new(&[left(1, pid, start_time(pid))], own_user(), LIMIT);
        let host = Host { open: |_| Err(io::Error::from_raw_os_error(libc::EMFILE)), ..search.host };
        let verdicts = end_by(Search { host, ..search });
        let [(_, Verdict::Unverified { pids, why })] = &verdicts[..] else { panic!("{verdicts:?}") };
        assert_eq!(&pids[..], [pid]);
        assert!(why.contains("could not be opened"), "{why}");
        assert!(runs(pid));
        // Of somebody as whom no command runs.
        let others = own_user().into_iter().map(|user| Identity { uid: user.uid + 1, uids: 9, ..user }).collect();
        let verdicts = end_by(Search::new(&[left(1, pid, start_time(pid))], others, LIMIT));
        let [(_, Verdict::Unverified { pids, why })] = &verdicts[..] else { panic!("{verdicts:?}") };
        assert_eq!(&pids[..], [pid]);
        assert!(why.contains("as which no command runs"), "{why}");
        assert!(runs(pid));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_name_may_hold_anything() {
        let stat = b"7 (a) Z 1 (b)) S 1 7 9 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 1 1";
        assert_eq!(parse(7, stat), Some(Seen { pid: 7, session: 9, started: 4711, zombie: false }));
        assert_eq!(parse(7, b"7 (a) S 1 7"), None);
        assert!(start_time(std::process::id()).is_some());
        assert_eq!(start_time(0), None);
    }
}
