//! The fence around a tenant's commands: a Landlock domain that no signal leaves. A command of it can end what the tenant has
//! started before, and nothing else: neither the keeper, nor the server, nor what another tenant runs, whoever runs it.
//!
//! A domain cannot be joined, only inherited. So one process for each tenant enters it once, the *zygote*, and forks the helpers
//! of that tenant, as children of the keeper and not of its own:
//!
//! ```text
//!   keeper ──┬─ zygote of a tenant        forks when it is told to, and does nothing else
//!            ├─ helper ── bash -c …       in the domain, as all that comes of it
//!            └─ helper ── bash -c …
//! ```
//! A command of the same user can end its tenant's zygote, as it can its tenant's helpers: the next one makes a new domain, and
//! what runs in the old one is out of the reach of later commands, though not of the keeper's.
#![expect(unsafe_code, reason = "clones helpers, and asks the kernel for a word that is shared")]

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use landlock::{
    ABI, AccessFs, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr,
    Scope,
};
use nix::{
    fcntl::{OFlag, open},
    sys::{
        memfd::{MFdFlags, memfd_create},
        signal::SigSet,
        socket::MsgFlags,
        stat::Mode,
    },
    unistd::{ForkResult, fork},
};

use super::{
    helper::{self, Context},
    spawn::SharedPids,
    wire::{self, Frame},
};

/// The rights on files that a fence knows: those of every kernel that has one.
const FILES: ABI = ABI::V3;
/// Opens a file to name it, and nothing else.
const PATH_ONLY: OFlag = OFlag::O_PATH.union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// The keeper's end of a zygote.
#[derive(Debug)]
pub(super) struct Zygote {
    socket: OwnedFd,
    /// A child of the keeper.
    pub(super) pid: i32,
}

impl Zygote {
    /// Starts one. That it cannot enter a domain shows in that it makes no helpers.
    pub(super) fn start(context: &Context) -> io::Result<Self> {
        let (ours, theirs) = wire::pair()?;
        // SAFETY: this process has one thread, so the child may go on as an ordinary program.
        match unsafe { fork() }? {
            ForkResult::Child => {
                drop(ours);
                let code = i32::from(run(theirs, context).is_err());
                // SAFETY: ends this process at once: the keeper's destructors and exit handlers are not the zygote's.
                unsafe { libc::_exit(code) }
            }
            ForkResult::Parent { child } => Ok(Self { socket: ours, pid: child.as_raw() }),
        }
    }

    /// Has a helper made that gets these sockets. Its id shows in what is returned as soon as there is one; that there will be
    /// none shows in that its sockets are closed.
    ///
    /// # Errors
    /// When the zygote is dead or does not listen.
    pub(super) fn make_helper(&self, name: u64, sockets: [OwnedFd; 2]) -> io::Result<SharedPids> {
        let shared = memfd_create(c"pids", MFdFlags::MFD_CLOEXEC)?;
        nix::unistd::ftruncate(&shared, SharedPids::BYTES)?;
        let pids = SharedPids::map(shared.as_fd())?;
        let [socket, news] = &sockets;
        let fds = [socket.as_fd(), news.as_fd(), shared.as_fd()];
        Frame::encode(&name)?.send(self.socket.as_fd(), &fds, MsgFlags::MSG_DONTWAIT)?;
        Ok(pids)
    }
}

/// Becomes a zygote; returns when the keeper is gone, or when there is no domain to enter.
fn run(socket: OwnedFd, context: &Context) -> io::Result<()> {
    let [socket] = helper::keep_only([socket])?;
    let _ = nix::sys::prctl::set_name(c"command-zygote");
    SigSet::all().thread_block()?;
    enter_domain(context)?;
    while let Some(packet) = wire::receive(socket.as_fd(), MsgFlags::empty())? {
        let Ok(name) = packet.decode::<u64>() else { continue };
        let (_, fds) = packet.into_parts();
        let Ok([theirs, news, shared]) = <[OwnedFd; 3]>::try_from(fds) else { continue };
        let Ok(pids) = SharedPids::map(shared.as_fd()) else { continue };
        let flags = libc::CLONE_PARENT | libc::CLONE_PARENT_SETTID | libc::SIGCHLD;
        let (no_stack, at) = (std::ptr::null_mut::<libc::c_void>(), pids.helper().as_ptr());
        // SAFETY: as `fork`, in a process with one thread: the child has its own copy of everything. The kernel writes the
        // child's id where it is told to before the child runs.
        if unsafe { libc::syscall(libc::SYS_clone, libc::c_long::from(flags), no_stack, at, no_stack, 0_usize) } == 0 {
            let code = i32::from(helper::run([theirs, news], name, context, &pids).is_err());
            // SAFETY: as in `Zygote::start`.
            unsafe { libc::_exit(code) }
        }
        // Of one that could not be made its sockets are closed here, which is how the keeper knows.
    }
    Ok(())
}

/// Enters a domain of its own, for good. What is to be hidden is left out of what its files are.
fn enter_domain(context: &Context) -> io::Result<()> {
    let refused = |error: landlock::RulesetError| io::Error::other(error);
    let mut ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    ruleset = ruleset.scope(Scope::Signal).map_err(refused)?;
    if !context.hidden.is_empty() {
        // Neither to list directories nor to execute: directories above would have to allow both of all below them.
        ruleset = ruleset.handle_access(AccessFs::from_write(FILES) | AccessFs::ReadFile).map_err(refused)?;
    }
    let mut created = ruleset.create().map_err(refused)?;
    if !context.hidden.is_empty() {
        created = allow_around(created, Path::new("/"), &context.hidden)?;
        if let Ok(spills) = open(&context.spills, PATH_ONLY, Mode::empty()) {
            created = created.add_rule(PathBeneath::new(spills, AccessFs::ReadFile)).map_err(refused)?;
        }
    }
    // With it no program can gain privileges any more, without which the kernel lets nobody but root enter a domain.
    created.restrict_self().map_err(refused)?;
    Ok(())
}

/// Allows everything in a directory that none of `hidden` is or lies below, and the same in those above it.
fn allow_around(mut created: RulesetCreated, directory: &Path, hidden: &[PathBuf]) -> io::Result<RulesetCreated> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        if kind.is_symlink() || hidden.contains(&path) {
            continue;
        }
        if hidden.iter().any(|hidden| hidden.starts_with(&path)) {
            created = allow_around(created, &path, hidden)?;
            continue;
        }
        // What cannot be opened cannot be used by a command of the same user either.
        let Ok(opened) = open(&path, PATH_ONLY, Mode::empty()) else { continue };
        let all = AccessFs::from_write(FILES) | AccessFs::ReadFile;
        let access = if kind.is_dir() { all } else { all & AccessFs::from_file(FILES) };
        created = created.add_rule(PathBeneath::new(opened, access)).map_err(io::Error::other)?;
    }
    Ok(created)
}
