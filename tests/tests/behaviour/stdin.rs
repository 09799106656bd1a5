//! Nothing waits for somebody who is not there: stdin is empty, and there is no terminal (kind I).

use std::time::Duration;

use executor_tests::{Backend, Setup, Stopwatch, World, every_backend, on_backend};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

/// What ends at once.
const AT_ONCE: Duration = Duration::from_millis(1_500);

/// What only has to give up.
const QUICKLY: Duration = Duration::from_secs(5);

every_backend!(i01_a_reader_in_the_background_ends_at_once);
async fn i01_a_reader_in_the_background_ends_at_once(world: &World) {
    let watch = Stopwatch::start();
    let id = world.background("cat; echo rc=$?").await;
    world.ended(&id, QUICKLY).await.expect("it ends");
    watch.assert_within("the reader", AT_ONCE);
    assert_eq!(world.output(&id).await, "rc=0\n\n[status: completed, exit code: 0]");
}

every_backend!(i02_a_reader_in_the_foreground_ends_at_once);
async fn i02_a_reader_in_the_foreground_ends_at_once(world: &World) {
    let watch = Stopwatch::start();
    assert_eq!(world.bash("cat; echo rc=$?").await, "rc=0\n");
    assert_eq!(world.bash("grep x").await, "(no output)\n[exit code: 1]");
    assert_eq!(world.bash("read -r x; echo rc=$?").await, "rc=1\n");
    assert_eq!(world.bash("[ -c /dev/stdin ] && readlink /proc/$$/fd/0").await, "/dev/null\n");
    watch.assert_within("four readers", AT_ONCE * 2);
}

every_backend!(i03_a_child_that_reads_leaves_the_rest_of_the_command);
async fn i03_a_child_that_reads_leaves_the_rest_of_the_command(world: &World) {
    let id = world.background("bash -c 'cat >/dev/null'; echo done").await;
    world.ended(&id, QUICKLY).await.expect("it ends");
    assert_eq!(world.output(&id).await, "done\n\n[status: completed, exit code: 0]");
}

/// Starts the program that follows as the leader of a session with a terminal, and copies what it prints.
const WITH_TERMINAL: &str = r"
import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], sys.argv[1:])
while True:
    try:
        printed = os.read(terminal, 65536)
    except OSError:
        break
    if not printed:
        break
    os.write(1, printed)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
";

fn on_a_terminal() -> Setup {
    Setup { launcher: ["python3", "-c", WITH_TERMINAL].map(ToOwned::to_owned).into(), ..Setup::default() }
}

on_backend!(Backend::Unix, i04_the_daemons_terminal_is_not_the_commands with on_a_terminal());
async fn i04_the_daemons_terminal_is_not_the_commands(world: &World) {
    let daemon = world.daemon().expect("there is one");
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", daemon.pid())).expect("it runs");
    let terminal = stat.rsplit_once(") ").and_then(|(_, fields)| fields.split(' ').nth(4)).map(ToOwned::to_owned);
    assert_ne!(terminal.as_deref(), Some("0"), "the daemon has a terminal");
    let watch = Stopwatch::start();
    let text = world.bash("read x </dev/tty; echo rc=$?").await;
    assert_eq!(text, "rc=1\n[stderr]\nbash: line 1: /dev/tty: No such device or address\n");
    watch.assert_within("the prompt", AT_ONCE);
}

/// A repository with three commits, in the directory.
const REPOSITORY: &str = "git init -q . && git config user.name n && git config user.email e@example.invalid \
     && for i in 1 2 3; do git commit -q --allow-empty -m c$i; done && git rev-parse HEAD";

every_backend!(i07_git_opens_no_editor_and_rewrites_nothing);
async fn i07_git_opens_no_editor_and_rewrites_nothing(world: &World) {
    let head = world.bash(REPOSITORY).await;
    assert_eq!(head.trim().len(), 40, "{head}");
    for command in ["git commit --allow-empty", "git rebase -i HEAD~2"] {
        let watch = Stopwatch::start();
        let text = world.bash(command).await;
        watch.assert_within(command, QUICKLY);
        assert!(text.contains("[exit code: "), "{text}");
    }
    assert_eq!(world.bash("git rev-parse HEAD; git log --format=%s").await, format!("{head}c3\nc2\nc1\n"));
}

every_backend!(i08_git_asks_for_no_password);
async fn i08_git_asks_for_no_password(world: &World) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("there are free ports");
    let port = listener.local_addr().expect("it is bound").port();
    let server = tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut request = vec![0; 4096];
            let reply = b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm=x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            if client.read(&mut request).await.is_ok() && client.write_all(reply).await.is_err() {
                break;
            }
        }
    });
    let watch = Stopwatch::start();
    let text = world.bash_with(&format!("git clone http://127.0.0.1:{port}/x"), json!({"timeoutMs": 20_000})).await;
    watch.assert_within("the clone", QUICKLY);
    assert!(text.contains("could not read Username") && text.ends_with("[exit code: 128]"), "{text}");
    server.abort();
}

every_backend!(i10_a_pause_does_not_end_the_output);
async fn i10_a_pause_does_not_end_the_output(world: &World) {
    assert_eq!(world.bash("sh -c 'echo a; sleep 2; echo b'").await, "a\nb\n");
}
