//! `docker-compose.yml` as it stands: what a user gets from it.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::engine::{Finished, compose, docker, image, must, run, unique, wait_for};

#[test]
fn a_client_runs_commands_in_the_daemons_container() {
    let deployment = Deployment::up();

    let identity = deployment.client(r#"tool-client bash 'whoami; pwd; hostname; exit 7'"#);
    let hostname = must(&mut docker(["exec", &deployment.daemon(), "hostname"]), "");
    assert_eq!(
        (identity.code, &*identity.stdout),
        (Some(7), &*format!("executor\n/workspace\n{hostname}\n")),
        "{identity}"
    );

    let secrets = deployment.client(r#"tool-client bash 'cat /run/secrets/*; cat /proc/1/environ; kill -0 1'"#);
    assert_eq!((secrets.code, &*secrets.stdout), (Some(1), ""), "the commands' user reaches the daemon: {secrets}");

    let stranger = deployment.client("unset EXECUTOR_TOKEN_FILE; tool-client info");
    assert_eq!(stranger.code, Some(125), "no token, no answer: {stranger}");

    let ports = must(&mut docker(["port", &deployment.daemon()]), "");
    assert_eq!(ports, "", "no port is published");
}

#[test]
fn a_background_task_and_its_notice() {
    let deployment = Deployment::up();
    let told = deployment.client(
        r#"for_session() { tool-client --owner session-1 "$@"; }
        arguments='{"command": "sleep 1; echo built", "description": "Build it", "run_in_background": true}'
        echo "$(for_session call bash "$arguments")"
        for_session output bash-1 --wait
        echo "$(for_session call bash_output '{"task_id": "bash-1"}')"
        until notices=$(for_session notices) && [ -n "$notices" ]; do sleep 0.1; done
        echo "$notices"
        echo "again: $(for_session notices)""#,
    );
    assert_eq!(told.code, Some(0), "{told}");
    let expected = "\
        started background task bash-1\n\
        built\n\
        (no new output)\n[status: completed, exit code: 0]\n\
        background bash task bash-1 finished [status: completed, exit code: 0]. Read its output with bash_output.\n\
        again: \n";
    assert_eq!(told.stdout, expected, "{told}");
}

#[test]
fn process_one_reaps_what_commands_orphan() {
    let deployment = Deployment::up();
    let run = deployment.client("for n in $(seq 50); do tool-client bash '(sleep 1 &); true' || exit; done");
    assert_eq!(run.code, Some(0), "{run}");
    let daemon = deployment.daemon();
    let processes = || must(&mut docker(["exec", &daemon, "sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null"]), "");
    // An orphan is a sleep until it has ended and a zombie until it has been reaped.
    wait_for("all orphans have ended and were reaped", || {
        let left = processes().lines().any(|stat| stat.contains("(sleep)") || stat.contains(") Z "));
        (!left).then_some(())
    });
    assert!(processes().contains("1 (executor-daemon"), "the daemon is process 1");
}

#[test]
fn stopping_ends_everything_in_time_and_leaves_nothing() {
    let deployment = Deployment::up();
    let started = deployment.client(
        r#"tool-client call bash '{"command": "trap : TERM; while :; do sleep 100 & wait; done", "description": "Ignore", "run_in_background": true}'"#,
    );
    assert_eq!(started.stdout.trim(), "started background task bash-1", "{started}");
    let daemon = deployment.daemon();
    let start = Instant::now();
    must(deployment.compose().args(["stop", "daemon"]), "");
    let took = start.elapsed();
    let state = must(&mut docker(["inspect", "--format={{.State.ExitCode}} {{.State.OOMKilled}}", &daemon]), "");
    assert_eq!(state, "0 false", "the daemon ends by itself: {}", run(&mut docker(["logs", &daemon]), ""));
    assert!(took < Duration::from_secs(15), "within the grace period, took {took:?}");

    let project = deployment.project.clone();
    drop(deployment);
    let filter = format!("--filter=label=com.docker.compose.project={project}");
    for list in [["ps", "--all", "--quiet"].as_slice(), &["network", "ls", "--quiet"], &["volume", "ls", "--quiet"]] {
        assert_eq!(must(docker(list).arg(&filter), ""), "", "{list:?}");
    }
}

/// The file, brought up under a name of its own; taken down when dropped.
struct Deployment {
    project: String,
    secret: tempfile::TempDir,
}

impl Deployment {
    /// Up, and the daemon healthy.
    fn up() -> Self {
        let secret = tempfile::tempdir().expect("a temporary directory can be made");
        let token = format!("{}\n", unique());
        std::fs::write(secret.path().join("token"), token).expect("the secret can be written");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(secret.path().join("token"), mode).expect("the secret can be closed");
        let deployment = Self { project: unique(), secret };
        must(deployment.compose().args(["up", "--detach", "--no-build", "daemon"]), "");
        let daemon = deployment.daemon();
        wait_for("the daemon is healthy", || {
            let state =
                must(&mut docker(["inspect", "--format={{.State.Status}} {{.State.Health.Status}}", &daemon]), "");
            assert!(state.starts_with("running"), "{state}: {}", run(&mut docker(["logs", &daemon]), ""));
            (state == "running healthy").then_some(())
        });
        deployment
    }

    fn compose(&self) -> std::process::Command {
        let mut command = compose(&self.project);
        command.env("EXECUTOR_IMAGE", image()).env("EXECUTOR_TOKEN_SECRET", self.secret.path().join("token"));
        command
    }

    /// The id of the daemon's container.
    fn daemon(&self) -> String {
        must(self.compose().args(["ps", "--quiet", "daemon"]), "")
    }

    /// Runs a script in the client's container.
    fn client(&self, script: &str) -> Finished {
        run(self.compose().args(["run", "--rm", "-T", "--entrypoint", "bash", "client", "-c", script]), "")
    }
}

impl Drop for Deployment {
    fn drop(&mut self) {
        let down = run(self.compose().args(["--profile", "client", "down", "--volumes", "--remove-orphans"]), "");
        assert!(down.code == Some(0) || thread::panicking(), "taking down {}: {down}", self.project);
    }
}
