//! A daemon with certificates of its own, configured as the test says.

use std::{
    fs::{self, File},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use executor_proto::types::OwnerId;
use executor_tests::{
    binaries,
    certificates::{init, private},
    wait_for, wait_until,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, Uid},
};
use tool_client::executor::{
    connect::{Access, ClientFiles, ClientTls, Endpoint, Token},
    remote::RemoteExecutor,
};

/// Longest wait for the daemon to do what it was told.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A running daemon. Dropped, it is ended.
#[derive(Debug)]
pub(crate) struct Rig {
    child: Child,
    dir: tempfile::TempDir,
    port: u16,
}

/// The owner that tests call for.
pub(crate) fn owner() -> OwnerId {
    OwnerId("s".to_owned())
}

/// The daemon's program, with at most so many descriptors, if that is said.
#[expect(clippy::disallowed_methods, reason = "the program under test is started as people start it")]
fn program(descriptors: Option<u64>) -> Command {
    let Some(descriptors) = descriptors else { return Command::new(binaries::executor_daemon()) };
    let mut command = Command::new("bash");
    command.args(["-c", &format!("ulimit -n {descriptors} && exec \"$0\" \"$@\"")]).arg(binaries::executor_daemon());
    command
}

impl Rig {
    /// Starts one with what `init` makes of these options, in `tls` of its directory, and changes the configuration by `edit`.
    /// It listens on a free port and on a Unix socket, and is given at most `descriptors`, if that is said.
    pub(crate) async fn start(
        options: &[&str],
        descriptors: Option<u64>,
        edit: impl FnOnce(&Path, String) -> String,
    ) -> Self {
        let dir = tempfile::Builder::new().prefix("xt-").tempdir().expect("a directory");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
        let tls = dir.path().join("tls");
        init(&tls, options);
        let config = tls.join("config.toml");
        let text = fs::read_to_string(&config).expect("it was made").replace("tcp:0.0.0.0:7700", "tcp:127.0.0.1:0");
        let text = text.replace("listen = [", &format!("listen = [\"unix:{}\", ", dir.path().join("sock").display()));
        private(&config, &edit(&tls, text));
        let log = File::create(dir.path().join("log")).expect("a log");
        let mut command = program(descriptors);
        command.arg("serve").arg("--config").arg(&config).arg("--state-dir").arg(dir.path().join("state"));
        if Uid::effective().is_root() {
            command.args(["--run-as", "nobody"]);
        }
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a log")).stderr(log).process_group(0);
        let mut child = command.spawn().expect("it can be started");
        let log = dir.path().join("log");
        let read = || fs::read_to_string(&log).unwrap_or_default();
        let port = wait_until("it is ready", SOON, async || {
            assert!(child.try_wait().expect("asked").is_none(), "it has ended:\n{}", read());
            let log = read();
            let (_, after) = log.lines().find(|line| line.contains(" ready: "))?.split_once("tcp:127.0.0.1:")?;
            after.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
        })
        .await;
        Self { child, dir, port }
    }

    /// A file in the directory with the certificates.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join("tls").join(name)
    }

    /// The directory with everything.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Its address on TCP, by a name.
    pub(crate) fn at(&self, scheme: &str, host: &str) -> Endpoint {
        Endpoint::parse(&format!("{scheme}://{host}:{}", self.port)).expect("an endpoint")
    }

    /// Its port.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Its Unix socket.
    pub(crate) fn unix(&self) -> RemoteExecutor {
        let endpoint = Endpoint::parse(&format!("unix:{}/sock", self.dir.path().display())).expect("an endpoint");
        RemoteExecutor::new(&endpoint, None)
    }

    /// What a client with this certificate has, or one without.
    pub(crate) fn access(&self, client: Option<&str>) -> Access {
        self.access_by(&self.file("ca.crt"), client.map(|name| self.file(name)))
    }

    /// The same with an authority and a certificate from anywhere; `client`: the path without its ending.
    pub(crate) fn access_by(&self, ca: &Path, client: Option<PathBuf>) -> Access {
        let identity = client.map(|path| (path.with_extension("crt"), path.with_extension("key")));
        let tls = ClientTls::read(&ClientFiles { ca: ca.to_owned(), identity }).expect("they can be read");
        Access { token: None, tls: Some(tls) }
    }

    /// A client with this certificate.
    pub(crate) fn by_certificate(&self, client: &str) -> RemoteExecutor {
        RemoteExecutor::new(&self.at("https", "localhost"), self.access(Some(client)))
    }

    /// A client with a token and no certificate.
    pub(crate) fn by_token(&self, token: &str) -> RemoteExecutor {
        let token = Some(Token::new(token.trim()).expect("a token"));
        RemoteExecutor::new(&self.at("https", "localhost"), Access { token, ..self.access(None) })
    }

    /// The token that `init` made.
    pub(crate) fn token(&self, client: &str) -> String {
        fs::read_to_string(self.file(&format!("{client}.token"))).expect("a token")
    }

    /// What it has said so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).expect("a log")
    }

    /// How often it has said that.
    pub(crate) fn said(&self, what: &str) -> usize {
        self.log().lines().filter(|line| line.contains(what)).count()
    }

    /// Sends SIGHUP, and waits until another server is ready.
    pub(crate) async fn hang_up(&self) {
        let before = self.said("the new server is ready");
        self.signal(Signal::SIGHUP);
        wait_for("another server is ready", SOON, || self.said("the new server is ready") > before).await;
    }

    #[expect(clippy::disallowed_methods, reason = "the child was started here and has not been waited for")]
    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).expect("a pid")), signal).expect("a signal");
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(Signal::SIGTERM);
            // Whatever it says: the test is over.
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            executor_tests::tell(format_args!("log of the daemon:\n{}", self.log()));
        }
    }
}
