//! Where the texts are better than those of the original harness: one test per row of the contract's table.
//!
//! The rows on hanging calls, long commands and characters between two reads are in `returns`, `ending`, `long_commands` and
//! `bytes`; every other one is here.

use std::{fs, time::Duration};

use executor_proto::types::{CommandSpec, TaskStatus};
use executor_tests::{SESSION, Setup, World, every_backend, every_daemon, wait_for, wait_until};
use nix::unistd::Uid;
use serde_json::json;
use tool_client::tools::Abort;

const SOON: Duration = Duration::from_secs(10);

fn cap(max_output_bytes: u64) -> Setup {
    Setup { max_output_bytes, ..Setup::default() }
}

/// The path in a mark of a cut text.
fn path(text: &str) -> &str {
    let (_, rest) = text.split_once("full output: ").unwrap_or_else(|| panic!("not marked: {text}"));
    rest.split([']', ' ']).next().unwrap_or_default()
}

every_backend!(the_last_bytes_are_kept_exactly with cap(1_000));
async fn the_last_bytes_are_kept_exactly(world: &World) {
    let text = world.bash("head -c 1000 /dev/zero | tr '\\0' a; sleep .2; printf b").await;
    let mark = format!("\n[output truncated; full output: {}]", path(&text));
    assert_eq!(text, "a".repeat(999) + "b" + &mark);
    assert_eq!(world.bash("head -c 1000 /dev/zero | tr '\\0' a").await, "a".repeat(1000));
}

every_backend!(a_cut_inside_a_character_drops_its_rest_and_nothing_else with cap(10));
async fn a_cut_inside_a_character_drops_its_rest_and_nothing_else(world: &World) {
    for (written, kept) in [
        ("éééééé", "ééééé".as_bytes()),
        ("ééééééx", "ééééx".as_bytes()),
        ("😀😀xxx", "😀xxx".as_bytes()),
        ("😀😀xx", "😀😀xx".as_bytes()),
        ("€€€xx", "€€xx".as_bytes()),
    ] {
        let spec = CommandSpec { command: format!("printf '{written}'").into(), ..CommandSpec::default() };
        let stdout = world.run(spec).await.expect("it runs").stdout;
        assert_eq!((stdout.tail.as_ref(), stdout.total), (kept, written.len() as u64), "{written}");
        assert_eq!(stdout.dropped, stdout.total - kept.len() as u64, "{written}");
    }
    // What only looks like the rest of a character is no part of a valid one, and stays.
    let spec = CommandSpec { command: "printf '\\x80%.0s' {1..11}".into(), ..CommandSpec::default() };
    let stdout = world.run(spec).await.expect("it runs").stdout;
    assert_eq!((stdout.tail.as_ref(), stdout.dropped), ([0x80; 10].as_slice(), 1));
}

every_backend!(a_task_that_dies_of_a_signal_says_so);
async fn a_task_that_dies_of_a_signal_says_so(world: &World) {
    let id = world.background("echo a; kill -SEGV $$").await;
    world.ended(&id, SOON).await.expect("it ends");
    assert_eq!(world.output(&id).await, "a\n\n[status: killed by SIGSEGV]");
    let notice = wait_until("the notice", SOON, async || world.mailbox().taken().pop()).await;
    let text =
        format!("background bash task {id} finished [status: killed by SIGSEGV]. Read its output with bash_output.");
    assert_eq!(notice.text, text);
}

every_backend!(real_time_signals_have_names);
async fn real_time_signals_have_names(world: &World) {
    for (number, name) in [(32, "SIG32"), (33, "SIG33"), (34, "SIGRTMIN+0"), (35, "SIGRTMIN+1"), (64, "SIGRTMIN+30")] {
        let text = world.bash(&format!("exec perl -e 'kill {number}, $$; sleep 5'")).await;
        assert_eq!(text, format!("(no output)\n[killed by signal: {name}]"));
    }
}

fn with_credentials() -> Setup {
    let names = ["zz_Password", "ZZ_PASSPHRASE_1", "zzcredentials", "ZZ_SECRET", "zz_key", "AZ_TOKENS", "ZZ_PASS"];
    Setup { environment: names.map(|name| (name.to_owned(), "canary".to_owned())).into(), ..Setup::default() }
}

every_backend!(credential_shaped_names_are_scrubbed_in_any_case with with_credentials());
async fn credential_shaped_names_are_scrubbed_in_any_case(world: &World) {
    assert_eq!(world.bash("env | grep canary").await, "ZZ_PASS=canary\n");
}

