//! A daemon that is not root, whose state and token lie below directories of root: its commands find neither.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        process::CommandExt,
    },
    path::Path,
    process::{Command, Stdio},
    rc::Rc,
};

use super::{Daemon, root};

/// A user without an account.
const SOMEBODY: u32 = 45_678;

/// Whether others come through every directory down to this one, and none of these is another's than root's.
fn traversable(place: &Path) -> bool {
    place.ancestors().all(|above| {
        fs::metadata(above)
            .is_ok_and(|found| found.uid() == 0 && found.mode() & 0o001 != 0 && found.mode() & 0o002 == 0)
    })
}

#[expect(clippy::disallowed_methods, reason = "the program under test is started as people start it")]
fn start(state: &Path, token: &Path) -> Daemon {
    let directory = Rc::new(tempfile::tempdir().expect("temporary directory"));
    std::os::unix::fs::chown(directory.path(), Some(SOMEBODY), Some(SOMEBODY)).expect("root may");
    let mut child = Command::new(env!("CARGO_BIN_EXE_executor-daemon"))
        .args(["serve", "--listen", "unix:sock", "--grace-ms", "300", "--max-output-bytes", "1000"])
        .args(["--default-workdir", "/tmp", "--state-dir"])
        .arg(state)
        .arg("--token-file")
        .arg(token)
        .current_dir(directory.path())
        .uid(SOMEBODY)
        .gid(SOMEBODY)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(fs::File::create(directory.path().join("log")).expect("a log"))
        .spawn()
        .expect("starts");
    let mut ready = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut ready).expect("text");
    let daemon = Daemon { keeper: child.id(), child, ready, directory };
    assert!(daemon.ready.contains(" ready: "), "{}{}", daemon.ready, daemon.log());
    daemon
}

#[tokio::test]
async fn commands_of_the_daemons_user_find_neither_its_state_nor_its_token() {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    if !root() {
        return;
    }
    if !traversable(place) {
        println!("not checked: {} is not open to other users, or not root's alone", place.display());
        return;
    }
    let place = tempfile::tempdir_in(place).expect("a directory");
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("ours");
    let (state, token) = (place.path().join("state"), place.path().join("token"));
    fs::create_dir(&state).expect("made");
    fs::write(&token, "0123456789abcdef0123456789abcdef\n").expect("written");
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).expect("ours");
    for path in [&state, &token] {
        std::os::unix::fs::chown(path, Some(SOMEBODY), Some(SOMEBODY)).expect("root may");
    }
    let daemon = start(&state, &token);
    let info = daemon.client().await.get_info(executor_proto::v1::GetInfoRequest {}).await.expect("it answers");
    let info = info.into_inner();
    if !info.features.iter().any(|one| one == "signal-fence") {
        println!("not checked: this kernel has no Landlock that refuses signals (version 6, Linux 6.12)");
        return;
    }
    assert!(!daemon.ready.contains("unprotected"), "{}", daemon.ready);
    assert!(!info.stated_limits.iter().any(|limit| limit.contains("own user")), "{:?}", info.stated_limits);
    let (state, token) = (state.display(), token.display());
    for attack in [
        format!("cat {token}"),
        format!("cat {state}/journal.sqlite"),
        format!("cp {state}/instance-id /tmp/"),
        format!("echo x > {state}/new"),
        format!("echo x >> {token}"),
        format!(": > {state}/journal.sqlite"),
        format!("rm {state}/instance-id"),
        format!("mv {state}/instance-id {state}/other"),
        format!("ln {token} /tmp/token-of-another"),
        format!("cat /proc/self/root{token}"),
        format!("cd {state} && cat instance-id"),
    ] {
        let (stdout, exit) = daemon.run(&format!("{attack} && echo done")).await;
        assert_eq!(stdout, "", "{attack}: {exit:?}");
    }
    // What lies beside is as it was, and so is what the model is told of.
    let beside = "cat /etc/hostname > /dev/null && d=$(mktemp -d) && echo x > $d/x && mkdir $d/y && mv $d/x $d/y/ && \
                  ln $d/y/x $d/z && cp /bin/true $d/t && $d/t && rm -r $d && echo done";
    assert_eq!(daemon.run(beside).await.0, "done\n");
    daemon.run("seq 1 1000").await;
    let spilled =
        format!("f=$(echo {state}/spill/run-*.stdout.*); head -n 1 $f; echo x >> $f || rm $f || echo refused");
    assert_eq!(daemon.run(&spilled).await.0, "1\nrefused\n");
}
