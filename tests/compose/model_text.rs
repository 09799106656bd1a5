//! The recorded model texts, played by a client in one container against a daemon in another.
//!
//! Each scenario has a daemon of its own, started as an ordinary user in the environment that the format prescribes, and
//! mutual TLS between the two. What they share is a volume: `${TMP}`, and the state directory with the spills.

use std::{
    collections::VecDeque,
    env, fs,
    sync::{Mutex, PoisonError},
    thread,
};

use serde_json::Value;

use crate::engine::{Finished, Marked, docker, image, must, run, wait_for, workspace};

/// Scenarios that are played at the same time; most of their time they wait.
const WORKERS: usize = 3;
/// Who runs the client and the daemons: the image's ordinary user.
const USER: u64 = 10_001;
const SEARCH_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Where the certificates are that `init --apart` has made.
const TLS: &str = "/workspace/tls";
/// Makes a scenario's files; its arguments are `${TMP}`, the daemon's own directory, the daemon's configuration, and the
/// scenario's setup lines. Keys must be their user's, who is not the same in all scenarios.
const PREPARE: &str = r#"
    mkdir "$0" "$1"
    (umask 077 && mkdir "$1/state" && cp -r /workspace/tls/server /workspace/tls/client "$1")
    printf %s "$2" >"$1/config.toml"
    cd "$0"
    for line in "${@:3}"; do bash -c "$line"; done
"#;
/// How many cases there are. All of them are played unless one is asked for.
const RECORDED: usize = 87;
const SCENARIOS: &str = "tests/model-text/scenarios.json";

