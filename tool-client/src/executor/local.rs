//! The executor in this process: the engine over a keeper of its own.
