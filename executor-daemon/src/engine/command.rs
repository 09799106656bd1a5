//! From a command as a caller gives it to a program as the keeper starts it. Pure, except for the memory files at the end.

use std::{
    ffi::OsStr,
    fs::{File, OpenOptions},
    io::{self, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
};

use bytes::Bytes;
use executor_proto::{
    error::{ExecutorError, SizedPart, SpawnStage},
    types::{CommandSpec, SandboxMode},
};
use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        resource::{Resource, getrlimit},
    },
};

use sha2::{Digest, Sha256};

use super::{keys::CommandDigest, registry::Kind};
use crate::{
    config::{Settings, TenantRules},
    ids::TenantId,
    keeper::protocol::{Identity, OUTSIDE_ROOTS, SpawnSpec},
    sandbox::{self, Support},
};

/// Longest command that fits into an argument: the kernel's `MAX_ARG_STRLEN` of 32 pages, less the closing NUL.
const MAX_ARGUMENT_BYTES: usize = 131_071;

/// What `bash -c` gets in place of a longer command: reads descriptor 3 as it is (no subshell, no newline lost), closes it,
/// and evaluates. `docs/adr/0004-long-commands.md` says why this one and what it changes.
const BOOTSTRAP: &str = "mapfile -d '' -u 3 -n 1 __command;exec 3<&-;eval \"unset -v __command;${__command[0]}\"";

/// Where `execvp` looks when there is no `PATH`.
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";

/// The digest of what was asked for, as it was asked: a retry under the same key must be the same in all of it.
pub(super) fn digest(kind: Kind, spec: &CommandSpec) -> CommandDigest {
    let CommandSpec { command, workdir, environment, stdin, timeout_ms, sandbox_mode, workspace } = spec;
    let mut hash = Sha256::new();
    // Each part with its length, so that no byte can move from one to the next.
    let mut part = |bytes: Option<&[u8]>| {
        hash.update([u8::from(bytes.is_some())]);
        hash.update((bytes.map_or(0, <[u8]>::len) as u64).to_le_bytes());
        hash.update(bytes.unwrap_or_default());
    };
    part(Some(match kind {
        Kind::Run => b"run",
        Kind::Task => b"task",
    }));
    part(Some(command));
    part(workdir.as_deref());
    part(stdin.as_deref());
    part(timeout_ms.map(f64::to_le_bytes).as_ref().map(<[u8; 8]>::as_slice));
    part(sandbox_mode.map(SandboxMode::as_str).map(str::as_bytes));
    part(workspace.as_deref());
    for variable in environment {
        part(Some(&variable.name));
        part(Some(&variable.value));
    }
    hash.finalize().into()
}

/// A command that is ready to be started.
#[derive(Debug)]
pub(super) struct Prepared {
    /// For the keeper.
    pub(super) spawn: SpawnSpec,
    /// The directory in force, absolute.
    pub(super) workdir: Bytes,
    /// The sandbox mode in force.
    pub(super) sandbox_mode: SandboxMode,
    /// The timeout in force, in milliseconds.
    pub(super) timeout_ms: f64,
    /// The command as it was given.
    pub(super) command: Bytes,
    stdin: Option<Bytes>,
}

