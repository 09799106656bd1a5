//! Spill files as the keeper makes and removes them.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use executor_daemon::ids::ProcessHandle;
use executor_proto::types::StreamName;

use super::{Keeper, NONE};

#[tokio::test]
async fn spill_files_are_private_and_removable() {
    use std::os::unix::fs::PermissionsExt;
    let keeper = Keeper::start().await;
    let command = keeper.spawn("sleep 100").await;
    let mode = |path: &Path| fs::metadata(path).expect("exists").permissions().mode() & 0o777;
    let open = |prefix: &str| keeper.link.open_spill(command.handle(), StreamName::Stdout, prefix.to_owned());
    let (file, path) = open("bash-1.stdout").await.expect("made");
    std::io::Write::write_all(&mut fs::File::from(file), b"bytes").expect("written");
    assert_eq!(fs::read(&path).expect("read"), b"bytes");
    assert_eq!((mode(&path), mode(path.parent().expect("has one"))), (0o600, 0o700));
    assert!(path.starts_with(keeper.directory.path().join("spill")));
    assert_eq!(open("../x").await.expect_err("refused").raw_os_error(), Some(libc::EINVAL));
    keeper.link.remove_spill(path.clone());
    // Answered after the removal, since messages are taken in order.
    open("bash-1.stdout").await.expect("made");
    assert!(!path.exists());
    let nobody = keeper.link.open_spill(ProcessHandle(u64::MAX), StreamName::Stdout, "x".to_owned()).await;
    assert_eq!(nobody.expect_err("unknown command").raw_os_error(), Some(libc::ESRCH));
    assert_eq!(command.end(Duration::ZERO).await, NONE);
}

#[tokio::test]
async fn a_sweep_spares_the_spills_of_commands_that_run() {
    let keeper = Keeper::start().await;
    let command = keeper.spawn("sleep 100").await;
    let open = |name, prefix: &str| keeper.link.open_spill(command.handle(), name, prefix.to_owned());
    let (_file, begun) = open(StreamName::Stdout, "bash-2.stdout").await.expect("made");
    let stray = PathBuf::from(begun.display().to_string().replace("bash-2", "bash-1"));
    fs::write(&stray, "of a command that nobody knows").expect("written");
    keeper.link.sweep_spills(Vec::new());
    // Answered after the sweep, since messages are taken in order.
    open(StreamName::Stderr, "bash-2.stderr").await.expect("made");
    assert!(begun.exists() && !stray.exists());
    assert_eq!(command.end(Duration::ZERO).await, NONE);
}
