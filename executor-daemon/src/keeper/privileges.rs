//! How the server gives up what root can do, before it reads a byte that somebody else wrote.
//!
//! It is started as root and becomes its user itself: it needs no right to execute the program's file, and there is no moment in
//! which a process of that user can be traced by another one (the kernel makes a process that changes its user not dumpable).
#![expect(unsafe_code, reason = "capset has no safe wrapper")]

use std::{ffi::OsString, io};

use nix::unistd::{Gid, Uid, getgroups, getresgid, getresuid, setgroups, setresgid, setresuid};

/// `_LINUX_CAPABILITY_VERSION_3`.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

/// The kernel's `__user_cap_header_struct`.
#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: i32,
}

/// The kernel's `__user_cap_data_struct`: 32 capabilities.
#[repr(C)]
#[derive(Default)]
struct CapabilityWord {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Becomes the user that the arguments name, a uid and a gid, for good: no other groups, no capabilities, and no program that it
/// might execute can give it more. Without arguments nothing happens.
///
/// # Errors
/// What the kernel answers, and when the process is not what it was to become: it must not go on then.
pub(super) fn become_user(arguments: &[OsString]) -> io::Result<()> {
    let (uid, gid) = match arguments {
        [] => return Ok(()),
        [uid, gid] => (Uid::from_raw(number(uid)?), Gid::from_raw(number(gid)?)),
        _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a uid and a gid")),
    };
    // In this order: each of them needs what the next one gives up.
    setgroups(&[])?;
    setresgid(gid, gid, gid)?;
    setresuid(uid, uid, uid)?;
    drop_capabilities()?;
    nix::sys::prctl::set_no_new_privs()?;
    let (uids, gids) = (getresuid()?, getresgid()?);
    let became = [uids.real, uids.effective, uids.saved] == [uid; 3]
        && [gids.real, gids.effective, gids.saved] == [gid; 3]
        && getgroups()?.is_empty();
    if became { Ok(()) } else { Err(io::Error::other("it could not give up its privileges")) }
}

fn number(argument: &OsString) -> io::Result<u32> {
    let number = argument.to_str().and_then(|text| text.parse().ok());
    number.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a uid and a gid"))
}

/// Also those that could be inherited, and with them the ambient ones.
fn drop_capabilities() -> io::Result<()> {
    let header = CapabilityHeader { version: CAPABILITY_VERSION, pid: 0 };
    let none = [CapabilityWord::default(), CapabilityWord::default()];
    // SAFETY: this process, the version whose data are two words, and both live through the call.
    match unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
