//! The daemon under test: the real binary, on a free socket, with exactly the environment that the test gives it.

use std::{
    fs::{self, File},
    os::unix::{
        fs::PermissionsExt,
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, Uid, chown},
};
use tokio_util::task::AbortOnDropHandle;
use tool_client::executor::connect::{Access, ClientFiles, ClientTls, Token};

use crate::{
    backend::{Backend, Setup},
    processes::{self, Found},
    random,
};

/// With it `unshare` makes its program root, if only in a namespace.
const MAP_ROOT_USER: &str = "--map-root-user";

/// Longest wait for the line that says that it is ready.
const START: Duration = Duration::from_secs(20);

/// Longest wait for its end after SIGTERM, above the grace that it gives commands.
const STOP: Duration = Duration::from_secs(15);

/// Longest wait for the end of its own processes after that of the outermost one.
const LAST_END: Duration = Duration::from_secs(2);

/// Longest wait for a keeper that is to die by itself.
const DEATH: Duration = Duration::from_secs(60);

/// Between two looks at it.
const LOOK: Duration = Duration::from_millis(5);

/// What dies of a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dies {
    /// Keeper and server at once, as with their host: neither sees the other's end or has time to write anything down.
    Daemon,
    /// The keeper alone.
    Keeper,
    /// The keeper alone, where a crash point has it die: it is waited for.
    KeeperByItself,
}

/// A running daemon. Dropped, it is killed; [`Daemon::stop`] is how it ends properly.
#[derive(Debug)]
pub struct Daemon {
    /// What was started: the daemon, or the launcher that it was asked to be started by.
    child: Child,
    /// The daemon's outermost process.
    pid: i32,
    program: PathBuf,
    endpoint: String,
    token_file: PathBuf,
    /// With TLS: where its certificates are and its client's.
    tls: Option<PathBuf>,
    log: PathBuf,
    grace: Duration,
}

impl Daemon {
    /// Starts one whose files lie in `root` and whose directory and HOME are `tmp`, and waits until it is ready. `listen` is
    /// the Unix socket or the TCP port.
    pub(crate) async fn start(backend: Backend, setup: &Setup, root: &Path, tmp: &Path) -> anyhow::Result<Self> {
        let (state, config, token_file, log) =
            (root.join("state"), root.join("config.toml"), root.join("token"), root.join("log"));
        fs::write(&config, setup.config_file())?;
        if !token_file.exists() {
            fs::write(&token_file, format!("{}\n", token()?))?;
        }
        fs::set_permissions(&token_file, fs::Permissions::from_mode(0o600))?;
        for file in [&config, &token_file] {
            give(file, setup.uid)?;
        }
        let socket = root.join("socket");
        let listen = setup.listen.clone().unwrap_or_else(|| match backend {
            Backend::Tcp | Backend::Tls => "tcp:127.0.0.1:0".to_owned(),
            Backend::Unix | Backend::InProcess => format!("unix:{}", socket.display()),
        });
        let launcher: Vec<String> =
            setup.launcher.iter().map(|word| word.replace("${ROOT}", &root.to_string_lossy())).collect();
        let program = (setup.program)();
        let program = if setup.own_program { copy_of(program, root)? } else { program.to_owned() };
        let mut command = command(&launcher, &program);
        command.arg("serve").args(["--listen", &listen]);
        command.arg("--state-dir").arg(&state).arg("--config").arg(&config);
        let tls = (backend == Backend::Tls).then(|| certificates(&program, root, setup.uid)).transpose()?;
        match &tls {
            Some(dir) => {
                for (flag, file) in [
                    ("--tls-cert-file", "server.crt"),
                    ("--tls-key-file", "server.key"),
                    ("--client-ca-file", "ca.crt"),
                ] {
                    command.arg(flag).arg(dir.join(file));
                }
            }
            None => {
                command.arg("--token-file").arg(&token_file);
            }
        }
        if let Some(uid) = setup.uid {
            command.uid(uid).gid(uid);
        } else if Uid::effective().is_root() || setup.launcher.iter().any(|word| word == MAP_ROOT_USER) {
            command.args(["--run-as", setup.run_as]);
        }
        if let Some(group) = setup.group {
            command.process_group(group);
        }
        let output = File::create(&log)?;
        command.env_clear().envs(setup.executor_environment(tmp)).current_dir(tmp);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = command.spawn().context("starting the daemon")?;
        let pid = i32::try_from(child.id()).expect("process ids are small");
        let grace = Duration::from_millis(setup.grace_ms);
        let mut daemon = Self { child, pid, program, endpoint: String::new(), token_file, tls, log, grace };
        daemon.endpoint = daemon.ready(backend, &socket).await?;
        if !setup.launcher.is_empty() {
            daemon.pid = daemon.processes().first().context("the launcher started no daemon")?.pid;
        }
        Ok(daemon)
    }

