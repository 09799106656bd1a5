//! The command line, as people and scripts meet it: the real binary against a daemon that does what the test says.

#![allow(missing_docs, reason = "tests say what they show by their names")]

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use bytes::Bytes;
use executor_proto::{
    error::ExecutorError,
    types::TaskId,
    v1::{self, run_event::Event},
};

#[path = "../support/fake.rs"]
#[allow(dead_code, reason = "the tests of the remote executor use the rest")]
mod fake;

mod embedded;
mod help;
mod mcp;
mod run;
mod tasks;
mod usage;

use fake::{Daemon, Script};

/// The binary, in a home of its own.
struct Cli {
    home: tempfile::TempDir,
}

impl Cli {
    fn new() -> Self {
        Self { home: tempfile::tempdir().expect("a directory") }
    }

    /// With a config file.
    fn with_config(config: &str) -> Self {
        let this = Self::new();
        let dir = this.home.path().join(".config/tool-client");
        std::fs::create_dir_all(&dir).expect("made");
        std::fs::write(dir.join("config.toml"), config).expect("written");
        this
    }

    #[expect(clippy::disallowed_methods, reason = "the test starts the binary that it tests")]
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tool-client"));
        command
            .args(arguments)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.home.path())
            .current_dir(self.home.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, arguments: &[&str]) -> Ended {
        ended(self.command(arguments))
    }

    /// What it prints, of a test without a runtime.
    fn run_here(&self, arguments: &[&str]) -> String {
        of_output(self.command(arguments).output().expect("the binary starts")).stdout
    }

    /// Against a daemon.
    fn run_at(&self, daemon: &Daemon, arguments: &[&str]) -> Ended {
        let mut command = self.command(arguments);
        command.env("EXECUTOR_ENDPOINT", daemon.endpoint());
        ended(command)
    }
}

/// How a call of the binary ended.
#[derive(Debug, PartialEq, Eq)]
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn ended(mut command: Command) -> Ended {
    // The daemon of the test goes on meanwhile.
    of_output(tokio::task::block_in_place(|| command.output().expect("the binary starts")))
}

fn of_output(Output { status, stdout, stderr }: Output) -> Ended {
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Ended { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
}

fn event(event: Event) -> v1::RunEvent {
    v1::RunEvent { event: Some(event) }
}

fn accepted() -> v1::RunEvent {
    event(Event::Accepted(v1::RunAccepted {
        run_id: "run-1".into(),
        timeout_ms: 1000.0,
        workdir: Bytes::from_static(b"/"),
        sandbox_mode: v1::SandboxMode::DangerFullAccess.into(),
    }))
}

fn chunk(stream: v1::StreamName, offset: u64, data: &'static [u8]) -> v1::StreamChunk {
    v1::StreamChunk { stream: stream.into(), offset, data: Bytes::from_static(data) }
}

fn exit(exit: v1::exit::Exit) -> v1::RunFinished {
    v1::RunFinished {
        exit: Some(v1::Exit { exit: Some(exit) }),
        stdout: Some(v1::StreamResult::default()),
        stderr: Some(v1::StreamResult::default()),
        ..v1::RunFinished::default()
    }
}

fn one_run(events: Vec<v1::RunEvent>) -> Daemon {
    Daemon::start(Script { runs: [Ok(events)].into(), ..Script::default() })
}
