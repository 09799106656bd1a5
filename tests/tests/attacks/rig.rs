//! The daemon that is attacked: TLS, tokens and a Unix socket, two tenants, and something of worth in each place.

use std::{
    fmt,
    fs::{self, File},
    os::unix::{
        fs::{PermissionsExt, chown, symlink},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use bytes::Bytes;
use executor_proto::types::{CommandSpec, EnvironmentVariable, OwnerId, RunResult, Spill};
use executor_tests::{
    binaries,
    certificates::init,
    processes::{self, Found},
    wait_until,
};
use nix::{
    sys::{
        signal::{Signal, kill},
        stat,
    },
    unistd::{Pid, Uid, mkfifo},
};
use tokio_util::sync::CancellationToken;
use tool_client::executor::{
    Executor,
    connect::{Access, ClientFiles, ClientTls, Endpoint, Token},
    remote::RemoteExecutor,
};

/// Longest wait for the daemon to do what it was told.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// The session that everything is done for.
pub(crate) const OWNER: &str = "owner-of-what-is-attacked";

/// In the daemon's environment, its command line knows nothing of it.
pub(crate) const CANARY: &str = "canary-5f0d9b7c21";

/// As whom the commands of the two tenants run where the daemon is root.
const UIDS: [&str; 2] = ["\"164000-164063\"", "\"164064-164127\""];

/// A neighbour's uid.
const NEIGHBOUR: u32 = 164_900;

/// As what the daemon runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Root; commands run as others, and the server as another again.
    Root,
    /// This user, as its commands.
    User(u32),
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => f.write_str("root"),
            Self::User(uid) => write!(f, "an ordinary user (uid {uid})"),
        }
    }
}

/// A running daemon and where everything of it is. Dropped, it is ended.
#[derive(Debug)]
pub(crate) struct Rig {
    pub(crate) mode: Mode,
    child: Child,
    dir: tempfile::TempDir,
    port: u16,
    server: Found,
    clients: [RemoteExecutor; 2],
    pub(crate) spill_of_a: PathBuf,
    pub(crate) spill_of_b: PathBuf,
}

impl Mode {
    /// Who is on the same host and has nothing to do with the daemon. `None`: only root can be somebody else.
    pub(crate) fn neighbour(self) -> Option<u32> {
        Uid::effective().is_root().then_some(NEIGHBOUR)
    }

    /// Whether commands with this uid are not the daemon itself; as an ordinary user they share its uid.
    pub(crate) fn is_not_the_daemon(self, uid: &str) -> bool {
        self != Self::Root || uid != "0"
    }

    /// Who may read what is the daemon's, for controls; `None`: whoever runs the test.
    pub(crate) fn daemon(self) -> Option<u32> {
        match self {
            Self::Root => None,
            Self::User(uid) => Uid::effective().is_root().then_some(uid),
        }
    }
}

impl Rig {
    /// Starts one, and has a task of each tenant that has written a spill file.
    pub(crate) async fn start(mode: Mode) -> Self {
        let dir = place();
        let at = |name: &str| dir.path().join(name);
        for (name, bits) in [
            ("bin", 0o755),
            ("work", 0o1777),
            ("run", 0o755),
            ("state", 0o700),
            ("public", 0o755),
            ("work/of-b", 0o1777),
        ] {
            fs::create_dir(at(name)).expect("a directory");
            fs::set_permissions(at(name), fs::Permissions::from_mode(bits)).expect("a mode");
        }
        fs::remove_dir(at("state")).expect("empty");
        init(&at("tls"), &["--tenant", "a", "--tenant", "b"]);
        for (from, to) in [(binaries::executor_daemon(), "daemon"), (binaries::tool_client(), "client")] {
            copy(from, &at("bin").join(to));
        }
        fs::copy(at("tls/ca.crt"), at("public/ca.crt")).expect("copied");
        fs::set_permissions(at("public/ca.crt"), fs::Permissions::from_mode(0o644)).expect("a mode");
        fs::write(at("public/intruder.py"), include_str!("intruder.py")).expect("written");
        fs::write(at("public/relay.py"), include_str!("relay.py")).expect("written");
        mkfifo(&at("public/fifo"), stat::Mode::from_bits_truncate(0o644)).expect("a fifo");
        symlink(at("work"), at("work/of-b/out")).expect("a link");
        symlink(at("tls"), at("public/link")).expect("a link");
        if Uid::effective().is_root() {
            copy(Path::new("/usr/bin/id"), &at("bin/suid-id"));
            fs::set_permissions(at("bin/suid-id"), fs::Permissions::from_mode(0o4755)).expect("a mode");
        }
        configure(mode, dir.path());
        let (child, port) = serve(mode, dir.path()).await;
        let server = server_of(&child).expect("it is ready");
        let none = PathBuf::new();
        let clients = ["a", "b"].map(|name| client(dir.path(), port, name));
        let mut rig = Self { mode, child, dir, port, server, clients, spill_of_a: none.clone(), spill_of_b: none };
        rig.spill_of_a = rig.spilled("a").await;
        rig.spill_of_b = rig.spilled("b").await;
        rig
    }

