//! What tasks had written when their keeper or host died, with real processes: still readable, once, and honest about what
//! is missing.

use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use executor_daemon::{
    config::Settings,
    engine::Engine,
    ids::{Caller, TenantId},
    keeper::embedded::{self, EmbeddedOptions},
};
use executor_proto::types::{
    CommandSpec, Exit, OwnerId, ReadId, ReadStreamEvent, StartKey, StreamDelta, StreamName, TaskId, TaskOutput,
    TaskStatus, WatchEvent,
};

/// For what has to happen at all; nothing waits this long when all is well.
const LIMIT: Duration = Duration::from_secs(20);

const TAIL: u64 = 1_000;

/// An executor that dies and comes back over the same directory.
struct World {
    engine: Option<Engine>,
    directory: tempfile::TempDir,
    adjust: fn(&mut Settings),
}

impl World {
    async fn new() -> Self {
        Self::with(|_| {}).await
    }

    async fn with(adjust: fn(&mut Settings)) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut world = Self { engine: None, directory, adjust };
        world.start().await;
        world
    }

    async fn start(&mut self) {
        let environment = [("PATH", "/usr/local/bin:/usr/bin:/bin")].map(|(name, value)| (name.into(), value.into()));
        let directory = self.directory.path();
        let environment = Settings::command_environment(environment);
        let mut settings = Settings::new(directory.join("state"), directory.to_owned(), environment);
        settings.max_output_bytes = TAIL;
        settings.grace_ms = 300;
        (self.adjust)(&mut settings);
        let spill_dir = settings.state_dir.join("spill");
        fs::create_dir_all(&settings.state_dir).expect("the state directory");
        let program = Some(env!("CARGO_BIN_EXE_executor-daemon").into());
        let keeper = embedded::start(EmbeddedOptions { program, spill_dir }).await.expect("the keeper starts");
        self.engine = Some(Engine::start(settings, keeper).await.expect("the engine starts"));
    }

    fn engine(&self) -> &Engine {
        self.engine.as_ref().expect("it was started")
    }

    /// The keeper is gone with the engine, as after a kill of both: nothing more is written down.
    async fn die(&mut self) {
        self.engine = None;
        // Whatever it was that ran has its directory here.
        let directory = fs::canonicalize(self.directory.path()).expect("it is there");
        until("its commands are ended", || {
            let processes = fs::read_dir("/proc").expect("proc").flatten();
            !processes
                .map(|entry| entry.path().join("cwd"))
                .any(|cwd| fs::read_link(cwd).is_ok_and(|cwd| cwd == directory))
        })
        .await;
    }

    /// Another boot of the host is what the journal takes the next start for.
    fn reboot(&self) {
        let journal = rusqlite::Connection::open(self.state("journal.sqlite")).expect("it opens");
        journal.execute("update worlds set boot = 'an earlier one'", ()).expect("it can be written");
    }

    fn state(&self, name: &str) -> PathBuf {
        self.directory.path().join("state").join(name)
    }

    fn rings(&self) -> Vec<PathBuf> {
        let mut found: Vec<_> = fs::read_dir(self.state("rings"))
            .into_iter()
            .flatten()
            .map(|entry| entry.expect("readable").path())
            .collect();
        found.sort_unstable();
        found
    }

    async fn task(&self, command: &str) -> TaskId {
        let spec = CommandSpec { command: command.to_owned().into(), ..CommandSpec::default() };
        self.engine().start_task(&owner(), StartKey(unique()), spec).await.expect("it starts")
    }

    async fn read(&self, id: &TaskId) -> TaskOutput {
        self.engine().read_output(&owner(), id, &ReadId(unique()), None).await.expect("it may be read")
    }

    /// Waits until so many bytes of its stdout have been taken; reads nothing.
    async fn wrote(&self, id: &TaskId, bytes: u64) {
        let until = Instant::now() + LIMIT;
        while self.engine().get_task(&owner(), id).await.expect("it is known").stdout_total < bytes {
            assert!(Instant::now() < until, "{bytes} bytes did not come in time");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Everything that is kept of its stdout, and where the stream ends.
    async fn stream(&self, id: &TaskId) -> (Vec<(u64, String)>, u64) {
        let mut reader = self.engine().read_stream(&owner(), id, StreamName::Stdout, 0, true).expect("it is known");
        let mut chunks = Vec::new();
        loop {
            match reader.next().await.expect("an end comes before nothing") {
                ReadStreamEvent::Chunk(chunk) => {
                    chunks.push((chunk.offset, String::from_utf8_lossy(&chunk.data).into_owned()));
                }
                ReadStreamEvent::End { total, closed } => {
                    assert!(closed);
                    return (chunks, total);
                }
            }
        }
    }

    async fn told(&self) -> Vec<TaskId> {
        let mut watch = self.engine().watch_tasks(&owner()).expect("an owner");
        let mut told = Vec::new();
        while let Some(WatchEvent::Completion(completion)) = watch.next().await {
            told.push(completion.task_id);
        }
        told
    }

    async fn close(self) {
        self.engine().drain().await;
    }
}

fn owner() -> Caller {
    Caller { tenant: TenantId::default_tenant(), owner: Some(OwnerId("a".into())) }
}

fn unique() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Keys outlive the engine under test, in its journal.
    format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < until, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn lines(range: std::ops::Range<u32>) -> String {
    range.map(|number| format!("line {number}\n")).collect()
}

fn text(delta: &StreamDelta) -> &str {
    std::str::from_utf8(&delta.data).expect("text")
}

fn ended(reason: &str) -> TaskStatus {
    TaskStatus::Ended(Exit::Unknown(reason.to_owned()))
}

const LINES: &str = "for ((i = 0; i < 20; i++)); do echo line $i; [ $i = 9 ] && until [ -e go ]; do sleep 0.01; done; done; \
                     printf 'half \\xe2\\x89'; echo err >&2; sleep 100";

/// A task that has written its lines, of which the first half was read.
async fn half_read(world: &World) -> TaskId {
    let id = world.task(LINES).await;
    let first = lines(0..10);
    world.wrote(&id, first.len() as u64).await;
    assert_eq!(text(&world.read(&id).await.stdout), first);
    fs::write(world.directory.path().join("go"), "").expect("written");
    world.wrote(&id, lines(0..20).len() as u64 + 7).await;
    let engine = world.engine();
    let until = Instant::now() + LIMIT;
    while engine.get_task(&owner(), &id).await.expect("it is known").stderr_total < 4 {
        assert!(Instant::now() < until, "stderr did not come in time");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    id
}

/// Until the ring of stdout holds a proof of all of it: after that the file does not change any more.
async fn proven(world: &World) {
    let path = world.rings().into_iter().find(|path| path.ends_with("1.stdout")).expect("it is there");
    let total = lines(0..20).len() as u64 + 7;
    let field = |at| {
        let mut bytes = [0; 8];
        fs::File::open(&path).and_then(|file| file.read_exact_at(&mut bytes, at)).expect("it can be read");
        u64::from_be_bytes(bytes)
    };
    // Where a proof ends, in either slot (`output/record.rs`).
    until("a proof", || field(64 + 24) == total || field(128 + 24) == total).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_not_read_when_the_keeper_died_is_read_once() {
    let mut world = World::new().await;
    let quiet = world.task("sleep 100").await;
    let id = half_read(&world).await;
    assert_eq!(world.rings().len(), 2, "none of a task without output: {:?}", world.rings());
    world.die().await;
    for restart in 0..3 {
        world.start().await;
        if restart == 0 {
            let output = world.read(&id).await;
            // The end: an incomplete character waits no longer.
            assert_eq!(output.stdout.data, [lines(10..20).as_bytes(), b"half \xe2\x89"].concat());
            assert_eq!(
                (output.stdout.start, output.stdout.dropped, output.stdout.missing),
                (lines(0..10).len() as u64, 0, 0)
            );
            assert_eq!((text(&output.stderr), output.status), ("err\n", ended("executor restarted")));
        }
        let again = world.read(&id).await;
        assert_eq!((text(&again.stdout), text(&again.stderr), again.stdout.missing), ("", "", 0));
        let (chunks, total) = world.stream(&id).await;
        assert_eq!((total, chunks.len(), chunks[0].0), (lines(0..20).len() as u64 + 7, 1, 0));
        assert!(chunks[0].1.starts_with(&lines(0..20)));
        let output = world.read(&quiet).await;
        assert_eq!((text(&output.stdout), output.stdout.missing, output.status), ("", 0, ended("executor restarted")));
        let mut told = world.told().await;
        told.sort_unstable();
        assert_eq!(told, [quiet.clone(), id.clone()], "one notice each");
        // What was in it is a finished task's kept output now.
        assert_eq!(world.rings(), Vec::<PathBuf>::new());
        world.die().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_another_boot_what_is_proven_is_read_and_a_newer_page_marks_the_rest() {
    let rest = [lines(10..20).as_bytes(), b"half "].concat();
    for torn in [false, true] {
        let mut world = World::new().await;
        let id = half_read(&world).await;
        proven(&world).await;
        world.die().await;
        if torn {
            // A total that its blocks on the disk do not come up to.
            let ring = world.rings().into_iter().find(|path| path.ends_with("1.stdout")).expect("it is there");
            let file = fs::File::options().write(true).open(&ring).expect("it is there");
            let end = lines(0..20).len() as u64 + 7;
            file.write_all_at(&[0; 4], 4096 + end - 4).expect("written");
        }
        world.reboot();
        world.start().await;
        let output = world.read(&id).await;
        assert_eq!(output.status, ended("executor host restarted"));
        if torn {
            // Nothing of it is as it was proven to be: it is all missing, and said to be.
            assert_eq!((text(&output.stdout), output.stdout.missing), ("", rest.len() as u64 + 2));
        } else {
            assert_eq!(&output.stdout.data[..rest.len()], rest);
            assert_eq!((output.stdout.data.len(), output.stdout.missing), (rest.len() + 2, 0));
        }
        let again = world.read(&id).await;
        assert_eq!((text(&again.stdout), again.stdout.missing, again.stdout.dropped), ("", 0, 0));
        assert_eq!(world.rings(), Vec::<PathBuf>::new());
        world.close().await;
    }
}

/// What somebody or something may make of a file, and how much of the stream can be told then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ring_file_in_any_state_is_read_as_far_as_it_goes_and_marked() {
    let total = lines(0..20).len() as u64 + 7;
    let read = lines(0..10).len() as u64;
    type Case = (&'static str, fn(&Path), u64, u64);
    let cases: [Case; 6] = [
        ("emptied", |path| fs::write(path, "").expect("written"), 0, 1),
        ("garbage", |path| fs::write(path, vec![b'x'; 9_000]).expect("written"), 0, 1),
        ("gone", |path| fs::remove_file(path).expect("removed"), 0, 1),
        ("a directory", |path| fs::remove_file(path).and_then(|()| fs::create_dir(path)).expect("made"), 0, 1),
        (
            "a link",
            |path| fs::remove_file(path).and_then(|()| std::os::unix::fs::symlink("/etc/passwd", path)).expect("made"),
            0,
            1,
        ),
        (
            "cut off in its bytes",
            |path| fs::File::options().write(true).open(path).and_then(|file| file.set_len(4_100)).expect("cut"),
            total - read,
            0,
        ),
    ];
    for (what, damage, dropped, missing) in cases {
        let mut world = World::new().await;
        let id = half_read(&world).await;
        world.die().await;
        damage(&world.rings().into_iter().find(|path| path.ends_with("1.stdout")).expect("it is there"));
        world.start().await;
        let output = world.read(&id).await;
        assert_eq!(
            (text(&output.stdout), output.stdout.dropped, output.stdout.missing),
            ("", dropped, missing),
            "{what}"
        );
        assert_eq!((text(&output.stderr), output.status), ("err\n", ended("executor restarted")), "{what}");
        let again = world.read(&id).await;
        assert_eq!((text(&again.stdout), again.stdout.dropped, again.stdout.missing), ("", 0, 0), "{what}");
        let (chunks, end) = world.stream(&id).await;
        assert_eq!((chunks, end), (vec![], if missing > 0 { read + 1 } else { total }), "{what}");
        world.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spill_is_still_there_after_the_keeper_s_death() {
    let mut world = World::new().await;
    let id = world.task("seq 1 1000; sleep 100").await;
    let whole: String = (1..=1_000).map(|number| format!("{number}\n")).collect();
    world.wrote(&id, whole.len() as u64).await;
    let spill =
        || fs::read_dir(world.state("spill")).expect("it is there").next().map(|file| file.expect("readable").path());
    until("the spill is written", || {
        spill().is_some_and(|path| fs::read(path).is_ok_and(|bytes| bytes == whole.as_bytes()))
    })
    .await;
    let path = spill().expect("it is there");
    world.die().await;
    world.start().await;
    let output = world.read(&id).await.stdout;
    assert_eq!(
        (text(&output), output.dropped, output.missing),
        (&whole[whole.len() - 1_000..], whole.len() as u64 - 1_000, 0)
    );
    let fact = output.spill.expect("it is named");
    assert_eq!((&fact.path[..], fact.cut_at), (path.as_os_str().as_encoded_bytes(), None));
    let (chunks, total) = world.stream(&id).await;
    assert_eq!(chunks.iter().map(|(_, text)| text.as_str()).collect::<String>(), whole);
    assert_eq!((total, fs::read(&path).expect("it is kept")), (whole.len() as u64, whole.into_bytes()));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_go_with_the_end_of_their_task_and_a_run_has_none() {
    let world = World::with(|settings| settings.finished_kept_seconds = 3).await;
    let spec = CommandSpec { command: "echo run; ls state/rings 2>/dev/null".into(), ..CommandSpec::default() };
    let mut run = world.engine().run(&owner(), StartKey(unique()), spec).await.expect("it starts");
    assert_eq!(run.finished().await.stdout.tail, "run\n");
    let id = world.task("echo out; until [ -e go ]; do sleep 0.01; done").await;
    world.wrote(&id, 4).await;
    assert_eq!(world.rings().len(), 1);
    fs::write(world.directory.path().join("go"), "").expect("written");
    until("its ring is gone", || world.rings().is_empty()).await;
    assert_eq!(text(&world.read(&id).await.stdout), "out\n");
    let left = || fs::read_dir(world.state("streams")).expect("it is there").count();
    until("and its output with its task", || left() == 0).await;
    world.close().await;
}

/// A directory that cannot be written costs what a death of the keeper takes, and nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_place_for_files_tasks_run_in_memory() {
    let mut world = World::new().await;
    fs::write(world.state("rings"), "in the way").expect("written");
    let id = half_read_in_memory(&world).await;
    world.die().await;
    world.start().await;
    // Some was read, so there was output; what came of it nobody knows.
    let output = world.read(&id).await;
    assert_eq!((text(&output.stdout), output.stdout.missing, output.status), ("", 1, ended("executor restarted")));
    world.close().await;
}

async fn half_read_in_memory(world: &World) -> TaskId {
    let id = world.task("seq 1 100000; echo end; sleep 100").await;
    let whole = (1..=100_000).map(|number: u32| number.to_string().len() as u64 + 1).sum::<u64>() + 4;
    world.wrote(&id, whole).await;
    let output = world.read(&id).await.stdout;
    assert_eq!((output.dropped, output.data.len()), (whole - TAIL, 1_000));
    assert!(text(&output).ends_with("100000\nend\n"));
    id
}
