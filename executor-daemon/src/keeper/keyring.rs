//! A session keyring of one's own: what the kernel keeps for a login (tickets, keys of file systems) can be read by every process
//! that has inherited the keyring, whatever its uid has become. An embedded keeper stays in its caller's, as its commands do.
#![expect(unsafe_code, reason = "keyctl has no safe wrapper")]

use std::{
    ptr,
    sync::atomic::{AtomicBool, Ordering},
};

/// Whether the keeper has left its own; helpers are forked from it and find it here.
static LEFT: AtomicBool = AtomicBool::new(false);

/// Leaves the session keyring that the daemon was started with for a new, empty one.
pub(super) fn leave() {
    join_new();
    LEFT.store(true, Ordering::Relaxed);
}

/// For a helper of a keeper that has left its own: a keyring that no other command has.
pub(super) fn separate() {
    if LEFT.load(Ordering::Relaxed) {
        join_new();
    }
}

/// The kernel, or a filter around it, may not have keyrings, and a user may have had its share of them: then nothing happens.
fn join_new() {
    // SAFETY: no name is given, so that nothing is read; only this process's credentials change.
    unsafe { libc::syscall(libc::SYS_keyctl, libc::KEYCTL_JOIN_SESSION_KEYRING, ptr::null::<libc::c_char>()) };
}