    /// As clients name it.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// The file with the token that it knows.
    #[must_use]
    pub fn token_file(&self) -> &Path {
        &self.token_file
    }

    /// How it lets its client in: with the certificate, or the token.
    ///
    /// # Errors
    /// When the files cannot be read.
    pub fn access(&self) -> anyhow::Result<Access> {
        let Some(dir) = &self.tls else { return Ok(Some(Token::read(&self.token_file)?).into()) };
        let identity = Some((dir.join("client.crt"), dir.join("client.key")));
        let tls = ClientTls::read(&ClientFiles { ca: dir.join("ca.crt"), identity })?;
        Ok(Access { token: None, tls: Some(tls) })
    }

    /// The path that it was started from.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The pid of its outermost process: the keeper.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether a process is the launcher, or the daemon itself.
    pub(crate) fn was_started_through(&self, pid: i32) -> bool {
        pid == self.pid || u32::try_from(pid) == Ok(self.child.id())
    }

    /// Its own processes: those below the outermost one that run the daemon's program.
    #[must_use]
    pub fn processes(&self) -> Vec<Found> {
        let own = |one: &Found| match &one.program {
            Some(program) => *program == self.program,
            // It hides from its own user, who has only its name to go by.
            None => one.command_line.split(' ').next().is_some_and(|word| word.ends_with("executor-daemon")),
        };
        processes::tree(self.pid).into_iter().filter(own).collect()
    }

    /// The process that serves: of its own processes the one with the most threads.
    ///
    /// # Panics
    /// When the daemon is not running.
    #[must_use]
    pub fn server(&self) -> Found {
        let threads = |one: &Found| status(one.pid, "Threads:");
        self.processes().into_iter().max_by_key(threads).expect("a running daemon has processes")
    }

    /// Kills the process that serves, as a crash would, and returns when it is dead; the keeper starts another one.
    ///
    /// # Errors
    /// When it was dead already, or does not die.
    #[expect(clippy::disallowed_methods, reason = "the server under test is killed as a crash would kill it")]
    pub async fn kill_server(&self) -> anyhow::Result<Found> {
        let server = self.server();
        kill(Pid::from_raw(server.pid), Signal::SIGKILL).context("killing the server")?;
        let begun = Instant::now();
        while server.is_alive() {
            anyhow::ensure!(begun.elapsed() < STOP, "it does not die: {server:?}");
            tokio::time::sleep(LOOK).await;
        }
        Ok(server)
    }

    /// Kills its server each time that so long has passed, until what is returned is dropped.
    pub fn kill_server_every(&self, time: Duration) -> AbortOnDropHandle<()> {
        let keeper = self.pid;
        AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                tokio::time::sleep(time).await;
                kill_server_of(keeper);
            }
        }))
    }

    /// Resident memory of its own processes, in KiB.
    #[must_use]
    pub fn resident_kib(&self) -> u64 {
        let resident = |one: &Found| status(one.pid, "VmRSS:");
        self.processes().iter().filter_map(resident).sum()
    }

    /// What it has printed so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Sends SIGTERM and waits for its end, which must be exit code 0 with nothing of it left.
    ///
    /// # Errors
    /// When it was something else.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        let all = processes::tree(self.pid());
        self.signal(Signal::SIGTERM)?;
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if begun.elapsed() > STOP + self.grace {
                bail!("it does not stop on SIGTERM: {:?}\n{}", processes::tree(self.pid()), self.log());
            }
            tokio::time::sleep(LOOK).await;
        };
        anyhow::ensure!(status.success(), "it stopped with {status}\n{}", self.log());
        // Idle helpers learn of its end by a closed socket, a moment later.
        let begun = Instant::now();
        loop {
            let left: Vec<_> = all.iter().filter(|one| one.is_alive()).collect();
            if left.is_empty() {
                return Ok(());
            }
            anyhow::ensure!(begun.elapsed() < LAST_END, "these outlived it: {left:?}\n{}", self.log());
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Kills it, and waits until what it had started is gone, and its server.
    ///
    /// # Errors
    /// When they do not go.
    #[expect(clippy::disallowed_methods, reason = "the daemon under test dies as with its host")]
    pub(crate) async fn kill(mut self, dies: Dies) -> anyhow::Result<()> {
        if dies == Dies::KeeperByItself {
            return self.died().await;
        }
        let all = processes::tree(self.pid());
        let both = [self.pid(), self.server().pid].map(Pid::from_raw);
        match dies {
            Dies::Keeper | Dies::KeeperByItself => kill(both[0], Signal::SIGKILL)?,
            Dies::Daemon => {
                for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
                    both.iter().try_for_each(|pid| kill(*pid, signal))?;
                }
            }
        }
        self.child.wait()?;
        let begun = Instant::now();
        while all.iter().any(Found::is_alive) {
            anyhow::ensure!(begun.elapsed() < STOP, "these outlived the daemon: {all:?}");
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// Waits until its keeper has died of SIGKILL. What it leaves (a server that writes down what it knows, helpers that end
    /// their commands) is still there: the next daemon has to cope with that.
    async fn died(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                let killed = status.signal() == Some(Signal::SIGKILL as i32);
                anyhow::ensure!(killed, "it ended with {status}:\n{}", self.log());
                return Ok(());
            }
            anyhow::ensure!(begun.elapsed() < DEATH, "it is still there after {DEATH:?}:\n{}", self.log());
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Sends a signal to its outermost process.
    ///
    /// # Errors
    /// When it has ended.
    #[expect(
        clippy::disallowed_methods,
        reason = "its id cannot have been reused: it is our child and was not waited for"
    )]
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        kill(Pid::from_raw(self.pid()), signal).context("signalling the daemon")
    }

    /// Whether and how it has ended.
    ///
    /// # Errors
    /// When that cannot be asked.
    pub fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    async fn ready(&mut self, backend: Backend, socket: &Path) -> anyhow::Result<String> {
        let begun = Instant::now();
        loop {
            let log = self.log();
            let line = log.lines().find(|line| line.contains("ready"));
            match (backend, line) {
                (_, None) => {}
                (Backend::Unix | Backend::InProcess, Some(_)) => return Ok(format!("unix:{}", socket.display())),
                (Backend::Tcp | Backend::Tls, Some(line)) => {
                    let port = line.split("127.0.0.1:").nth(1).context("its ready line names no port")?;
                    let port: String = port.chars().take_while(char::is_ascii_digit).collect();
                    let scheme = if backend == Backend::Tls { "https" } else { "http" };
                    return Ok(format!("{scheme}://127.0.0.1:{port}"));
                }
            }
            if let Some(status) = self.ended()? {
                bail!("the daemon ended at its start with {status}:\n{log}");
            }
            anyhow::ensure!(begun.elapsed() < START, "the daemon was not ready after {START:?}:\n{log}");
            tokio::time::sleep(LOOK).await;
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        // A test has failed. What the daemon would have ended, it still ends when asked to.
        let asked = self.signal(Signal::SIGTERM);
        let begun = Instant::now();
        while asked.is_ok() && begun.elapsed() < STOP && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(LOOK);
        }
        if self.child.kill().is_ok() && self.child.wait().is_err() {
            // Nothing more can be done for it here.
        }
    }
}

