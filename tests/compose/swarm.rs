//! `deploy/swarm/stack.yml` on this machine: three daemons that are one executor.

use std::{collections::BTreeMap, process::Command, thread};

use crate::{
    client::Client,
    engine::{docker, image, must, run, unique, wait_for, workspace},
};

/// Sessions that are placed, and how often each of them calls.
const SESSIONS: usize = 30;

over_containers!(sessions_are_shared_out_and_stay_with_their_tasks);
fn sessions_are_shared_out_and_stay_with_their_tasks() {
    let stack = Stack::deploy();
    let client = stack.client();
    let home = |session: &str| client.must(&format!("tool-client --owner {session} bash 'cat /etc/hostname'"));

    let mut shares: BTreeMap<String, usize> = BTreeMap::new();
    for n in 0..SESSIONS {
        let session = format!("session-{n}");
        let first = home(&session);
        assert_eq!(first, home(&session), "another process of {session} goes to the same host");
        *shares.entry(first).or_default() += 1;
    }
    println!("swarm: {SESSIONS} sessions on 3 replicas: {:?}", shares.values().collect::<Vec<_>>());
    assert_eq!(shares.len(), 3, "each has some: {shares:?}");

    // Tasks keep their sessions where they are when there are more hosts. Some of these would be the new one's.
    let started = |n| client.must(&format!("tool-client --owner busy-{n} bash --background 'echo {n}; sleep 1000'"));
    let tasks: Vec<String> = (0..SESSIONS).map(started).collect();
    stack.scale(4);
    for (n, task) in tasks.iter().enumerate() {
        assert_eq!(client.must(&format!("tool-client --owner busy-{n} logs {task}")), n.to_string());
    }

    // One whose host dies learns of it, and finds what was written with the successor that has the volume.
    let host = client.must("tool-client --owner busy-7 bash 'cat /etc/hostname'");
    let task = &tasks[7];
    let waiting = client.begin(&format!("echo waits; tool-client --owner busy-7 output {task} --wait"));
    must(&mut docker(["kill", &host]), "");
    let told = waiting.finish();
    assert!(
        (told.code == Some(125) && told.stderr.contains("executor unavailable"))
            || told.stdout.contains("exit unknown"),
        "what it waits for is gone: {told}"
    );
    let read = wait_for("the successor answers for it", || {
        let read = client.run(&format!(r#"tool-client --owner busy-7 call bash_output '{{"task_id": "{task}"}}'"#));
        read.stdout.contains("exit unknown").then_some(read)
    });
    assert!(read.stdout.trim_end().ends_with("[status: ended, exit unknown]"), "{read}");
    assert_eq!(client.must(&format!("tool-client --owner busy-7 logs {task}")), "7");
}

/// The stack under a name of its own, on a Swarm that is left again if it was begun here.
struct Stack {
    name: String,
    tls: tempfile::TempDir,
    swarm_is_ours: bool,
}

impl Stack {
    fn deploy() -> Self {
        let image = image();
        let swarm = must(&mut docker(["info", "--format={{.Swarm.LocalNodeState}}"]), "");
        let swarm_is_ours = swarm == "inactive";
        if swarm_is_ours {
            must(&mut docker(["swarm", "init", "--advertise-addr=127.0.0.1", "--listen-addr=127.0.0.1:2377"]), "");
        }
        let tls = tempfile::tempdir().expect("a temporary directory can be made");
        let stack = Self { name: unique(), tls, swarm_is_ours };
        let mut init = Command::new(workspace().join("target/release/executor-daemon"));
        init.args(["init", "--apart", "--name", &stack.host(), "--dir"]).arg(stack.tls.path());
        must(&mut init, "");
        for file in ["ca.crt", "server.crt", "server.key"] {
            let path = stack.tls.path().join("server").join(file);
            must(docker(["secret", "create", &format!("executor-{file}")]).arg(path), "");
        }
        let mut deploy = docker(["stack", "deploy", "--resolve-image=never", "--compose-file"]);
        deploy.arg(workspace().join("deploy/swarm/stack.yml")).arg(&stack.name).env("EXECUTOR_IMAGE", image);
        must(&mut deploy, "");
        stack.wait_for_replicas(3);
        stack
    }

    fn service(&self) -> String {
        format!("{}_daemon", self.name)
    }

    /// The name that has an address for each replica.
    fn host(&self) -> String {
        format!("tasks.{}", self.service())
    }

    fn scale(&self, replicas: usize) {
        must(&mut docker(["service", "scale", "--detach", &format!("{}={replicas}", self.service())]), "");
        self.wait_for_replicas(replicas);
    }

    /// Waits until so many are healthy.
    fn wait_for_replicas(&self, replicas: usize) {
        let filter = format!("--filter=label=com.docker.swarm.service.name={}", self.service());
        wait_for("healthy replicas", || {
            let healthy = must(docker(["ps", "--quiet", "--filter=health=healthy"]).arg(&filter), "");
            (healthy.lines().count() == replicas).then_some(())
        });
    }

    /// A client on the daemons' network.
    fn client(&self) -> Client {
        let container = unique();
        let tls = self.tls.path().join("client");
        let mut start = docker(["run", "--detach", "--no-healthcheck", "--entrypoint=sleep"]);
        start.arg(format!("--network={}_agents", self.name)).arg(format!("--name={container}"));
        start.arg(format!("--volume={}:/tls:ro", tls.display()));
        start.arg(format!("--env=EXECUTOR_ENDPOINT=https://{}:7700", self.host()));
        start.args(["--env=EXECUTOR_CA_FILE=/tls/ca.crt", "--env=EXECUTOR_CERT_FILE=/tls/client.crt"]);
        start.args(["--env=EXECUTOR_KEY_FILE=/tls/client.key", image(), "infinity"]);
        must(&mut start, "");
        Client { container }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        let down = run(&mut docker(["stack", "rm", &self.name]), "");
        assert!(down.code == Some(0) || thread::panicking(), "{down}");
        let filter = format!("--filter=label=com.docker.swarm.service.name={}", self.service());
        wait_for("the replicas are gone", || {
            run(docker(["ps", "--all", "--quiet"]).arg(&filter), "").stdout.trim().is_empty().then_some(())
        });
        for file in ["ca.crt", "server.crt", "server.key"] {
            run(&mut docker(["secret", "rm", &format!("executor-{file}")]), "");
        }
        if self.swarm_is_ours {
            let left = run(&mut docker(["swarm", "leave", "--force"]), "");
            assert!(left.code == Some(0) || thread::panicking(), "{left}");
        }
        let volumes = run(&mut docker(["volume", "ls", "--quiet", "--filter", &format!("name={}", self.name)]), "");
        if !volumes.stdout.trim().is_empty() {
            run(docker(["volume", "rm", "--force"]).args(volumes.stdout.split_whitespace()), "");
        }
    }
}
