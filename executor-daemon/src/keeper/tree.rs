//! Who descends from this process, proven, and the only place from which signals leave.
//!
//! The proof: a direct child that has not been reaped keeps its id, and only this process reaps it. A deeper descendant
//! is opened as a pidfd first; then its parent is read, and then its parent's pidfd must still say alive, so that the
//! parent's id cannot have changed hands meanwhile. A signal goes through the pidfd. Group ids are only used while the
//! shell that leads the group is unreaped. A walk is a snapshot, never a proof that there is nothing else: that proof is
//! `waitpid` saying ECHILD in a sub-reaper.
#![expect(unsafe_code, reason = "pidfds, raw signals and raw wait statuses")]

use std::{
    collections::HashMap,
    fs, io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    rc::Rc,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Most processes that one walk looks at.
const MAX_WALKED: usize = 1024;
/// Longest walk. A bomb must not keep a helper from answering.
const MAX_WALK: Duration = Duration::from_millis(100);
/// Command lines are cut to this many bytes.
const MAX_COMMAND_LINE_BYTES: usize = 256;

/// A process that was proven to descend from this one.
#[derive(Debug, Clone)]
pub(super) struct Descendant {
    /// Its id.
    pub(super) pid: i32,
    /// Its process group when it was looked at.
    pub(super) group: i32,
    /// The letter of its state when it was looked at.
    pub(super) state: u8,
    /// `None`: a direct child, whose id stays its own until it is reaped.
    pidfd: Option<Rc<OwnedFd>>,
}

impl Descendant {
    /// Whether this is a direct child.
    pub(super) fn direct(&self) -> bool {
        self.pidfd.is_none()
    }

    /// Whether it had ended already and waits to be reaped.
    pub(super) fn zombie(&self) -> bool {
        matches!(self.state, b'Z' | b'X')
    }

    /// Whether it was stopped (not by a tracer).
    pub(super) fn stopped(&self) -> bool {
        self.state == b'T'
    }

    /// Sends it a signal. That it is gone already, or may not be signalled (another uid), shows in the next walk.
    pub(super) fn signal(&self, signal: i32) {
        match &self.pidfd {
            None => signal_child(self.pid, signal),
            Some(pidfd) => {
                let no_info = std::ptr::null::<libc::siginfo_t>();
                // SAFETY: an open pidfd, a number, no further information, no flags.
                unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, no_info, 0) };
            }
        }
    }

    /// Its arguments joined by spaces, cut to 256 bytes; empty when it has none or is gone.
    pub(super) fn command_line(&self) -> Vec<u8> {
        let mut line = fs::read(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default();
        while line.last() == Some(&0) {
            line.pop();
        }
        line.truncate(MAX_COMMAND_LINE_BYTES);
        line.iter_mut().filter(|byte| **byte == 0).for_each(|byte| *byte = b' ');
        line
    }

    fn alive(&self) -> bool {
        let Some(pidfd) = &self.pidfd else { return true };
        let mut polled = [PollFd::new(std::os::fd::AsFd::as_fd(&**pidfd), PollFlags::POLLIN)];
        poll(&mut polled, PollTimeout::ZERO) == Ok(0)
    }
}

/// Signals a direct child that has not been reaped.
pub(super) fn signal_child(pid: i32, signal: i32) {
    if pid > 1 && pid != own_pid() {
        // SAFETY: integers only.
        unsafe { libc::kill(pid, signal) };
    }
}

/// Signals the group that an unreaped direct child leads; nothing happens when it does not lead one of its own.
pub(super) fn signal_group_of(leader: i32, signal: i32) {
    // SAFETY: integers only.
    let (group, own) = unsafe { (libc::getpgid(leader), libc::getpgid(0)) };
    if leader > 1 && group == leader && group != own {
        // SAFETY: integers only; a group that is not 0, 1 or our own.
        unsafe { libc::kill(-leader, signal) };
    }
}

fn own_pid() -> i32 {
    // SAFETY: takes nothing, cannot fail.
    unsafe { libc::getpid() }
}

/// What a `waitpid` found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reaped {
    /// A child has ended: its id and raw status.
    Child(i32, i32),
    /// There are children, and none has ended.
    NoneEnded,
    /// There are no children: of a sub-reaper, nothing at all is left.
    NoChildren,
}

/// Reaps one child if one has ended.
pub(super) fn reap() -> Reaped {
    let mut status = 0;
    loop {
        // SAFETY: writes one integer. __WALL: also children that do not announce their end by SIGCHLD.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG | libc::__WALL) };
        match pid {
            0 => return Reaped::NoneEnded,
            pid if pid > 0 => return Reaped::Child(pid, status),
            _ if io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) => {}
            _ => return Reaped::NoChildren,
        }
    }
}

