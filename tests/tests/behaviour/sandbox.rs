//! What each sandbox mode lets a command do, and that a denial reads the same everywhere.

use std::time::Duration;

use executor_proto::types::{CommandSpec, EnvironmentVariable, Exit, SandboxMode};
use executor_tests::{Setup, World, every_backend, every_daemon, wait_for};
use tool_client::{executor::ExecutorError, text};

const SOON: Duration = Duration::from_secs(15);

/// A workspace, a TMPDIR beside it and a third directory beside both, each with a file and a directory in it.
fn places() -> Setup {
    let mut setup = Setup::default();
    setup.environment.insert("TMPDIR".to_owned(), "${TMP}/../temporary".to_owned());
    setup.prepare = vec![
        "for d in . ../temporary ../elsewhere; do mkdir -p $d/old.d && echo kept > $d/old || exit; done".to_owned(),
        // Nothing but the sandbox keeps a command from writing there.
        "chmod -R a+rwX . ../temporary ../elsewhere".to_owned(),
    ];
    setup
}

fn spec(mode: SandboxMode, command: &str) -> CommandSpec {
    CommandSpec { command: command.to_owned().into(), sandbox_mode: Some(mode), ..CommandSpec::default() }
}

/// The text that a model reads of a run in this mode.
async fn text_in(world: &World, mode: SandboxMode, command: &str) -> String {
    text::run::result(&world.run(spec(mode, command)).await.unwrap_or_else(|error| panic!("{command}: {error}")))
}

/// All ways to change something in a directory, one line each.
fn changes(at: &str) -> Vec<String> {
    [
        "echo x > AT/new",
        "echo x >> AT/old",
        ": > AT/old",
        "truncate -s 1 AT/old",
        "mkdir AT/new.d",
        "rmdir AT/old.d",
        "ln -s x AT/new.link",
        "ln AT/old AT/new.hard",
        "mkfifo AT/new.pipe",
        "mv AT/old AT/old.moved",
        "mv AT/old AT/old.d/moved",
        "rm AT/old",
    ]
    .iter()
    .map(|change| change.replace("AT", at))
    .collect()
}

every_backend!(a_mode_limits_what_is_written with places());
async fn a_mode_limits_what_is_written(world: &World) {
    use SandboxMode::{DangerFullAccess, ReadOnly, WorkspaceWrite};
    let rows = [
        (ReadOnly, [false, false, false]),
        (WorkspaceWrite, [true, true, false]),
        (DangerFullAccess, [true, true, true]),
    ];
    for (mode, allowed) in rows {
        for (at, allowed) in [".", "\"$TMPDIR\"", "../elsewhere"].into_iter().zip(allowed) {
            for change in changes(at) {
                // Each begins with things as they were.
                let again = format!("cd {at} && rm -rf new* old* && mkdir old.d && echo kept > old");
                assert_eq!(text_in(world, DangerFullAccess, &again).await, "(no output)");
                let result = world.run(spec(mode, &change)).await.expect("it runs");
                assert_eq!(result.exit == Exit::Code(0), allowed, "{change} in {mode:?}: {result:?}");
                assert_eq!(result.sandbox_denied, (!allowed).then_some(mode), "{change}: {result:?}");
                let now = text_in(world, DangerFullAccess, &format!("cd {at} && echo *; cat old")).await;
                assert_eq!(now == "old old.d\nkept\n", !allowed, "{change} in {mode:?}: {now}");
            }
        }
    }
}

every_backend!(a_mode_limits_neither_reading_nor_programs_nor_its_own_output with places());
async fn a_mode_limits_neither_reading_nor_programs_nor_its_own_output(world: &World) {
    for mode in SandboxMode::ALL {
        for (command, expected) in [
            ("cat ../elsewhere/old old \"$TMPDIR/old\"", "kept\nkept\nkept\n"),
            ("ls / > /dev/null; ls -d /etc", "/etc\n"),
            ("/bin/echo program", "program\n"),
            ("echo a > /dev/stdout; echo b > /dev/stderr", "a\n[stderr]\nb\n"),
            ("echo x > /dev/null && echo x 2> /dev/full | cat", "x\n"),
            ("head -c 3 /dev/zero | wc -c; head -c 3 /dev/urandom | wc -c", "3\n3\n"),
            (
                "cat /proc/self/comm; [ -d /proc/self/fd ] && readlink /proc/self/exe > /dev/null && echo ok",
                "cat\nok\n",
            ),
            ("cat <(echo substituted)", "substituted\n"),
            ("sleep 300 & kill %1; wait %1; echo $?", "143\n"),
        ] {
            assert_eq!(text_in(world, mode, command).await, expected, "{command} in {mode:?}");
        }
        let with_stdin = CommandSpec { stdin: Some("from stdin".into()), ..spec(mode, "cat /dev/stdin") };
        assert_eq!(world.run(with_stdin).await.expect("it runs").stdout.tail, "from stdin");
    }
}