impl Prepared {
    /// Checks a command and completes it with what holds here.
    pub(super) fn new(
        settings: &Settings,
        tenant: &TenantId,
        rules: &TenantRules,
        support: &Support,
        (identity, uid): (&Identity, u32),
        spec: CommandSpec,
    ) -> Result<Self, ExecutorError> {
        spec.check()?;
        let workspace = spec.workspace.as_deref().map(sandbox::path);
        let (sandbox_mode, confinement) = sandbox::confinement(rules, support, spec.sandbox_mode, workspace)?;
        let environment = environment(rules, (identity, uid), &spec);
        let path = environment.iter().find_map(|(name, value)| (name == b"PATH").then_some(value.as_slice()));
        let programs = programs(path.unwrap_or(DEFAULT_PATH));
        let workdir = workdir(settings, rules, spec.workdir.as_deref());
        let script = spec.command.len() > MAX_ARGUMENT_BYTES;
        let text = if script { BOOTSTRAP.into() } else { spec.command.to_vec() };
        let spawn = SpawnSpec {
            // The tenant's is the caller's to set.
            group: u32::MAX,
            identity: rules.identity,
            uid,
            programs,
            arguments: vec![b"bash".into(), b"-c".into(), text],
            environment: environment
                .into_iter()
                .map(|(mut variable, value)| {
                    variable.push(b'=');
                    variable.extend(value);
                    variable
                })
                .collect(),
            workdir: workdir.to_vec(),
            workdir_roots: rules.workdir_roots.iter().map(|root| root.as_os_str().as_bytes().to_vec()).collect(),
            stdin: spec.stdin.is_some(),
            script,
            confinement,
            fence: support.has_fence(rules.allow_setuid).then(|| tenant.0.clone()),
        };
        Ok(Self {
            spawn,
            workdir,
            sandbox_mode,
            timeout_ms: spec.timeout_ms.unwrap_or(settings.timeout_ms).min(settings.max_timeout_ms),
            command: spec.command,
            stdin: spec.stdin,
        })
    }

    /// What the command reads from descriptor 0, where it was given.
    pub(super) fn stdin_file(&self) -> Result<Option<OwnedFd>, ExecutorError> {
        self.stdin.as_deref().map(memory_file).transpose().map_err(|error| prepare_failed(&error))
    }

    /// The script that the bootstrap reads from descriptor 3, where the command is too long for an argument.
    pub(super) fn script_file(&self) -> Result<Option<OwnedFd>, ExecutorError> {
        self.spawn.script.then(|| memory_file(&self.command)).transpose().map_err(|error| prepare_failed(&error))
    }

    /// What a failed spawn means to the caller: with the path it was about, and E2BIG as what it is.
    pub(super) fn explain(&self, error: ExecutorError) -> ExecutorError {
        match error {
            ExecutorError::Spawn { stage: SpawnStage::Chdir, errno: OUTSIDE_ROOTS, path: _ } => {
                ExecutorError::WorkdirOutsideRoots { path: self.workdir.clone() }
            }
            ExecutorError::Spawn { stage: SpawnStage::Chdir, errno, path: _ } => {
                ExecutorError::Spawn { stage: SpawnStage::Chdir, errno, path: Some(self.workdir.clone()) }
            }
            ExecutorError::Spawn { stage: SpawnStage::Sandbox, errno, path: _ } => {
                sandbox::explain(self.sandbox_mode, errno)
            }
            ExecutorError::Spawn { stage: SpawnStage::Exec, errno: libc::E2BIG, .. } => ExecutorError::TooLarge {
                part: SizedPart::Environment,
                name: None,
                bytes: argument_bytes(&self.spawn),
                limit: max_argument_bytes(),
            },
            other => other,
        }
    }
}

/// The environment of a command: the executor's for all, the identity's own, the caller's; a later one wins. Each name once,
/// in the order in which the names came first.
fn environment(rules: &TenantRules, (identity, uid): (&Identity, u32), spec: &CommandSpec) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut all: Vec<(Vec<u8>, Vec<u8>)> = Vec::with_capacity(rules.environment.len() + spec.environment.len());
    let mut places = std::collections::HashMap::with_capacity(all.capacity());
    let mut set = |name: &[u8], value: &[u8]| {
        let place = *places.entry(name.to_vec()).or_insert(all.len());
        match all.get_mut(place) {
            Some((_, old)) => *old = value.to_vec(),
            None => all.push((name.to_vec(), value.to_vec())),
        }
    };
    for (name, value) in &rules.environment {
        set(name.as_bytes(), value.as_bytes());
    }
    if identity.change {
        set(b"HOME", identity.home.as_os_str().as_bytes());
        // One of several has no name.
        let name = if identity.uids > 1 { uid.to_string() } else { identity.name.clone() };
        set(b"USER", name.as_bytes());
        set(b"LOGNAME", name.as_bytes());
    }
    for variable in &spec.environment {
        set(&variable.name, &variable.value);
    }
    all
}

