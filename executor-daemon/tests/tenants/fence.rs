//! The operating system stands between tenants, and between the sessions of one that has a range of users.

use executor_proto::v1;
use nix::sys::signal::Signal;

use super::{Daemon, root};

/// Two tenants with users that need no accounts, one of them with one for each owner.
const TWO: &[(&str, &str)] = &[("a", "run_as = 'daemon'"), ("b", "uid_range = '70000-70003'")];

/// What is in `/proc/self/status`, as one line.
const STATUS: &str = "grep -E '^(Cap|NoNewPrivs)' /proc/self/status | tr -d '\\t' | tr '\\n' ' '";

/// No capability in any set, and none to be had.
const NOTHING: &str = "CapInh:0000000000000000 CapPrm:0000000000000000 CapEff:0000000000000000 CapBnd:0000000000000000 \
                       CapAmb:0000000000000000 NoNewPrivs:1";

#[tokio::test]
async fn each_tenant_has_users_of_its_own_and_no_privileges() {
    if !root() {
        return;
    }
    let daemon = Daemon::start(TWO).await;
    assert!(daemon.ready.contains("daemon (uid 1), uids 70000-70003"), "{}", daemon.ready);
    assert!(!daemon.ready.contains("unprotected"), "{}", daemon.ready);
    let (mut a, mut b) = (daemon.client("a").await, daemon.client("b").await);
    let who = "echo $(id -u) $(id -g) $(id -G) $HOME $USER $LOGNAME";
    assert_eq!(a.run(None, who).await, "1 1 1 /usr/sbin daemon daemon");
    assert_eq!(b.run(Some("s"), who).await, "70000 70000 70000 / 70000 70000");
    for client in [&mut a, &mut b] {
        assert_eq!(client.run(None, STATUS).await, NOTHING);
    }
    let (of_a, of_b) = (a.inner.get_info(v1::GetInfoRequest {}).await, b.inner.get_info(v1::GetInfoRequest {}).await);
    let (of_a, of_b) = (of_a.expect("an answer").into_inner(), of_b.expect("an answer").into_inner());
    assert_eq!((of_a.run_as_user.as_str(), of_b.run_as_user.as_str()), ("daemon", "70000-70003"));
    let shared = |info: &v1::GetInfoResponse| info.stated_limits.iter().any(|limit| limit.contains("share a user"));
    assert!(shared(&of_a) && !shared(&of_b));
}

#[tokio::test]
async fn a_daemon_with_few_capabilities_of_its_own_takes_all_from_commands() {
    if !root() {
        return;
    }
    // As in a container that has dropped what the daemon does not need, CAP_SETPCAP among it.
    let few = "--bounding-set=-all,+chown,+dac_override,+fowner,+kill,+setgid,+setuid";
    let daemon = Daemon::start_through(&["setpriv", few], TWO).await;
    let mut b = daemon.client("b").await;
    let status = b.run(Some("s"), &format!("id -u; {STATUS}")).await;
    assert_eq!(status, format!("70000\n{}", NOTHING.replace("CapBnd:0000000000000000", "CapBnd:00000000000000eb")));
}

