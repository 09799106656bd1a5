//! The keeper dies at each step, and another daemon is started over what it left: what it had started has ended or is named, the
//! output of every task can be read, an exit that nobody saw is unknown, each task has one notice, and no key ran twice.

use std::{collections::BTreeMap, fs, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use executor_daemon::crash::Point;
use executor_proto::types::{Exit, OwnerId, StreamDelta, TaskId, TaskInfo, TaskOutput, TaskStatus};
use executor_tests::{Backend, Dies, SESSION, Setup, Stopwatch, World, binaries, block_on, tell, wait_for, wait_until};
use futures_util::{FutureExt as _, StreamExt as _, stream};
use nix::sys::signal::Signal;
use serde_json::json;
use tool_client::{
    executor::{Executor, ExecutorError},
    session::Session,
    tools::{Abort, Tools},
};

use crate::{AT_ONCE, LIMIT, lines, passes, variable};

/// Where a start dies, the first (a run), the second (a task) and the last (one that is killed) are tried.
const OF_STARTS: [Point; 2] = [Point::HelperAssigned, Point::StartHeard];

/// Files to which each command adds a line when it begins.
const MARKS: [&str; 4] = ["runs", "tasks", "floods", "kills"];

/// What is started, with what each writes to stdout and how it ends when it is let.
const RUN: &str = "echo x >> runs; sleep 0.1 > /dev/null 2>&1 & echo out; echo err >&2; exit 3";
const RUN_TEXT: &str = "out\n[stderr]\nerr\n[exit code: 3]";
const TASK: &str = "echo x >> tasks; echo first; until [ -e go ]; do sleep .02; done; echo last; exit 4";
const FLOOD: &str = "echo x >> floods; seq 20000; exit 5";

/// A session that outlives its daemons.
struct Client {
    tools: Tools,
    executor: Arc<dyn Executor>,
    session: Session,
}

/// What it was told until its daemon had died.
struct Told {
    run: String,
    /// What was answered to each start, by the file of its mark.
    starts: BTreeMap<&'static str, String>,
    kill: Option<String>,
    /// How much of the task's stdout it has read.
    read: String,
}

impl Client {
    fn of(world: &World) -> Self {
        let executor = Arc::clone(world.executor());
        Self { tools: Tools::new(Arc::clone(&executor)), executor, session: world.session(SESSION) }
    }

    async fn call(&self, tool: &str, arguments: serde_json::Value) -> String {
        self.tools.call(Some(&self.session), tool, &arguments.to_string(), &Abort::default()).await.text
    }

    async fn bash(&self, command: &str, background: bool) -> String {
        let arguments = json!({"command": command, "description": "test", "run_in_background": background});
        self.call("bash", arguments).await
    }

    /// Asks again where five attempts in a row have met no daemon.
    async fn read(&self, id: &TaskId, wait: Duration) -> TaskOutput {
        wait_until(format!("{id} can be read"), LIMIT, async || {
            match self.executor.read_output(Some(&self.session.id), id, Some(wait)).await {
                Ok(output) => Some(output),
                // Or the server of the dead keeper's, on its way out.
                Err(ExecutorError::Unavailable { .. } | ExecutorError::Stopping) => None,
                Err(error) => panic!("{id} cannot be read: {error}"),
            }
        })
        .await
    }

    /// Uses everything that passes a step of the keeper's; some of it fails when the keeper dies.
    async fn begin(&self) -> Told {
        let run = self.bash(RUN, false).await;
        let mut starts = BTreeMap::new();
        starts.insert("tasks", self.bash(TASK, true).await);
        starts.insert("floods", self.bash(FLOOD, true).await);
        let mut read = String::new();
        if let Some(id) = id(&starts["tasks"]) {
            loop {
                let output = self.read(&id, Duration::from_millis(20)).await;
                take(&mut read, &output.stdout, "first\nlast\n");
                if read == "first\n" || output.status != TaskStatus::Running {
                    break;
                }
            }
        }
        if let Some(id) = id(&starts["floods"]) {
            wait_until("the flood ends", LIMIT, async || {
                let task = self.executor.get_task(Some(&self.session.id), &id).await;
                task.is_ok_and(|task| task.status != TaskStatus::Running).then_some(())
            })
            .await;
        }
        starts.insert("kills", self.bash("echo x >> kills; exec sleep 300", true).await);
        let kill = match id(&starts["kills"]) {
            Some(id) => Some(self.call("bash_kill", json!({"task_id": id.0})).await),
            None => None,
        };
        Told { run, starts, kill, read }
    }
}

fn id(started: &str) -> Option<TaskId> {
    started.strip_prefix("started background task ").map(|id| TaskId(id.to_owned()))
}

/// Takes what a read has brought: the next bytes of what its command writes.
fn take(had: &mut String, delta: &StreamDelta, written: &str) {
    assert_eq!((delta.start, delta.dropped), (had.len() as u64, 0), "after {had:?}");
    had.push_str(str::from_utf8(&delta.data).expect("text"));
    assert!(written.starts_with(had.as_str()), "{had:?} was never written");
}

/// Whether a call's text says that its outcome is not known, or that there was nobody to ask.
fn lost(text: &str) -> bool {
    text.starts_with("Error: outcome unknown: ") || text.starts_with("Error: executor unavailable: ")
}

/// What makes the keeper pass the point at which it dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// The session's own calls.
    Calls,
    /// Another server takes over from one that was killed.
    ServerKilled,
    /// Another server is started on SIGHUP, while the one before serves.
    Hangup,
}

