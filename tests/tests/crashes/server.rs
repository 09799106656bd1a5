//! The server dies at each step of a start, an end, a read, a kill and a taking over; a client sees nothing of it: every command
//! runs once, texts and bytes are those without a death, and each task has one notice.

use std::{fs, time::Duration};

use executor_daemon::crash::Point;
use executor_proto::types::{Exit, OwnerId, TaskId, TaskStatus, WatchEvent};
use executor_tests::{Backend, SESSION, Setup, Stopwatch, World, binaries, block_on, tell, wait_for, wait_until};
use futures_util::{StreamExt as _, stream};

use crate::{AT_ONCE, LIMIT, lines, passes, variable};

/// The points that a run passes first and a task after it: both are tried.
const OF_BOTH: [Point; 7] = [
    Point::StartBegun,
    Point::StartAsked,
    Point::StartAnswered,
    Point::StartRecorded,
    Point::StartReplied,
    Point::ExitSeen,
    Point::Released,
];

/// What a client sees.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    run: String,
    task: (String, TaskStatus),
    kill: String,
    notices: Vec<String>,
}

/// Reads on until `enough` of the text; the bytes of stdout go on where they ended, and nothing is dropped.
async fn read(world: &World, id: &TaskId, text: &mut String, enough: impl Fn(&str, &TaskStatus) -> bool) -> TaskStatus {
    let owner = OwnerId(SESSION.to_owned());
    let watch = Stopwatch::start();
    loop {
        // What is waited for is the task's end; what it has written by then is there.
        let wait = Some(Duration::from_millis(20));
        let output = world.executor().read_output(Some(&owner), id, wait).await.expect("it can be read");
        assert_eq!((output.stdout.start, output.stdout.dropped), (text.len() as u64, 0), "after {text:?}");
        text.push_str(str::from_utf8(&output.stdout.data).expect("text"));
        if enough(text, &output.status) {
            return output.status;
        }
        assert!(watch.elapsed() < LIMIT, "{text:?} is all that it wrote");
    }
}

/// Uses everything that a session uses; with `death` the server dies at that pass of that point.
async fn session(death: Option<(Point, u64)>) -> Seen {
    let mut setup = Setup { program: binaries::executor_daemon_with_crash_points, ..Setup::default() };
    setup.environment.extend(death.map(variable));
    let death_name = death.map_or_else(|| "no death".to_owned(), |(point, pass)| format!("{} {pass}", point.name()));
    let world = World::start(Backend::Unix, setup).await.expect("the executor starts");

    let run = world.bash("echo x >> runs; echo out; echo err >&2; exit 3").await;
    let task =
        world.background("echo x >> tasks; echo first; until [ -e go ]; do sleep .02; done; echo last; exit 4").await;
    let mut text = String::new();
    read(&world, &task, &mut text, |text, _| text == "first\n").await;
    if death.is_some_and(|(point, _)| point.of_taking_over()) {
        world.daemon().expect("it is a daemon's world").kill_server().await.expect("it is killed");
    }
    let killed = world.background(&format!("echo x >> kills; {}", world.sleep(300))).await;
    wait_for("it runs", LIMIT, || lines(&world.tmp().join("kills")) == 1).await;
    let kill = world.kill(&killed).await;
    fs::write(world.tmp().join("go"), "").expect("written");
    let status = read(&world, &task, &mut text, |_, status| *status != TaskStatus::Running).await;

    if let Some((_, pass)) = death {
        wait_for(format!("{death_name} is passed"), LIMIT, || passes(&world) >= pass).await;
    }
    // Whatever is told again is told before nothing waits any more.
    wait_for("both notices are here", LIMIT, || world.mailbox().taken().len() >= 2).await;
    wait_until("everything is acknowledged", LIMIT, async || {
        let mut events = world.direct().watch_tasks(&OwnerId(SESSION.to_owned())).await.ok()?;
        matches!(events.next().await, Some(Ok(WatchEvent::CaughtUp))).then_some(())
    })
    .await;
    assert_eq!(world.bash("echo and on").await, "and on\n", "after {death_name}");
    for file in ["runs", "tasks", "kills"] {
        assert_eq!(lines(&world.tmp().join(file)), 1, "{file} with {death_name}");
    }
    world.assert_no_survivors(format!("after {death_name}"));
    let mut notices: Vec<String> = world.mailbox().taken().into_iter().map(|notice| notice.text).collect();
    notices.sort_unstable();
    world.finish().await.expect("the executor ends well");
    Seen { run, task: (text, status), kill, notices }
}

#[test]
fn the_server_may_die_at_every_step() {
    let watch = Stopwatch::start();
    block_on(async {
        let expected = session(None).await;
        assert_eq!(expected.task, ("first\nlast\n".to_owned(), TaskStatus::Ended(Exit::Code(4))));
        assert_eq!(expected.notices.len(), 2);
        let first = Point::OF_SERVER.iter().map(|point| (*point, if point.of_taking_over() { 2 } else { 1 }));
        let deaths: Vec<_> = first.chain(OF_BOTH.map(|point| (point, 2))).collect();
        let count = deaths.len();
        stream::iter(deaths)
            .for_each_concurrent(AT_ONCE, |death| {
                let expected = &expected;
                async move { assert_eq!(session(Some(death)).await, *expected, "with a death at {death:?}") }
            })
            .await;
        tell(format_args!("{count} deaths at {} points: {:?}", Point::OF_SERVER.len(), watch.elapsed()));
    });
}