every_backend!(a_denial_has_one_text with places());
async fn a_denial_has_one_text(world: &World) {
    for mode in [SandboxMode::ReadOnly, SandboxMode::WorkspaceWrite] {
        assert_eq!(
            text_in(world, mode, "echo out; echo x > ../elsewhere/new").await,
            format!(
                "out\n[stderr]\nbash: line 1: ../elsewhere/new: Permission denied\n\
                 [sandbox: file access denied under {} mode]\n[exit code: 1]",
                mode.as_str()
            )
        );
        // Its words alone are none, and neither is a failure alone.
        assert_eq!(text_in(world, mode, "echo Permission denied >&2").await, "[stderr]\nPermission denied\n");
        assert_eq!(text_in(world, mode, "exit 3").await, "(no output)\n[exit code: 3]");
    }
    let full = text_in(world, SandboxMode::DangerFullAccess, "echo Permission denied >&2; exit 1").await;
    assert_eq!(full, "[stderr]\nPermission denied\n[exit code: 1]");
}

every_backend!(no_descendant_gets_out_of_its_sandbox with places());
async fn no_descendant_gets_out_of_its_sandbox(world: &World) {
    let escapes = [
        "setsid -w bash -c 'echo x > ../elsewhere/new'",
        "(trap '' HUP; exec bash -c 'cd /; exec -a other bash -c \"echo x > \\\"$OLDPWD\\\"/../elsewhere/new\"')",
        "cat /proc/1/root/proc/version > /dev/null; echo x > /proc/self/cwd/../elsewhere/new",
        "mount --bind . ../elsewhere",
        "ln ../elsewhere/old taken && echo x > taken",
        "mv ../elsewhere/old taken",
    ];
    for escape in escapes {
        let result = world.run(spec(SandboxMode::WorkspaceWrite, escape)).await.expect("it runs");
        assert_ne!(result.exit, Exit::Code(0), "{escape}: {result:?}");
    }
    assert_eq!(world.bash("cd ../elsewhere && echo * && cat old").await, "old old.d\nkept\n");
}

every_backend!(a_link_does_not_widen_a_sandbox with places());
async fn a_link_does_not_widen_a_sandbox(world: &World) {
    let outside = world.tmp().parent().expect("it lies somewhere").join("elsewhere");
    let in_workspace = |workspace: String, command: &str| CommandSpec {
        workspace: Some(workspace.into()),
        ..spec(SandboxMode::WorkspaceWrite, command)
    };
    let link = world.tmp().join("link");
    assert_eq!(world.bash("ln -s ../elsewhere link; ln -s / ../temporary/root").await, "(no output)");
    // Named as the workspace it is refused, with what to do.
    let error = world.run(in_workspace(link.display().to_string(), "echo x > link/new")).await.expect_err("refused");
    assert_eq!(
        error.to_string(),
        "sandbox mode workspace-write is not available: the session's workspace, TMPDIR or a writable path is reached through \
         a symbolic link; give its real path"
    );
    // One in what may be written anyway is covered by that, and leads nowhere.
    let below = world.tmp().parent().expect("it lies somewhere").join("temporary/root");
    let result =
        world.run(in_workspace(below.display().to_string(), "echo x > ../elsewhere/new")).await.expect("it runs");
    assert_eq!(result.sandbox_denied, Some(SandboxMode::WorkspaceWrite));
    assert!(!outside.join("new").exists());
}

every_backend!(the_workspace_is_the_sessions_wherever_a_command_starts with places());
async fn the_workspace_is_the_sessions_wherever_a_command_starts(world: &World) {
    let elsewhere = world.tmp().parent().expect("it lies somewhere").join("elsewhere");
    let there = CommandSpec {
        workdir: Some(elsewhere.display().to_string().into()),
        workspace: Some(world.tmp().display().to_string().into()),
        ..spec(SandboxMode::WorkspaceWrite, "echo x > ../tmp/new; echo x > new")
    };
    let result = world.run(there).await.expect("it runs");
    assert_eq!((result.exit, result.sandbox_denied), (Exit::Code(1), Some(SandboxMode::WorkspaceWrite)));
    assert!(world.tmp().join("new").exists() && !elsewhere.join("new").exists());
    let all = CommandSpec { workspace: Some("/".into()), ..spec(SandboxMode::WorkspaceWrite, "echo x > new.2") };
    let error = world.run(all).await.expect_err("it would limit nothing");
    assert!(matches!(&error, ExecutorError::SandboxUnavailable { .. }), "{error}");
    assert!(error.to_string().contains("the session's workspace is /"), "{error}");
    assert!(!world.tmp().join("new.2").exists(), "it ran without");
}

every_backend!(a_task_keeps_to_its_sandbox with places());
async fn a_task_keeps_to_its_sandbox(world: &World) {
    let mut session = world.session("limited");
    session.sandbox = Some(SandboxMode::ReadOnly);
    let arguments = r#"{"command": "echo x > new || echo no", "description": "d", "run_in_background": true}"#;
    let started = world.call(Some(&session), "bash", arguments, &tool_client::tools::Abort::default()).await.text;
    let id =
        executor_proto::types::TaskId(started.strip_prefix("started background task ").expect(&started).to_owned());
    world.ended(&id, SOON).await.expect("it ends");
    assert!(!world.tmp().join("new").exists());
}

