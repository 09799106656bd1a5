//! Replays journals: arbitrary bytes as the bodies of records, and as damage to the files. Never a panic, and what was opened can
//! be opened again.
//!
//! The first byte below 128: records follow, each its table, its length and its body. From 128 on: whether the database (even) or its
//! log is damaged, then edits of three bytes, a place and what is turned over there; 0 cuts the file off.
#![no_main]

use std::{path::PathBuf, sync::LazyLock};

static DIRECTORY: LazyLock<PathBuf> =
    LazyLock::new(|| std::env::temp_dir().join(format!("executor-fuzz-journal-{}", std::process::id())));

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| executor_daemon::fuzzing::journals(bytes, &DIRECTORY));
