//! The engine's command line, the image under test, and what a test leaves in the engine.

use std::{
    env,
    ffi::OsStr,
    fmt,
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Marks everything that a run of these tests makes; its value is the run.
pub(crate) const LABEL: &str = "executor-daemon.e2e";
/// The longest that one command of the engine may take, in seconds. Above it something hangs.
const COMMAND_SECONDS: &str = "300";
/// How long a condition is waited for: far more than an idle machine needs.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a command printed and how it ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl fmt::Display for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exit {:?}\nstdout: {}\nstderr: {}", self.code, self.stdout, self.stderr)
    }
}

/// The root of the workspace.
pub(crate) fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in a workspace")
}

/// Whether somebody has said that there is no engine here; nobody is left to think that these tests have passed.
pub(crate) fn switched_off() -> bool {
    let off = env::var_os("EXECUTOR_TEST_CONTAINERS").is_some_and(|value| value == "off");
    if off {
        println!("EXECUTOR_TEST_CONTAINERS=off: nothing was started and nothing is shown");
    }
    off
}

/// A value that no other test of this machine has, for names.
pub(crate) fn unique() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("executor-e2e-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Runs a program to its end.
pub(crate) fn run(command: &mut Command, stdin: &str) -> Finished {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("starting {command:?}: {error}"));
    let mut input = child.stdin.take().expect("stdin is a pipe");
    let stdin = stdin.to_owned();
    // A program that does not read its stdin closes it: that is its own affair.
    let writer = thread::spawn(move || input.write_all(stdin.as_bytes()).is_ok());
    let output = child.wait_with_output().expect("a child can be waited for");
    let _ = writer.join();
    Finished {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Runs a program to its end, which must be a success, and gives back what it printed, trimmed.
pub(crate) fn must(command: &mut Command, stdin: &str) -> String {
    let finished = run(command, stdin);
    assert_eq!(finished.code, Some(0), "{command:?}: {finished}");
    finished.stdout.trim().to_owned()
}

/// A command of the engine.
pub(crate) fn docker<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Command {
    let mut command = bounded();
    command.arg("docker").args(arguments);
    command
}

/// A command of Compose, for the project of that name. `also`: another file on top.
pub(crate) fn compose(project: &str, also: Option<&str>) -> Command {
    let mut command = bounded();
    command.args(compose_program());
    command.args(["--project-name", project, "--file"]).arg(workspace().join("docker-compose.yml"));
    if let Some(also) = also {
        command.arg("--file").arg(workspace().join(also));
    }
    command
}

/// `docker compose` where it exists, else the `docker-compose` of old.
fn compose_program() -> &'static [&'static str] {
    static PROGRAM: OnceLock<&'static [&'static str]> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let plugin = run(&mut docker(["compose", "version"]), "");
        if plugin.code == Some(0) { &["docker", "compose"] } else { &["docker-compose"] }
    })
}

/// A command with an end. BuildKit has to be asked for in old engines, whose own client stands in /usr/bin: a newer one
/// elsewhere would want a plugin for it.
fn bounded() -> Command {
    let mut command = Command::new("timeout");
    command
        .arg(COMMAND_SECONDS)
        .current_dir(workspace())
        .env("DOCKER_BUILDKIT", "1")
        .env("COMPOSE_DOCKER_CLI_BUILD", "1");
    let path = env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("/usr/bin:{path}"));
    command
}

/// The image under test, made from the release binaries as they are now: its name.
pub(crate) fn image() -> &'static str {
    static IMAGE: OnceLock<String> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let engine = run(&mut docker(["version", "--format", "{{.Server.Version}}"]), "");
        assert_eq!(engine.code, Some(0), "these tests need a Docker engine: {engine}");
        must(Command::new("bash").arg(workspace().join("tests/compose/base-image.sh")), "");
        build_binaries();
        let name = "executor-daemon-e2e";
        // Of an image that is not there some clients print an empty line.
        let id = || run(&mut docker(["image", "inspect", "--format={{.Id}}", name]), "").stdout.trim().to_owned();
        let before = id();
        let mut build = compose(name, None);
        build.args(["build", "daemon"]).env("BINARIES", "prebuilt").env("EXECUTOR_IMAGE", name);
        must(&mut build, "");
        // The image stays, so that the next build finds its layers; the one that it replaces does not.
        if !before.is_empty() && before != id() {
            must(&mut docker(["image", "rm", &before]), "");
        }
        name.to_owned()
    })
}

/// Cargo decides what is stale.
fn build_binaries() {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.current_dir(workspace()).env("CARGO_TARGET_DIR", workspace().join("target"));
    // What cargo tells a test about itself would have build scripts run again, here and in the next build elsewhere.
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_"].iter().any(|begin| name.starts_with(begin)) {
            build.env_remove(name);
        }
    }
    build.args(["build", "--release", "--locked", "--quiet"]);
    build.args(["-p", "executor-daemon", "-p", "tool-client", "-p", "executor-tests"]);
    build.args(["--bin", "executor-daemon", "--bin", "tool-client", "--bin", "scenarios", "--bin", "bench"]);
    must(&mut build, "");
}

/// Waits until a condition gives a value.
pub(crate) fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Everything in the engine with one value of [`LABEL`]; gone when dropped.
#[derive(Debug)]
pub(crate) struct Marked {
    /// The value, and the prefix of names.
    pub(crate) name: String,
}

impl Marked {
    pub(crate) fn new() -> Self {
        Self { name: unique() }
    }

    /// The argument that marks what is made.
    pub(crate) fn label(&self) -> String {
        format!("--label={LABEL}={}", self.name)
    }
}

impl Drop for Marked {
    fn drop(&mut self) {
        let filter = format!("--filter=label={LABEL}={}", self.name);
        let kinds: [(&[&str], &[&str]); 3] = [
            (&["ps", "--all", "--quiet"], &["rm", "--force", "--volumes"]),
            (&["network", "ls", "--quiet"], &["network", "rm"]),
            (&["volume", "ls", "--quiet"], &["volume", "rm"]),
        ];
        for (list, remove) in kinds {
            let found = run(docker(list).arg(&filter), "").stdout;
            let ids: Vec<&str> = found.split_whitespace().collect();
            if !ids.is_empty() {
                run(docker(remove).args(ids), "");
            }
        }
    }
}
