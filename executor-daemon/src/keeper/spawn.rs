//! From a helper to a command: `clone` with shared memory and an own stack, then the set-up, then `execve`.
//!
//! The helper is suspended until the child has executed the command or has given up, so the child may use the helper's
//! memory: it reads what was prepared and leaves the reason of a failure there. Between the two it makes raw system calls
//! only: nothing that allocates, locks, panics or runs destructors. All signals are blocked around it, and the helper has
//! no handlers, so a signal has the default effect on the command from its first moment on.
#![expect(unsafe_code, reason = "clone with shared memory and raw system calls in the child")]

use std::{
    ffi::{CString, c_char, c_int, c_long, c_uint, c_ulong, c_void},
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
    ptr::{self, NonNull},
    sync::atomic::{AtomicI32, Ordering},
};

use seccompiler::BpfProgram;

use super::{
    confine::Confined,
    protocol::{Identity, OUTSIDE_ROOTS, SpawnSpec, Stage},
};

/// Bytes of the child's stack. It holds a few frames of system calls; only touched pages cost memory.
const STACK_BYTES: usize = 64 * 1024;
/// Below it, unmapped for access: an overflow faults instead of writing elsewhere.
const GUARD_BYTES: usize = 4096;

/// Where something failed, and the kernel's answer.
pub(super) type Failure = (Stage, i32);

/// The child's stack; made once per helper.
#[derive(Debug)]
pub(super) struct Stack {
    lowest: NonNull<c_void>,
}

impl Stack {
    /// Maps a stack.
    pub(super) fn new() -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh anonymous mapping, known to nobody else.
        let lowest = unsafe { libc::mmap(ptr::null_mut(), GUARD_BYTES + STACK_BYTES, protection, flags, -1, 0) };
        if lowest == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stack = Self { lowest: NonNull::new(lowest).ok_or(io::ErrorKind::OutOfMemory)? };
        // SAFETY: the first page of the mapping above.
        if unsafe { libc::mprotect(lowest, GUARD_BYTES, libc::PROT_NONE) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(stack)
    }

    fn top(&self) -> *mut c_void {
        // SAFETY: one past the end of the mapping, which is page-aligned (and so 16-byte aligned).
        unsafe { self.lowest.as_ptr().byte_add(GUARD_BYTES + STACK_BYTES) }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; no child runs on it, since `start` returns only after it has left.
        unsafe { libc::munmap(self.lowest.as_ptr(), GUARD_BYTES + STACK_BYTES) };
    }
}

/// Where the kernel writes the id of a shell before the shell runs, and that of a helper which another process makes; the keeper
/// reads them there.
#[derive(Debug)]
pub(super) struct SharedPids {
    words: NonNull<[AtomicI32; 2]>,
}

impl SharedPids {
    /// Size of a file that they lie in.
    pub(super) const BYTES: libc::off_t = size_of::<[AtomicI32; 2]>() as libc::off_t;

    /// Maps words, both 0, that stay shared with the processes that are forked.
    pub(super) fn new() -> io::Result<Self> {
        Self::mapped(libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1)
    }

    /// Maps those in a file, which has [`Self::BYTES`].
    pub(super) fn map(file: BorrowedFd<'_>) -> io::Result<Self> {
        Self::mapped(libc::MAP_SHARED, file.as_raw_fd())
    }

    fn mapped(flags: c_int, file: RawFd) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping; what others do to the file goes through atomics, as here.
        let words = unsafe { libc::mmap(ptr::null_mut(), size_of::<[AtomicI32; 2]>(), protection, flags, file, 0) };
        if words == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { words: NonNull::new(words.cast()).ok_or(io::ErrorKind::OutOfMemory)? })
    }

    /// The id of the shell that was started last. 0: none.
    pub(super) fn shell(&self) -> &AtomicI32 {
        &self.words()[0]
    }

    /// The id of the helper. 0: none was made yet, or it was made without this.
    pub(super) fn helper(&self) -> &AtomicI32 {
        &self.words()[1]
    }

    fn words(&self) -> &[AtomicI32; 2] {
        // SAFETY: mapped and page-aligned as long as `self` lives, and zeroed at first.
        unsafe { self.words.as_ref() }
    }
}

