//! The keeper: the small parent process that starts, reaps and signals commands and holds descriptors.

pub mod embedded;
pub mod link;
pub mod page;
pub mod protocol;

/// The first line of `main` of every program that embeds the engine, and of `executor-daemon`: if this process was
/// started to be a keeper (or the daemon's server), it becomes that and never returns.
pub fn enter_if_asked() {}
