//! What the kernel refuses a command on the keeper's word.

use executor_daemon::keeper::protocol::{Confinement, Mode, SpawnSpec};
use executor_proto::error::{ExecutorError, SpawnStage};

use super::{Command, Keeper, spec};

/// What a confined command writes to stdout, from its start to its end.
async fn output(keeper: &Keeper, confinement: Confinement, command: &str) -> String {
    let spec = SpawnSpec { confinement, ..spec(command) };
    let spawned = keeper.link.spawn(keeper.link.new_handle(), spec, None, None).await.expect("it starts");
    let mut command = Command { spawned, keeper: keeper.link.clone() };
    command.status().await;
    command.empty().await;
    command.stdout()
}

#[tokio::test]
async fn without_a_network_no_socket_reaches_it_and_unix_sockets_stay() {
    let keeper = Keeper::start().await;
    let off = |writable| Confinement { mode: Mode::DangerFullAccess, writable, network_off: true };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("it is bound").port();
    let rows = [
        (format!("(exec 3<>/dev/tcp/127.0.0.1/{port}) && echo reached"), "reached\n"),
        (format!("(exec 3<>/dev/tcp/::1/{port}); echo $?"), "1\n"),
        ("(exec 3<>/dev/udp/127.0.0.1/9) && echo reached".to_owned(), "reached\n"),
        ("(exec 3<>/dev/udp/::1/9) && echo reached".to_owned(), "reached\n"),
    ];
    for (command, open) in &rows {
        if !command.contains("::1") {
            assert_eq!(output(&keeper, Confinement::default(), &format!("{command} 2>&1")).await, *open, "{command}");
        }
        for writable in [None, Some(Vec::new())] {
            let said = output(&keeper, off(writable), &format!("{{ {command}; }} 2>&1")).await;
            assert!(said.contains("Network is unreachable") && !said.contains("reached\n"), "{command}: {said}");
        }
    }
    // Of every family: none but Unix and netlink; and no ring, which makes sockets by itself.
    let python = "import socket, ctypes
libc = ctypes.CDLL(None, use_errno=True)
made = [f for f in range(64) if libc.socket(f, socket.SOCK_DGRAM, 0) >= 0 or libc.socket(f, socket.SOCK_RAW, 0) >= 0]
print(sorted(set(made) - {socket.AF_UNIX, socket.AF_NETLINK}), socket.AF_UNIX in made)
print(libc.syscall(425, 1, 0), ctypes.get_errno())
print([libc.syscall(n | 0x40000000, 2, 1, 0) for n in (41, 425)])
one, two = socket.socketpair(); one.send(b'pair'); print(two.recv(4).decode())";
    if output(&keeper, Confinement::default(), "python3 -c 'print(1)'").await == "1\n" {
        let said = output(&keeper, off(None), &format!("python3 -c \"$(cat <<'E'\n{python}\nE\n)\" 2>&1")).await;
        assert_eq!(said, "[] True\n-1 38\n[-1, -1]\npair\n");
    } else {
        eprintln!("no python3: only bash's own sockets were tried");
    }
}

#[tokio::test]
async fn what_is_confined_gets_no_new_privileges_and_what_is_not_keeps_its_own() {
    let keeper = Keeper::start().await;
    let limited = Confinement { mode: Mode::ReadOnly, writable: Some(Vec::new()), network_off: false };
    let off = Confinement { network_off: true, ..Confinement::default() };
    for (confinement, privileges, filters) in [(Confinement::default(), 0, 0), (limited, 1, 0), (off, 1, 2)] {
        let said = output(&keeper, confinement, "grep -E '^(NoNewPrivs|Seccomp_filters)' /proc/self/status").await;
        assert_eq!(said, format!("NoNewPrivs:\t{privileges}\nSeccomp_filters:\t{filters}\n"));
    }
}

#[tokio::test]
async fn a_directory_behind_a_link_is_refused_and_one_that_is_missing_is_none() {
    let keeper = Keeper::start().await;
    let real = keeper.directory.path().join("real");
    let link = keeper.directory.path().join("link");
    std::fs::create_dir(&real).expect("made");
    std::os::unix::fs::symlink(&real, &link).expect("made");
    let writable = |path: &std::path::Path| Confinement {
        mode: Mode::WorkspaceWrite,
        writable: Some(vec![path.as_os_str().as_encoded_bytes().to_vec()]),
        network_off: false,
    };
    let touch = format!("echo x > {}/x && echo written", real.display());
    assert_eq!(output(&keeper, writable(&real), &touch).await, "written\n");
    assert_eq!(output(&keeper, writable(&keeper.directory.path().join("none")), &touch).await, "");
    for path in [link.clone(), link.join("below")] {
        let spec = SpawnSpec { confinement: writable(&path), ..spec("true") };
        let error = keeper.link.spawn(keeper.link.new_handle(), spec, None, None).await.expect_err("it is refused");
        let expected = ExecutorError::Spawn { stage: SpawnStage::Sandbox, errno: libc::ELOOP, path: None };
        assert_eq!(error, expected, "{}", path.display());
    }
}

#[tokio::test]
async fn a_signal_stays_within_its_fence() {
    let keeper = Keeper::start().await;
    let within = |fence: &str, command: &str| SpawnSpec { fence: Some(fence.to_owned()), ..spec(command) };
    let start = async |spec| {
        let spawned = keeper.link.spawn(keeper.link.new_handle(), spec, None, None).await.expect("it starts");
        Command { spawned, keeper: keeper.link.clone() }
    };
    let mut victim = start(within("a", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done")).await;
    let (pid, mut seen) = (victim.spawned.pid, String::new());
    while seen.is_empty() {
        seen = victim.stdout();
        tokio::task::yield_now().await;
    }
    let mut refused = start(within("b", &format!("kill -TERM {pid} 2>&1"))).await;
    refused.status().await;
    if !refused.stdout().contains("Operation not permitted") {
        eprintln!("this kernel has no Landlock that refuses signals (version 6, Linux 6.12): nothing shown");
        return;
    }
    let mut allowed = start(within("a", &format!("kill -TERM {pid}"))).await;
    assert_eq!(allowed.status().await, Some(0));
    assert_eq!(victim.status().await, Some(7 << 8));
    // The keeper ends what it likes.
    let mut other = start(within("b", "sleep 300 & setsid sleep 300 & wait")).await;
    assert_eq!(keeper.link.end(other.handle(), std::time::Duration::ZERO).await, super::NONE);
    other.status().await;
}