impl Drop for SharedPids {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `mapped`, to which no reference is left.
        unsafe { libc::munmap(self.words.as_ptr().cast(), size_of::<[AtomicI32; 2]>()) };
    }
}

/// The descriptors that a command gets.
#[derive(Debug)]
pub(super) struct Descriptors {
    /// Becomes 0; `None`: `/dev/null`.
    pub(super) stdin: Option<OwnedFd>,
    /// Becomes 1.
    pub(super) stdout: OwnedFd,
    /// Becomes 2.
    pub(super) stderr: OwnedFd,
    /// Becomes 3.
    pub(super) script: Option<OwnedFd>,
}

/// Strings for the kernel: the texts, and the null-terminated list of their addresses.
struct Strings {
    _texts: Vec<CString>,
    addresses: Vec<*const c_char>,
}

impl Strings {
    fn new(texts: Vec<Vec<u8>>) -> Result<Self, Failure> {
        let texts: Vec<_> = texts.into_iter().map(text).collect::<Result<_, _>>()?;
        let addresses = texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect();
        Ok(Self { _texts: texts, addresses })
    }
}

fn text(bytes: Vec<u8>) -> Result<CString, Failure> {
    CString::new(bytes).map_err(|_nul_inside| (Stage::Prepare, libc::EINVAL))
}

/// What a command gets less of than its helper has.
#[derive(Debug)]
pub(super) struct Limits {
    /// The limit on descriptors that it gets (soft, hard); `None`: the helper's own.
    pub(super) open_files: Option<(u64, u64)>,
    /// The limit on processes of its user, where that is another one than the helper's; `None`: the helper's own.
    pub(super) processes: Option<u64>,
    /// The capabilities that [`bound_capabilities`] has left.
    pub(super) capabilities: u64,
    /// What it is refused.
    pub(super) confined: Confined,
}

/// Gives up, for whatever this process starts, the capabilities that no command may have. What it has itself it keeps: it
/// executes nothing. Without the right to do so nothing happens; see [`give_up_capabilities`].
pub(super) fn bound_capabilities(kept: u64) {
    for capability in (0..u64::BITS).filter(|capability| kept >> capability & 1 == 0) {
        // SAFETY: integers only.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, c_ulong::from(capability), UNUSED, UNUSED, UNUSED) } < 0 {
            // Above the kernel's last, or not permitted.
            break;
        }
    }
}

/// What the child reads, and where it leaves the reason of a failure.
struct Setup {
    stdin: RawFd,
    stdout: RawFd,
    stderr: RawFd,
    script: RawFd,
    open_files: Option<libc::rlimit64>,
    ruleset: RawFd,
    filters: *const libc::sock_fprog,
    filter_count: usize,
    processes: Option<libc::rlimit64>,
    identity: Option<ChildIdentity>,
    /// Those that it keeps, and those that a command of the helper could have. `None`: it keeps what the helper has.
    capabilities: Option<(u64, u64)>,
    no_new_privileges: bool,
    workdir: *const c_char,
    roots: *const Vec<u8>,
    root_count: usize,
    programs: *const *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    failure: Option<Failure>,
}

struct ChildIdentity {
    uid: u32,
    gid: u32,
    groups: *const u32,
    group_count: usize,
}

/// Arguments of `prctl`, which looks at all of their bits.
const ON: c_ulong = 1;
const UNUSED: c_ulong = 0;

/// No descriptor.
const NONE: RawFd = -1;

