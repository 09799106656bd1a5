//! Structured logs on stderr: one line per decision, never output, never secrets.

mod lines;

use std::io;

use serde::{Deserialize, Serialize};
use tracing_subscriber::{EnvFilter, fmt};

pub(crate) use self::lines::Lines;

/// How much is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogLevel {
    /// Faults of the daemon.
    Error,
    /// And refusals.
    Warn,
    /// And a line for each call.
    Info,
    /// And what the daemon does inside.
    Debug,
    /// And the text of commands, which may hold secrets.
    Trace,
}

impl LogLevel {
    /// All of them with their words, from least to most.
    pub(crate) const WORDS: [(&'static str, Self); 5] = [
        ("error", Self::Error),
        ("warn", Self::Warn),
        ("info", Self::Info),
        ("debug", Self::Debug),
        ("trace", Self::Trace),
    ];

    fn as_str(self) -> &'static str {
        Self::WORDS.into_iter().find(|(_, level)| *level == self).map_or("info", |(word, _)| word)
    }
}

/// What a line looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

impl LogFormat {
    /// Both with their words.
    pub(crate) const WORDS: [(&'static str, Self); 2] = [("text", Self::Text), ("json", Self::Json)];
}

/// How the server logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogSettings {
    /// How much.
    pub level: LogLevel,
    /// In which form.
    pub format: LogFormat,
}

impl Default for LogSettings {
    fn default() -> Self {
        Self { level: LogLevel::Info, format: LogFormat::Text }
    }
}

/// Starts logging. The libraries below are heard from `warn` on only, unless everything is asked for.
///
/// # Errors
/// When there can be no thread that writes the lines.
pub(crate) fn init(settings: LogSettings) -> io::Result<Lines> {
    let libraries = match settings.level {
        LogLevel::Error => "error",
        LogLevel::Warn | LogLevel::Info | LogLevel::Debug | LogLevel::Trace => "warn",
    };
    let filter = EnvFilter::new(format!("{libraries},executor_daemon={}", settings.level.as_str()));
    let out = Lines::start(io::stderr())?;
    let lines = fmt().with_env_filter(filter).with_writer(out.clone()).with_target(false);
    // A second start in one process, which only tests do, keeps the first's.
    let _ = match settings.format {
        LogFormat::Text => lines.with_ansi(false).try_init(),
        LogFormat::Json => lines.json().flatten_event(true).try_init(),
    };
    Ok(out)
}