/// Where bash may be, in order, as `execvp` looks along `PATH`: an empty element is the working directory.
fn programs(path: &[u8]) -> Vec<Vec<u8>> {
    path.split(|byte| *byte == b':')
        .map(|directory| match directory {
            b"" => b"./bash".to_vec(),
            directory => [directory, b"/bash"].concat(),
        })
        .collect()
}

/// The directory in force: absolute as it was given; relative, resolved lexically against the start directory.
fn workdir(settings: &Settings, rules: &TenantRules, given: Option<&[u8]>) -> Bytes {
    let start_dir = settings.start_dir.as_os_str().as_bytes();
    match given {
        None => Bytes::copy_from_slice(rules.default_workdir.as_os_str().as_bytes()),
        Some(given) if given.starts_with(b"/") => Bytes::copy_from_slice(given),
        Some(given) => {
            let mut parts: Vec<&[u8]> = Vec::new();
            for part in start_dir.split(|byte| *byte == b'/').chain(given.split(|byte| *byte == b'/')) {
                match part {
                    b"" | b"." => {}
                    b".." => {
                        parts.pop();
                    }
                    part => parts.push(part),
                }
            }
            Bytes::from([b"/", parts.join(&b'/').as_slice()].concat())
        }
    }
}

/// What arguments and environment take of what the kernel allows for them: the strings, their NULs and their pointers.
fn argument_bytes(spawn: &SpawnSpec) -> u64 {
    let strings = spawn.arguments.iter().chain(&spawn.environment);
    strings.map(|string| (string.len() + 1 + size_of::<*const u8>()) as u64).sum()
}

/// What the kernel allows: a quarter of the stack limit, between 128 KiB and 6 MiB (`bprm_stack_limits`).
fn max_argument_bytes() -> u64 {
    let stack = getrlimit(Resource::RLIMIT_STACK).map_or(8 * 1024 * 1024, |(soft, _)| soft);
    (stack / 4).clamp(128 * 1024, 6 * 1024 * 1024)
}

fn prepare_failed(error: &io::Error) -> ExecutorError {
    ExecutorError::Spawn { stage: SpawnStage::Prepare, errno: error.raw_os_error().unwrap_or(libc::EIO), path: None }
}