every_backend!(a_spill_at_its_cap_keeps_its_head_and_says_so
    with Setup { max_output_bytes: 1_000, max_spill_bytes: Some(5_000), ..Setup::default() });
async fn a_spill_at_its_cap_keeps_its_head_and_says_so(world: &World) {
    let all: String = (1..=20_000).map(|number| format!("{number}\n")).collect();
    let text = world.bash("seq 1 20000").await;
    let mark = format!("\n[output truncated; full output: {} (first 5000 bytes)]", path(&text));
    assert_eq!(text, all[all.len() - 1_000..].to_owned() + &mark);
    assert!(fs::read(path(&text)).expect("it can be read") == all.as_bytes()[..5_000], "the head");
    let id = world.background("seq 1 20000").await;
    world.ended(&id, SOON).await.expect("it ends");
    let text = world.output(&id).await;
    let mark = format!("\n[some output was dropped from memory; full output: {} (first 5000 bytes)]", path(&text));
    assert_eq!(text, all[all.len() - 1_000..].to_owned() + &mark + "\n[status: completed, exit code: 0]");
}

every_backend!(a_spill_that_cannot_be_made_is_unavailable with cap(1_000));
async fn a_spill_that_cannot_be_made_is_unavailable(world: &World) {
    fs::remove_dir_all(world.spill_dir()).expect("it can be removed");
    fs::write(world.spill_dir(), "in the way").expect("it can be written");
    let tail = "a".repeat(1_000);
    let text = world.bash("head -c 2000 /dev/zero | tr '\\0' a").await;
    assert_eq!(text, format!("{tail}\n[output truncated; full output: (unavailable)]"));
    let id = world.background("head -c 2000 /dev/zero | tr '\\0' a").await;
    world.ended(&id, SOON).await.expect("it ends");
    let lossy = "[some output was dropped from memory; full output: (unavailable)]";
    assert_eq!(world.output(&id).await, format!("{tail}\n{lossy}\n[status: completed, exit code: 0]"));
    assert_eq!(world.bash("echo on").await, "on\n");
}

/// Runs the daemon with a state directory of 1 MiB that nobody else sees.
fn on_a_small_disk() -> Setup {
    let mount = "mount -t tmpfs -o mode=0711,size=1m none \"$0/state\" && exec \"$@\"";
    let user: &[&str] = if Uid::effective().is_root() { &[] } else { &["--user", "--map-root-user"] };
    let words = [&["unshare", "--mount"], user, &["sh", "-c", mount, "${ROOT}"]].concat();
    Setup { launcher: words.into_iter().map(ToOwned::to_owned).collect(), max_output_bytes: 1_000, ..Setup::default() }
}

/// What such a disk gives to spills in all: a tenth.
const SMALL_DISKS_SPILLS: &str = " (first 104857 bytes)]";

every_daemon!(a_small_disk_keeps_the_head_of_a_spill_and_is_no_failure with on_a_small_disk());
async fn a_small_disk_keeps_the_head_of_a_spill_and_is_no_failure(world: &World) {
    let text = world.bash("head -c 8000000 /dev/zero | tr '\\0' a").await;
    assert!(text.starts_with(&("a".repeat(1_000) + "\n[output truncated; full output: /")), "{text}");
    assert!(text.ends_with(SMALL_DISKS_SPILLS), "{text}");
    assert_eq!(world.bash("echo ok").await, "ok\n");
    let id = world.background("echo ok").await;
    world.ended(&id, SOON).await.expect("it ends");
    assert_eq!(world.output(&id).await, "ok\n\n[status: completed, exit code: 0]");
}

every_daemon!(a_disk_that_fills_up_under_a_task_costs_its_files_only with on_a_small_disk());
async fn a_disk_that_fills_up_under_a_task_costs_its_files_only(world: &World) {
    let id = world.background("head -c 8000000 /dev/zero | tr '\\0' b; echo end >&2").await;
    world.ended(&id, SOON).await.expect("it ends");
    let text = world.output(&id).await;
    let beginning =
        format!("{}\n[stderr]\nend\n\n[some output was dropped from memory; full output: ", "b".repeat(1_000));
    assert!(text.starts_with(&beginning), "{text}");
    assert!(text.ends_with("]\n[status: completed, exit code: 0]"), "{text}");
    let log = world.daemon().expect("there is one").log();
    assert_eq!(log.matches("output goes on in memory").count(), 1, "{log}");
    assert_eq!(world.bash("echo on").await, "on\n");
}

