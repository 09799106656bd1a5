//! Whom the kernel ends when memory runs out: a command before the daemon, however small the command is.
//!
//! The kernel picks by size, and beside many small processes the server is a large one. Lowering the daemon's own score takes a
//! privilege that it does without, so commands get a higher one, and what they start inherits it. Where the daemon has not that privilege
//! a command can go back to the daemon's score, and no lower: this is no wall, but for what takes memory by accident.

use std::fs;

/// How far above the daemon's score: as if a command used this many thousandths of the memory more than it does.
const ABOVE_THE_DAEMON: i32 = 500;
/// The kernel's highest.
const HIGHEST: i32 = 1000;

/// The score that commands get.
#[derive(Debug)]
pub(super) struct Score(String);

impl Score {
    /// From that of this process, which whoever has started the daemon chose. `None`: this kernel has none.
    pub(super) fn of_commands() -> Option<Self> {
        let own: i32 = fs::read_to_string("/proc/self/oom_score_adj").ok()?.trim().parse().ok()?;
        Some(Self(own.saturating_add(ABOVE_THE_DAEMON).min(HIGHEST).to_string()))
    }

    /// Gives it to an unreaped child that has executed its program.
    pub(super) fn give(&self, pid: i32) {
        // It has ended already, or must do with the score that it has.
        let _ = fs::write(format!("/proc/{pid}/oom_score_adj"), &self.0);
    }
}