/// Plays the session, has the keeper die and another daemon come; returns what the session was told, and the tasks that are known.
async fn play(
    (point, pass, why): (Point, u64, Why),
    world: &mut World,
    mut setup: Setup,
    client: &Client,
) -> (Told, Vec<TaskInfo>) {
    setup.environment.remove("EXECUTOR_CRASH");
    let told = if why == Why::Calls {
        let (told, restarted) = tokio::join!(client.begin(), world.restart_after(Dies::KeeperByItself, &setup, |_| {}));
        restarted.expect("it comes back");
        told
    } else {
        let told = client.begin().await;
        let daemon = world.daemon().expect("it is a daemon's world");
        match why {
            Why::Hangup => daemon.signal(Signal::SIGHUP).expect("sent"),
            Why::ServerKilled | Why::Calls => drop(daemon.kill_server().await.expect("it is killed")),
        }
        world.restart_after(Dies::KeeperByItself, &setup, |_| {}).await.expect("it comes back");
        told
    };
    assert_eq!(passes(world), pass, "{point:?}");
    fs::write(world.tmp().join("go"), "").expect("written");
    let tasks = wait_until("all has ended", LIMIT, async || {
        let listed = client.executor.list_tasks(Some(&client.session.id)).await.ok()?;
        let over = listed.iter().all(|task| task.status != TaskStatus::Running && task.leftovers.is_empty());
        over.then(|| listed.into_iter().filter(|task| task.id.0.starts_with("bash-")).collect::<Vec<_>>())
    })
    .await;
    (told, tasks)
}

async fn session(death: (Point, u64, Why)) {
    let (point, pass, _) = death;
    let mut setup = Setup { program: binaries::executor_daemon_with_crash_points, ..Setup::default() };
    setup.environment.extend([variable((point, pass))]);
    let mut world = World::start(Backend::Unix, setup.clone()).await.expect("the executor starts");
    world.attach(&OwnerId(SESSION.to_owned()));
    let client = Client::of(&world);
    let (told, tasks) = play(death, &mut world, setup, &client).await;

    let death = format!("{death:?}");
    world.assert_no_survivors(format_args!("after {death}"));
    for mark in MARKS {
        assert!(lines(&world.tmp().join(mark)) <= 1, "{mark} twice with {death}");
    }
    check_answers(&death, &told, &tasks);
    if told.run == RUN_TEXT {
        assert_eq!(lines(&world.tmp().join("runs")), 1, "{death}");
    }
    check_output(&death, &client, told).await;
    check_notices(&death, &world, &tasks).await;
    world.finish().await.expect("the executor ends well");
}

