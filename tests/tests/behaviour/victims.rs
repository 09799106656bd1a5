//! Nothing but the command's own processes is ever signalled (kind C).

use std::{
    fs,
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use executor_tests::{
    Backend, Setup, World, every_backend,
    processes::{self, Found},
    run, tell,
};
use serde_json::json;

const SOON: Duration = Duration::from_secs(10);

/// A process that is not the executor's. Killed by its handle when dropped.
struct Stranger {
    child: Child,
    seen: Found,
}

impl Stranger {
    /// One that leads its own group.
    #[expect(clippy::disallowed_methods, reason = "a bystander, that must not be signalled")]
    fn start() -> Self {
        let child = Command::new("sleep").arg("1000").process_group(0).stdin(Stdio::null()).spawn();
        let child = child.expect("sleep can be started");
        let seen = processes::look(i32::try_from(child.id()).expect("process ids are small")).expect("it lives");
        Self { child, seen }
    }

    /// One with this process id, if the kernel can be made to give it.
    fn with_pid(pid: i32) -> Option<Self> {
        let begun = Instant::now();
        while begun.elapsed() < SOON * 6 {
            // Only root may say which id comes next; others wait until the ids have come round.
            if fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).is_err() && !ids_come_round_soon() {
                return None;
            }
            let stranger = Self::start();
            if stranger.seen.pid == pid {
                return Some(stranger);
            }
        }
        None
    }

    fn is_untouched(&mut self) -> bool {
        self.seen.is_alive() && matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        if self.child.kill().is_ok() {
            let _ended = self.child.wait();
        }
    }
}

fn ids_come_round_soon() -> bool {
    let most = fs::read_to_string("/proc/sys/kernel/pid_max").ok().and_then(|most| most.trim().parse().ok());
    most.is_some_and(|most: u32| most <= 65_536)
}

every_backend!(c01_a_reused_pid_is_not_signalled);
async fn c01_a_reused_pid_is_not_signalled(world: &World) {
    let id = world.background("echo $$").await;
    world.ended(&id, SOON).await.expect("it ends");
    let text = world.output(&id).await;
    let pid = text.lines().next().and_then(|line| line.parse().ok()).expect("it printed its id");
    let Some(mut stranger) = Stranger::with_pid(pid) else {
        tell(format_args!(
            "c01_a_reused_pid_is_not_signalled: not shown: no process could be given the id {pid} a second time (root chooses \
             ids; others wait until they come round, on machines that give out few)"
        ));
        return;
    };
    assert_eq!(world.kill(&id).await, format!("task {id} had already finished"));
    assert!(stranger.is_untouched(), "the kill hit a stranger");
}

/// Becomes the program that follows, with a filter that it and all that comes of it inherit: `setsid` answers EPERM to every
/// one of them, the daemon's own processes included.
const WITHOUT_SETSID: &str = r#"
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
SETSID = {"x86_64": 112, "aarch64": 157}[os.uname().machine]
def op(code, jt, jf, k): return struct.pack("HBBI", code, jt, jf, k)
program = op(0x20, 0, 0, 0) + op(0x15, 0, 1, SETSID) + op(0x06, 0, 0, 0x00050001) + op(0x06, 0, 0, 0x7fff0000)
buffer = ctypes.create_string_buffer(program)
class Fprog(ctypes.Structure): _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
fprog = Fprog(4, ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(fprog), 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.argv[1], sys.argv[1:])
"#;

#[test]
fn c02_without_a_session_of_its_own_a_command_does_not_start() {
    let mut bystander = Stranger::start();
    let setup = Setup {
        launcher: ["python3", "-c", WITHOUT_SETSID].map(ToOwned::to_owned).into(),
        group: Some(bystander.seen.pid),
        ..Setup::default()
    };
    run(Backend::Unix, setup, async |world: &World| {
        let server = world.daemon().expect("there is one").server();
        let text = world.bash(&format!("echo ran > {}/ran", world.tmp().display())).await;
        assert_eq!(text, "Error: spawn bash EPERM: setsid");
        assert!(!world.tmp().join("ran").exists(), "it ran in a group that is not its own");
        let text = world.bash_with("true", json!({"run_in_background": true})).await;
        assert_eq!(text, "Error: spawn bash EPERM: setsid");
        let id = executor_proto::types::TaskId("bash-1".to_owned());
        assert_eq!(world.kill(&id).await, "Error: unknown bash task \"bash-1\"");
        assert!(server.is_alive(), "the daemon signalled itself");
        assert!(bystander.is_untouched(), "the daemon signalled its own group");
    });
}

every_backend!(c07_a_kill_after_the_exit_signals_nothing);
async fn c07_a_kill_after_the_exit_signals_nothing(world: &World) {
    let id = world.background("echo out").await;
    world.ended(&id, SOON).await.expect("it ends");
    assert_eq!(world.kill(&id).await, format!("task {id} had already finished"));
    assert_eq!(world.output(&id).await, "out\n\n[status: completed, exit code: 0]");
}

#[test]
fn c08_a_daemon_that_shares_a_group_signals_none_but_its_own() {
    let mut bystander = Stranger::start();
    let setup = Setup { group: Some(bystander.seen.pid), ..Setup::default() };
    run(Backend::Unix, setup, async |world: &World| {
        let daemon = world.daemon().expect("there is one");
        let before = daemon.server();
        for _ in 0..20 {
            assert_eq!(world.bash("true").await, "(no output)");
        }
        let text = world.bash_with("trap '' TERM; sleep 30", json!({"timeoutMs": 100})).await;
        assert_eq!(text, "(no output)\n[timed out after 100ms]\n[killed by signal: SIGKILL]");
        let id = world.background("sleep 30").await;
        assert_eq!(world.kill(&id).await, format!("killed background task {id}"));
        assert!(before.is_alive(), "the server was replaced");
        assert_eq!(daemon.server().pid, before.pid);
        assert!(bystander.is_untouched(), "the daemon signalled its own group");
    });
    assert!(bystander.is_untouched(), "the daemon signalled its own group when it stopped");
}
