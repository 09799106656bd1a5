//! A keeper of one's own, for a program that runs the engine in its own process.

use std::{
    ffi::OsString,
    io,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::unistd::{Gid, Uid, User};

use super::{
    KEEPER_ARGUMENT,
    desk::{Desk, Notice},
    groups::Groups,
    link::{self, KeeperLink},
    protocol::Identity,
    spill::Spills,
    wire,
};

/// What the embedded keeper still needs of its environment: where a program that is linked dynamically finds its libraries.
/// Everything else of the host's environment stays with the host, where commands cannot read it.
const KEPT_VARIABLE: &str = "LD_LIBRARY_PATH";
/// How long the keeper stays for the last of what it kills. Its helpers go on without it.
const LAST_KILL_LIMIT: Duration = Duration::from_secs(3);
/// Stack of the thread that waits for the keeper's end.
const WAITER_STACK_BYTES: usize = 64 * 1024;

/// What an embedded keeper is told.
#[derive(Debug, Clone)]
pub struct EmbeddedOptions {
    /// The program that becomes the keeper: one whose `main` begins with [`super::enter_if_asked`]. `None`: this program.
    pub program: Option<PathBuf>,
    /// Where spill files go; made with mode 0700 if missing.
    pub spill_dir: PathBuf,
}

/// Starts a keeper as a child process. Commands run as the caller. The keeper ends everything and itself when the link is
/// dropped or this process dies.
///
/// # Errors
/// When the program cannot be started or does not answer as a keeper within 10 s.
#[expect(clippy::disallowed_methods, reason = "the one program that is not started by a keeper is the keeper")]
pub async fn start(options: EmbeddedOptions) -> io::Result<KeeperLink> {
    let EmbeddedOptions { program, spill_dir } = options;
    let spill_dir = std::path::absolute(spill_dir)?;
    let (ours, theirs) = wire::pair()?;
    let mut command = Command::new(program.unwrap_or_else(|| "/proc/self/exe".into()));
    command.arg0(std::env::args_os().next().unwrap_or_else(|| OsString::from("keeper")));
    command
        .arg(KEEPER_ARGUMENT)
        .arg(spill_dir)
        .env_clear()
        .envs(std::env::vars_os().filter(|(name, _)| name == KEPT_VARIABLE));
    // Without a hook between fork and exec, so that the cost does not grow with this process's memory.
    let mut keeper = command.stdin(theirs).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    // It closes this process's copy of the keeper's end, whose closing tells that the keeper is gone.
    drop(command);
    std::thread::Builder::new().name("keeper-waiter".to_owned()).stack_size(WAITER_STACK_BYTES).spawn(move || {
        // Only so that no zombie stays; the link tells of the end.
        let _ = keeper.wait();
    })?;
    let (link, _) = KeeperLink::greeted(ours).await?.take_over().await?;
    Ok(link)
}

/// Becomes an embedded keeper; returns its exit code.
pub(super) fn keeper_main(spill_dir: Option<PathBuf>) -> i32 {
    let Some(spill_dir) = spill_dir else { return 64 };
    i32::from(keep(&spill_dir).is_err())
}

fn keep(spill_dir: &std::path::Path) -> io::Result<()> {
    let link = link::take_from_stdin()?;
    // Ctrl-C is the host's to handle; so is every other signal, which this process blocks.
    let _ = nix::unistd::setsid();
    let identities = vec![caller()];
    let spills = Spills::open(spill_dir, &identities)?;
    let mut desk = Desk::open(identities, Vec::new(), Groups::default(), spills, &[])?;
    desk.greet(link, Vec::new(), Vec::new())?;
    'host: loop {
        for notice in desk.turn(None)? {
            match notice {
                Notice::Standby => desk.promote()?,
                Notice::LinkLost { .. } | Notice::NextLost { .. } => break 'host,
                Notice::Ready | Notice::Drained | Notice::Child { .. } | Notice::Signal(_) => {}
            }
        }
    }
    desk.disconnect();
    let until = Instant::now() + LAST_KILL_LIMIT;
    while !desk.quiet() && Instant::now() < until {
        desk.turn(Some(until))?;
    }
    Ok(())
}

/// The user that this process runs as.
fn caller() -> Identity {
    let (uid, gid) = (Uid::effective(), Gid::effective());
    let user = User::from_uid(uid).ok().flatten();
    let (name, home) = user.map_or_else(|| (uid.to_string(), PathBuf::from("/")), |user| (user.name, user.dir));
    let groups = nix::unistd::getgroups().unwrap_or_default().into_iter().map(Gid::as_raw).collect();
    Identity {
        name,
        uid: uid.as_raw(),
        uids: 1,
        gid: gid.as_raw(),
        groups,
        home,
        change: false,
        capabilities: None,
        allow_setuid: true,
    }
}