every_backend!(a_ceiling_is_the_default_and_nothing_wider_can_be_had
    with Setup { sandbox: Some(SandboxMode::WorkspaceWrite), ..places() });
async fn a_ceiling_is_the_default_and_nothing_wider_can_be_had(world: &World) {
    let info = world.executor().info().await.expect("it answers");
    assert_eq!(info.sandbox_modes, [SandboxMode::ReadOnly, SandboxMode::WorkspaceWrite]);
    assert_eq!(info.sandbox_mode, Some(SandboxMode::WorkspaceWrite));
    assert_eq!(world.bash("echo x > new && cat new").await, "x\n");
    let text = world.bash("echo x > ../elsewhere/new").await;
    assert!(text.ends_with("[sandbox: file access denied under workspace-write mode]\n[exit code: 1]"), "{text}");
    let mut session = world.session("wide");
    session.sandbox = Some(SandboxMode::DangerFullAccess);
    let arguments = r#"{"command": "echo x > wide", "description": "d"}"#;
    let text = world.call(Some(&session), "bash", arguments, &tool_client::tools::Abort::default()).await.text;
    let reason = "this executor allows workspace-write at most";
    assert_eq!(text, format!("Error: sandbox mode danger-full-access is not available here: {reason}"));
    assert!(!world.tmp().join("wide").exists(), "it ran");
    // Nor can a caller make everything its workspace, or have another TMPDIR.
    let all = CommandSpec {
        workspace: world.tmp().parent().map(|root| root.display().to_string().into()),
        ..spec(SandboxMode::WorkspaceWrite, "true")
    };
    let error = world.run(all).await.expect_err("it is outside").to_string();
    assert!(error.contains("is outside of what this executor allows"), "{error}");
    let mut other = spec(SandboxMode::WorkspaceWrite, "echo x > $TMPDIR/new");
    let elsewhere = world.tmp().parent().expect("it lies somewhere").join("elsewhere").display().to_string();
    other.environment = vec![EnvironmentVariable { name: "TMPDIR".into(), value: elsewhere.into() }];
    assert_eq!(world.run(other).await.expect("it runs").sandbox_denied, Some(SandboxMode::WorkspaceWrite));
}

every_backend!(arguments_of_the_model_do_not_move_the_sandbox
    with Setup { sandbox: Some(SandboxMode::ReadOnly), ..places() });
async fn arguments_of_the_model_do_not_move_the_sandbox(world: &World) {
    let more = serde_json::json!({
        "sandbox": "danger-full-access", "sandbox_mode": 3, "sandboxMode": "danger-full-access", "workspace": "/",
        "workdir": "..", "dangerouslyDisableSandbox": true
    });
    let text = world.bash_with("echo x > elsewhere/new", more).await;
    assert!(text.ends_with("[sandbox: file access denied under read-only mode]\n[exit code: 1]"), "{text}");
}

every_backend!(without_a_network_no_mode_has_one with Setup { network: false, ..places() });
async fn without_a_network_no_mode_has_one(world: &World) {
    assert!(world.executor().info().await.expect("it answers").network_off);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("it is bound").port();
    for mode in SandboxMode::ALL {
        for way in [format!("/dev/tcp/127.0.0.1/{port}"), "/dev/udp/127.0.0.1/9".to_owned()] {
            // It is no denial of a file.
            let text = text_in(world, mode, &format!("(exec 3<>{way})")).await;
            let lines = [format!("{way}: Network is unreachable"), "[exit code: 1]".to_owned()];
            assert!(lines.iter().all(|line| text.contains(line)) && !text.contains("[sandbox"), "{mode:?}: {text}");
        }
    }
}

every_backend!(with_a_network_every_mode_has_it with places());
async fn with_a_network_every_mode_has_it(world: &World) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("it is bound").port();
    for mode in SandboxMode::ALL {
        for way in [format!("/dev/tcp/127.0.0.1/{port}"), "/dev/udp/127.0.0.1/9".to_owned()] {
            assert_eq!(text_in(world, mode, &format!("(exec 3<>{way}) && echo reached")).await, "reached\n");
        }
    }
}

every_daemon!(a_run_that_a_new_server_takes_over_is_still_in_its_sandbox with places());
async fn a_run_that_a_new_server_takes_over_is_still_in_its_sandbox(world: &World) {
    let daemon = world.daemon().expect("there is one");
    let wait = "echo > ready; until [ -e go ]; do sleep 0.01; done; echo x > ../elsewhere/new";
    let die = async {
        wait_for("it runs", SOON, || world.tmp().join("ready").exists()).await;
        daemon.kill_server().await.expect("it is killed");
        std::fs::write(world.tmp().join("go"), "").expect("written");
    };
    let (text, ()) = futures_util::future::join(text_in(world, SandboxMode::WorkspaceWrite, wait), die).await;
    assert!(text.contains("[sandbox: file access denied under workspace-write mode]\n[exit code: 1]"), "{text}");
}