/// A child that was stopped and has not been told of yet. Reaps nothing; a stop under a tracer does not count.
pub(super) fn stopped_child() -> Option<i32> {
    // SAFETY: all zero is a valid siginfo_t; one that stays so has the id 0, which nobody has.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WSTOPPED | libc::WNOHANG | libc::__WALL;
    // SAFETY: writes one siginfo_t, whose id is set by this call.
    let pid = unsafe { if libc::waitid(libc::P_ALL, 0, &raw mut info, flags) == 0 { info.si_pid() } else { 0 } };
    (pid > 0).then_some(pid)
}

/// Every descendant that can be seen and proven just now, direct children first; ended ones that nobody has reaped
/// included. Bounded in number and time.
pub(super) fn walk() -> Vec<Descendant> {
    walk_until(Instant::now() + MAX_WALK)
}

/// The same until a moment, at most as long as [`walk`] may take.
pub(super) fn walk_until(until: Instant) -> Vec<Descendant> {
    let until = until.min(Instant::now() + MAX_WALK);
    let mut source = Source::new();
    let mut found: Vec<Descendant> = direct_children_from(&mut source);
    let mut next = 0;
    while next < found.len() && found.len() < MAX_WALKED && Instant::now() < until {
        let parent = found[next].clone();
        next += 1;
        for pid in source.children(parent.pid) {
            if found.len() >= MAX_WALKED {
                break;
            }
            found.extend(prove(pid, &parent));
        }
    }
    found
}

/// The ids of all direct children; each stays that child's until it is reaped.
pub(super) fn direct_children() -> Vec<i32> {
    Source::new().children(own_pid())
}

fn direct_children_from(source: &mut Source) -> Vec<Descendant> {
    let own = own_pid();
    let children = source.children(own).into_iter().filter_map(|pid| {
        let stat = Stat::read(pid)?;
        (stat.parent == own).then_some(Descendant { pid, group: stat.group, state: stat.state, pidfd: None })
    });
    children.take(MAX_WALKED).collect()
}

fn prove(pid: i32, parent: &Descendant) -> Option<Descendant> {
    // SAFETY: integers only.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let pidfd = i32::try_from(pidfd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: just opened (close-on-exec, as all pidfds), owned by nobody else.
    let pidfd = Rc::new(unsafe { OwnedFd::from_raw_fd(pidfd) });
    let stat = Stat::read(pid)?;
    let proven = stat.parent == parent.pid && parent.alive();
    proven.then_some(Descendant { pid, group: stat.group, state: stat.state, pidfd: Some(pidfd) })
}

/// What is needed of `/proc/<pid>/stat`.
struct Stat {
    state: u8,
    parent: i32,
    group: i32,
}

impl Stat {
    fn read(pid: i32) -> Option<Self> {
        Self::parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// The name in parentheses may hold anything, so the fields are counted from the last one.
    fn parse(stat: &[u8]) -> Option<Self> {
        let name_end = stat.iter().rposition(|byte| *byte == b')')?;
        let mut fields = stat.get(name_end + 2..)?.split(|byte| *byte == b' ');
        let state = *fields.next()?.first()?;
        let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse().ok();
        Some(Self { state, parent: number()?, group: number()? })
    }
}

/// Where children are looked up: in the kernel's own lists, or in one scan of `/proc` where it does not show them.
enum Source {
    Lists,
    Scan(HashMap<i32, Vec<i32>>),
}

impl Source {
    fn new() -> Self {
        let own = own_pid();
        if fs::exists(format!("/proc/{own}/task/{own}/children")).unwrap_or(false) {
            return Self::Lists;
        }
        let mut by_parent: HashMap<i32, Vec<i32>> = HashMap::new();
        for pid in numbers("/proc") {
            if let Some(stat) = Stat::read(pid) {
                by_parent.entry(stat.parent).or_default().push(pid);
            }
        }
        Self::Scan(by_parent)
    }

    fn children(&mut self, parent: i32) -> Vec<i32> {
        match self {
            Self::Scan(by_parent) => by_parent.remove(&parent).unwrap_or_default(),
            Self::Lists => {
                let lists = numbers(&format!("/proc/{parent}/task")).into_iter().filter_map(|thread| {
                    // A process may have threads that have children of their own.
                    fs::read_to_string(format!("/proc/{parent}/task/{thread}/children")).ok()
                });
                lists
                    .flat_map(|list| {
                        list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()
                    })
                    .collect()
            }
        }
    }
}

fn numbers(directory: &str) -> Vec<i32> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_and_spaces_does_not_shift_the_fields() {
        let stat = Stat::parse(b"77 (a) R 1 (b) c) S 12 34 34 0 -1").expect("well-formed");
        assert_eq!((stat.state, stat.parent, stat.group), (b'S', 12, 34));
        assert!(Stat::parse(b"77 (a").is_none());
        assert!(Stat::parse(b"77 (a) S x").is_none());
    }
}
