//! What a caller is told who wants more than it may have, and that the room comes back.

use super::*;

fn of(owner: &str) -> Option<v1::Caller> {
    Some(v1::Caller { owner: Some(owner.to_owned()) })
}

fn over(status: Status) -> (String, u64, u64) {
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    match error(status) {
        ExecutorError::OverLimit { what, used, limit } => (what, used, limit),
        other => panic!("not over a limit: {other:?}"),
    }
}

fn told(what: &str, used: u64, limit: u64) -> (String, u64, u64) {
    (what.to_owned(), used, limit)
}

fn sleeping(owner: &str) -> v1::RunRequest {
    v1::RunRequest { caller: of(owner), key: key(), spec: run("sleep 60"), ..v1::RunRequest::default() }
}

/// Makes a call until it is let in.
async fn at_last<T>(what: &str, mut call: impl AsyncFnMut() -> Result<T, Status>) -> T {
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    loop {
        match call().await {
            Ok(answer) => return answer,
            Err(status) => assert_eq!(over(status).1, 1, "{what}"),
        }
        assert!(std::time::Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn requests_over_their_number_are_refused_and_ends_are_not() {
    let daemon = Daemon::start(&["--max-requests", "4"]);
    let mut client = client(daemon.unix().await);
    let keys: Vec<_> = ["a", "a", "b", "b"].map(|owner| (owner, sleeping(owner))).into();
    let mut streams = Vec::new();
    for (_, request) in &keys {
        let mut stream = client.run(request.clone()).await.expect("there is room").into_inner();
        stream.message().await.expect("it is accepted");
        streams.push(stream);
    }
    let refused = client.run(sleeping("c")).await.expect_err("four are under way");
    assert_eq!(over(refused), told("requests", 4, 4));
    let refused = client.get_info(v1::GetInfoRequest {}).await.expect_err("it is one more");
    assert_eq!(over(refused), told("requests", 4, 4));
    // What ends something is let in, and gives the room back.
    let (owner, request) = &keys[3];
    let cancel = v1::CancelRunRequest { caller: of(owner), key: request.key.clone() };
    client.cancel_run(cancel).await.expect("it is let in");
    while streams[3].message().await.expect("it ends in order").is_some() {}
    let refused = client.run(sleeping("a")).await.expect_err("two are the half of four");
    assert_eq!(over(refused), told("requests of the owner", 2, 2));
    let info = client.get_info(v1::GetInfoRequest {}).await.expect("there is room again").into_inner();
    let budgets = info.budgets.expect("they are told");
    assert_eq!(budgets.max_requests, 4);
    assert!(budgets.max_spill_bytes_in_all > 0 && budgets.max_spill_bytes_per_owner == 1 << 30, "{budgets:?}");
    // A client that goes away gives it back, too.
    drop(streams);
    let begun = std::time::Instant::now();
    while let Err(status) = client.run(sleeping("a")).await {
        over(status);
        assert!(begun.elapsed() < Duration::from_secs(30), "the room never came back");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let log = daemon.log();
    assert_eq!(log.matches("over its limit: requests (4 of 4)").count(), 2, "{log}");
}

#[tokio::test]
async fn watchers_are_counted_apart_and_come_back_when_they_are_dropped() {
    let daemon = Daemon::start(&["--max-watchers", "2", "--max-requests", "2"]);
    let mut client = client(daemon.unix().await);
    let watch = |owner: &str| v1::WatchTasksRequest { caller: of(owner) };
    let first = client.watch_tasks(watch("a")).await.expect("there is room").into_inner();
    let refused = client.watch_tasks(watch("a")).await.expect_err("one is the half of two");
    assert_eq!(over(refused), told("watchers of the owner", 1, 1));
    let _second = client.watch_tasks(watch("b")).await.expect("there is room");
    let refused = client.watch_tasks(watch("c")).await.expect_err("both places are taken");
    assert_eq!(over(refused), told("watchers", 2, 2));
    client.get_info(v1::GetInfoRequest {}).await.expect("it is no watcher");
    drop(first);
    let mut again = client.clone();
    let _again = at_last("the first is gone", async || {
        let watched = again.watch_tasks(watch("a")).await;
        watched.map_err(|status| if status.message().contains("2 of 2") { one_of_one() } else { status })
    })
    .await;
}

/// As the owner's own refusal: either of the two may still be counted.
fn one_of_one() -> Status {
    ExecutorError::OverLimit { what: "watchers".to_owned(), used: 1, limit: 1 }.to_status()
}

#[tokio::test]
async fn spills_over_their_size_keep_their_head_and_the_oldest_that_has_ended_goes() {
    let daemon = Daemon::start(&["--max-spill-bytes-per-owner", "3000000", "--max-output-bytes", "1000"]);
    let mut client = client(daemon.unix().await);
    let mut spilled = async |bytes: u64| {
        let command = format!("head -c {bytes} /dev/zero | tr '\\0' x");
        let request = v1::RunRequest { caller: of("a"), key: key(), spec: run(&command), ..v1::RunRequest::default() };
        let mut events = client.run(request).await.expect("it starts").into_inner();
        let mut spill = None;
        while let Some(event) = events.message().await.expect("it goes on") {
            if let Some(Event::Finished(finished)) = event.event {
                spill = finished.stdout.and_then(|stdout| stdout.spill);
            }
        }
        let spill = spill.expect("its head is kept");
        (std::path::PathBuf::from(String::from_utf8(spill.path.to_vec()).expect("UTF-8")), spill.cut_at)
    };
    let (first, cut_at) = spilled(2_000_000).await;
    assert_eq!((first.metadata().expect("there").len(), cut_at), (2_000_000, None));
    // It is kept for as long as there is room.
    wait_until("the first is over", || daemon.log().contains("exit code 0").then_some(())).await;
    let begun = std::time::Instant::now();
    while first.exists() {
        let (second, cut_at) = spilled(2_500_000).await;
        // Until the first is over, which is a moment after its result, nothing of it can go.
        let held = second.metadata().map_or(0, |file| file.len());
        assert!(cut_at.is_none_or(|at| at <= held || held == 0), "{cut_at:?} of {held}");
        assert!(begun.elapsed() < Duration::from_secs(30), "the first never went");
    }
    let (last, cut_at) = spilled(5_000_000).await;
    assert_eq!((last.metadata().expect("there").len(), cut_at), (3_000_000, Some(3_000_000)));
    let log = daemon.log();
    assert!(log.contains("a spill of what has ended goes: its room is needed"), "{log}");
    assert!(log.contains("a spill keeps its head"), "{log}");
}

/// Two tenants with users of their own, one of which may have few processes.
fn of_their_own(dir: &std::path::Path) -> String {
    use std::os::unix::fs::PermissionsExt;
    for tenant in ["bomb", "calm"] {
        let file = dir.join(tenant);
        std::fs::write(&file, format!("{tenant}-0123456789abcdef")).expect("a token file");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("a mode");
    }
    let config = dir.join("config.toml");
    let at = dir.display();
    let tables = format!(
        "[tenants.bomb]\ntoken_file = '{at}/bomb'\nuid_range = '61001-61002'\nmax_processes = 64\n\
         [tenants.calm]\ntoken_file = '{at}/calm'\nuid_range = '61003-61004'\n"
    );
    std::fs::write(&config, tables).expect("a configuration");
    config.display().to_string()
}

/// Processes of the bomb's users that are alive.
fn bombs() -> usize {
    let processes = std::fs::read_dir("/proc").expect("proc").flatten();
    let uids = processes.filter_map(|process| std::fs::read_to_string(process.path().join("status")).ok());
    let is_bomb = |status: &str| ["Uid:\t61001\t", "Uid:\t61002\t"].iter().any(|line| status.contains(line));
    uids.filter(|status| is_bomb(status) && !status.contains("State:\tZ")).count()
}

#[tokio::test]
async fn a_fork_bomb_of_one_tenant_leaves_the_other_working_and_is_ended() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can give tenants users of their own");
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let config = of_their_own(dir.path());
    let daemon = Daemon::start(&["--config", &config, "--default-workdir", "/"]);
    let mut client = client(daemon.tcp().await);
    let request = |command: &str, timeout_ms: f64| {
        let spec = run(command).map(|spec| v1::CommandSpec { timeout_ms: Some(timeout_ms), ..spec });
        v1::RunRequest { caller: nobody(), key: key(), spec, ..v1::RunRequest::default() }
    };
    let token = |tenant: &str| format!("{tenant}-0123456789abcdef");
    let bomb = bearer(request("f() { f | f & }; f; sleep 30", 3_000.0), &token("bomb"));
    let mut bombed = client.run(bomb).await.expect("it starts").into_inner();
    wait_until("the bomb has grown", || (bombs() > 30).then_some(())).await;
    for _ in 0..5 {
        let calm = bearer(request("true", 10_000.0), &token("calm"));
        let mut events = client.run(calm).await.expect("it starts").into_inner();
        let mut exit = None;
        while let Some(event) = events.message().await.expect("it goes on") {
            if let Some(Event::Finished(finished)) = event.event {
                exit = finished.exit.and_then(|exit| exit.exit);
            }
        }
        assert_eq!(exit, Some(v1::exit::Exit::Code(0)));
        let processes = bombs();
        assert!(processes <= 64, "{processes} processes");
    }
    while bombed.message().await.expect("it ends at its timeout").is_some() {}
    wait_until("nothing of the bomb is alive", || (bombs() == 0).then_some(())).await;
    let info = client.get_info(bearer(v1::GetInfoRequest {}, &token("bomb"))).await.expect("info").into_inner();
    assert_eq!(info.budgets.expect("they are told").max_processes, 64);
}
