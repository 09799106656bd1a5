//! Many tenants on one daemon, all but one of them as loud as they can be: the quiet one is served, and what the daemon has taken
//! for the others it gives back. `NEIGHBOURS` is how
//! many there are, `NEIGHBOURS_SECONDS` how long they are loud.

use std::{
    fmt::Write as _,
    fs::{self, File},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use executor_proto::types::{CommandSpec, EnvironmentVariable, OwnerId, StreamName};
use executor_tests::{binaries, block_on, certificates::private, processes, tell, wait_until};
use futures_util::future::join_all;
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, Uid},
};
use tokio_util::sync::CancellationToken;
use tool_client::executor::{
    Executor,
    connect::{Endpoint, Token},
    remote::RemoteExecutor,
};

const SOON: Duration = Duration::from_secs(60);
/// No call of the quiet tenant takes longer: it hangs.
const HANGS: Duration = Duration::from_secs(10);
/// Memory that the daemon may hold more than before, in KiB: what allocators keep, and the journal's cache.
const KEPT_KIB: u64 = 96 * 1024;
/// Descriptors that it may hold more than before: helpers that were made ahead of need.
const KEPT_DESCRIPTORS: usize = 16;
/// Most bytes that a stream may spill.
const SPILLED: u64 = 1_000_000;

/// What the loud ones run, in turn: a flood, a bomb within bounds that end it, many processes that leave their shell, much on stderr.
const LOUD: [&str; 4] = [
    "yes a-line-of-a-flood",
    "ulimit -u 200 2>/dev/null; for n in $(seq 8); do (while :; do (:); done) & done; wait",
    "while :; do (setsid sleep 0.2 &); sleep 0.01; done",
    "while :; do head -c 1000000 /dev/zero >&2; done",
];

/// A daemon, ended when it is dropped.
struct Daemon(Child);

impl Drop for Daemon {
    #[expect(clippy::disallowed_methods, reason = "the child was started here and has not been waited for")]
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            kill(Pid::from_raw(pid_of(&self.0)), Signal::SIGTERM).expect("a signal");
            // Whatever it says: the test is over.
            let _ = self.0.wait();
        }
    }
}

fn pid_of(child: &Child) -> i32 {
    i32::try_from(child.id()).expect("process ids are small")
}

fn token(tenant: usize) -> String {
    format!("token-of-tenant-number-{tenant:04}")
}

#[expect(clippy::disallowed_methods, reason = "the program under test is started as people start it")]
fn start(dir: &Path, tenants: usize) -> Daemon {
    let mut config = format!("grace_ms = 300\nmax_spill_bytes = {SPILLED}\n");
    for tenant in 0..tenants {
        let file = dir.join(format!("token-{tenant}"));
        private(&file, &token(tenant));
        let _infallible = writeln!(config, "[tenants.t{tenant}]\ntoken_file = {file:?}");
        if Uid::effective().is_root() {
            let first = 165_000 + tenant * 4;
            let _infallible = writeln!(config, "uid_range = \"{first}-{}\"", first + 3);
        }
    }
    private(&dir.join("config.toml"), &config);
    let log = File::create(dir.join("log")).expect("a log");
    // It leads a session, as under an init: the child leads no group yet, so `setsid` becomes it.
    let mut command = Command::new("setsid");
    command.arg(binaries::executor_daemon()).args(["serve", "--listen", "tcp:127.0.0.1:0", "--default-workdir", "/"]);
    command.arg("--config").arg(dir.join("config.toml")).arg("--state-dir").arg(dir.join("state"));
    if Uid::effective().is_root() {
        command.args(["--run-as", "nobody"]);
    }
    command.stdin(Stdio::null()).stdout(log.try_clone().expect("a log")).stderr(log);
    Daemon(command.spawn().expect("it can be started"))
}

fn client(port: u16, tenant: usize) -> RemoteExecutor {
    let endpoint = Endpoint::parse(&format!("http://127.0.0.1:{port}")).expect("an endpoint");
    RemoteExecutor::new(&endpoint, Some(Token::new(&token(tenant)).expect("a token")))
}

/// It and all that comes from it carries the directory's name.
fn command(text: &str, dir: &Path) -> CommandSpec {
    let mark = EnvironmentVariable { name: "NEIGHBOURS_DIR".into(), value: dir.display().to_string().into() };
    CommandSpec { command: text.to_owned().into(), environment: vec![mark], ..CommandSpec::default() }
}

/// How long `true` takes, each of these times.
async fn quiet(client: &RemoteExecutor, dir: &Path, until: impl Fn(usize) -> bool) -> Vec<Duration> {
    let (owner, never) = (OwnerId("quiet".to_owned()), CancellationToken::new());
    let mut took = Vec::new();
    while until(took.len()) {
        let begun = Instant::now();
        let run = client.run(Some(&owner), command("true", dir), &never, None);
        tokio::time::timeout(HANGS, run).await.expect("the quiet tenant does not hang").expect("it runs");
        took.push(begun.elapsed());
    }
    took.sort();
    took
}

/// What a daemon holds.
#[derive(Debug)]
struct Held {
    /// Resident, of keeper and server.
    kib: u64,
    /// Of both.
    descriptors: usize,
    /// Processes of commands, wherever they are.
    commands: usize,
    /// Bytes of output below its state directory.
    spilled: u64,
}

