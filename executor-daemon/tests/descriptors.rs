//! A process that runs out of descriptors: what needs some fails, and nothing else does. One test, because the limit is the
//! whole process's.

use std::{fs::File, os::fd::AsRawFd, path::PathBuf, time::Duration};

use executor_daemon::keeper::{
    embedded::{self, EmbeddedOptions},
    link::{KeeperLink, ProcessEvent, Spawned},
    protocol::{Confinement, SpawnSpec},
};
use executor_proto::{error::ExecutorError, types::StreamName};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// For what has to happen at all; nothing waits this long when all is well.
const LIMIT: Duration = Duration::from_secs(20);

fn spec(command: &str, variable_bytes: usize) -> SpawnSpec {
    SpawnSpec {
        identity: 0,
        group: 0,
        uid: nix::unistd::geteuid().as_raw(),
        programs: vec![b"/usr/bin/bash".to_vec(), b"/bin/bash".to_vec()],
        arguments: ["bash", "-c", command].map(|argument| argument.as_bytes().to_vec()).to_vec(),
        environment: vec![b"PATH=/usr/bin:/bin".to_vec(), [b"A=", "a".repeat(variable_bytes).as_bytes()].concat()],
        workdir: b"/".to_vec(),
        workdir_roots: Vec::new(),
        stdin: false,
        script: false,
        confinement: Confinement::default(),
        fence: None,
    }
}

/// The lowest number that the next descriptor can have.
fn lowest_free() -> u64 {
    let file = File::open("/dev/null").expect("a descriptor is free");
    u64::try_from(file.as_raw_fd()).expect("not negative")
}

async fn event(spawned: &mut Spawned) -> ProcessEvent {
    let event = tokio::time::timeout(LIMIT, spawned.events.recv()).await.expect("an event in time");
    event.expect("the keeper lives")
}

async fn start(link: &KeeperLink, command: &str) -> Spawned {
    link.spawn(link.new_handle(), spec(command, 0), None, None).await.expect("starts")
}

#[tokio::test]
async fn only_what_needs_descriptors_fails_when_they_run_out() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let spill_dir = directory.path().join("spill");
    let options = EmbeddedOptions {
        program: Some(PathBuf::from(env!("CARGO_BIN_EXE_executor-daemon"))),
        spill_dir: spill_dir.clone(),
    };
    let link = embedded::start(options).await.expect("a keeper");
    let mut bystander = start(&link, "exec sleep 600").await;

    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    let free = lowest_free();
    // Room for one of a command's two descriptors; then for none.
    for room in [1, 0] {
        setrlimit(Resource::RLIMIT_NOFILE, free + room, hard).expect("lowered");
        let refused = link.spawn(link.new_handle(), spec("exec sleep 600", 0), None, None).await.expect_err("no room");
        assert!(
            matches!(&refused, ExecutorError::OutcomeUnknown { reason } if reason.contains("open files")),
            "{refused:?}"
        );
    }
    let refused = link.open_spill(bystander.handle, StreamName::Stdout, "a".to_owned()).await.expect_err("no room");
    assert_eq!(refused.raw_os_error(), Some(libc::EMFILE));
    // So long that it needs a descriptor to be said.
    let refused = link.spawn(link.new_handle(), spec("true", 100_000), None, None).await.expect_err("no room");
    assert!(matches!(refused, ExecutorError::Spawn { errno: libc::EMFILE, .. }), "{refused:?}");
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).expect("raised");

    assert_eq!(lowest_free(), free, "descriptors of a cut packet stay open");
    let mut after = start(&link, "exit 3").await;
    assert_eq!(event(&mut after).await, ProcessEvent::Exited { status: Some(3 << 8), empty: true });
    // Questions are answered in order: the spill that nobody took has been removed by now.
    link.processes(bystander.handle).await;
    assert_eq!(std::fs::read_dir(spill_dir).expect("a directory").count(), 0);
    assert!(bystander.events.try_recv().is_err(), "the bystander was touched");
    assert_eq!(link.end(bystander.handle, Duration::ZERO).await, [0; 0]);
    assert!(matches!(event(&mut bystander).await, ProcessEvent::Exited { .. }));
}
