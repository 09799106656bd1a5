//! The daemon's keeper with real processes: start, identities, the server's death, signals, PID 1, the end.

mod hidden;
mod server_user;
mod state;

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    rc::Rc,
    time::{Duration, Instant},
};

use executor_proto::v1::{self, executor_client::ExecutorClient, run_event::Event};
use futures_util::StreamExt as _;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// For what has to happen at all; nothing waits this long when all is well.
const LIMIT: Duration = Duration::from_secs(20);

struct Daemon {
    child: Child,
    /// The keeper, which is not the child where something stands between.
    keeper: u32,
    ready: String,
    directory: Rc<tempfile::TempDir>,
}

impl Daemon {
    async fn start() -> Self {
        Self::start_by(&[env!("CARGO_BIN_EXE_executor-daemon")], &nix::unistd::geteuid().to_string()).await
    }

    /// Starts it by a command that its arguments are added to.
    async fn start_by(command: &[&str], run_as: &str) -> Self {
        Self::start_in(Rc::new(tempfile::tempdir().expect("temporary directory")), command, run_as).await
    }

    /// The same, over what a daemon before has left in a directory.
    #[expect(clippy::disallowed_methods, reason = "the program under test is started as people start it")]
    async fn start_in(directory: Rc<tempfile::TempDir>, command: &[&str], run_as: &str) -> Self {
        // Whoever commands run as comes through to the spill files.
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("ours");
        let mut child = Command::new(command[0])
            .args(&command[1..])
            .args(["serve", "--listen", "unix:sock", "--state-dir", "state", "--grace-ms", "300", "--run-as", run_as])
            .args(["--max-output-bytes", "1000", "--default-workdir", "/"])
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(directory.path().join("log")).expect("a log"))
            .spawn()
            .expect("starts");
        let mut ready = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut ready).expect("text");
        let mut daemon = Self { keeper: child.id(), child, ready, directory };
        assert!(daemon.ready.contains(" ready: "), "{}{}", daemon.ready, daemon.log());
        while daemon.server().is_none() {
            daemon.keeper = children(daemon.keeper)[0];
        }
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("sock")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// The server's id, while there is one.
    fn server(&self) -> Option<u32> {
        let is_it = |pid: &u32| command_line(*pid).split('\0').any(|argument| argument == "__server");
        children(self.keeper).into_iter().find(|pid| alive(*pid) && is_it(pid))
    }

    async fn client(&self) -> ExecutorClient<Channel> {
        let socket = self.socket();
        let connector = tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://localhost");
        ExecutorClient::new(endpoint.connect_with_connector(connector).await.expect("a connection"))
    }

    /// Starts a task; its id.
    async fn start_task(&self, command: &str) -> String {
        let request = v1::StartTaskRequest { caller: caller(), key: key(), spec: spec(command) };
        self.client().await.start_task(request).await.expect("starts").into_inner().task_id
    }

    /// Runs a command; its stdout and exit.
    async fn run(&self, command: &str) -> (String, v1::exit::Exit) {
        let request = v1::RunRequest { caller: caller(), key: key(), spec: spec(command), ..Default::default() };
        let mut events = self.client().await.run(request).await.expect("starts").into_inner();
        let mut stdout = Vec::new();
        while let Some(event) = events.next().await {
            match event.expect("an event").event.expect("a known one") {
                Event::Tail(chunk) if chunk.stream() == v1::StreamName::Stdout => stdout.extend_from_slice(&chunk.data),
                Event::Finished(finished) => {
                    let exit = finished.exit.and_then(|exit| exit.exit);
                    return (String::from_utf8_lossy(&stdout).into_owned(), exit.expect("an exit"));
                }
                _ => {}
            }
        }
        panic!("no result");
    }

    fn signal(&self, signal: nix::sys::signal::Signal) {
        send(self.child.id(), signal);
    }

    async fn wait(&mut self) -> ExitStatus {
        let until = Instant::now() + LIMIT;
        loop {
            if let Some(status) = self.child.try_wait().expect("our child") {
                return status;
            }
            assert!(Instant::now() < until, "did not end in time: {}", self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            send(self.child.id(), nix::sys::signal::Signal::SIGTERM);
            // It has had its chance to end by itself where that is what is tested.
            let _ = self.child.wait();
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a process that was started here and has not been waited for")]
fn send(pid: u32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(i32::try_from(pid).expect("a pid")), signal).expect("it lives");
}

#[expect(clippy::unnecessary_wraps, reason = "as the field of a request is")]
fn caller() -> Option<v1::Caller> {
    Some(v1::Caller { owner: None })
}

#[expect(clippy::unnecessary_wraps, reason = "as the field of a request is")]
fn spec(command: &str) -> Option<v1::CommandSpec> {
    Some(v1::CommandSpec { command: command.to_owned().into(), ..Default::default() })
}

fn key() -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed).to_string()
}

fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().map(|pid| pid.parse().expect("a pid")).collect()
}

fn command_line(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default()
}

fn stat(pid: u32) -> Option<String> {
    Some(fs::read_to_string(format!("/proc/{pid}/stat")).ok()?.rsplit_once(") ")?.1.to_owned())
}

fn alive(pid: u32) -> bool {
    stat(pid).is_some_and(|stat| !stat.starts_with(['Z', 'X']))
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

#[expect(clippy::print_stdout, reason = "a skipped check says why")]
fn root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("not checked: needs root");
    }
    root
}

const TERM: nix::sys::signal::Signal = nix::sys::signal::Signal::SIGTERM;
const KILL: nix::sys::signal::Signal = nix::sys::signal::Signal::SIGKILL;

#[tokio::test]
async fn the_ready_line_says_where_and_as_whom() {
    let daemon = Daemon::start().await;
    let expected = format!(
        "executor-daemon {} ready: listening on unix:{}; commands run as ",
        env!("CARGO_PKG_VERSION"),
        daemon.socket().display()
    );
    assert!(daemon.ready.starts_with(&expected), "{}", daemon.ready);
    assert!(daemon.ready.contains(&format!("(uid {})", nix::unistd::geteuid())), "{}", daemon.ready);
    assert_eq!(fs::metadata(daemon.socket()).expect("exists").permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_link(format!("/proc/{}/cwd", daemon.keeper)).expect("alive"), Path::new("/"));
}

#[tokio::test]
async fn commands_of_another_user_are_that_user() {
    if !root() {
        return;
    }
    let daemon = Daemon::start_by(&[env!("CARGO_BIN_EXE_executor-daemon")], "nobody").await;
    let (text, _) = daemon
        .run("id -un; id -G; echo out > /dev/stdout; echo err > /dev/stderr; ls /proc/$PPID/fd 2>&1 | grep -c denied; kill -9 $PPID 2>/dev/null || echo safe; grep ^CapEff /proc/self/status")
        .await;
    let groups = nix::unistd::getgrouplist(c"nobody", nix::unistd::Gid::from_raw(65534)).expect("a user database");
    let groups: Vec<_> = groups.iter().map(ToString::to_string).collect();
    let expected = format!("nobody\n{}\nout\n1\nsafe\nCapEff:\t0000000000000000\n", groups.join(" "));
    assert_eq!(text, expected);

    // A spill: readable by the command's user, writable by nobody but the daemon.
    assert_eq!(daemon.run("seq 1 1000").await.1, v1::exit::Exit::Code(0));
    let directory = daemon.directory.path().join("state/spill/65534");
    let mut spills = fs::read_dir(&directory).expect("made at the start");
    let path = spills.next().expect("one spill").expect("readable").path().display().to_string();
    let (text, _) = daemon
        .run(&format!(
            "head -n 1 {path}; stat -c '%a %U %G' {path} $(dirname {path}); echo x >> {path} || echo refused"
        ))
        .await;
    assert_eq!(text, "1\n640 root nogroup\n750 root nogroup\nrefused\n");
    let gone = daemon.run("cd /root && echo inside").await;
    assert_eq!(gone.1, v1::exit::Exit::Code(1));
}