    /// A run of a tenant that writes more than is kept in memory; the file with all of it.
    async fn spilled(&self, tenant: &str) -> PathBuf {
        let script = format!("echo {CANARY} of {tenant}; head -c 300000 /dev/zero | tr '\\0' x");
        let result = self.run_as(tenant, &script).await;
        let Some(Spill { path, .. }) = result.stdout.spill else { panic!("no spill: {result:?}") };
        let path = PathBuf::from(String::from_utf8_lossy(&path).into_owned());
        assert!(fs::read(&path).expect("whoever tests can read it").starts_with(CANARY.as_bytes()));
        path
    }

    /// A file or directory of it.
    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Its port on TCP.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Its keeper's pid.
    pub(crate) fn keeper(&self) -> i32 {
        i32::try_from(self.child.id()).expect("process ids are small")
    }

    /// Its server's.
    pub(crate) fn server(&self) -> i32 {
        self.server.pid
    }

    /// What it has said so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.at("log")).expect("a log")
    }

    /// The token of a tenant.
    pub(crate) fn token(&self, tenant: &str) -> String {
        fs::read_to_string(self.at(&format!("tls/{tenant}.token"))).expect("a token").trim().to_owned()
    }

    /// A client of a tenant, by token.
    pub(crate) fn tenant(&self, name: &str) -> &RemoteExecutor {
        &self.clients[usize::from(name == "b")]
    }

    /// What scripts are told, by name.
    fn variables(&self) -> Vec<(&'static str, String)> {
        let path = |name: &str| self.at(name).display().to_string();
        vec![
            ("BASE", path("")),
            ("CA", path("public/ca.crt")),
            ("CANARY", CANARY.to_owned()),
            ("CLIENT", path("bin/client")),
            ("DAEMON", path("bin/daemon")),
            ("INTRUDER", format!("/usr/bin/python3 -I {}", path("public/intruder.py"))),
            ("KEEPER", self.keeper().to_string()),
            ("PORT", self.port.to_string()),
            ("SERVER", self.server.pid.to_string()),
            ("SOCKET", path("state/sock")),
            ("SPILL_OF_A", self.spill_of_a.display().to_string()),
            ("SPILL_OF_B", self.spill_of_b.display().to_string()),
            ("STATE", path("state")),
            ("TLS", path("tls")),
            ("WORK", path("work")),
        ]
    }

    /// Runs a script as a command of a tenant.
    pub(crate) async fn run_as(&self, tenant: &str, script: &str) -> RunResult {
        self.run_for(tenant, OWNER, script).await
    }

    /// Runs a script as a command of a tenant's session.
    pub(crate) async fn run_for(&self, tenant: &str, owner: &str, script: &str) -> RunResult {
        let environment = self
            .variables()
            .into_iter()
            .map(|(name, value)| EnvironmentVariable { name: Bytes::from(name), value: Bytes::from(value) });
        let spec = CommandSpec {
            command: script.to_owned().into(),
            environment: environment.collect(),
            timeout_ms: Some(60_000.0),
            ..CommandSpec::default()
        };
        let owner = OwnerId(owner.to_owned());
        let run = self.tenant(tenant).run(Some(&owner), spec, &CancellationToken::new(), None).await;
        run.unwrap_or_else(|error| panic!("{script}: {error}\n{}", self.log()))
    }

    /// What a command of tenant `a` writes, both streams.
    pub(crate) async fn inside(&self, script: &str) -> String {
        let result = self.run_as("a", &format!("exec 2>&1\n{script}")).await;
        String::from_utf8_lossy(&result.stdout.tail).into_owned()
    }

    /// What a script writes that this user runs outside of the daemon; `None`: whoever runs the test.
    #[expect(clippy::disallowed_methods, reason = "neighbours and controls are started outside of the daemon")]
    pub(crate) fn outside(&self, uid: Option<u32>, script: &str) -> String {
        let mut command = Command::new("timeout");
        command
            .args(["--signal=KILL", "60", "bash", "-c", &format!("exec 2>&1\n{script}")])
            .env_clear()
            .envs(self.variables());
        command.env("PATH", PATH).env("HOME", "/").current_dir("/").stdin(Stdio::null());
        if let Some(uid) = uid {
            command.uid(uid).gid(uid);
        }
        String::from_utf8_lossy(&command.output().expect("it can be started").stdout).into_owned()
    }

    /// Whether keeper and server are those of the start.
    pub(crate) fn is_the_same(&self) -> bool {
        server_of(&self.child).is_some_and(|now| now.pid == self.server.pid && now.started == self.server.started)
    }

    /// That the daemon is the same as at its start, and answers.
    pub(crate) async fn assert_whole(&self, after: &str) {
        assert!(self.is_the_same(), "another server after {after}: {:?}\n{}", server_of(&self.child), self.log());
        for tenant in ["a", "b"] {
            let info = tokio::time::timeout(SOON, async { self.tenant(tenant).info().await }).await;
            assert!(matches!(info, Ok(Ok(_))), "after {after} it answers {info:?}\n{}", self.log());
        }
    }
}

