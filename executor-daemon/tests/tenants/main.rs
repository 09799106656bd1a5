//! Several tenants of one daemon, with real processes: as whom their commands run, what these can do to each other's, and what a
//! tenant is told of another's. What needs root says so where it cannot run.

mod fence;
mod strangers;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use executor_proto::v1::{self, executor_client::ExecutorClient, run_event::Event};
use futures_util::StreamExt as _;
use nix::sys::signal::Signal;
use tonic::{
    Request, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

/// For what has to happen at all; nothing waits this long when all is well.
const LIMIT: Duration = Duration::from_secs(20);

/// A running daemon with tenants that are known by their tokens. Dropped, it is ended.
struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
    port: u16,
    ready: String,
}

/// The token of a tenant.
fn token(tenant: &str) -> String {
    format!("a-token-of-tenant-{tenant}")
}

impl Daemon {
    /// Starts one with these tables, `[tenants.NAME]` without their tokens; `${DIR}` stands for its directory.
    async fn start(tables: &[(&str, &str)]) -> Self {
        Self::start_through(&[], tables).await
    }

    /// The same through a program that executes what follows it.
    async fn start_through(launcher: &[&str], tables: &[(&str, &str)]) -> Self {
        let dir = tempfile::Builder::new().prefix("xt-").tempdir().expect("a directory");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
        let mut config = "listen = 'tcp:127.0.0.1:0'\nmax_output_bytes = 1000\ngrace_ms = 300\n".to_owned();
        config += &format!("state_dir = '{}'\n", dir.path().join("state").display());
        if nix::unistd::geteuid().is_root() {
            config += "run_as = 'nobody'\n";
        }
        for (name, rules) in tables {
            let file = dir.path().join(format!("{name}.token"));
            fs::write(&file, token(name)).expect("written");
            fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("a mode");
            let rules = rules.replace("${DIR}", &dir.path().display().to_string());
            config += &format!("[tenants.{name}]\ntoken_file = '{}'\n{rules}\n", file.display());
        }
        fs::write(dir.path().join("config.toml"), config).expect("written");
        let (child, ready, port) = launch(launcher, dir.path()).await;
        Self { child, dir, port, ready }
    }

    /// Ends it, and starts it again over what it has left.
    async fn restart(&mut self) {
        self.signal(Signal::SIGTERM);
        self.child.wait().expect("our child");
        self.start_again().await;
    }

    /// Starts it again over what one that is gone has left.
    async fn start_again(&mut self) {
        (self.child, self.ready, self.port) = launch(&[], self.dir.path()).await;
    }

    /// Kills its server, and waits until there is another one.
    async fn kill_server(&self) {
        let server = || {
            let children = format!("/proc/{0}/task/{0}/children", self.child.id());
            let children = fs::read_to_string(children).unwrap_or_default();
            let is_it = |pid: &&str| {
                fs::read(format!("/proc/{pid}/cmdline"))
                    .is_ok_and(|line| line.ends_with(b"\0") && String::from_utf8_lossy(&line).contains("__server"))
            };
            children.split_whitespace().find(is_it).and_then(|pid| pid.parse::<i32>().ok())
        };
        let before = server().expect("one lives");
        kill(before, Signal::SIGKILL);
        eventually("another server", || server().filter(|pid| *pid != before)).await;
    }

    fn signal(&self, signal: Signal) {
        kill(i32::try_from(self.child.id()).expect("a pid"), signal);
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    async fn client(&self, tenant: &str) -> Client {
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{}", self.port)).expect("an address");
        let token = format!("Bearer {}", token(tenant)).parse().expect("plain letters");
        let with_token = Box::new(move |mut request: Request<()>| {
            request.metadata_mut().insert("authorization", tonic::metadata::MetadataValue::clone(&token));
            Ok(request)
        });
        Client { inner: ExecutorClient::with_interceptor(endpoint.connect().await.expect("a connection"), with_token) }
    }
}

type Interceptor = Box<dyn FnMut(Request<()>) -> Result<Request<()>, Status> + Send>;

/// One tenant's.
struct Client {
    inner: ExecutorClient<InterceptedService<Channel, Interceptor>>,
}

fn caller(owner: Option<&str>) -> Option<v1::Caller> {
    Some(v1::Caller { owner: owner.map(str::to_owned) })
}

fn key() -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

impl Client {
    /// Runs a command of an owner; its stdout, without the last line break.
    async fn run(&mut self, owner: Option<&str>, command: &str) -> String {
        let spec = Some(v1::CommandSpec { command: command.to_owned().into(), ..Default::default() });
        self.run_spec(owner, spec).await.unwrap_or_else(|status| panic!("{command}: {status}"))
    }

    async fn run_spec(&mut self, owner: Option<&str>, spec: Option<v1::CommandSpec>) -> Result<String, Status> {
        let request = v1::RunRequest { caller: caller(owner), key: key(), spec, ..Default::default() };
        let mut events = self.inner.run(request).await?.into_inner();
        let mut stdout = Vec::new();
        while let Some(event) = events.next().await {
            match event?.event.expect("a known one") {
                Event::Tail(chunk) if chunk.stream() == v1::StreamName::Stdout => stdout.extend_from_slice(&chunk.data),
                Event::Finished(_) => return Ok(String::from_utf8_lossy(&stdout).trim_end().to_owned()),
                _ => {}
            }
        }
        panic!("no result");
    }

    /// Starts a task of an owner; its id.
    async fn start_task(&mut self, owner: Option<&str>, command: &str) -> String {
        let spec = Some(v1::CommandSpec { command: command.to_owned().into(), ..Default::default() });
        let request = v1::StartTaskRequest { caller: caller(owner), key: key(), spec };
        self.inner.start_task(request).await.expect("it starts").into_inner().task_id
    }
}

#[expect(clippy::disallowed_methods, reason = "the program under test is started as people start it")]
async fn launch(launcher: &[&str], dir: &Path) -> (Child, String, u16) {
    let words = [launcher, &[env!("CARGO_BIN_EXE_executor-daemon")]].concat();
    let mut child = Command::new(words[0])
        .args(&words[1..])
        .args(["serve", "--config", "config.toml", "--default-workdir", "/"])
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(fs::File::create(dir.join("ready")).expect("a file"))
        .stderr(fs::File::create(dir.join("log")).expect("a file"))
        .spawn()
        .expect("it starts");
    let ready = eventually("it is ready", || {
        let log = || fs::read_to_string(dir.join("log")).unwrap_or_default();
        assert!(child.try_wait().expect("our child").is_none(), "it has ended: {}", log());
        fs::read_to_string(dir.join("ready")).ok().filter(|line| line.ends_with('\n'))
    })
    .await;
    let (_, after) = ready.split_once("tcp:127.0.0.1:").expect("where it listens");
    let port = after.split(|letter: char| !letter.is_ascii_digit()).next().and_then(|port| port.parse().ok());
    (child, ready, port.expect("a port"))
}

async fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + LIMIT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a process that was started here and has not been waited for, or its child"
)]
fn kill(pid: i32, signal: Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).expect("it lives");
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(Signal::SIGTERM);
            // Whatever it says: the test is over.
            let _ = self.child.wait();
        }
    }
}

#[expect(clippy::print_stdout, reason = "a skipped check says why")]
fn root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("not checked: needs root");
    }
    root
}