#[tokio::test]
async fn a_killed_server_leaves_its_commands_alone_and_is_replaced() {
    let mut daemon = Daemon::start().await;
    let pids = daemon.directory.path().join("pids");
    let command = "trap '' TERM; (setsid env -i sleep 100 & echo $! >> PIDS); echo $$ >> PIDS; sleep 100";
    daemon.start_task(&command.replace("PIDS", &pids.display().to_string())).await;
    let started = eventually("it runs", || {
        let text = fs::read_to_string(&pids).ok()?;
        let pids: Vec<u32> = text.lines().filter_map(|line| line.parse().ok()).collect();
        (pids.len() == 2).then_some(pids)
    })
    .await;
    let first = daemon.server().expect("one lives");
    send(first, KILL);
    let mut server = eventually("another server", || daemon.server().filter(|pid| *pid != first)).await;
    let untouched = |when: &str| assert!(started.iter().all(|pid| alive(*pid)), "{when}: {}", daemon.log());
    untouched("after the first");
    // A client that comes before the server is ready waits, and is not refused.
    assert_eq!(daemon.run("echo ok").await.0, "ok\n");

    // Each has answered: to be killed again and again does not make the next one later.
    for kills in 2..=8 {
        send(server, KILL);
        server = eventually("the next", || daemon.server().filter(|pid| *pid != server)).await;
        assert_eq!(daemon.run("echo ok").await.0, "ok\n");
        let at_once = daemon.log().matches("was ended by signal 9; starting it again in 100ms").count();
        assert_eq!(at_once, kills, "{}", daemon.log());
    }

    // One that ends by a fault of its own again and again is: later each time.
    for (wait, signal) in [("200ms", nix::sys::signal::Signal::SIGABRT), ("400ms", nix::sys::signal::Signal::SIGILL)] {
        send(server, signal);
        server = eventually("the next", || daemon.server().filter(|pid| *pid != server)).await;
        let expected = format!("was ended by signal {}; starting it again in {wait}", signal as i32);
        assert!(daemon.log().contains(&expected), "{}", daemon.log());
        assert_eq!(daemon.run("echo ok").await.0, "ok\n");
    }
    untouched("after all of them");

    let all = descendants(daemon.child.id());
    assert!(started.iter().all(|pid| all.contains(pid)), "{started:?} of {all:?}");
    daemon.signal(TERM);
    assert!(daemon.wait().await.success(), "{}", daemon.log());
    eventually("all are gone", || (!all.iter().any(|pid| alive(*pid))).then_some(())).await;
}

#[tokio::test]
async fn sigterm_ends_everything_and_leaves_nothing() {
    let mut daemon = Daemon::start().await;
    let pids = daemon.directory.path().join("pids");
    for ending in ["sleep 100", "trap '' TERM; while :; do sleep 1; done", "setsid env -i sleep 100 & exit 0"] {
        daemon.start_task(&format!("echo $$ >> {}; {ending}", pids.display())).await;
    }
    eventually("they run", || (fs::read_to_string(&pids).ok()?.lines().count() == 3).then_some(())).await;
    let before = daemon.server().expect("one lives");
    daemon.signal(nix::sys::signal::Signal::SIGHUP);
    eventually("SIGHUP brings a new server", || daemon.log().contains("the new server is ready").then_some(())).await;
    let after = eventually("it is the only one", || daemon.server().filter(|pid| *pid != before)).await;
    let all: Vec<u32> = descendants(daemon.child.id());
    assert!(all.len() >= 7 && all.contains(&after), "{after} and {all:?}");
    daemon.signal(TERM);
    assert!(daemon.wait().await.success(), "{}", daemon.log());
    assert!(!daemon.socket().exists());
    // The helpers may take a moment to see that the keeper is gone.
    eventually("all are gone", || (!all.iter().any(|pid| alive(*pid))).then_some(())).await;
}

#[tokio::test]
async fn sigterm_leaves_nothing_at_whatever_instant_of_a_replacement() {
    let hangup = |daemon: &Daemon| daemon.signal(nix::sys::signal::Signal::SIGHUP);
    for instant in ["asked", "begun", "the old one is gone", "killed", "killed and seen"] {
        let mut daemon = Daemon::start().await;
        daemon.start_task("trap '' TERM; (setsid env -i sleep 100 &); sleep 100").await;
        let server = daemon.server().expect("one lives");
        match instant {
            "asked" => hangup(&daemon),
            "begun" => {
                hangup(&daemon);
                eventually(instant, || daemon.log().contains("SIGHUP: starting a new server").then_some(())).await;
            }
            "the old one is gone" => {
                hangup(&daemon);
                eventually(instant, || (!alive(server)).then_some(())).await;
            }
            "killed" => send(server, KILL),
            _ => {
                send(server, KILL);
                eventually(instant, || daemon.log().contains("was ended by signal 9").then_some(())).await;
            }
        }
        let mut all = descendants(daemon.child.id());
        let asked = Instant::now();
        daemon.signal(TERM);
        // Whoever is started meanwhile is seen as long as the keeper lives.
        while matches!(daemon.child.try_wait(), Ok(None)) {
            all.extend(descendants(daemon.child.id()));
            tokio::task::yield_now().await;
        }
        assert!(daemon.wait().await.success(), "{instant}: {}", daemon.log());
        // A server that is dead is not waited for; that would be two seconds.
        let took = asked.elapsed();
        assert!(!instant.starts_with("killed") || took < Duration::from_millis(1_500), "{instant}: {took:?}");
        assert!(!daemon.socket().exists(), "{instant}");
        assert!(!daemon.log().contains("stay behind"), "{instant}: {}", daemon.log());
        eventually(instant, || (!all.iter().any(|pid| alive(*pid))).then_some(())).await;
    }
}