/// Starts a command; returns its pid when it has been executed. It leads a session and a group of its own.
///
/// `spec` names a user that `identity` has.
///
/// # Errors
/// The stage that failed and the kernel's answer; no process is left then.
pub(super) fn start(
    stack: &Stack,
    pids: &SharedPids,
    spec: SpawnSpec,
    identity: &Identity,
    descriptors: &Descriptors,
    limits: &Limits,
) -> Result<i32, Failure> {
    let filters: Vec<_> = limits.confined.filters.iter().map(filter).collect::<Result<_, _>>()?;
    let (programs, arguments) = (Strings::new(spec.programs)?, Strings::new(spec.arguments)?);
    let (environment, workdir) = (Strings::new(spec.environment)?, text(spec.workdir)?);
    let mut setup = Setup {
        stdin: descriptors.stdin.as_ref().map_or(NONE, AsRawFd::as_raw_fd),
        stdout: descriptors.stdout.as_raw_fd(),
        stderr: descriptors.stderr.as_raw_fd(),
        script: descriptors.script.as_ref().map_or(NONE, AsRawFd::as_raw_fd),
        ruleset: limits.confined.ruleset.as_ref().map_or(NONE, AsRawFd::as_raw_fd),
        filters: filters.as_ptr(),
        filter_count: filters.len(),
        open_files: limits.open_files.map(|(soft, hard)| libc::rlimit64 { rlim_cur: soft, rlim_max: hard }),
        processes: limits
            .processes
            .filter(|_| identity.change)
            .map(|most| libc::rlimit64 { rlim_cur: most, rlim_max: most }),
        identity: identity.change.then_some(ChildIdentity {
            uid: spec.uid,
            gid: identity.gid,
            groups: identity.groups.as_ptr(),
            group_count: identity.groups.len(),
        }),
        capabilities: identity.capabilities.map(|kept| (kept, limits.capabilities)),
        no_new_privileges: !identity.allow_setuid,
        workdir: workdir.as_ptr(),
        roots: spec.workdir_roots.as_ptr(),
        root_count: spec.workdir_roots.len(),
        programs: programs.addresses.as_ptr(),
        arguments: arguments.addresses.as_ptr(),
        environment: environment.addresses.as_ptr(),
        failure: None,
    };
    let setup = &raw mut setup;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PARENT_SETTID | libc::SIGCHLD;
    // SAFETY: the stack is ours and unused; `setup` and all it points to live until the end of this function, and the
    // caller is suspended (CLONE_VFORK) until the child has left this memory.
    let pid = unsafe { libc::clone(child, stack.top(), flags, setup.cast(), pids.shell().as_ptr()) };
    if pid < 0 {
        return Err((Stage::Clone, errno()));
    }
    // SAFETY: the child is gone from this memory; it may have written the field, which the compiler cannot see.
    match unsafe { (&raw const (*setup).failure).read_volatile() } {
        None => Ok(pid),
        Some(failure) => {
            pids.shell().store(0, Ordering::Release);
            // SAFETY: waits for our own child, which is exiting.
            while unsafe { libc::waitpid(pid, ptr::null_mut(), libc::__WALL) } < 0 && errno() == libc::EINTR {}
            Err(failure)
        }
    }
}