every_backend!(a_kill_ends_what_a_finished_task_left);
async fn a_kill_ends_what_a_finished_task_left(world: &World) {
    let id = world.background(&format!("{} & exit 5", world.sleep(300))).await;
    world.ended(&id, SOON).await.expect("it ends");
    assert!(!world.survivors().is_empty(), "it left something");
    assert_eq!(world.kill(&id).await, format!("killed background task {id}"));
    world.assert_no_survivors("after the kill");
    assert_eq!(world.output(&id).await, "(no new output)\n[status: completed, exit code: 5]");
    assert_eq!(world.kill(&id).await, format!("task {id} had already finished"));
}

every_backend!(a_concurrent_kill_waits_for_the_same_end with Setup {
    grace_ms: 1_000,
    spared: Some("a kill that is cut is asked again, and cannot say which of two has ended the task"),
    ..Setup::default()
});
async fn a_concurrent_kill_waits_for_the_same_end(world: &World) {
    let program = "$SIG{TERM} = sub { open F, '>', 'asked' }; open F, '>', 'ready'; close F; sleep 1 while 1";
    let id = world.background(&format!("exec perl -e \"{}\" {}", program.replace('$', "\\$"), world.tag())).await;
    wait_for("it is ready", SOON, || world.tmp().join("ready").exists()).await;
    let reply = async || {
        let text = world.kill(&id).await;
        world.assert_no_survivors("when a kill has been answered");
        text
    };
    let second = async {
        wait_for("the first one is at work", SOON, || world.tmp().join("asked").exists()).await;
        reply().await
    };
    let (first, second) = futures_util::future::join(reply(), second).await;
    assert_eq!(first, format!("killed background task {id}"));
    assert_eq!(second, format!("task {id} had already finished"));
    assert_eq!(world.output(&id).await, "(no new output)\n[status: killed by SIGKILL]");
}

every_backend!(a_workdir_that_cannot_be_used_is_named_with_the_reason);
async fn a_workdir_that_cannot_be_used_is_named_with_the_reason(world: &World) {
    assert_eq!(world.bash("mkdir d; echo > file; ln -s loop loop").await, "(no output)");
    let at = |name: &str| format!("{}/{name}", world.tmp().display());
    let long = at(&"n".repeat(300));
    let very_long = format!("/{}", "d/".repeat(2_100));
    for (workdir, said) in [
        (at("missing"), format!("ENOENT: workdir \"{}\" does not exist", at("missing"))),
        (at("file"), format!("ENOTDIR: workdir \"{}\" is not a directory", at("file"))),
        (at("loop"), format!("ELOOP: workdir \"{}\": too many symbolic links", at("loop"))),
        (long.clone(), format!("ENAMETOOLONG: workdir \"{long}\": name too long")),
        (very_long.clone(), format!("ENAMETOOLONG: workdir \"{very_long}\": name too long")),
    ] {
        // The original says these two without naming the program's shell.
        let spawn = if said.starts_with("ENOENT") { "spawn bash" } else { "spawn" };
        let expected = format!("Error: {spawn} {said}");
        assert_eq!(world.bash_with("pwd", json!({"workdir": workdir})).await, expected);
        let background = json!({"workdir": workdir, "run_in_background": true});
        assert_eq!(world.bash_with("pwd", background).await, expected);
    }
    assert_eq!(world.background("true").await.0, "bash-1", "a start that fails uses no id");
}

every_daemon!(a_workdir_that_is_shut_is_named with Setup { run_as: "nobody", prepare: shut(), ..Setup::default() });
async fn a_workdir_that_is_shut_is_named(world: &World) {
    let path = world.tmp().join("shut");
    let text = world.bash_with("pwd", json!({"workdir": path})).await;
    assert_eq!(text, format!("Error: spawn bash EACCES: workdir \"{}\": permission denied", path.display()));
}

fn shut() -> Vec<String> {
    vec!["mkdir -m 000 shut".to_owned()]
}

fn without_bash() -> Setup {
    Setup { environment: [("PATH".to_owned(), "/nonexistent".to_owned())].into(), ..Setup::default() }
}

