//! What a person at a terminal sees of the daemon: help, mistakes, exit codes. No daemon gets as far as listening here.

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

#[expect(clippy::disallowed_methods, reason = "the program under test is started as people start it")]
fn run_in(directory: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_executor-daemon"))
        .args(arguments)
        .current_dir(directory)
        .env("COLUMNS", "100")
        .env_remove("EXECUTOR_ENDPOINT")
        .stdin(Stdio::null())
        .output()
        .expect("the program can be started")
}

fn run(arguments: &[&str]) -> Output {
    run_in(Path::new("/"), arguments)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program prints UTF-8")
}

/// Who the tests run as, by number: the one user that is allowed everywhere.
fn me() -> String {
    nix::unistd::geteuid().to_string()
}

/// Compares with a file beside this one; `UPDATE_GOLDEN=1` writes it.
fn golden(name: &str, is: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, is).expect("the file can be written");
    }
    let wanted = fs::read_to_string(&path).unwrap_or_default();
    assert!(is == wanted, "{} differs (UPDATE_GOLDEN=1 renews it); now:\n{is}", path.display());
}

#[test]
fn help_is_what_was_agreed_on() {
    for (arguments, file) in [
        (&["--help"][..], "help.txt"),
        (&["serve", "--help"], "serve-help.txt"),
        (&["init", "--help"], "init-help.txt"),
        (&["health", "--help"], "health-help.txt"),
    ] {
        let output = run(arguments);
        assert!(output.status.success(), "{arguments:?}");
        assert_eq!(text(&output.stderr), "");
        golden(file, &text(&output.stdout));
    }
}

#[test]
fn the_version_is_the_crate_s() {
    let output = run(&["--version"]);
    assert!(output.status.success());
    assert_eq!(text(&output.stdout), format!("executor-daemon {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn completions_are_a_script_and_nothing_else() {
    for (shell, holds) in [("bash", "complete -F"), ("zsh", "#compdef"), ("fish", "complete -c executor-daemon")] {
        let output = run(&["completions", shell]);
        assert!(output.status.success(), "{shell}");
        assert!(text(&output.stdout).contains(holds), "{shell}");
        assert_eq!(text(&output.stderr), "");
    }
}

#[test]
fn a_mistake_in_the_command_line_is_one_line_and_64() {
    for (arguments, says) in [
        (&[][..], "requires a subcommand"),
        (&["--listen", "x"], "unexpected argument '--listen' found"),
        (&["serve", "--lisen", "x"], "unexpected argument '--lisen' found; a similar argument exists: '--listen' (see"),
        (&["serve", "--listen"], "a value is required for '--listen <ADDRESS>'"),
        (&["health"], "say which daemon: --endpoint or EXECUTOR_ENDPOINT"),
        (&["init", "--dir", "/nowhere/x", "--name", "a b"], "--name a b: must be a host's name"),
        (&["init", "--dir", "/nowhere/x", "--tenant", "../x"], "--tenant ../x: must be 1 to 64"),
        (&["completions", "tcsh"], "invalid value 'tcsh'"),
        (
            &["health", "--endpoint", "https://localhost:1"],
            "--ca, the authority of the daemon's certificate, must be given",
        ),
        (&["health", "--endpoint", "localhost:1"], "must be unix:PATH, https://HOST:PORT or http://HOST:PORT"),
    ] {
        let output = run(arguments);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
        assert!(stderr.starts_with("executor-daemon: "), "{arguments:?}: {stderr}");
        assert!(stderr.contains(says), "{arguments:?}: {stderr}");
        assert_eq!(text(&output.stdout), "");
    }
}

#[test]
fn all_mistakes_of_a_configuration_are_printed_one_per_line() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    fs::write(dir.path().join("config.toml"), "timeout_ms = 0\ngrace = 1\nlisten = 'https://x'\n").expect("a file");
    let output = run_in(
        dir.path(),
        &["serve", "--config", "config.toml", "--run-as", &me(), "--max-output-bytes", "1e6", "--log-level", "loud"],
    );
    assert_eq!(output.status.code(), Some(64));
    assert_eq!(text(&output.stdout), "");
    golden("mistakes.txt", &text(&output.stderr));
}

#[test]
fn a_daemon_that_is_not_there_is_not_healthy() {
    let output = run(&["health", "--endpoint", "unix:/nowhere/executor.sock"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        text(&output.stderr),
        "executor-daemon: unix:/nowhere/executor.sock: cannot be reached: No such file or directory (os error 2)\n"
    );
}

#[test]
fn a_state_directory_that_cannot_be_made_is_the_daemon_s_failure() {
    let output = run(&["serve", "--listen", "unix:/tmp/never.sock", "--run-as", &me(), "--state-dir", "/dev/null/x"]);
    assert_eq!(output.status.code(), Some(125));
    assert_eq!(text(&output.stderr), "executor-daemon: state directory /dev/null/x: Not a directory (os error 20)\n");
}
