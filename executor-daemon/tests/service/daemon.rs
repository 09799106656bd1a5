//! A daemon under test: the real binary in a directory of its own, ended with the test.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use executor_proto::v1::{self, executor_client::ExecutorClient};
use hyper_util::rt::TokioIo;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::net::UnixStream;
use tonic::{
    Request, Status,
    transport::{Channel, Endpoint, Uri},
};
use tower::service_fn;

/// The token that the daemon knows.
pub(crate) const TOKEN: &str = "0123456789abcdef";

/// A test that waits longer than this for a condition has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often a condition is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// A running daemon.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
    tcp: String,
}

#[expect(clippy::disallowed_methods, reason = "the program under test is started as people start it")]
fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_executor-daemon"))
}

/// This test program, running one test as another user.
#[expect(clippy::disallowed_methods, reason = "a caller of another user has to be a process of its own")]
pub(crate) fn this_test_as(uid: u32, test: &str, socket: &Path) -> Output {
    // Where this program lies the other user may not be able to go.
    let dir = tempfile::tempdir().expect("a temporary directory");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    let copy = dir.path().join("test");
    fs::copy(std::env::current_exe().expect("this program"), &copy).expect("a copy");
    Command::new(copy)
        .args(["--exact", test, "--include-ignored", "--nocapture"])
        .env("SOCKET_UNDER_TEST", socket)
        .current_dir("/")
        .uid(uid)
        .gid(uid)
        .output()
        .expect("this program can be started")
}

impl Daemon {
    /// Starts a daemon with some options more, in a directory of its own, and waits until it is ready.
    pub(crate) fn start(options: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let token = dir.path().join("token");
        fs::write(&token, TOKEN).expect("a token file");
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).expect("a mode");
        let log = File::create(dir.path().join("log")).expect("a log file");
        let me = nix::unistd::geteuid().to_string();
        let mut child = program()
            .args(["serve", "--listen", "unix:sock", "--listen", "tcp:127.0.0.1:0", "--token-file", "token"])
            .args(["--state-dir", "state", "--run-as", &me])
            .args(options)
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("the daemon can be started");
        let mut ready = String::new();
        let stdout = child.stdout.take().expect("it was piped");
        BufReader::new(stdout).read_line(&mut ready).expect("the ready line can be read");
        let tcp = ready.split_whitespace().find_map(|word| word.strip_prefix("tcp:"));
        let Some(tcp) = tcp.map(|tcp| tcp.trim_end_matches([',', ';']).to_owned()) else {
            let log = fs::read_to_string(dir.path().join("log")).unwrap_or_default();
            panic!("not ready: {ready:?}\n{log}");
        };
        Self { child, dir, tcp }
    }

    /// The program, run to its end.
    pub(crate) fn program(arguments: &[&str]) -> Output {
        program().args(arguments).stdin(Stdio::null()).output().expect("the program can be started")
    }

    /// Where it was started.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Its Unix socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("sock")
    }

    /// Its pid.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Both addresses, as clients write them.
    pub(crate) fn endpoints(&self) -> [String; 2] {
        [format!("unix:{}", self.socket().display()), format!("http://{}", self.tcp)]
    }

    /// What it has logged so far.
    pub(crate) fn log(&self) -> String {
        let mut log = String::new();
        File::open(self.dir.path().join("log")).expect("a log").read_to_string(&mut log).expect("UTF-8");
        log
    }

    /// A connection to the Unix socket.
    pub(crate) async fn unix(&self) -> Channel {
        connect_unix(self.socket()).await
    }

    /// A connection to the TCP address.
    pub(crate) async fn tcp(&self) -> Channel {
        let [_, endpoint] = self.endpoints();
        Endpoint::from_shared(endpoint).expect("an address").connect().await.expect("a connection")
    }

    /// Lets every user connect to the socket.
    pub(crate) fn open_to_everybody(&self) {
        fs::set_permissions(self.dir.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
        fs::set_permissions(self.socket(), fs::Permissions::from_mode(0o666)).expect("a mode");
    }

    /// Sends SIGTERM.
    #[expect(clippy::disallowed_methods, reason = "the child was started here and has not been waited for")]
    pub(crate) fn terminate(&self) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).expect("a pid")), Signal::SIGTERM).expect("a signal");
    }

    /// Waits for its end.
    pub(crate) async fn wait(&mut self) -> ExitStatus {
        loop {
            if let Some(status) = self.child.try_wait().expect("it can be waited for") {
                return status;
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.terminate();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            let _ = writeln!(std::io::stderr(), "log of the daemon:\n{}", self.log());
        }
    }
}

/// A connection to a Unix socket.
pub(crate) async fn connect_unix(socket: PathBuf) -> Channel {
    let connector = service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector(connector).await.expect("a connection")
}

pub(crate) fn client(channel: Channel) -> ExecutorClient<Channel> {
    ExecutorClient::new(channel)
}

/// A request with a token.
pub(crate) fn bearer<T>(message: T, token: &str) -> Request<T> {
    let mut request = Request::new(message);
    let value = format!("Bearer {token}").parse().expect("a header value");
    request.metadata_mut().insert("authorization", value);
    request
}

/// An interceptor that sends the token.
pub(crate) fn with_token(mut request: Request<()>) -> Result<Request<()>, Status> {
    let value = format!("Bearer {TOKEN}").parse().expect("a header value");
    request.metadata_mut().insert("authorization", value);
    Ok(request)
}

/// A caller without a session.
#[expect(clippy::unnecessary_wraps, reason = "as the field of a request is")]
pub(crate) fn nobody() -> Option<v1::Caller> {
    Some(v1::Caller { owner: None })
}

/// A command.
#[expect(clippy::unnecessary_wraps, reason = "as the field of a request is")]
pub(crate) fn run(command: &str) -> Option<v1::CommandSpec> {
    Some(v1::CommandSpec { command: command.to_owned().into(), ..v1::CommandSpec::default() })
}

/// A key that nobody has used.
pub(crate) fn key() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("key-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Waits until there is something.
pub(crate) async fn wait_until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = std::time::Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "waited in vain until {what}");
        tokio::time::sleep(LOOK).await;
    }
}
