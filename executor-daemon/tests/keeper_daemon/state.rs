//! State that cannot be opened: said once by a daemon that starts, and no reason to lose a server that serves.

use super::*;

const STATE: &str = "state";
const PROGRAM: &[&str] = &[env!("CARGO_BIN_EXE_executor-daemon")];

/// What a daemon has left in a directory that has run a command and a task.
async fn used() -> Rc<tempfile::TempDir> {
    let mut daemon = Daemon::start().await;
    daemon.start_task("true").await;
    daemon.signal(TERM);
    assert!(daemon.wait().await.success(), "{}", daemon.log());
    Rc::clone(&daemon.directory)
}

/// Starts a daemon over it that is to give up: its exit code, and what it said.
#[expect(clippy::disallowed_methods, reason = "the program under test is started as people start it")]
async fn refused(directory: &Path) -> (Option<i32>, String) {
    let log = directory.join("log");
    let mut child = Command::new(PROGRAM[0])
        .args(["serve", "--listen", "unix:sock", "--state-dir", STATE, "--default-workdir", "/"])
        .args(["--run-as", &nix::unistd::geteuid().to_string()])
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(&log).expect("a log"))
        .spawn()
        .expect("starts");
    let until = Instant::now() + LIMIT;
    while Instant::now() < until {
        if let Some(status) = child.try_wait().expect("our child") {
            return (status.code(), fs::read_to_string(log).expect("a log"));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    send(child.id(), TERM);
    let _ = child.wait();
    (None, fs::read_to_string(log).expect("a log"))
}

fn counter(state: &Path) -> PathBuf {
    let mut names = fs::read_dir(state).expect("there").map(|entry| entry.expect("there").path());
    names.find(|path| path.to_string_lossy().contains("bash-counter-")).expect("a task was started")
}

fn set_version(state: &Path) {
    // Where SQLite keeps `user_version`.
    const AT: u64 = 60;
    let journal = fs::OpenOptions::new().write(true).open(state.join("journal.sqlite")).expect("there");
    std::os::unix::fs::FileExt::write_all_at(&journal, &9_u32.to_be_bytes(), AT).expect("written");
}

fn without_tables(state: &Path) {
    let path = state.join("journal.sqlite");
    fs::remove_file(&path).expect("there");
    let journal = rusqlite::Connection::open(path).expect("made");
    journal.execute_batch("pragma application_id = 0x6578656a; pragma user_version = 1;").expect("written");
}

fn directory_at(path: &Path) {
    let _ = fs::remove_file(path);
    fs::create_dir(path).expect("made");
}

fn spoil_streams(state: &Path) {
    fs::remove_dir_all(state.join("streams")).expect("there");
    fs::write(state.join("streams"), "").expect("written");
}

#[tokio::test]
async fn a_first_server_that_cannot_open_its_state_ends_the_daemon_and_says_why() {
    type Spoil = fn(&Path);
    let ways: [(&str, Spoil); 7] = [
        ("journal.sqlite: it is of version 9", set_version),
        ("streams: Not a directory", spoil_streams),
        ("journal.sqlite: Is a directory", |state| directory_at(&state.join("journal.sqlite"))),
        ("journal.sqlite-wal: Is a directory", |state| directory_at(&state.join("journal.sqlite-wal"))),
        ("journal.sqlite-shm: Is a directory", |state| directory_at(&state.join("journal.sqlite-shm"))),
        // Seen only by one that has taken over.
        ("no such table", without_tables),
        ("the counter is damaged", |state| fs::write(counter(state), [7; 32]).expect("written")),
    ];
    for (says, spoil) in ways {
        let directory = used().await;
        spoil(&directory.path().join(STATE));
        let (code, log) = refused(directory.path()).await;
        assert_eq!(code, Some(125), "{says}: {log}");
        assert_eq!(log.matches(says).count(), 1, "{says}: {log}");
        assert!(!log.contains("starting it again"), "{says}: {log}");
        assert!(!directory.path().join("sock").exists(), "{says}");
    }
}

#[tokio::test]
async fn a_new_server_that_cannot_open_the_state_leaves_the_old_one_alone() {
    let daemon = Daemon::start().await;
    let server = daemon.server().expect("one lives");
    spoil_streams(&daemon.directory.path().join(STATE));
    daemon.signal(nix::sys::signal::Signal::SIGHUP);
    eventually("it is given up", || daemon.log().contains("the old one stays").then_some(())).await;
    assert!(daemon.log().contains("streams: Not a directory"), "{}", daemon.log());
    assert_eq!(daemon.server(), Some(server), "{}", daemon.log());
    assert_eq!(daemon.run("echo ok").await.0, "ok\n");
}