/// Calls were answered, or the session was told that nobody knows; each task has an end that somebody saw, or an unknown one.
fn check_answers(death: &str, told: &Told, tasks: &[TaskInfo]) {
    let unknown = "[exit unknown: executor restarted]";
    assert!(told.run == RUN_TEXT || told.run.ends_with(unknown) || lost(&told.run), "{death}: {}", told.run);
    for (mark, text) in &told.starts {
        match id(text) {
            Some(id) => assert!(tasks.iter().any(|task| task.id == id), "{death}: {text}, and not among {tasks:?}"),
            None => assert!(lost(text), "{death}: {mark}: {text}"),
        }
    }
    if let (Some(kill), Some(id)) = (&told.kill, id(&told.starts["kills"])) {
        let right = [format!("killed background task {id}"), format!("task {id} had already finished")];
        let named = kill.starts_with(&format!("Error: could not end task {id}: still running: "));
        assert!(right.contains(kill) || named || lost(kill), "{death}: {kill}");
    }
    let right = [
        TaskStatus::Ended(Exit::Code(4)),
        TaskStatus::Ended(Exit::Code(5)),
        TaskStatus::Ended(Exit::Unknown("executor restarted".to_owned())),
        TaskStatus::Killed(Some(15)),
    ];
    for task in tasks {
        assert!(right.contains(&task.status), "{death}: {task:?}");
    }
}

/// What each task had written is read, once, and all of it where its end was seen.
async fn check_output(death: &str, client: &Client, mut told: Told) {
    if let Some(id) = id(&told.starts["tasks"]) {
        let output = client.read(&id, Duration::ZERO).await;
        take(&mut told.read, &output.stdout, "first\nlast\n");
        let whole = output.status == TaskStatus::Ended(Exit::Code(4));
        assert!(!whole || told.read == "first\nlast\n", "{death}: {:?}, {:?}", told.read, output.status);
        let again = client.read(&id, Duration::ZERO).await;
        assert_eq!((again.status, &again.stdout.data[..]), (output.status, &b""[..]), "{death}");
    }
    if let Some(id) = id(&told.starts["floods"]) {
        let written: String = (1..=20_000).map(|number| format!("{number}\n")).collect();
        let output = client.read(&id, Duration::ZERO).await;
        let start = usize::try_from(output.stdout.start).expect("small");
        let end = start + output.stdout.data.len();
        assert_eq!(output.stdout.data, written.as_bytes()[start..end], "{death}");
        assert!(output.status != TaskStatus::Ended(Exit::Code(5)) || end == written.len(), "{death}: {end} bytes");
    }
}

/// One notice each, also after a while in which another could have come.
async fn check_notices(death: &str, world: &World, tasks: &[TaskInfo]) {
    wait_for(format_args!("the notices after {death}"), LIMIT, || world.mailbox().taken().len() >= tasks.len()).await;
    let last = world.background("true").await;
    let of = |id: &TaskId| world.mailbox().taken().iter().filter(|notice| notice.task_id == *id).count();
    wait_for(format_args!("a later notice after {death}"), LIMIT, || of(&last) == 1).await;
    for task in tasks {
        assert_eq!(of(&task.id), 1, "{death}: notices of {}", task.id);
    }
    assert_eq!(world.mailbox().taken().len(), tasks.len() + 1, "{death}");
}

#[test]
fn the_keeper_may_die_at_every_step() {
    let watch = Stopwatch::start();
    block_on(async {
        let replaces = |point: &Point| point.of_taking_over() || *point == Point::CommandCarried;
        let (of_taking_over, others): (Vec<Point>, Vec<Point>) = Point::OF_KEEPER.iter().copied().partition(replaces);
        // The first daemon passes the way to take over when it is started, and carries nothing then.
        let second = |point: Point| if point == Point::CommandCarried { 1 } else { 2 };
        let replaced = of_taking_over
            .into_iter()
            .flat_map(|point| [Why::ServerKilled, Why::Hangup].map(|why| (point, second(point), why)));
        let first = others.into_iter().map(|point| (point, 1));
        let more = OF_STARTS.iter().flat_map(|point| [(*point, 2), (*point, 4)]);
        let of_streams = [(Point::FileHeld, 4), (Point::ExitHeard, 2), (Point::ReleaseTaken, 2)];
        let called = first.chain(more).chain(of_streams).map(|(point, pass)| (point, pass, Why::Calls));
        let deaths: Vec<_> = called.chain(replaced).collect();
        let count = deaths.len();
        let played = stream::iter(deaths).map(async |death| {
            let played = AssertUnwindSafe(session(death)).catch_unwind().await;
            played.is_err().then_some(death)
        });
        let failed: Vec<_> = played.buffer_unordered(AT_ONCE).filter_map(async |failed| failed).collect().await;
        assert!(failed.is_empty(), "these are told above: {failed:?}");
        tell(format_args!("{count} deaths of the keeper at {} points: {:?}", Point::OF_KEEPER.len(), watch.elapsed()));
    });
}
