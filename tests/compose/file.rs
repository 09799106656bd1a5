//! `docker-compose.yml` as it stands: what a user gets from it.

use crate::{
    deployment::Deployment,
    engine::{docker, must, run},
};

over_containers!(what_the_file_gives_to_a_user);
fn what_the_file_gives_to_a_user() {
    let deployment = Deployment::up();
    // The way that the README says, once.
    let mut readme = deployment.compose();
    let said = run(readme.args(["run", "--rm", "-T", "client", "bash", "whoami; pwd; hostname; exit 7"]), "");
    let hostname = deployment.inside("hostname");
    assert_eq!((said.code, said.stdout), (Some(7), format!("executor\n/workspace\n{hostname}\n")), "{}", said.stderr);

    each_party_has_its_own_secrets(&deployment);
    a_second_start_changes_no_certificate(&deployment);
    a_background_task_and_its_notice(&deployment);
    process_one_reaps_what_commands_orphan(&deployment);

    let project = deployment.project.clone();
    drop(deployment);
    let filter = format!("--filter=label=com.docker.compose.project={project}");
    for list in [["ps", "--all", "--quiet"].as_slice(), &["network", "ls", "--quiet"], &["volume", "ls", "--quiet"]] {
        assert_eq!(must(docker(list).arg(&filter), ""), "", "nothing is left: {list:?}");
    }
}

fn each_party_has_its_own_secrets(deployment: &Deployment) {
    let client = deployment.client();
    assert_eq!(
        client.must("cd /etc/executor-daemon && ls -d */*"),
        "client/ca.crt\nclient/client.crt\nclient/client.key"
    );
    assert_eq!(
        deployment.inside("cd /etc/executor-daemon && ls -d */*"),
        "server/ca.crt\nserver/server.crt\nserver/server.key"
    );
    let all_private = "find /etc/executor-daemon -type f ! -perm 600";
    assert_eq!((client.must(all_private), deployment.inside(all_private)), (String::new(), String::new()));

    let reached = client.run(
        "tool-client bash 'cat /etc/executor-daemon/*/*.key; cat /proc/1/environ /proc/1/mem; kill -0 1; ls /proc/1/fd'",
    );
    assert_eq!(reached.stdout, "", "the commands' user reaches the daemon: {reached}");

    let stranger = client.run("unset EXECUTOR_CERT_FILE EXECUTOR_KEY_FILE; tool-client info");
    assert_eq!(stranger.code, Some(125), "no certificate, no answer: {stranger}");
    assert!(stranger.stderr.contains("certificate"), "{stranger}");
    let plain = client.run("EXECUTOR_ENDPOINT=http://daemon:7700 tool-client info");
    assert_eq!(plain.code, Some(125), "nothing is spoken in the clear: {plain}");

    assert_eq!(must(&mut docker(["port", &deployment.daemon()]), ""), "", "no port is published");
    assert_eq!(
        deployment.inside("touch /usr/x 2>&1; touch /workspace/x /tmp/x && rm /workspace/x /tmp/x").lines().count(),
        1
    );
}

fn a_second_start_changes_no_certificate(deployment: &Deployment) {
    let sums = || deployment.inside("cat /etc/executor-daemon/server/* | cksum");
    let before = sums();
    deployment.up_again();
    assert_eq!(sums(), before);
    let said = must(deployment.compose().args(["logs", "--no-color", "init"]), "");
    assert!(said.contains("/etc/executor-daemon/server: is there, and stays."), "{said}");
}

fn a_background_task_and_its_notice(deployment: &Deployment) {
    let told = deployment.client().run(
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

fn process_one_reaps_what_commands_orphan(deployment: &Deployment) {
    let orphans = deployment.client().run("for n in $(seq 50); do tool-client bash '(sleep 1 &); true' || exit; done");
    assert_eq!(orphans.code, Some(0), "{orphans}");
    // An orphan is a sleep until it has ended and a zombie until it has been reaped.
    let processes = || deployment.inside("cat /proc/[0-9]*/stat 2>/dev/null");
    crate::engine::wait_for("all orphans have ended and were reaped", || {
        let left = processes().lines().any(|stat| stat.contains("(sleep)") || stat.contains(") Z "));
        (!left).then_some(())
    });
    assert!(processes().contains("1 (executor-daemon"), "the daemon is process 1");
}