/// A filter as the kernel takes it: where it is, and how long.
fn filter(program: &BpfProgram) -> Result<libc::sock_fprog, Failure> {
    let len = u16::try_from(program.len()).map_err(|_too_long| (Stage::Sandbox, libc::E2BIG))?;
    // Both are the kernel's `struct sock_filter`; it is only read.
    Ok(libc::sock_fprog { len, filter: program.as_ptr().cast_mut().cast() })
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Runs on the new stack. Returning ends the child by a raw `exit`, which runs nothing of this process.
extern "C" fn child(setup: *mut c_void) -> c_int {
    let setup: *mut Setup = setup.cast();
    // SAFETY: points to the live `Setup` of the suspended parent.
    let failure = unsafe { become_command(&*setup) };
    // SAFETY: as above; nobody else accesses it while the parent is suspended.
    unsafe { (&raw mut (*setup).failure).write_volatile(Some(failure)) };
    127
}

/// One raw system call as a result.
macro_rules! call {
    ($stage:expr, $($argument:expr),+) => {
        // The arguments are integers and addresses of live memory of the shapes that the call expects.
        match libc::syscall($($argument),+) {
            result if result < 0 => return ($stage, *libc::__errno_location()),
            result => result,
        }
    };
}

/// SAFETY: only in the child of [`start`]: raw system calls on what `Setup` points to, no return on success.
unsafe fn become_command(setup: &Setup) -> Failure {
    // SAFETY: every pointer in `setup` is valid until the parent goes on, which is after this function; the calls below
    // take integers, or such pointers in the shape that they expect.
    unsafe {
        call!(Stage::Setsid, libc::SYS_setsid);
        let stdin = if setup.stdin == NONE {
            let null = c"/dev/null".as_ptr();
            let flags = libc::O_RDONLY | libc::O_CLOEXEC;
            call!(Stage::Descriptors, libc::SYS_openat, libc::AT_FDCWD, null, flags)
        } else {
            c_long::from(setup.stdin)
        };
        call!(Stage::Descriptors, libc::SYS_dup3, stdin, 0, 0);
        call!(Stage::Descriptors, libc::SYS_dup3, setup.stdout, 1, 0);
        call!(Stage::Descriptors, libc::SYS_dup3, setup.stderr, 2, 0);
        let mut first_unused: c_int = 3;
        if setup.script != NONE {
            // Received descriptors lie above the helper's own, so nothing that is still needed is at 3.
            call!(Stage::Descriptors, libc::SYS_dup3, setup.script, 3, 0);
            first_unused = 4;
        }
        if let Err(failure) = confine(setup) {
            return failure;
        }
        // A net only: every descriptor here is closed on exec anyway, so a kernel without the call does no harm.
        libc::syscall(libc::SYS_close_range, first_unused, c_int::MAX, 0);
        if let Some(limit) = &setup.open_files {
            let no_old = ptr::null::<c_void>();
            call!(Stage::Limits, libc::SYS_prlimit64, 0, libc::RLIMIT_NOFILE, ptr::from_ref(limit), no_old);
        }
        if let Some(limit) = &setup.processes {
            let no_old = ptr::null::<c_void>();
            call!(Stage::Limits, libc::SYS_prlimit64, 0, libc::RLIMIT_NPROC, ptr::from_ref(limit), no_old);
        }
        if let Some((kept, possible)) = setup.capabilities {
            // Without effect where there is nothing to keep, or nobody to become.
            call!(
                Stage::Identity,
                libc::SYS_prctl,
                libc::PR_SET_KEEPCAPS,
                c_ulong::from(kept != 0),
                UNUSED,
                UNUSED,
                UNUSED
            );
            if let Err(failure) = bound(setup, possible & !kept) {
                return failure;
            }
        }
        if let Some(ChildIdentity { uid, gid, groups, group_count }) = setup.identity {
            call!(Stage::Identity, libc::SYS_setgroups, group_count, groups);
            call!(Stage::Identity, libc::SYS_setresgid, gid, gid, gid);
            call!(Stage::Identity, libc::SYS_setresuid, uid, uid, uid);
        }
        if let Some((kept, _)) = setup.capabilities
            && let Err(failure) = keep_capabilities(kept)
        {
            return failure;
        }
        if setup.no_new_privileges {
            call!(Stage::Identity, libc::SYS_prctl, libc::PR_SET_NO_NEW_PRIVS, ON, UNUSED, UNUSED, UNUSED);
        }
        call!(Stage::Chdir, libc::SYS_chdir, setup.workdir);
        if setup.root_count > 0
            && let Err(failure) = check_workdir(setup)
        {
            return failure;
        }
        let (no_signals, no_old) = (0_u64, ptr::null::<c_void>());
        let (mask, bytes) = (ptr::from_ref(&no_signals), size_of::<u64>());
        call!(Stage::Limits, libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, mask, no_old, bytes);
        execute(setup)
    }
}

/// Gives up what the command is refused, for good: nothing that it executes gets it back.
///
/// SAFETY: as [`become_command`].
unsafe fn confine(setup: &Setup) -> Result<(), Failure> {
    if setup.ruleset == NONE && setup.filter_count == 0 {
        return Ok(());
    }
    // SAFETY: integers, and filters that live as long as `setup`.
    unsafe {
        let done = |result: c_long| if result < 0 { Err((Stage::Sandbox, *libc::__errno_location())) } else { Ok(()) };
        done(libc::syscall(libc::SYS_prctl, libc::PR_SET_NO_NEW_PRIVS, ON, UNUSED, UNUSED, UNUSED))?;
        if setup.ruleset != NONE {
            done(libc::syscall(libc::SYS_landlock_restrict_self, setup.ruleset, 0))?;
        }
        for n in 0..setup.filter_count {
            let filter = setup.filters.add(n);
            done(libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, filter))?;
        }
    }
    Ok(())
}

