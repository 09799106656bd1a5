//! Two tenants on one daemon, told apart by their certificates: `deploy/compose/tenants.yml`.

use crate::deployment::Deployment;

over_containers!(two_agents_cannot_reach_each_other_s_tasks);
fn two_agents_cannot_reach_each_other_s_tasks() {
    let deployment = Deployment::with(Some("deploy/compose/tenants.yml"), Vec::new());
    let [a, b] = ["team-a", "team-b"].map(|service| deployment.client_of(service));
    assert_eq!(a.must("ls /etc/executor-daemon"), "team-a", "only its own certificate is mounted");

    // The same owner on purpose: it is the tenant that keeps them apart.
    let started = a.must("tool-client --owner s bash --background 'echo secret; sleep 1000'");
    assert_eq!(started, "bash-1");
    for attempt in ["output bash-1", "kill bash-1", "logs bash-1"] {
        let refused = b.run(&format!("tool-client --owner s {attempt}"));
        assert_eq!(refused.code, Some(125), "{attempt}: {refused}");
        assert!(refused.stderr.contains("unknown bash task \"bash-1\""), "{attempt}: {refused}");
        assert!(!refused.stdout.contains("secret"), "{attempt}: {refused}");
    }
    let theirs = b.must("tool-client --owner s ps");
    assert!(!theirs.contains("bash-1"), "{theirs}");
    assert_eq!(b.must("tool-client --owner s bash --background true"), "bash-1", "ids count for each tenant");
    assert_eq!(a.must("tool-client --owner s logs bash-1"), "secret");
    let killed = a.must(r#"tool-client --owner s call bash_kill '{"task_id": "bash-1"}'"#);
    assert!(killed.contains("killed"), "{killed}");

    // Somebody else's certificate with this tenant's key is no identity at all.
    let mixed = a.run("EXECUTOR_CERT_FILE=/etc/executor-daemon/team-a/ca.crt tool-client info");
    assert_ne!(mixed.code, Some(0), "{mixed}");
}