/// Kills the server that a keeper has, if it has one just now.
#[expect(clippy::disallowed_methods, reason = "the server under test is killed as a crash would kill it")]
fn kill_server_of(keeper: i32) {
    let server =
        processes::all().into_values().find(|one| one.parent == keeper && one.command_line.ends_with(" __server"));
    if let Some(server) = server {
        // An error: it has ended in this moment.
        let _ = kill(Pid::from_raw(server.pid), Signal::SIGKILL);
    }
}

/// A number in a process's status; `None`: it has ended, or does not have it.
fn status(pid: i32, name: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(name))?.trim().trim_end_matches(" kB").parse().ok()
}

/// Gives a file or directory to the user that the executor runs as.
pub(crate) fn give(path: &Path, uid: Option<u32>) -> anyhow::Result<()> {
    uid.map_or(Ok(()), |uid| chown(path, Some(uid.into()), Some(uid.into())))
        .with_context(|| format!("giving {} to {uid:?}", path.display()))
}

#[expect(clippy::disallowed_methods, reason = "tests start the daemon that they test")]
fn command(launcher: &[String], program: &Path) -> Command {
    let Some((first, rest)) = launcher.split_first() else { return Command::new(program) };
    let mut command = Command::new(first);
    command.args(rest).arg(program);
    command
}

/// Made by a process of its own: a file that is open for writing in a process that starts others cannot be executed for a moment.
#[expect(clippy::disallowed_methods, reason = "what is there before the executor starts is made outside of it")]
fn copy_of(program: &Path, root: &Path) -> anyhow::Result<PathBuf> {
    let copy = root.join("executor-daemon");
    let status = Command::new("cp").arg(program).arg(&copy).status()?;
    anyhow::ensure!(status.success(), "copying the daemon's program: {status}");
    Ok(copy)
}

/// Certificates as people make them, for a daemon of this user.
#[expect(clippy::disallowed_methods, reason = "what is there before the executor starts is made outside of it")]
fn certificates(program: &Path, root: &Path, uid: Option<u32>) -> anyhow::Result<PathBuf> {
    let dir = root.join("tls");
    let made = Command::new(program).arg("init").arg("--dir").arg(&dir).output().context("making certificates")?;
    anyhow::ensure!(made.status.success(), "making certificates: {made:?}");
    give(&dir, uid)?;
    for file in fs::read_dir(&dir)? {
        give(&file?.path(), uid)?;
    }
    Ok(dir)
}

/// A token that no other daemon under test has.
fn token() -> anyhow::Result<String> {
    Ok(random::<24>()?.iter().map(|byte| format!("{byte:02x}")).collect())
}
