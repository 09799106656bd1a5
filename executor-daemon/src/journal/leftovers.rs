//! What a dead keeper left: processes of recorded commands that nobody owns any more. They are ended where they are proven to
//! be ours, and named where they are not.
//!
//! The proof, for a shell: its pid and its start time in the same boot and pid namespace, looked at again after a pidfd
//! was opened; the signal goes through that. For others: they are in the session of a shell that is proven and has not been
//! reaped, whose number therefore names that session only. The shell is stopped first and killed last, so that this
//! stays true. Of a shell that is gone, the session's number proves it only if no number was given out twice since the boot:
//! fewer processes were started than there are numbers. What has left the session (`setsid`) is not found here.
//!
//! ```text
//!   shell proven ─► stopped ─► the others killed, until there are none ─► killed ─► ended
//!   shell gone ──► others: killed where the number proves them, else unverified
//!   number is somebody else's by now ─► gone
//! ```

use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

use super::record::{RecordedStart, StartNumber, World};

/// Longest pause between two looks.
const PAUSE_MS: u16 = 20;

/// What became of the processes of one start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// None was alive.
    Gone,
    /// These were killed, and none is alive.
    Ended(Vec<u32>),
    /// These were killed and are not gone yet.
    Survive(Vec<u32>),
    /// Something may be alive that could not be proven ours, or not be signalled: nothing is claimed.
    Unverified {
        /// What may be ours.
        pids: Vec<u32>,
        /// Why it was left alone.
        why: String,
    },
}

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

/// How a pidfd is opened; tests let it fail.
type Open<'a> = &'a dyn Fn(Pid) -> io::Result<OwnedFd>;

/// One start whose processes are looked after.
#[derive(Debug)]
struct Case {
    number: StartNumber,
    shell: i32,
    /// `None`: not recorded, so nothing can be proven.
    started: Option<u64>,
    stopped: bool,
    killed: BTreeSet<u32>,
    verdict: Option<Verdict>,
}

/// Ends what is alive of starts of other keepers, and says of each what became of it. Takes at most about `limit`; blocks.
/// Starts of this keeper, and those from before the host or the container was started again, are not looked at.
pub(crate) fn end(starts: &[RecordedStart], limit: Duration) -> Vec<(StartNumber, Verdict)> {
    end_with(starts, limit, &|pid| Ok(pidfd_open(pid, PidfdFlags::empty())?), &numbers_are_unique)
}

fn end_with(
    starts: &[RecordedStart],
    limit: Duration,
    open: Open<'_>,
    unique: &dyn Fn() -> bool,
) -> Vec<(StartNumber, Verdict)> {
    let until = Instant::now() + limit;
    let mut cases: Vec<Case> = starts.iter().filter_map(Case::new).collect();
    while cases.iter().any(|case| case.verdict.is_none()) {
        let sessions = walk();
        let mut signalled = Vec::new();
        for case in cases.iter_mut().filter(|case| case.verdict.is_none()) {
            let session = sessions.get(&case.shell).map_or(&[][..], Vec::as_slice);
            case.step(session, open, unique, &mut signalled);
        }
        if Instant::now() >= until {
            cases.iter_mut().for_each(Case::give_up);
            break;
        }
        if !signalled.is_empty() {
            let mut fds: Vec<_> =
                signalled.iter().map(|fd: &OwnedFd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)).collect();
            // Only a pause: the next look tells what is gone.
            let _ = poll(&mut fds, PollTimeout::from(PAUSE_MS));
        }
    }
    cases.into_iter().filter_map(|case| Some((case.number, case.verdict?))).collect()
}

impl Case {
    fn new(start: &RecordedStart) -> Option<Self> {
        let started = start.started.as_ref()?;
        let shell = i32::try_from(started.pid).ok().filter(|pid| *pid > 1)?;
        (start.world == World::SamePids).then_some(Self {
            number: start.number,
            shell,
            started: started.pid_started,
            stopped: false,
            killed: BTreeSet::new(),
            verdict: None,
        })
    }