impl Held {
    fn now(keeper: i32, dir: &Path) -> Self {
        let both = processes::all().into_values();
        let both = both.filter(|one| {
            one.pid == keeper || one.parent == keeper && one.command_line.starts_with("executor-daemon __server")
        });
        let (mut kib, mut descriptors) = (0, 0);
        for one in both {
            let status = fs::read_to_string(format!("/proc/{}/status", one.pid)).expect("it runs");
            let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it is there");
            kib += resident.trim().trim_end_matches(" kB").parse::<u64>().expect("a number");
            descriptors += fs::read_dir(format!("/proc/{}/fd", one.pid)).expect("it runs").count();
        }
        let mark = dir.display().to_string();
        let commands = processes::marked(&[&mark], &dir.join("nowhere"), binaries::executor_daemon()).len();
        Self { kib, descriptors, commands, spilled: bytes_below(&dir.join("state/spill")) }
    }
}

/// A number from the environment, or this one.
fn given(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// Starts a task at each, follows its output without reading it, and kills all when the time has come; how many were not ended
/// within their second.
async fn all_run(loud: &[RemoteExecutor], dir: &Path, texts: &[&str], meanwhile: impl Future<Output = ()>) -> usize {
    let owner = OwnerId("loud".to_owned());
    let started = loud.iter().zip(texts.iter().cycle());
    let started = started.map(|(client, text)| client.start_task(Some(&owner), command(text, dir)));
    let tasks: Vec<_> = join_all(started).await.into_iter().map(|task| task.expect("started")).collect();
    let followed = loud.iter().zip(&tasks);
    let followed = followed.map(|(client, task)| client.read_stream(Some(&owner), task, StreamName::Stdout, 0, true));
    let stalled = join_all(followed).await;
    meanwhile.await;
    drop(stalled);
    let killed = loud.iter().zip(&tasks).map(|(client, task)| client.kill_task(Some(&owner), task));
    // What could not be ended within its second is named, and the ending goes on.
    let outcomes = join_all(killed).await.into_iter().map(|outcome| outcome.expect("its own"));
    outcomes.filter(|outcome| !outcome.survivors.is_empty()).count()
}

#[test]
fn a_quiet_tenant_among_loud_ones_is_served_and_all_is_given_back() {
    let tenants = usize::try_from(given("NEIGHBOURS", 16)).expect("a small number");
    let seconds = Duration::from_secs(given("NEIGHBOURS_SECONDS", 3));
    block_on(async {
        let dir = tempfile::Builder::new().prefix("xn-").tempdir().expect("a directory");
        let dir = dir.path();
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).expect("a mode");
        let mut daemon = start(dir, tenants);
        let log = dir.join("log");
        let port = wait_until("it is ready", SOON, async || {
            let log = fs::read_to_string(&log).unwrap_or_default();
            assert!(daemon.0.try_wait().expect("asked").is_none(), "it has ended:\n{log}");
            let (_, after) = log.lines().find(|line| line.contains(" ready: "))?.split_once("tcp:127.0.0.1:")?;
            after.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
        });
        let port = port.await;
        let keeper = pid_of(&daemon.0);
        let nobody_else = client(port, 0);
        let loud: Vec<_> = (1..tenants).map(|tenant| client(port, tenant)).collect();
        // What the daemon keeps for a tenant from its first task on is there before it is counted: files, a waiting helper.
        all_run(&loud, dir, &["sleep 600"], async {}).await;
        let idle = quiet(&nobody_else, dir, |done| done < 50).await;
        let before = Held::now(keeper, dir);
        assert_eq!(before.commands, 0, "{before:?}");

        let (mut under_load, mut most) = (Vec::new(), None);
        let late = all_run(&loud, dir, &LOUD, async {
            let begun = Instant::now();
            under_load = quiet(&nobody_else, dir, |_| begun.elapsed() < seconds).await;
            most = Some(Held::now(keeper, dir));
        });
        let late = late.await;
        let (idle, load) = (idle[idle.len() / 2], under_load[under_load.len() / 2]);
        tell(format_args!(
            "a quiet tenant's `true` beside {} loud ones: p50 {idle:?} idle, {load:?} under load, ratio {:.1}, {} calls; {late} ends took longer than their second",
            tenants - 1,
            load.as_secs_f64() / idle.as_secs_f64(),
            under_load.len(),
        ));
        let most = most.expect("counted");
        assert!(most.commands >= tenants - 1, "they are all running: {most:?}");
        let begun = Instant::now();
        let now = wait_until("what the daemon has taken is given back", SOON * 2, async || {
            let now = Held::now(keeper, dir);
            let given_back = now.commands == 0
                && now.kib <= before.kib + KEPT_KIB
                && now.descriptors <= before.descriptors + KEPT_DESCRIPTORS;
            assert!(given_back || begun.elapsed() < SOON, "{before:?} before, {most:?} under load, {now:?} now");
            given_back.then_some(now)
        });
        let now = now.await;
        tell(format_args!("{before:?} before, {most:?} under load, {now:?} {:?} after the ends", begun.elapsed()));
        let allowed = u64::try_from(tenants).expect("a small number") * 2 * SPILLED;
        assert!(most.spilled <= allowed && now.spilled <= allowed, "of {allowed} bytes: {most:?}, {now:?}");
    });
}

/// Bytes of all files below a directory.
fn bytes_below(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    let of = |entry: fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => bytes_below(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    };
    entries.filter_map(Result::ok).map(of).sum()
}