/// Gives up capabilities that a program could bring back: those that an executed file, or being root, would give.
///
/// SAFETY: as [`become_command`].
unsafe fn bound(setup: &Setup, given_up: u64) -> Result<(), Failure> {
    for capability in 0..u64::BITS {
        if given_up >> capability & 1 == 0 {
            continue;
        }
        // SAFETY: integers only.
        if unsafe {
            libc::syscall(libc::SYS_prctl, libc::PR_CAPBSET_DROP, c_ulong::from(capability), UNUSED, UNUSED, UNUSED)
        } < 0
        {
            // SAFETY: this thread's own.
            match unsafe { *libc::__errno_location() } {
                // The kernel has no more.
                libc::EINVAL => return Ok(()),
                // A daemon without CAP_SETPCAP. No program can bring them back all the same where none can give privileges, but
                // to be root.
                libc::EPERM if setup.no_new_privileges && setup.identity.as_ref().is_some_and(|one| one.uid != 0) => {
                    return Ok(());
                }
                errno => return Err((Stage::Identity, errno)),
            }
        }
    }
    Ok(())
}

/// Has these capabilities and no other, in every set but the one of [`bound`].
///
/// SAFETY: as [`become_command`].
unsafe fn keep_capabilities(kept: u64) -> Result<(), Failure> {
    /// `_LINUX_CAPABILITY_VERSION_3`, and this process.
    const HEADER: [u32; 2] = [0x2008_0522, 0];
    /// `PR_CAP_AMBIENT_RAISE`.
    const RAISE: c_ulong = 2;
    #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
    let (low, high) = (kept as c_uint, (kept >> 32) as c_uint);
    // Effective, permitted, inheritable; twice.
    let data = [low, low, low, high, high, high];
    // SAFETY: the kernel's two structures, alive through the call; integers.
    unsafe {
        if libc::syscall(libc::SYS_capset, HEADER.as_ptr(), data.as_ptr()) < 0 {
            return Err((Stage::Identity, *libc::__errno_location()));
        }
        for capability in 0..u64::BITS {
            if kept >> capability & 1 == 1
                && libc::syscall(
                    libc::SYS_prctl,
                    libc::PR_CAP_AMBIENT,
                    RAISE,
                    c_ulong::from(capability),
                    UNUSED,
                    UNUSED,
                ) < 0
            {
                return Err((Stage::Identity, *libc::__errno_location()));
            }
        }
    }
    Ok(())
}

/// Whether the directory that was gone to lies where it may. The kernel says where that is: what its path was made of does not
/// matter any more, and it cannot be exchanged.
///
/// SAFETY: as [`become_command`].
unsafe fn check_workdir(setup: &Setup) -> Result<(), Failure> {
    /// `PATH_MAX`.
    const MAX_PATH_BYTES: usize = 4096;

    let mut path = [0_u8; MAX_PATH_BYTES];
    // SAFETY: a buffer of that length; the roots live as long as `setup`.
    let (length, roots) = unsafe {
        let length = libc::syscall(libc::SYS_getcwd, path.as_mut_ptr(), path.len());
        if length < 1 {
            return Err((Stage::Chdir, *libc::__errno_location()));
        }
        (usize::try_from(length).unwrap_or(0), std::slice::from_raw_parts(setup.roots, setup.root_count))
    };
    // It ends with a NUL, and what cannot be reached from the root directory does not begin with a slash.
    let here = path.get(..length.saturating_sub(1)).unwrap_or_default();
    let below = |root: &[u8]| match here.strip_prefix(root) {
        Some(rest) => rest.is_empty() || rest.first() == Some(&b'/') || root == b"/",
        None => false,
    };
    if roots.iter().any(|root| below(root)) { Ok(()) } else { Err((Stage::Chdir, OUTSIDE_ROOTS)) }
}

/// Tries the candidates in order, as `execvp` does: one that is missing is passed over, one that may not be executed is
/// remembered.
///
/// SAFETY: as [`become_command`].
unsafe fn execute(setup: &Setup) -> Failure {
    let mut answer = libc::ENOENT;
    let mut program = setup.programs;
    // SAFETY: the list ends with a null, and all of it is alive; see `become_command`.
    unsafe {
        while !(*program).is_null() {
            libc::syscall(libc::SYS_execve, *program, setup.arguments, setup.environment);
            match *libc::__errno_location() {
                libc::ENOENT | libc::ENOTDIR | libc::ESTALE | libc::ENODEV | libc::ETIMEDOUT => {}
                libc::EACCES => answer = libc::EACCES,
                other => return (Stage::Exec, other),
            }
            program = program.add(1);
        }
    }
    (Stage::Exec, answer)
}