#[tokio::test]
async fn no_tenant_reaches_anothers_processes_or_files_nor_an_owner_anothers_of_a_range() {
    if !root() {
        return;
    }
    let daemon = Daemon::start(TWO).await;
    let (mut a, mut b) = (daemon.client("a").await, daemon.client("b").await);
    for (client, owner, path) in [(&mut a, None, "a"), (&mut b, Some("one"), "b")] {
        let file = format!("/tmp/{}", daemon.path(path).replace('/', "-"));
        client.start_task(owner, &format!("echo $$ > {file}; SECRET=x exec sleep 300")).await;
    }
    let file = |name: &str| format!("/tmp/{}", daemon.path(name).replace('/', "-"));
    let mut pids = Vec::new();
    for name in ["a", "b"] {
        let pid =
            super::eventually("it runs", || std::fs::read_to_string(file(name)).ok().filter(|pid| pid.ends_with('\n')))
                .await;
        pids.push(pid.trim().to_owned());
        std::fs::remove_file(file(name)).expect("it is there");
    }
    // A spill of each, with its path.
    let mut spills = Vec::new();
    for (client, owner) in [(&mut a, None), (&mut b, Some("one"))] {
        client.run(owner, "seq 1 1000").await;
    }
    for directory in ["1", "70000"] {
        let directory = daemon.path(&format!("state/spill/{directory}"));
        let mut files = std::fs::read_dir(&directory).expect("made at the start");
        spills.push(files.next().expect("one spill").expect("an entry").path().display().to_string());
    }
    let tries = |pid: &str, spill: &str| {
        format!(
            "kill -0 {pid} 2>/dev/null && echo signalled; cat /proc/{pid}/environ >/dev/null 2>&1 && echo environ; \
             head -c 1 /proc/{pid}/maps 2>/dev/null | grep -q . && echo traced; ls /proc/{pid}/fd >/dev/null 2>&1 && echo fds; \
             head -n 1 {spill} 2>/dev/null; ls $(dirname {spill}) >/dev/null 2>&1 && echo listed; \
             (echo x >> {spill}) 2>/dev/null && echo written; true"
        )
    };
    assert_eq!(a.run(None, &tries(&pids[1], &spills[1])).await, "", "of b by a");
    assert_eq!(b.run(Some("one"), &tries(&pids[0], &spills[0])).await, "", "of a by b");
    // Its own: all but writing, so that what is refused above is refused for a reason.
    let own = "signalled\nenviron\ntraced\nfds\n1\nlisted";
    assert_eq!(a.run(None, &tries(&pids[0], &spills[0])).await, own);
    assert_eq!(b.run(Some("one"), &tries(&pids[1], &spills[1])).await, own);
    // Another session of the same tenant reads what the model is told of, and does not reach processes.
    assert_eq!(b.run(Some("two"), &tries(&pids[1], &spills[1])).await, "1\nlisted");
}

#[tokio::test]
async fn an_owner_keeps_its_user_over_a_killed_server_and_a_restart() {
    if !root() {
        return;
    }
    let mut daemon = Daemon::start(TWO).await;
    let mut b = daemon.client("b").await;
    let mut users = Vec::new();
    for owner in [Some("one"), None, Some("two")] {
        users.push(b.run(owner, "id -u").await);
    }
    assert_eq!(users, ["70000", "70001", "70002"]);
    b.start_task(Some("two"), "sleep 300").await;
    daemon.kill_server().await;
    let mut b = daemon.client("b").await;
    assert_eq!(b.run(Some("two"), "id -u").await, "70002");
    assert_eq!(b.run(Some("three"), "id -u").await, "70003");
    daemon.restart().await;
    let mut b = daemon.client("b").await;
    for (owner, user) in [(Some("three"), "70003"), (None, "70001"), (Some("one"), "70000")] {
        assert_eq!(b.run(owner, "id -u").await, user);
    }
}

#[tokio::test]
async fn what_a_dead_daemon_left_of_any_user_of_a_range_is_ended_by_the_next() {
    if !root() {
        return;
    }
    let mut daemon = Daemon::start(TWO).await;
    let mut b = daemon.client("b").await;
    assert_eq!(b.run(Some("one"), "id -u").await, "70000");
    let task_id = b.start_task(Some("two"), "exec sleep 300").await;
    let asked = v1::GetTaskRequest { caller: super::caller(Some("two")), task_id };
    let task = b.inner.get_task(asked).await.expect("its own").into_inner().task.expect("it is there");
    let shell = task.shell_pid.expect("it runs");
    let alive = || {
        let stat = std::fs::read_to_string(format!("/proc/{shell}/stat")).ok()?;
        let (_, after) = stat.rsplit_once(") ")?;
        (!after.starts_with(['Z', 'X'])).then(|| after.split(' ').nth(1).and_then(|parent| parent.parse().ok()))?
    };
    let helper = alive().expect("it runs, and has a parent");
    // The keeper is held, so that nobody takes the command over from its helper.
    daemon.signal(Signal::SIGSTOP);
    super::kill(helper, Signal::SIGKILL);
    daemon.signal(Signal::SIGKILL);
    daemon.child.wait().expect("our child");
    assert!(alive().is_some(), "nobody is there to end it");
    daemon.start_again().await;
    super::eventually("it is ended", || alive().is_none().then_some(())).await;
}