    /// One look at the session and what follows from it.
    fn step(&mut self, session: &[Seen], open: Open<'_>, unique: &dyn Fn() -> bool, signalled: &mut Vec<OwnedFd>) {
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
            None if unique() => self.kill(&others, open, signalled),
            None => self.unverified(&others, "their shell is gone, and its number may have been used again".to_owned()),
            Some(shell) if shell.session != self.shell => {
                self.unverified(&[shell], "the shell does not lead a session".to_owned());
            }
            Some(shell) if others.is_empty() && shell.zombie => self.over(),
            Some(shell) if others.is_empty() => self.kill(&[shell], open, signalled),
            Some(shell) => {
                if !shell.zombie && !self.stopped {
                    self.stopped = true;
                    if let Err(why) = signal(shell, Signal::STOP, open) {
                        return self.unverified(&[shell], why);
                    }
                }
                self.kill(&others, open, signalled);
            }
        }
    }

    fn kill(&mut self, all: &[Seen], open: Open<'_>, signalled: &mut Vec<OwnedFd>) {
        for seen in all {
            match signal(*seen, Signal::KILL, open) {
                Ok(Some(pidfd)) => {
                    self.killed.insert(pid_of(*seen));
                    signalled.push(pidfd);
                }
                Ok(None) => {}
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

/// Signals the process that was seen, if it is still the same one behind an open pidfd. `None`: it is gone.
fn signal(seen: Seen, signal: Signal, open: Open<'_>) -> Result<Option<OwnedFd>, String> {
    let Some(pid) = Pid::from_raw(seen.pid).filter(|pid| seen.pid > 1 && *pid != getpid()) else {
        return Err(format!("pid {} is never signalled", seen.pid));
    };
    let gone = |error: &io::Error| error.raw_os_error() == Some(libc::ESRCH);
    let pidfd = match open(pid) {
        Ok(pidfd) => pidfd,
        Err(error) if gone(&error) => return Ok(None),
        Err(error) => return Err(format!("pid {} could not be opened: {error}", seen.pid)),
    };
    // The number could have changed hands before it was opened; behind the descriptor it cannot any more.
    if look(seen.pid).is_none_or(|now| (now.started, now.session) != (seen.started, seen.session)) {
        return Ok(None);
    }
    match pidfd_send_signal(&pidfd, signal).map_err(io::Error::from) {
        Ok(()) => Ok(Some(pidfd)),
        Err(error) if gone(&error) => Ok(None),
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

    use super::{
        super::{Account, Kind, Start, Started},
        *,
    };

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

    fn recorded(number: i64, pid: u32, pid_started: Option<u64>) -> RecordedStart {
        let start = Start {
            account: Account { tenant: "t".into(), owner: None },
            key: "k".into(),
            kind: Kind::Task,
            digest: [0; 32],
            command: Vec::new(),
            workdir: Vec::new(),
            timeout_ms: 1.0,
            begun_at_ms: 1,
            handle: None,
        };
        RecordedStart {
            number: StartNumber(number),
            world: World::SamePids,
            start,
            started: Some(Started { id: format!("bash-{number}"), handle: 1, pid, pid_started, at_ms: 1 }),
            asked_to_end: Vec::new(),
            ended: None,
            told: false,
            read: None,
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
        let verdicts = end(&[recorded(1, pid, Some(start))], LIMIT);
        let [(StartNumber(1), Verdict::Ended(killed))] = &verdicts[..] else { panic!("{verdicts:?}") };
        assert!(killed.contains(&pid) && killed.contains(&other), "{killed:?}");
        assert!(!runs(pid) && !runs(other));
        assert!(runs(stranger_pid));
        ours.wait().unwrap();
        // Nothing of it is there the second time.
        assert_eq!(end(&[recorded(1, pid, Some(start))], LIMIT), [(StartNumber(1), Verdict::Gone)]);
        // A number that somebody else has by now.
        let wrong = start_time(stranger_pid).unwrap() - 1;
        assert_eq!(end(&[recorded(2, stranger_pid, Some(wrong))], LIMIT), [(StartNumber(2), Verdict::Gone)]);
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
        let open: Open<'_> = &|pid| Ok(pidfd_open(pid, PidfdFlags::empty())?);
        let [(_, Verdict::Unverified { pids, .. })] =
            &end_with(&[recorded(1, pid, Some(start))], LIMIT, open, &|| false)[..]
        else {
            panic!("it is not proven")
        };
        assert_eq!((&pids[..], runs(other)), (&[other][..], true));
        let verdicts = end_with(&[recorded(1, pid, Some(start))], LIMIT, open, &|| true);
        assert_eq!(verdicts, [(StartNumber(1), Verdict::Ended(vec![other]))]);
        assert!(!runs(other));
    }

    #[test]
    fn what_cannot_be_proven_or_opened_is_left_alone_and_said() {
        let (mut child, pid, _) = shell("echo; exec sleep 300");
        let [(_, Verdict::Unverified { pids, why })] = &end(&[recorded(1, pid, None)], LIMIT)[..] else {
            panic!("no start time proves nothing")
        };
        assert_eq!((&pids[..], why.as_str()), (&[pid][..], "no start time was recorded"));
        let refused: Open<'_> = &|_| Err(io::Error::from_raw_os_error(libc::EMFILE));
        let verdicts = end_with(&[recorded(1, pid, start_time(pid))], LIMIT, refused, &|| true);
        let [(_, Verdict::Unverified { pids, why })] = &verdicts[..] else { panic!("{verdicts:?}") };
        assert_eq!(&pids[..], [pid]);
        assert!(why.contains("could not be opened"), "{why}");
        assert!(runs(pid));
        // Of another world nothing is even looked at.
        for world in [World::ThisKeeper, World::OtherPids, World::OtherBoot] {
            let other = RecordedStart { world, ..recorded(1, pid, start_time(pid)) };
            assert_eq!(end(&[other], LIMIT), []);
        }
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
