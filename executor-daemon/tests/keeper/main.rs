//! The keeper with real processes: the binary of this crate as an embedded keeper, driven through the link.

mod bombs;
mod confinement;
mod endings;
mod helpers;
mod spills;
mod starts;

use std::{
    fs,
    io::Read,
    os::fd::OwnedFd,
    path::PathBuf,
    time::{Duration, Instant},
};

use executor_daemon::{
    ids::ProcessHandle,
    keeper::{
        embedded::{self, EmbeddedOptions},
        link::{KeeperLink, ProcessEvent, Spawned},
        protocol::{Confinement, SpawnSpec},
    },
};

/// For what has to happen at all; nothing waits this long when all is well.
const LIMIT: Duration = Duration::from_secs(20);

/// Longer than any test may take, so that what ends has ended by itself.
const GRACE: Duration = Duration::from_secs(600);

/// No survivors.
const NONE: [u32; 0] = [];

struct Keeper {
    link: KeeperLink,
    directory: tempfile::TempDir,
}

impl Keeper {
    async fn start() -> Self {
        let directory = tempfile::tempdir().expect("temporary directory");
        let options = EmbeddedOptions {
            program: Some(PathBuf::from(env!("CARGO_BIN_EXE_executor-daemon"))),
            spill_dir: directory.path().join("spill"),
        };
        Self { link: embedded::start(options).await.expect("a keeper"), directory }
    }

    async fn spawn(&self, command: &str) -> Command {
        let spawned = self.link.spawn(self.link.new_handle(), spec(command), None, None).await.expect("starts");
        Command { spawned, keeper: self.link.clone() }
    }

    /// Runs a command to the end of all of it; its output and raw status.
    async fn run(&self, command: &str) -> (String, Option<i32>) {
        let mut command = self.spawn(command).await;
        let status = command.status().await;
        command.empty().await;
        (command.stdout(), status)
    }
}

fn spec(command: &str) -> SpawnSpec {
    let path = std::env::var("PATH").unwrap_or_else(|_| "/usr/bin:/bin".to_owned());
    SpawnSpec {
        identity: 0,
        group: 0,
        uid: nix::unistd::geteuid().as_raw(),
        programs: path.split(':').map(|directory| format!("{directory}/bash").into_bytes()).collect(),
        arguments: ["bash", "-c", command].map(|argument| argument.as_bytes().to_vec()).to_vec(),
        environment: vec![format!("PATH={path}").into_bytes()],
        workdir: b"/".to_vec(),
        workdir_roots: Vec::new(),
        stdin: false,
        script: false,
        confinement: Confinement::default(),
        fence: None,
    }
}

struct Command {
    spawned: Spawned,
    keeper: KeeperLink,
}

impl Command {
    fn handle(&self) -> ProcessHandle {
        self.spawned.handle
    }

    async fn event(&mut self) -> ProcessEvent {
        let event = tokio::time::timeout(LIMIT, self.spawned.events.recv()).await.expect("an event in time");
        event.expect("the keeper lives")
    }

    /// Waits for the shell.
    async fn status(&mut self) -> Option<i32> {
        match self.event().await {
            ProcessEvent::Exited { status, .. } => status,
            ProcessEvent::Empty => panic!("empty before the shell exited"),
        }
    }

    /// Waits until nothing is left, after [`Command::status`].
    async fn empty(&mut self) {
        match tokio::time::timeout(LIMIT, self.spawned.events.recv()).await.expect("an event in time") {
            Some(ProcessEvent::Empty) | None => {}
            Some(other) => panic!("unexpected {other:?}"),
        }
    }

    /// What was written to stdout and is still in the pipe.
    fn stdout(&self) -> String {
        read_pipe(&self.spawned.stdout)
    }

    /// Waits until stdout holds whole lines, and takes them.
    async fn line(&self) -> String {
        let until = Instant::now() + LIMIT;
        let mut text = String::new();
        while !text.ends_with('\n') {
            assert!(Instant::now() < until, "no line in time, only {text:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
            text.push_str(&read_pipe(&self.spawned.stdout));
        }
        text.trim_end().to_owned()
    }

    async fn end(&self, grace: Duration) -> Vec<u32> {
        tokio::time::timeout(LIMIT, self.keeper.end(self.handle(), grace)).await.expect("an answer in time")
    }
}

fn read_pipe(pipe: &OwnedFd) -> String {
    let mut file = fs::File::from(pipe.try_clone().expect("a copy"));
    let (mut all, mut part) = (Vec::new(), [0; 65536]);
    loop {
        match file.read(&mut part) {
            Ok(0) => break,
            Ok(bytes) => all.extend_from_slice(&part[..bytes]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
            Err(error) => panic!("pipe: {error}"),
        }
    }
    String::from_utf8_lossy(&all).into_owned()
}

/// Alive, that is, neither gone nor a zombie.
fn alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X'])))
}

/// Waits until a condition holds.
async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let until = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < until, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn numbers(text: &str) -> Vec<u32> {
    text.split_whitespace().map(|word| word.parse().expect("a number")).collect()
}

fn exited(code: i32) -> Option<i32> {
    Some(code << 8)
}