#[tokio::test]
async fn a_tenant_has_what_it_was_given_and_the_daemon_says_so() {
    if !root() {
        return;
    }
    let daemon = Daemon::start(&[
        ("ops", "run_as = 'root'"),
        ("web", "run_as = 'daemon'\ncapabilities = ['CAP_NET_BIND_SERVICE']"),
        ("sudoers", "run_as = 'bin'\nallow_setuid = true"),
    ])
    .await;
    for says in [
        "commands of tenant ops run as root",
        "commands of tenant web have CAP_NET_BIND_SERVICE",
        "commands of tenant sudoers can gain privileges by programs such as sudo",
    ] {
        assert!(daemon.ready.contains(says), "{says}: {}", daemon.ready);
    }
    let mut ops = daemon.client("ops").await;
    assert_eq!(ops.run(None, "id -u; cat /proc/self/status | grep -c '^CapEff:.0000000000000000$'").await, "0\n0");
    let (mut web, mut sudoers) = (daemon.client("web").await, daemon.client("sudoers").await);
    let one = "0000000000000400";
    let all = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"].map(|set| format!("{set}:{one} ")).concat();
    assert_eq!(web.run(None, STATUS).await, format!("{all}NoNewPrivs:1"));
    assert_eq!(sudoers.run(None, "grep NoNewPrivs /proc/self/status | cut -f 2").await, "0");
    for (client, says) in [(&mut ops, "run as root"), (&mut web, "CAP_NET_BIND"), (&mut sudoers, "gain privileges")] {
        let info = client.inner.get_info(v1::GetInfoRequest {}).await.expect("an answer").into_inner();
        assert!(info.stated_limits.iter().any(|limit| limit.contains(says)), "{says}: {:?}", info.stated_limits);
    }
}

#[tokio::test]
async fn a_workdir_lies_in_the_roots_wherever_its_links_lead() {
    let rules = "workdir_roots = ['${DIR}/site']\ndefault_workdir = '${DIR}/site'";
    let ids = if root() { "\nuid_range = '70000-70003'" } else { "" };
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("a mode");
    for name in ["site", "site/below", "site2"] {
        std::fs::create_dir(dir.path().join(name)).expect("made");
    }
    std::os::unix::fs::symlink(dir.path().join("site2"), dir.path().join("site/out")).expect("made");
    std::os::unix::fs::symlink(dir.path().join("site/below"), dir.path().join("in")).expect("made");
    let here = dir.path().display().to_string();
    let daemon = Daemon::start(&[("a", &format!("{}{ids}", rules.replace("${DIR}", &here)))]).await;
    let mut a = daemon.client("a").await;
    assert_eq!(a.run(None, "pwd -P").await, format!("{here}/site"));
    let mut at = async |path: &str| {
        let workdir = Some(format!("{here}/{path}").into());
        a.run_spec(None, Some(v1::CommandSpec { command: "pwd -P".into(), workdir, ..Default::default() })).await
    };
    for path in ["site/below", "in", "site/../in"] {
        assert_eq!(at(path).await.expect(path), format!("{here}/site/below"));
    }
    assert_eq!(at("site2/../site").await.expect("it leads back"), format!("{here}/site"));
    for path in ["site2", "site/out", "site/..", "in/../..", "."] {
        let refused = at(path).await.expect_err(path);
        assert_eq!(refused.message(), "workdir outside the allowed roots", "{path}");
    }
    assert!(at("site/none").await.expect_err("it is not there").message().contains("chdir"));
}
