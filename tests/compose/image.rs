//! The image by itself: how large it is, how soon it serves, and that it needs to write nowhere but in its volume.

use std::{
    fs,
    time::{Duration, Instant},
};

use crate::engine::{Marked, docker, image, must, run, wait_for, workspace};

/// What the image may add to its base.
const MOST_BYTES: u64 = 120 * 1_000_000;
/// From the daemon's start to its first answer. A machine that tests other things as well gets thrice that.
const SOON: Duration = Duration::from_millis(300);

over_containers!(the_image_adds_little_and_says_what_it_is);
fn the_image_adds_little_and_says_what_it_is() {
    let inspect = |image: &str, what: &str| must(&mut docker(["image", "inspect", "--format", what, image]), "");
    let size = |image| inspect(image, "{{.Size}}").parse::<u64>().expect("a size is a number");
    let (all, base) = (size(image()), size("debian:bookworm-slim"));
    println!("image: {} kB over its base of {} kB", (all - base) / 1000, base / 1000);
    assert!(all - base <= MOST_BYTES, "the image adds {} bytes", all - base);
    assert_eq!(
        inspect(
            image(),
            r#"{{.Config.StopSignal}} {{.Config.Entrypoint}} {{index .Config.Labels "org.opencontainers.image.title"}} {{index .Config.Labels "org.opencontainers.image.version"}}"#
        ),
        concat!("SIGTERM [executor-daemon] executor-daemon ", env!("CARGO_PKG_VERSION"))
    );
}

over_containers!(a_read_only_root_is_enough_and_it_serves_soon);
fn a_read_only_root_is_enough_and_it_serves_soon() {
    let marked = Marked::new();
    let name = &marked.name;
    let mut start = docker(["run", "--detach", "--read-only", "--tmpfs=/tmp", "--health-interval=1s"]);
    must(start.args([marked.label(), format!("--name={name}"), image().to_owned()]), "");
    let of_container = |what: &str| must(&mut docker(["inspect", "--format", what, name]), "");
    wait_for("the engine calls it healthy", || {
        let state = of_container("{{.State.Status}} {{.State.Health.Status}}");
        assert!(state.starts_with("running"), "{state}: {}", run(&mut docker(["logs", name]), ""));
        (state == "running healthy").then_some(())
    });
    let endpoint = "--env=EXECUTOR_ENDPOINT=unix:/var/lib/executor-daemon/executor.sock";
    let script = "whoami; touch /tmp/x && echo written; head -c 300000 /dev/zero | tr '\\0' x";
    let said = must(&mut docker(["exec", endpoint, name, "tool-client", "bash", "--workdir=/", script]), "");
    assert!(said.starts_with("executor\nwritten\nxxx"), "{:?}", said.get(..80));
    let written = must(&mut docker(["diff", name]), "");
    assert_eq!(written, "", "nothing is written but in the volume and in /tmp");

    let begun = Instant::now();
    must(&mut docker(["stop", name]), "");
    assert!(begun.elapsed() < Duration::from_secs(5), "an idle daemon ends at once, took {:?}", begun.elapsed());
    assert_eq!(of_container("{{.State.ExitCode}}"), "0");

    let serves = time_to_the_first_answer(&marked);
    println!("image: the daemon answers its health check {serves:?} after its start (the best of 5)");
    assert!(serves <= SOON * 3, "it took {serves:?}, more than thrice {SOON:?}");
}

/// From the daemon's start in a container to the health check's first success, both in that container: an engine's own
/// commands take longer than what is measured.
fn time_to_the_first_answer(marked: &Marked) -> Duration {
    const SCRIPT: &str = r#"
        for attempt in 1 2 3 4 5; do
            begun=${EPOCHREALTIME/./}
            executor-daemon serve --listen unix:/var/lib/executor-daemon/executor.sock >/dev/null 2>&1 &
            until executor-daemon health --endpoint unix:/var/lib/executor-daemon/executor.sock 2>/dev/null; do :; done
            echo $((${EPOCHREALTIME/./} - begun))
            kill $! && wait $!
        done"#;
    let mut run = docker(["run", "--rm", "--entrypoint=bash", "--no-healthcheck"]);
    let took = must(run.args([&marked.label(), image(), "-c", SCRIPT]), "");
    let took: Vec<u64> = took.lines().map(|line| line.parse().expect("microseconds")).collect();
    assert_eq!(took.len(), 5, "{took:?}");
    Duration::from_micros(took.into_iter().min().expect("five of them"))
}

over_containers!(the_kubernetes_manifest_s_arguments_work_under_its_restrictions);
fn the_kubernetes_manifest_s_arguments_work_under_its_restrictions() {
    let manifest = workspace().join("deploy/kubernetes/statefulset.yaml");
    let manifest = fs::read_to_string(manifest).expect("the manifest can be read");
    let words = |from: &str, to: &str| -> Vec<String> {
        let lines = manifest.lines().map(str::trim).skip_while(|line| *line != from).skip(1);
        lines.take_while(|line| *line != to).filter_map(|line| line.strip_prefix("- ")).map(str::to_owned).collect()
    };
    let (arguments, health) = (words("args:", "env:"), words("command:", "periodSeconds: 1"));
    assert!(arguments.len() > 3 && health.len() == 4, "{arguments:?} {health:?}");

    let marked = Marked::new();
    let name = &marked.name;
    let state = format!("{name}-state");
    for volume in [name, &state] {
        must(docker(["volume", "create"]).args([&marked.label(), volume]), "");
    }
    // As the kubelet mounts a secret and a volume for a group.
    let owned = "executor-daemon init --apart --dir /made --name daemon && cp /made/server/* /tls && chgrp 10001 /tls/* /state && \
                 chmod 440 /tls/* && chmod 2775 /state";
    let mut prepare = docker(["run", "--rm", "--entrypoint=sh", "--no-healthcheck", &format!("--volume={name}:/tls")]);
    must(prepare.args([&marked.label(), &format!("--volume={state}:/state"), image(), "-c", owned]), "");

    let mut start =
        docker(["run", "--detach", "--no-healthcheck", "--read-only", "--user=10001:10001", "--cap-drop=ALL"]);
    start.args([
        "--security-opt=no-new-privileges",
        "--env=HOME=/workspace",
        "--tmpfs=/tmp",
        "--tmpfs=/workspace:uid=10001,gid=10001,mode=0700",
    ]);
    // Without what Docker would make of an empty one: the image's owner and mode.
    start.arg(format!("--volume={state}:/var/lib/executor-daemon:nocopy"));
    start.args([marked.label(), format!("--name={name}"), format!("--volume={name}:/run/secrets/executor:ro")]);
    must(start.arg(image()).args(&arguments), "");
    wait_for("the manifest's probe succeeds", || {
        let running = must(&mut docker(["inspect", "--format={{.State.Running}}", name]), "");
        assert_eq!(running, "true", "{}", run(&mut docker(["logs", name]), ""));
        (run(docker(["exec", name]).args(&health), "").code == Some(0)).then_some(())
    });
    let endpoint = format!("--env=EXECUTOR_ENDPOINT={}", health[3]);
    let said = must(&mut docker(["exec", &endpoint, name, "tool-client", "bash", "whoami; pwd; touch x && ls"]), "");
    assert_eq!(said, "executor\n/workspace\nx");
}
