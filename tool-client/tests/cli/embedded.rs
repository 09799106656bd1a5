//! Without an endpoint: an executor of our own, for one call.

use std::{fs::File, io::Read, os::unix::process::CommandExt};

use super::*;

/// A home whose temporary directory can be looked into.
fn cli() -> Cli {
    let cli = Cli::new();
    std::fs::create_dir(cli.home.path().join("tmp")).expect("made");
    cli
}

impl Cli {
    fn embedded(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(arguments);
        command.env("TMPDIR", self.home.path().join("tmp"));
        command
    }

    fn left_in_tmp(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.home.path().join("tmp")).expect("it is there");
        entries.map(|entry| entry.expect("it reads").path()).collect()
    }
}

fn is_alive(pid: &str) -> bool {
    // A zombie has a directory too, but no command line.
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_runs_here_as_it_would_in_a_shell() {
    let cli = cli();
    let ran = ended(cli.embedded(&["bash", "pwd; echo err >&2; exit 3"]));
    let home = std::fs::canonicalize(cli.home.path()).expect("it is there");
    assert_eq!(ran, Ended { code: Some(3), stdout: format!("{}\n", home.display()), stderr: "err\n".into() });
    let ran = ended(cli.embedded(&["bash", "pwd; kill -9 $$", "--workdir", "tmp"]));
    assert_eq!(ran, Ended { code: Some(137), stdout: format!("{}/tmp\n", home.display()), stderr: String::new() });
    let ran = ended(cli.embedded(&["bash", "sleep 9", "--timeout", "100ms"]));
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(124), "tool-client: timed out after 100ms\n"));
    let ran = ended(cli.embedded(&["bash", "true", "--workdir", "/none"]));
    assert_eq!(
        (ran.code, ran.stderr.as_str()),
        (Some(125), "tool-client: spawn bash ENOENT: workdir \"/none\" does not exist\n")
    );
    assert_eq!(cli.left_in_tmp(), [] as [PathBuf; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_byte_comes_through_in_both_directions() {
    let cli = cli();
    let (source, copy) = (cli.home.path().join("source"), cli.home.path().join("copy"));
    let bytes: Vec<u8> = (0..7_000_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    std::fs::write(&source, &bytes).expect("written");
    let mut command = cli.embedded(&["bash", "cat; cat source source", "--stdin"]);
    command.stdin(File::open(&source).expect("it is there")).stdout(File::create(&copy).expect("made"));
    assert_eq!(ended(command), Ended { code: Some(0), stdout: String::new(), stderr: String::new() });
    assert!(std::fs::read(&copy).expect("it reads") == [&bytes[..], &bytes, &bytes].concat(), "the copy differs");
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_on_a_terminal_reaches_everybody_and_ends_the_command() {
    let cli = cli();
    let mut command = cli.embedded(&["bash", "trap 'echo asked; exit 1' TERM; echo $$; sleep 60 & wait"]);
    command.process_group(0);
    let mut child = command.spawn().expect("the binary starts");
    let mut pid = String::new();
    let mut stdout = std::io::BufReader::new(child.stdout.take().expect("piped"));
    tokio::task::block_in_place(|| std::io::BufRead::read_line(&mut stdout, &mut pid)).expect("it comes");
    let group = nix::unistd::Pid::from_raw(i32::try_from(child.id()).expect("a pid"));
    #[expect(clippy::disallowed_methods, reason = "the group is the test's own child, which has not been waited for")]
    nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGINT).expect("it is alive");
    let mut rest = String::new();
    tokio::task::block_in_place(|| stdout.read_to_string(&mut rest)).expect("it ends");
    let ended = of_output(tokio::task::block_in_place(|| child.wait_with_output()).expect("it ends"));
    assert_eq!((ended.code, rest.as_str(), ended.stderr.as_str()), (Some(130), "asked\n", ""));
    assert!(!is_alive(pid.trim()));
    assert_eq!(cli.left_in_tmp(), [] as [PathBuf; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_command_leaves_running_ends_with_the_call() {
    let ran = ended(cli().embedded(&["bash", "sleep 300 & echo $!"]));
    let pid = ran.stdout.trim();
    assert_eq!(ran.stderr, format!("tool-client: left running, ended with this call: {pid}\n"));
    assert_eq!(ran.code, Some(0));
    assert!(!is_alive(pid));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_a_text_names_is_there_after_the_call() {
    let cli = cli();
    let arguments = r#"{"command": "seq 1 50000", "description": "Count"}"#;
    let ran = ended(cli.embedded(&["call", "bash", arguments]));
    let (_, path) = ran.stdout.split_once("full output: ").expect("it is long");
    let whole = std::fs::read_to_string(path.trim_end_matches(']')).expect("it is there");
    assert!(whole.starts_with("1\n2\n") && whole.ends_with("\n50000\n"));

    let ran = ended(cli.embedded(&["bash", "seq 1 50000", "--json"]));
    let result: serde_json::Value = serde_json::from_str(&ran.stdout).expect("JSON");
    let saved = std::fs::read_to_string(result["stdout_file"].as_str().expect("a path")).expect("it is there");
    assert_eq!(saved, whole);
}

/// The binary with a terminal as its stderr; what it wrote there.
fn with_terminal(mut command: Command) -> String {
    let pty = nix::pty::openpty(None, None).expect("a terminal");
    command.stderr(pty.slave);
    let mut child = command.spawn().expect("the binary starts");
    // The terminal ends when nobody has its other side any more: not the child, and not what started it.
    drop(command);
    let mut said = Vec::new();
    tokio::task::block_in_place(|| {
        let _ = File::from(pty.master).read_to_end(&mut said);
        child.wait()
    })
    .expect("it ends");
    String::from_utf8(said).expect("UTF-8")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_is_told_where_the_command_runs() {
    let said = with_terminal(cli().embedded(&["bash", "echo oops >&2"]));
    assert_eq!(said, "tool-client: no endpoint is set: running on this host, as you\r\noops\r\n");
    let said = with_terminal(cli().embedded(&["call", "bash", r#"{"command": "true", "description": "d"}"#]));
    assert_eq!(said, "");
}
