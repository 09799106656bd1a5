//! Where the programs under test are, and that they are current.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    sync::OnceLock,
    time::SystemTime,
};

use nix::fcntl::{Flock, FlockArg};

/// The daemon, of the profile that this test was built with.
///
/// # Panics
/// When it cannot be built.
#[must_use]
pub fn executor_daemon() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| current("executor-daemon", &ALL))
}

/// The daemon with its crash points (`executor_daemon::crash`), of the profile that this test was built with.
///
/// # Panics
/// When it cannot be built.
#[must_use]
pub fn executor_daemon_with_crash_points() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        current("crash-points", &["--bin", "crash-points", "--features", "executor-daemon/crash-points"])
    })
}

/// The client's command line, of the profile that this test was built with.
///
/// # Panics
/// When it cannot be built.
#[must_use]
pub fn tool_client() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| current("tool-client", &ALL))
}

/// The root of the workspace.
#[must_use]
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in a workspace")
}

/// Builds every program but the one with crash points.
const ALL: [&str; 1] = ["--bins"];

/// Cargo builds the programs of a package for that package's own tests only, so a missing or stale one is built here. One
/// process at a time; the others find it done.
fn current(name: &str, what: &[&str]) -> PathBuf {
    let directory = profile_directory();
    let program = directory.join(name);
    if is_current(&program) {
        return program;
    }
    let lock = fs::File::create(directory.join(".executor-tests.lock")).expect("the target directory can be written");
    let locked =
        Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno).expect("a lock can be waited for");
    if !is_current(&program) {
        build(&directory, what);
    }
    drop(locked);
    program
}

/// `target/<profile>`, where this program or its `deps/` lies.
fn profile_directory() -> PathBuf {
    let own = std::env::current_exe().expect("a program knows its path");
    let directory = own.parent().expect("a program lies in a directory");
    match directory.file_name() {
        Some(name) if name == "deps" || name == "examples" => {
            directory.parent().expect("deps lies in a profile").to_owned()
        }
        _ => directory.to_owned(),
    }
}

/// Whether a program is at least as new as every file that cargo says it was made from.
fn is_current(program: &Path) -> bool {
    let newer_than_sources = || -> io::Result<bool> {
        let built = fs::metadata(program)?.modified()?;
        let sources = fs::read_to_string(program.with_extension("d"))?;
        let (_, sources) = sources.split_once(": ").ok_or(io::ErrorKind::InvalidData)?;
        for source in sources.replace("\\ ", "\u{0}").split_whitespace() {
            let changed: SystemTime = fs::metadata(source.replace('\u{0}', " "))?.modified()?;
            if changed > built {
                return Ok(false);
            }
        }
        Ok(true)
    };
    newer_than_sources().unwrap_or(false)
}

#[expect(clippy::disallowed_methods, reason = "tests start the programs that they test")]
fn build(directory: &Path, what: &[&str]) {
    let profile = match directory.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let target = directory.parent().expect("a profile lies in a target directory");
    let output = std::process::Command::new(cargo)
        .args(["build", "--quiet", "-p", "executor-daemon", "-p", "tool-client", "--profile", profile])
        .args(what)
        .current_dir(workspace())
        .env("CARGO_TARGET_DIR", target)
        .output()
        .expect("cargo can be run");
    assert!(output.status.success(), "building the programs under test: {}", String::from_utf8_lossy(&output.stderr));
}