every_backend!(a_missing_bash_is_no_missing_workdir with without_bash());
async fn a_missing_bash_is_no_missing_workdir(world: &World) {
    assert_eq!(world.bash("true").await, "Error: spawn bash ENOENT: bash not found on PATH");
    let text = world.bash_with("true", json!({"run_in_background": true})).await;
    assert_eq!(text, "Error: spawn bash ENOENT: bash not found on PATH");
}

every_backend!(a_nul_is_refused_in_our_words);
async fn a_nul_is_refused_in_our_words(world: &World) {
    assert_eq!(world.bash("echo a\0b").await, "Error: invalid command: contains a NUL byte");
    let text = world.bash_with("true", json!({"workdir": "/tmp\0"})).await;
    assert_eq!(text, "Error: invalid workdir: contains a NUL byte");
}

every_backend!(the_output_can_be_opened_by_its_name);
async fn the_output_can_be_opened_by_its_name(world: &World) {
    assert_eq!(world.bash("echo x > /dev/stderr; echo y > /dev/stdout").await, "y\n[stderr]\nx\n");
}

every_daemon!(the_output_can_be_opened_by_another_user with Setup { run_as: "nobody", ..Setup::default() });
async fn the_output_can_be_opened_by_another_user(world: &World) {
    let user =
        if Uid::effective().is_root() { "nobody".to_owned() } else { world.bash("id -un").await.trim().to_owned() };
    let text = world.bash("echo x > /dev/stderr; id -un > /dev/stdout").await;
    assert_eq!(text, format!("{user}\n[stderr]\nx\n"));
}

every_backend!(an_abort_does_not_stay_attached_to_a_task);
async fn an_abort_does_not_stay_attached_to_a_task(world: &World) {
    let abort = Abort::default();
    let arguments = json!({"command": world.sleep(300), "description": "d", "run_in_background": true}).to_string();
    let session = world.session(SESSION);
    let text = world.call(Some(&session), "bash", &arguments, &abort).await.text;
    assert_eq!(text, "started background task bash-1");
    abort.token.cancel();
    // The next call has been through the whole executor: whatever the abort does would have begun.
    assert_eq!(world.bash("echo next").await, "next\n");
    let id = executor_proto::types::TaskId("bash-1".to_owned());
    let task = world.executor().get_task(Some(&session.id), &id).await.expect("it is there");
    assert_eq!(task.status, TaskStatus::Running);
    assert_eq!(world.kill(&id).await, "killed background task bash-1");
}

every_backend!(a_completion_waits_for_its_owner);
async fn a_completion_waits_for_its_owner(world: &World) {
    let session = world.session(SESSION);
    let id = world.background("until [ -e go ]; do sleep .02; done; exit 2").await;
    world.dispose(&session.id).await;
    fs::write(world.tmp().join("go"), "").expect("it can be written");
    world.ended(&id, SOON).await.expect("it ends");
    assert_eq!(world.mailbox().taken(), []);
    let text = format!(
        "background bash task {id} finished [status: completed, exit code: 2]. Read its output with bash_output."
    );
    // The owner listens again, twice: it is told once.
    for _ in 0..2 {
        assert_eq!(world.bash("echo back").await, "back\n");
        wait_for("the notice", SOON, || !world.mailbox().taken().is_empty()).await;
        world.dispose(&session.id).await;
    }
    let taken = world.mailbox().taken();
    assert_eq!(taken.iter().map(|notice| (&notice.owner, &notice.text)).collect::<Vec<_>>(), [(&session.id, &text)]);
}

every_backend!(very_long_timeouts_are_honoured with Setup { max_timeout_ms: 1e12, ..Setup::default() });
async fn very_long_timeouts_are_honoured(world: &World) {
    assert_eq!(world.bash_with("sleep .3; echo hi", json!({"timeoutMs": 3_000_000_000_u64})).await, "hi\n");
    assert_eq!(world.bash_with("sleep .3; echo hi", json!({"timeoutMs": 1e11})).await, "hi\n");
}

every_backend!(an_abort_without_a_reason_says_cancelled);
async fn an_abort_without_a_reason_says_cancelled(world: &World) {
    let abort = Abort::default();
    abort.token.cancel();
    let arguments = json!({"command": "echo > ran", "description": "d"}).to_string();
    let result = world.call(Some(&world.session(SESSION)), "bash", &arguments, &abort).await;
    assert_eq!((result.text.as_str(), result.is_error), ("Error: aborted before spawn: cancelled", true));
    assert_eq!(world.bash("ls").await, "(no output)", "it ran");
}