fn descendants(pid: u32) -> Vec<u32> {
    children(pid).into_iter().flat_map(|child| std::iter::once(child).chain(descendants(child))).collect()
}

#[tokio::test]
async fn nothing_survives_a_killed_keeper() {
    let mut daemon = Daemon::start().await;
    daemon.start_task("trap '' TERM; (setsid env -i sleep 100 &); sleep 100").await;
    let all = descendants(daemon.child.id());
    send(daemon.keeper, KILL);
    daemon.wait().await;
    eventually("all are gone", || (!all.iter().any(|pid| alive(*pid))).then_some(())).await;
}

#[tokio::test]
async fn a_socket_that_is_in_use_is_refused() {
    let daemon = Daemon::start().await;
    let again = |directory: &Path| {
        #[expect(clippy::disallowed_methods, reason = "the program under test is started as people start it")]
        let mut program = Command::new(env!("CARGO_BIN_EXE_executor-daemon"));
        program
            .args(["serve", "--state-dir", "other", "--run-as", &nix::unistd::geteuid().to_string()])
            .arg("--listen")
            .arg(format!("unix:{}", daemon.socket().display()))
            .current_dir(directory)
            .output()
            .expect("starts")
    };
    let directory = tempfile::tempdir().expect("temporary directory");
    let refused = again(directory.path());
    assert_eq!(refused.status.code(), Some(125));
    let expected = format!(
        "executor-daemon: cannot listen on unix:{}: another process is listening there\n",
        daemon.socket().display()
    );
    assert_eq!(String::from_utf8_lossy(&refused.stderr), expected);
    assert_eq!(daemon.run("echo ok").await.0, "ok\n");
}

#[tokio::test]
async fn the_daemons_own_directory_may_vanish() {
    let daemon = Daemon::start().await;
    let own = daemon.directory.path().to_owned();
    // Its socket stays open, whatever happens to its name; so the connection is made first.
    let mut client = daemon.client().await;
    fs::remove_dir_all(&own).expect("ours");
    let request =
        v1::RunRequest { caller: caller(), key: key(), spec: spec("pwd; echo x > /dev/null"), ..Default::default() };
    let mut events = client.run(request).await.expect("starts").into_inner();
    let mut stdout = Vec::new();
    while let Some(Ok(event)) = events.next().await {
        if let Some(Event::Tail(chunk)) = event.event {
            stdout.extend_from_slice(&chunk.data);
        }
    }
    assert_eq!(stdout, b"/\n");
}

#[tokio::test]
async fn as_pid_1_it_leaves_no_zombies_and_passes_signals_on() {
    if !root() {
        return;
    }
    let unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", env!("CARGO_BIN_EXE_executor-daemon")];
    let mut daemon = Daemon::start_by(&unshare, "root").await;
    let init = children(daemon.child.id())[0];
    assert_ne!(init, daemon.keeper, "the keeper is a child of the init");
    for _ in 0..50 {
        assert_eq!(daemon.run("(sleep 0.1 &) ; true").await.1, v1::exit::Exit::Code(0));
    }
    let zombies = || descendants(init).into_iter().filter(|pid| !alive(*pid)).count();
    eventually("no zombies", || (zombies() == 0).then_some(())).await;

    // A stranger, as `docker exec` brings them: its orphan is the init's, and neither killed nor left unreaped.
    #[expect(clippy::disallowed_methods, reason = "a stranger is not started by the keeper")]
    let stranger = Command::new("nsenter")
        .args(["--pid", "--target", &init.to_string(), "bash", "-c", "(sleep 0.5 & sleep 600 &)"])
        .status();
    assert!(stranger.expect("starts").success());
    let orphan = eventually("the stranger's orphan comes to the init", || {
        children(init).into_iter().find(|pid| command_line(*pid) == "sleep\x00600\0")
    })
    .await;
    assert_eq!(daemon.run("kill -9 $PPID; sleep 100").await.1, v1::exit::Exit::Signal(9));
    eventually("the other orphan is reaped", || (children(init).len() == 2).then_some(())).await;
    assert!(alive(orphan), "a helper's death is not the stranger's business");

    send(init, TERM);
    assert_eq!(daemon.wait().await.code(), Some(0), "{}", daemon.log());
}