/// A sealed memory file with these bytes, open for reading only: whoever gets it reads them from the start and can change
/// nothing.
fn memory_file(bytes: &[u8]) -> io::Result<OwnedFd> {
    let made = memfd_create("executor-input", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    let mut file = File::from(made);
    file.write_all(bytes)?;
    let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(OpenOptions::new().read(true).open(OsStr::new(&name))?.into())
}

#[cfg(test)]
mod tests {
    use std::{io::Read, path::PathBuf};

    use executor_proto::types::EnvironmentVariable;

    use super::*;

    fn tenant() -> TenantId {
        TenantId::default_tenant()
    }

    const FULL: Support = Support { landlock_abi: 7, filters: true };

    fn settings(environment: &[(&str, &str)]) -> Settings {
        let environment = environment.iter().map(|(name, value)| (name.into(), value.into())).collect();
        Settings::new("/state".into(), "/srv/here".into(), environment)
    }

    fn identity(change: bool) -> Identity {
        let home = PathBuf::from("/home/executor");
        Identity {
            name: "executor".into(),
            uid: 7,
            uids: 1,
            gid: 7,
            groups: vec![7],
            home,
            change,
            capabilities: None,
            allow_setuid: true,
        }
    }

    fn spec(command: &[u8]) -> CommandSpec {
        CommandSpec { command: Bytes::copy_from_slice(command), ..CommandSpec::default() }
    }

    fn prepare(settings: &Settings, spec: CommandSpec) -> Result<Prepared, ExecutorError> {
        Prepared::new(settings, &tenant(), &settings.tenant_defaults, &FULL, (&identity(false), 7), spec)
    }

    fn texts(all: &[Vec<u8>]) -> Vec<&str> {
        all.iter().map(|one| std::str::from_utf8(one).unwrap()).collect()
    }

    #[test]
    fn a_later_variable_wins_and_each_name_comes_once() {
        let settings = settings(&[("PATH", "/a::/b"), ("HOME", "/root"), ("X", "1"), ("USER", "root")]);
        let mut spec = spec(b"true");
        for (name, value) in [("X", "2"), ("LOGNAME", "me"), ("X", "3")] {
            spec.environment.push(EnvironmentVariable { name: name.into(), value: value.into() });
        }
        let changed =
            Prepared::new(&settings, &tenant(), &settings.tenant_defaults, &FULL, (&identity(true), 7), spec.clone())
                .unwrap()
                .spawn;
        assert_eq!(
            texts(&changed.environment),
            ["PATH=/a::/b", "HOME=/home/executor", "X=3", "USER=executor", "LOGNAME=me"]
        );
        assert_eq!(texts(&changed.programs), ["/a/bash", "./bash", "/b/bash"]);
        let same = prepare(&settings, spec).unwrap().spawn;
        assert_eq!(texts(&same.environment), ["PATH=/a::/b", "HOME=/root", "X=3", "USER=root", "LOGNAME=me"]);
    }

    #[test]
    fn bash_is_looked_up_on_the_path_that_the_command_gets() {
        let mut with_path = spec(b"true");
        with_path.environment.push(EnvironmentVariable { name: "PATH".into(), value: "/mine".into() });
        let prepared = prepare(&settings(&[("PATH", "/a")]), with_path).unwrap();
        assert_eq!(texts(&prepared.spawn.programs), ["/mine/bash"]);
        assert_eq!(
            texts(&prepare(&settings(&[]), spec(b"true")).unwrap().spawn.programs),
            ["/bin/bash", "/usr/bin/bash"]
        );
    }

    #[test]
    fn workdirs_resolve_lexically() {
        let settings = settings(&[]);
        let rules = TenantRules::new("/usr".into(), Vec::new());
        let at = |given: Option<&str>| {
            String::from_utf8(workdir(&settings, &rules, given.map(str::as_bytes)).to_vec()).unwrap()
        };
        assert_eq!(at(None), "/usr");
        assert_eq!(at(Some("/a/../b/")), "/a/../b/");
        assert_eq!(at(Some("sub/./x/")), "/srv/here/sub/x");
        assert_eq!(at(Some("../..//../etc")), "/etc");
        assert_eq!(at(Some("../../..")), "/");
        assert_eq!(at(Some("~")), "/srv/here/~");
    }

    #[test]
    fn every_part_of_a_command_is_in_its_digest_and_none_runs_into_the_next() {
        let variable =
            |name: &'static str, value: &'static str| EnvironmentVariable { name: name.into(), value: value.into() };
        let plain = spec(b"true");
        let specs = [
            plain.clone(),
            spec(b"false"),
            CommandSpec { workdir: Some("".into()), ..plain.clone() },
            CommandSpec { workdir: Some("/".into()), ..plain.clone() },
            CommandSpec { stdin: Some("".into()), ..plain.clone() },
            CommandSpec { stdin: Some("/".into()), ..plain.clone() },
            CommandSpec { timeout_ms: Some(1.0), ..plain.clone() },
            CommandSpec { sandbox_mode: Some(SandboxMode::ReadOnly), ..plain.clone() },
            CommandSpec { workspace: Some("/".into()), ..plain.clone() },
            CommandSpec { environment: vec![variable("A", "BC")], ..plain.clone() },
            CommandSpec { environment: vec![variable("AB", "C")], ..plain.clone() },
            CommandSpec { environment: vec![variable("A", "BC"), variable("D", "")], ..plain.clone() },
            CommandSpec { environment: vec![variable("D", ""), variable("A", "BC")], ..plain },
        ];
        let digests: std::collections::HashSet<_> = [Kind::Run, Kind::Task]
            .into_iter()
            .flat_map(|kind| specs.iter().map(move |spec| digest(kind, spec)))
            .collect();
        assert_eq!(digests.len(), 2 * specs.len());
        assert!(specs.iter().all(|spec| digests.contains(&digest(Kind::Run, &spec.clone()))));
    }

    #[test]
    fn the_timeout_is_capped() {
        let mut long = spec(b"true");
        long.timeout_ms = Some(1e300);
        assert_eq!(prepare(&settings(&[]), long).unwrap().timeout_ms, 600_000.0);
        assert_eq!(prepare(&settings(&[]), spec(b"true")).unwrap().timeout_ms, 120_000.0);
    }

    #[test]
    fn a_command_at_the_kernels_limit_is_an_argument_and_one_above_is_a_script() {
        let at = prepare(&settings(&[]), spec(&[b'a'; MAX_ARGUMENT_BYTES])).unwrap();
        assert_eq!((at.spawn.script, at.spawn.arguments[2].len()), (false, MAX_ARGUMENT_BYTES));
        assert!(at.script_file().unwrap().is_none());
        let above = prepare(&settings(&[]), spec(&[b'a'; MAX_ARGUMENT_BYTES + 1])).unwrap();
        assert_eq!((above.spawn.script, texts(&above.spawn.arguments)[2]), (true, BOOTSTRAP));
        let mut script = Vec::new();
        File::from(above.script_file().unwrap().unwrap()).read_to_end(&mut script).unwrap();
        assert_eq!(script.len(), MAX_ARGUMENT_BYTES + 1);
    }

    #[test]
    fn what_a_command_reads_cannot_be_written() {
        let mut with_stdin = spec(b"cat");
        with_stdin.stdin = Some(Bytes::from_static(b"in\0put"));
        let mut file = File::from(prepare(&settings(&[]), with_stdin).unwrap().stdin_file().unwrap().unwrap());
        assert!(file.write_all(b"x").is_err());
        let mut read = Vec::new();
        file.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"in\0put");
    }

    #[test]
    fn a_sandbox_mode_that_cannot_be_enforced_fails_closed() {
        let mut limited = spec(b"true");
        limited.sandbox_mode = Some(SandboxMode::ReadOnly);
        let none = Support { landlock_abi: 0, filters: false };
        let settings = settings(&[]);
        let error =
            Prepared::new(&settings, &tenant(), &settings.tenant_defaults, &none, (&identity(false), 7), limited)
                .unwrap_err();
        assert!(matches!(error, ExecutorError::SandboxUnavailable { mode: SandboxMode::ReadOnly, .. }));
    }

    #[test]
    fn spawn_errors_say_what_they_are_about() {
        let mut elsewhere = spec(b"true");
        elsewhere.workdir = Some("/gone".into());
        let prepared = prepare(&settings(&[]), elsewhere).unwrap();
        let spawn = |stage, errno| ExecutorError::Spawn { stage, errno, path: None };
        let chdir = prepared.explain(spawn(SpawnStage::Chdir, libc::ENOENT));
        let path = Some(Bytes::from_static(b"/gone"));
        assert_eq!(chdir, ExecutorError::Spawn { stage: SpawnStage::Chdir, errno: libc::ENOENT, path });
        let large = prepared.explain(spawn(SpawnStage::Exec, libc::E2BIG));
        assert!(matches!(large, ExecutorError::TooLarge { part: SizedPart::Environment, name: None, .. }), "{large:?}");
        let outside = prepared.explain(spawn(SpawnStage::Chdir, OUTSIDE_ROOTS));
        assert_eq!(outside, ExecutorError::WorkdirOutsideRoots { path: Bytes::from_static(b"/gone") });
        let missing = spawn(SpawnStage::Exec, libc::ENOENT);
        assert_eq!(prepared.explain(missing.clone()), missing);
    }
}