fn client(dir: &Path, port: u16, tenant: &str) -> RemoteExecutor {
    let token = Token::read(&dir.join(format!("tls/{tenant}.token"))).expect("a token");
    let tls = ClientTls::read(&ClientFiles { ca: dir.join("tls/ca.crt"), identity: None }).expect("they can be read");
    let endpoint = Endpoint::parse(&format!("https://localhost:{port}")).expect("an endpoint");
    RemoteExecutor::new(&endpoint, Access { token: Some(token), tls: Some(tls) })
}

/// Where programs are.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A directory whose parents nobody but root can write in, where that can be had: only such a one is fenced where the daemon is
/// not root.
fn place() -> tempfile::TempDir {
    let mut builder = tempfile::Builder::new();
    let builder = builder.prefix("xa-");
    let dir = if Uid::effective().is_root() { builder.tempdir_in("/var/lib") } else { builder.tempdir() };
    let dir = dir.expect("a directory");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    dir
}

/// Made by a process of its own: a file that is open for writing in a process that starts others cannot be executed for a moment.
#[expect(clippy::disallowed_methods, reason = "what is there before the daemon starts is made outside of it")]
fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg(from).arg(to).status().expect("cp").success(), "copying {}", from.display());
}

/// Writes the configuration, and gives to the daemon's user what is to be its own.
fn configure(mode: Mode, dir: &Path) {
    let config = dir.join("tls/config.toml");
    let text = fs::read_to_string(&config).expect("it was made").replace("tcp:0.0.0.0:7700", "tcp:127.0.0.1:0");
    let text = text.replace("listen = [", &format!("listen = [\"unix:{}\", ", dir.join("state/sock").display()));
    let work = dir.join("work");
    // As root each session has a uid of its own, out of ranges that nobody else here uses: `kill -9 -1` ends nobody else.
    let text = match mode {
        Mode::Root => text.replace("\"70000-70063\"", UIDS[0]).replace("\"70064-70127\"", UIDS[1]),
        Mode::User(_) => text.lines().filter(|line| !line.starts_with("uid_range")).collect::<Vec<_>>().join("\n"),
    };
    let roots = format!("[tenants.b]\nworkdir_roots = [{:?}]\ndefault_workdir = {0:?}", dir.join("work/of-b"));
    let text = text.replace("[tenants.b]", &roots);
    let text = format!("default_workdir = {work:?}\nmax_timeout_ms = 60000\ngrace_ms = 300\n{text}");
    fs::write(&config, text).expect("written");
    if let Some(uid) = mode.daemon() {
        // What it has to keep to itself is its own, in directories that are not: only that can be hidden from its commands.
        let tls = dir.join("tls");
        fs::set_permissions(&tls, fs::Permissions::from_mode(0o755)).expect("a mode");
        for name in ["config.toml", "ca.crt", "server.crt"] {
            fs::set_permissions(tls.join(name), fs::Permissions::from_mode(0o644)).expect("a mode");
        }
        let state = dir.join("state");
        fs::create_dir(&state).expect("a directory");
        fs::set_permissions(&state, fs::Permissions::from_mode(0o700)).expect("a mode");
        for own in [state, tls.join("server.key"), tls.join("a.token"), tls.join("b.token")] {
            chown(&own, Some(uid), Some(uid)).expect("given");
        }
    }
}

