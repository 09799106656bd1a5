//! The promises of the design, each with the numbers that it is given with.

use std::{collections::BTreeMap, fs, time::Duration};

use executor_proto::types::{OwnerId, TaskId, TaskStatus};
use executor_tests::{Setup, Stopwatch, World, every_backend, processes::Witness, wait_for, wait_until};
use futures_util::{StreamExt, future::join_all, stream};
use serde_json::json;
use tool_client::tools::Abort;

const SOON: Duration = Duration::from_secs(15);

/// A program that does all it can to be left over. The tag is in its arguments, and nothing else says whose it is.
struct Opponent {
    what: &'static str,
    command: String,
    /// It is at work when so many processes are seen, or else when it has made this file.
    at_work: Result<usize, &'static str>,
}

fn opponents(world: &World) -> Vec<Opponent> {
    let tag = world.tag();
    let sleep = world.sleep(300);
    let daemonize = "fork and exit; POSIX::setsid(); fork and exit; $SIG{$_} = \"IGNORE\" for qw(TERM HUP INT); \
                     open F, \">daemonized\"; close F; chdir \"/\"; open STDIN, \"/dev/null\"; \
                     open STDOUT, \">/dev/null\"; open STDERR, \">/dev/null\"; sleep 300";
    // Each hop is a new process in a new session whose parent is gone. A list of processes hardly ever shows one.
    let hop = "while (1) { my $pid = fork; exit if $pid; POSIX::setsid(); select undef, undef, undef, 0.002; \
               if ($n++ == 20) { open F, \">hopped\"; close F } }";
    let opponent = |what, at_work, command| Opponent { what, command: format!("exec 9>witness; {command}"), at_work };
    vec![
        opponent(
            "sessions of their own",
            Ok(21),
            format!("for i in {{1..20}}; do (setsid env -i {sleep} &); done; {sleep}"),
        ),
        opponent("a daemon", Err("daemonized"), format!("env -i perl -MPOSIX -e '{daemonize}' {tag}; {sleep}")),
        opponent(
            "hoppers",
            Err("hopped"),
            format!("for i in 1 2 3; do env -i perl -MPOSIX -e '{hop}' {tag} & done; {sleep}"),
        ),
        opponent("a deaf shell", Ok(3), format!("trap '' TERM HUP INT; (trap '' TERM; {sleep}) & {sleep}; {sleep}")),
        opponent("a stopped child", Ok(2), format!("{sleep} & kill -STOP $!; {sleep}")),
    ]
}

impl Opponent {
    /// Waits until it has really begun.
    async fn begins(&self, world: &World, witness: &mut Witness) {
        let at_work = || match self.at_work {
            Ok(processes) => world.survivors().len() >= processes,
            Err(file) => world.tmp().join(file).exists(),
        };
        wait_for(format_args!("{} is at work", self.what), SOON, || witness.is_held() && at_work()).await;
        if let Err(file) = self.at_work {
            fs::remove_file(world.tmp().join(file)).expect("it was there");
        }
    }
}

every_backend!(a_kill_reply_is_evidence);
async fn a_kill_reply_is_evidence(world: &World) {
    for opponent in opponents(world) {
        let what = opponent.what;
        let mut witness = Witness::new(world.tmp()).expect("it can be made");
        let id = world.background(&opponent.command).await;
        opponent.begins(world, &mut witness).await;
        assert_eq!(world.kill(&id).await, format!("killed background task {id}"), "{what}");
        assert!(!witness.is_held(), "something is left of {what}: {:#?}", world.survivors());
        world.assert_no_survivors(format_args!("after the kill of {what}"));
    }
}

every_backend!(a_timeout_leaves_nothing_either);
async fn a_timeout_leaves_nothing_either(world: &World) {
    for Opponent { what, command, .. } in opponents(world) {
        let mut witness = Witness::new(world.tmp()).expect("it can be made");
        let watch = Stopwatch::start();
        let text = world.bash_with(&command, json!({"timeoutMs": 700})).await;
        watch.assert_within(what, Duration::from_millis(700 + 300 + 2_000));
        assert!(text.contains("[timed out after 700ms]"), "{what}: {text}");
        assert!(!text.contains("still running"), "{what}: {text}");
        assert!(!witness.is_held(), "something is left of {what}: {:#?}", world.survivors());
        world.assert_no_survivors(format_args!("after the timeout of {what}"));
    }
}

every_backend!(an_abort_leaves_nothing_either);
async fn an_abort_leaves_nothing_either(world: &World) {
    for opponent in opponents(world) {
        let what = opponent.what;
        let mut witness = Witness::new(world.tmp()).expect("it can be made");
        let abort = Abort::default();
        let arguments = json!({"command": opponent.command, "description": "d"}).to_string();
        let session = world.session("s1");
        let raise = async {
            opponent.begins(world, &mut witness).await;
            abort.token.cancel();
        };
        let (result, ()) =
            futures_util::future::join(world.call(Some(&session), "bash", &arguments, &abort), raise).await;
        assert_eq!((result.text.as_str(), result.is_error), ("Error: command aborted", true), "{what}");
        assert!(!witness.is_held(), "something is left of {what}: {:#?}", world.survivors());
        world.assert_no_survivors(format_args!("after the abort of {what}"));
    }
}