over_containers!(the_model_reads_the_recorded_texts_between_two_containers);
fn the_model_reads_the_recorded_texts_between_two_containers() {
    let recorded = fs::read(workspace().join(SCENARIOS)).expect("the recorded cases can be read");
    let recorded: Vec<Value> = serde_json::from_slice(&recorded).expect("they are a list");
    assert_eq!(recorded.len(), RECORDED, "cases were lost or added");
    // For work on one of them: E2E_ONLY=NAME just e2e
    let only = env::var_os("E2E_ONLY").map(|only| only.into_string().expect("names of scenarios are UTF-8"));
    let asked = |scenario: &Value| only.as_ref().is_none_or(|only| name(scenario).contains(only));
    let queue: VecDeque<Value> = recorded.into_iter().filter(asked).collect();
    let total = queue.len();
    match &only {
        Some(only) => assert!(total > 0, "no scenario has a name with {only}"),
        None => assert_eq!(total, RECORDED),
    }

    let stage = Stage::set_up();
    let queue = Mutex::new(queue);
    let failed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for worker in 0..WORKERS {
            let (stage, queue, failed) = (&stage, &queue, &failed);
            scope.spawn(move || {
                let client = stage.client(worker);
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    let Some(scenario) = next else { break };
                    if let Err(report) = stage.play(worker, &client, &scenario) {
                        println!("{}:\n{report}", name(&scenario));
                        failed.lock().unwrap_or_else(PoisonError::into_inner).push(name(&scenario).to_owned());
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("scenarios between containers: {} passed, {} failed", total - failed.len(), failed.len());
    assert!(failed.is_empty(), "not as recorded: {failed:?}");
}

/// What all scenarios share: the network and the volume.
struct Stage {
    marked: Marked,
}

impl Stage {
    fn set_up() -> Self {
        let marked = Marked::new();
        must(docker(["network", "create", "--internal"]).arg(marked.label()).arg(&marked.name), "");
        must(docker(["volume", "create"]).arg(marked.label()).arg(&marked.name), "");
        let stage = Self { marked };
        // The volume is the user's, as the image's /workspace is; scenarios with a uid of their own write there as well, and
        // copy the certificates.
        let names = (0..WORKERS).map(|worker| format!("--name={}", host(worker))).collect::<Vec<_>>().join(" ");
        let prepare =
            format!("chmod 1777 /workspace && executor-daemon init --apart --dir {TLS} {names} && chmod -R a+rX {TLS}");
        let mut command = docker(["run", "--rm", "--entrypoint=sh"]);
        must(command.args(stage.placement()).args([image(), "-c", &prepare]), "");
        stage
    }

    /// Where a container is and as whom.
    fn placement(&self) -> Vec<String> {
        let name = &self.marked.name;
        vec![
            self.marked.label(),
            format!("--network={name}"),
            format!("--volume={name}:/workspace"),
            format!("--user={USER}:{USER}"),
            "--no-healthcheck".to_owned(),
        ]
    }

    /// Starts a client's container; the scenarios' player lies in it beside the client.
    fn client(&self, worker: usize) -> String {
        let client = format!("{}-client-{worker}", self.marked.name);
        let player =
            format!("--volume={}:/usr/local/bin/scenarios:ro", workspace().join("target/release/scenarios").display());
        let recorded = format!("--volume={}:/scenarios.json:ro", workspace().join(SCENARIOS).display());
        let mut command = docker(["run", "--detach", "--rm", "--entrypoint=sleep"]);
        command.args(self.placement()).args([player, recorded, format!("--name={client}")]);
        must(command.args([image(), "infinity"]), "");
        client
    }

    /// Plays one scenario; the error is what was different.
    fn play(&self, worker: usize, client: &str, scenario: &Value) -> Result<(), String> {
        let name = name(scenario);
        let user = format!("--user={}", scenario["uid"].as_u64().unwrap_or(USER));
        // Neither path begins with the other: the player puts a placeholder wherever a text has the first.
        let (tmp, own) = (format!("/workspace/{name}"), format!("/workspace/daemon-of-{name}"));
        let mut prepare = docker(["exec", &user, client, "bash", "-ec", PREPARE, &tmp, &own, &config(scenario, &tmp)]);
        let lines = scenario["setup"].as_array().into_iter().flatten();
        prepare.args(lines.map(|line| line.as_str().expect("a setup line is a string").replace("${TMP}", &tmp)));
        must(&mut prepare, "");

        let daemon = format!("{}-{name}", self.marked.name);
        let mut start = docker(["run", "--detach", "--entrypoint=/usr/bin/env"]);
        start.args(self.placement()).args([&user, &format!("--name={daemon}"), &format!("--workdir={tmp}")]);
        start.args([&format!("--network-alias={}", host(worker)), image(), "-i"]);
        start.args(environment(scenario, &tmp)).args(["executor-daemon", "serve", "--listen=tcp:0.0.0.0:7700"]);
        start.args([
            format!("--tls-cert-file={own}/server/server.crt"),
            format!("--tls-key-file={own}/server/server.key"),
        ]);
        start.arg(format!("--client-ca-file={own}/server/ca.crt"));
        start.args([format!("--config={own}/config.toml"), format!("--state-dir={own}/state")]);
        must(&mut start, "");

        let connect = [
            format!("--endpoint=https://{}:7700", host(worker)),
            format!("--ca={own}/client/ca.crt"),
            format!("--cert={own}/client/client.crt"),
            format!("--key={own}/client/client.key"),
        ];
        wait_for(&format!("the daemon of {name} answers"), || {
            let asked = run(docker(["exec", &user, client, "tool-client"]).args(&connect).arg("info"), "");
            let running = must(&mut docker(["inspect", "--format={{.State.Running}}", &daemon]), "");
            assert_eq!(running, "true", "{name}: {}", run(&mut docker(["logs", &daemon]), ""));
            (asked.code == Some(0)).then_some(())
        });
        let mut player = docker(["exec", &user, client, "scenarios", "/scenarios.json", "--backend=connect"]);
        let played = run(player.args(&connect).args([format!("--tmp={tmp}"), format!("--only={name}")]), "");
        let stopped = self.stop(&daemon);
        let closing = "1 passed, 0 failed";
        if played.code == Some(0) && played.stdout.lines().any(|line| line == closing) && stopped.code == Some(0) {
            return Ok(());
        }
        Err(format!("{played}\nthe daemon, {stopped}"))
    }

    /// Stops a daemon with SIGTERM and removes its container: how it ended and what it had logged.
    fn stop(&self, daemon: &str) -> Finished {
        must(&mut docker(["stop", "--time=10", daemon]), "");
        let code = must(&mut docker(["inspect", "--format={{.State.ExitCode}}", daemon]), "");
        let logged = run(&mut docker(["logs", daemon]), "");
        must(&mut docker(["rm", "--volumes", daemon]), "");
        Finished { code: code.parse().ok(), ..logged }
    }
}

/// The name that a worker's daemon has on the network; one after the other has it.
fn host(worker: usize) -> String {
    format!("daemon-{worker}")
}

fn name(scenario: &Value) -> &str {
    scenario["name"].as_str().expect("a scenario has a name")
}

/// The daemon's configuration: the recorded names are in camel case, ours are not.
fn config(scenario: &Value, tmp: &str) -> String {
    let names = [
        ("timeoutMs", "timeout_ms"),
        ("maxTimeoutMs", "max_timeout_ms"),
        ("maxOutputBytes", "max_output_bytes"),
        ("graceMs", "grace_ms"),
        ("cwd", "default_workdir"),
    ];
    let recorded = scenario["config"].as_object().expect("a scenario has a configuration");
    assert!(recorded.keys().all(|key| names.iter().any(|(theirs, _)| theirs == key)), "unknown key in {recorded:?}");
    names
        .iter()
        .filter_map(|(theirs, ours)| Some(format!("{ours} = {}\n", recorded.get(*theirs)?)))
        .collect::<String>()
        .replace("${TMP}", tmp)
}

/// The executor's environment, which is the whole of it.
fn environment(scenario: &Value, tmp: &str) -> Vec<String> {
    let fixed = [("PATH", SEARCH_PATH), ("HOME", tmp), ("LANG", "C.UTF-8"), ("TZ", "UTC"), ("USER", "oracle")];
    let mut all: Vec<String> = fixed.iter().map(|(name, value)| format!("{name}={value}")).collect();
    all.push("SHELL=/bin/bash".to_owned());
    for (name, value) in scenario["processEnv"].as_object().into_iter().flatten() {
        let value = value.as_str().expect("a variable is a string");
        all.push(format!("{name}={}", value.replace("${TMP}", tmp)));
    }
    all
}