/// Starts the daemon and waits until it is ready; its port.
#[expect(clippy::disallowed_methods, reason = "the program under test is started as people start it")]
async fn serve(mode: Mode, dir: &Path) -> (Child, u16) {
    let log = dir.join("log");
    let file = File::create(&log).expect("a log");
    // With a session keyring that holds something, as after a login.
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-I", "-c", WITH_A_KEYRING]).arg(dir.join("bin/daemon"));
    command.arg("serve").arg("--config").arg(dir.join("tls/config.toml")).arg("--state-dir").arg(dir.join("state"));
    if mode == Mode::Root {
        // For whom no table says otherwise; nothing here runs for them.
        command.args(["--run-as", "nobody"]);
    }
    if let Some(uid) = mode.daemon() {
        command.uid(uid).gid(uid);
    }
    command.env_clear().env("PATH", PATH).env("HOME", dir.join("work")).env("API_TOKEN", CANARY).current_dir("/");
    command.stdin(Stdio::null()).stdout(file.try_clone().expect("a log")).stderr(file).process_group(0);
    let mut child = command.spawn().expect("it can be started");
    let port = wait_until("it is ready", SOON, async || {
        let log = fs::read_to_string(&log).unwrap_or_default();
        assert!(child.try_wait().expect("asked").is_none(), "it has ended:\n{log}");
        let (_, after) = log.lines().find(|line| line.contains(" ready: "))?.split_once("tcp:127.0.0.1:")?;
        after.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
    });
    let port = port.await;
    (child, port)
}

/// Puts a key into a new session keyring and becomes the program that is named. Says so in the log, for the control.
const WITH_A_KEYRING: &str = r#"
import ctypes, os, platform, sys
call = ctypes.CDLL(None).syscall
call.restype = ctypes.c_long
add, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
call(keyctl, 1, b"of-the-login")
if call(add, b"user", b"key-of-the-login", b"secret", 6, ctypes.c_long(-3)) >= 0:
    print("the login has a key", flush=True)
os.execv(sys.argv[1], sys.argv[1:])
"#;

/// The server that a keeper has.
fn server_of(keeper: &Child) -> Option<Found> {
    let keeper = i32::try_from(keeper.id()).expect("process ids are small");
    processes::all().into_values().find(|one| one.parent == keeper && one.command_line.contains(" __server"))
}

impl Drop for Rig {
    #[expect(clippy::disallowed_methods, reason = "the child was started here and has not been waited for")]
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            kill(Pid::from_raw(self.keeper()), Signal::SIGTERM).expect("a signal");
            // Whatever it says: the test is over.
            let _ = self.child.wait();
        }
    }
}
