//! Whom the kernel lets run first: the daemon before what it has started, however much that is.
//!
//! Every command leads a session, and the kernel divides the processors by sessions before it divides them by processes (autogroups),
//! so one with a thousand processes has no more than its part. But the daemon, which serves all of them, would have one part as
//! well. The session's part is raised, not the daemon's niceness: commands do not see it, and their own sessions begin with one part.
//! In control groups with a part of their own there are no autogroups; there it is the keeper's group that has more
//! ([`super::groups`]).

use std::fs;

use nix::unistd::{getpid, getsid};

/// The part of the daemon's group; each tenant's is 100.
pub(super) const WEIGHT: &str = "1000";
/// About the same for its session, as the kernel counts niceness: nine times the part of another one.
const NICE: &str = "-10";

/// Raises the part of this process's session where it leads it: another one may hold a person's shell and what that has started.
pub(super) fn raise() {
    if getsid(None) == Ok(getpid()) {
        // It needs a privilege and a kernel that has autogroups; without, the daemon has one part as the others.
        let _ = fs::write("/proc/self/autogroup", NICE);
    }
}
