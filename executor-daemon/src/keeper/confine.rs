//! What the kernel is to refuse a command, made ready in its helper so that between fork and exec nothing but three system calls
//! is left to do: Landlock for files, scopes and TCP, seccomp for every other socket. What a mode allows is decided elsewhere.
#![expect(unsafe_code, reason = "asks the kernel what it can do")]

use std::{
    error::Error as _,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr,
};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
};
use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, openat2},
    sys::stat::{Mode, SFlag, fstat},
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

use super::{
    protocol::{Confinement, Stage},
    spawn::Failure,
};

/// The rights that a limited mode refuses: all writing that the third version of Landlock knows, the first one that can refuse to
/// truncate.
const LIMITED: ABI = ABI::V3;
/// The first version that can refuse TCP.
const TCP: ABI = ABI::V4;
/// The first version that can refuse signals, and abstract Unix sockets.
pub(crate) const FIRST_ABI_FOR_SIGNALS: u32 = 6;
/// Devices that hold nothing, and terminals: written to in every mode.
const DEVICES: [&str; 8] =
    ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx", "/dev/pts"];
/// Set in the number of a call of the x32 ABI, which is of the same architecture as far as a filter can tell.
const X32: i64 = 0x4000_0000;

/// What a command is confined by, ready for the kernel.
#[derive(Debug, Default)]
pub(super) struct Confined {
    /// The Landlock ruleset.
    pub(super) ruleset: Option<OwnedFd>,
    /// The seccomp filters, in the order in which they are set.
    pub(super) filters: Vec<BpfProgram>,
}

/// The version of the kernel's Landlock; 0: it has none, or it is not enabled.
pub(crate) fn landlock_abi() -> u32 {
    const VERSION: libc::c_uint = 1;
    // SAFETY: with this flag the call takes no attributes, and answers with a number.
    let abi =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, ptr::null::<libc::c_void>(), 0_usize, VERSION) };
    u32::try_from(abi).unwrap_or(0)
}

/// Whether the kernel has seccomp filters that answer a call with an error.
pub(crate) fn has_filters() -> bool {
    const GET_ACTION_AVAIL: libc::c_uint = 2;
    let action = libc::SECCOMP_RET_ERRNO;
    // SAFETY: reads the number that the pointer is the address of.
    unsafe { libc::syscall(libc::SYS_seccomp, GET_ACTION_AVAIL, 0, &raw const action) == 0 }
}

/// Makes ready what `confinement` says.
///
/// # Errors
/// The kernel's answer: ELOOP where a directory that may be written is reached through a symbolic link.
pub(super) fn prepare(confinement: &Confinement) -> Result<Confined, Failure> {
    let failed = |error: io::Error| (Stage::Sandbox, error.raw_os_error().unwrap_or(libc::EIO));
    Ok(Confined {
        ruleset: ruleset(confinement).map_err(failed)?,
        filters: if confinement.network_off { socket_filters().map_err(failed)? } else { Vec::new() },
    })
}

fn ruleset(confinement: &Confinement) -> io::Result<Option<OwnedFd>> {
    if confinement.writable.is_none() && !confinement.network_off {
        return Ok(None);
    }
    let mut ruleset = Ruleset::default();
    if confinement.writable.is_some() {
        // All of it or nothing runs: the rest is what a kernel may lack.
        ruleset = ruleset.set_compatibility(CompatLevel::HardRequirement);
        ruleset = ruleset.handle_access(AccessFs::from_write(LIMITED)).map_err(kernel)?;
    }
    ruleset = ruleset.set_compatibility(CompatLevel::BestEffort);
    ruleset = ruleset.scope(Scope::AbstractUnixSocket).map_err(kernel)?;
    if confinement.network_off {
        ruleset = ruleset.handle_access(AccessNet::from_all(TCP)).map_err(kernel)?;
    }
    let mut created = ruleset.create().map_err(kernel)?;
    if let Some(writable) = &confinement.writable {
        for device in DEVICES {
            match nix::fcntl::open(device, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()) {
                Ok(device) => created = allow(created, device.as_fd(), AccessFs::WriteFile | AccessFs::Truncate)?,
                Err(Errno::ENOENT) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        for path in writable {
            match open_real(path) {
                Ok(directory) => created = allow(created, directory.as_fd(), AccessFs::from_write(LIMITED))?,
                // There is nothing to be written.
                Err(Errno::ENOENT | Errno::ENOTDIR | Errno::EACCES) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
    Ok(created.into())
}

/// Opens what a path names without following a link in any part of it: a command could have put one there that leads elsewhere.
fn open_real(path: &[u8]) -> Result<OwnedFd, Errno> {
    let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_CLOEXEC).resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
    openat2(nix::fcntl::AT_FDCWD, path, how)
}

fn allow(created: RulesetCreated, at: BorrowedFd<'_>, access: BitFlags<AccessFs>) -> io::Result<RulesetCreated> {
    let is_directory = SFlag::from_bits_truncate(fstat(at)?.st_mode & SFlag::S_IFMT.bits()) == SFlag::S_IFDIR;
    let access = if is_directory { access } else { access & AccessFs::from_file(LIMITED) };
    created.add_rule(PathBeneath::new(at, access)).map_err(kernel)
}

/// The kernel's answer in an error of Landlock's; without one it lacks what is needed.
fn kernel(error: RulesetError) -> io::Error {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = error.source();
    while let Some(error) = cause {
        if let Some(errno) = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
            return io::Error::from_raw_os_error(errno);
        }
        cause = error.source();
    }
    io::Error::from_raw_os_error(libc::EOPNOTSUPP)
}

/// Sockets of any kind but Unix ones and those that ask the kernel about interfaces, and `io_uring`, which makes sockets without
/// the call that is refused.
fn socket_filters() -> io::Result<Vec<BpfProgram>> {
    let wrong = |error: seccompiler::BackendError| io::Error::new(io::ErrorKind::Unsupported, error);
    let other_than = |domain: i32| {
        let domain = u64::try_from(domain).unwrap_or(0);
        SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, domain)
    };
    let network =
        SeccompRule::new(vec![other_than(libc::AF_UNIX).map_err(wrong)?, other_than(libc::AF_NETLINK).map_err(wrong)?])
            .map_err(wrong)?;
    let filter = |call: i64, rules: Vec<SeccompRule>, errno: i32| {
        let calls = [call, call | X32].map(|call| (call, rules.clone())).into();
        let refuse = SeccompAction::Errno(errno.unsigned_abs());
        let arch = std::env::consts::ARCH.try_into().map_err(wrong)?;
        BpfProgram::try_from(SeccompFilter::new(calls, SeccompAction::Allow, refuse, arch).map_err(wrong)?)
            .map_err(wrong)
    };
    Ok(vec![
        filter(libc::SYS_socket, vec![network], libc::ENETUNREACH)?,
        // An empty list of rules matches always.
        filter(libc::SYS_io_uring_setup, Vec::new(), libc::ENOSYS)?,
    ])
}