every_backend!(every_call_ends_in_time with Setup { grace_ms: 500, ..Setup::default() });
async fn every_call_ends_in_time(world: &World) {
    let sleep = world.sleep(300);
    let cases = [
        format!("{sleep} & exit 0"),
        format!("setsid {sleep} & exit 0"),
        format!("(trap '' TERM; {sleep}) & {sleep}"),
        "yes & yes >&2 & exit 0".to_owned(),
        "exec yes".to_owned(),
        format!("exec >&- 2>&-; {sleep}"),
        format!("kill -STOP $$; {sleep}"),
    ];
    join_all(cases.iter().map(|command| async move {
        let watch = Stopwatch::start();
        world.bash_with(command, json!({"timeoutMs": 1_000})).await;
        watch.assert_within(command, Duration::from_millis(1_000 + 500 + 2_000));
    }))
    .await;
}

/// Writes bytes in pieces that respect no character, and a copy of them to a file.
const WRITER: &str = r#"
import os, random, sys
random.seed(7)
alphabet = ["a", "\n", "é", "€", "😀", "\u0000"]
data = "".join(random.choice(alphabet) for _ in range(60000)).encode() + b"\xff\xfe"
open("copy", "wb").write(data)
at = 0
while at < len(data):
    size = random.choice([1, 2, 3, 7, 100, 4096, 20000])
    os.write(1, data[at:at + size])
    at += size
"#;

every_backend!(bytes_are_exact_for_any_reader with Setup { max_output_bytes: 1_000_000, ..Setup::default() });
async fn bytes_are_exact_for_any_reader(world: &World) {
    fs::write(world.tmp().join("writer.py"), WRITER).expect("it can be written");
    let id = world.background("exec python3 writer.py").await;
    let owner = world.session("s1").id;
    let mut seen = Vec::new();
    let mut reads = 0;
    loop {
        let output = world.executor().read_output(Some(&owner), &id, None).await.expect("it can be read");
        assert_eq!(output.stdout.start, seen.len() as u64, "in order, without gaps");
        assert_eq!(output.stdout.dropped, 0);
        seen.extend_from_slice(&output.stdout.data);
        reads += 1;
        if output.status != TaskStatus::Running {
            assert_eq!(output.status, TaskStatus::Ended(executor_proto::types::Exit::Code(0)));
            break;
        }
        // As long as more is to come, no read ends inside a character.
        if let Err(error) = std::str::from_utf8(&output.stdout.data) {
            assert!(error.error_len().is_some(), "a part of a character was given: {error}");
        }
    }
    assert!(reads > 1, "the reader raced with the writer");
    assert!(seen == fs::read(world.tmp().join("copy")).expect("it was written"), "the bytes differ");
}

every_backend!(each_task_gives_one_notice_to_its_owner);
async fn each_task_gives_one_notice_to_its_owner(world: &World) {
    const TASKS: usize = 60;
    let sessions = ["s1", "s2", ""].map(|id| world.session(id));
    let started: Vec<(TaskId, OwnerId, usize)> = stream::iter(0..TASKS)
        .map(|index| {
            let session = &sessions[index % sessions.len()];
            async move {
                let command = format!("exit {index}");
                let arguments = json!({"command": command, "description": "d", "run_in_background": true}).to_string();
                let text = world.call(Some(session), "bash", &arguments, &Abort::default()).await.text;
                let id = text.strip_prefix("started background task ").expect("it starts").to_owned();
                (TaskId(id), session.id.clone(), index)
            }
        })
        .buffer_unordered(8)
        .collect()
        .await;
    // A task without a session gives none.
    let arguments = json!({"command": "true", "description": "d", "run_in_background": true}).to_string();
    world.call(None, "bash", &arguments, &Abort::default()).await;
    wait_until("all notices", SOON, async || (world.mailbox().taken().len() >= TASKS).then_some(())).await;
    // A last task per session is told of after everything else that its session is told.
    for session in &sessions {
        let arguments = json!({"command": "true", "description": "last", "run_in_background": true}).to_string();
        world.call(Some(session), "bash", &arguments, &Abort::default()).await;
    }
    wait_until("the last notices", SOON, async || (world.mailbox().taken().len() >= TASKS + 3).then_some(())).await;
    let taken = world.mailbox().taken();
    assert_eq!(taken.len(), TASKS + 3, "none twice");
    let told: BTreeMap<TaskId, (OwnerId, String)> =
        taken.into_iter().map(|notice| (notice.task_id, (notice.owner, notice.text))).collect();
    for (id, owner, code) in started {
        let text = format!(
            "background bash task {id} finished [status: completed, exit code: {code}]. Read its output with bash_output."
        );
        assert_eq!(told.get(&id), Some(&(owner, text)));
    }
}
