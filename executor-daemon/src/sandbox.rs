//! What a sandbox mode allows a command here, and whether this host can hold it to that. Pure: how the kernel is told is the
//! keeper's, in `keeper/confine.rs`.
//!
//! Every mode may read whatever the command's user may. `read-only` may write devices that hold nothing and its own output;
//! `workspace-write` also what lies below the session's workspace, TMPDIR and the configured paths. Not covered, by any kernel so
//! far: modes, owners, times and extended attributes of files that the user owns, and sockets that have a path.

use std::{
    ffi::OsStr,
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
};

use executor_proto::{
    error::ExecutorError,
    types::{Exit, SandboxMode},
};

use crate::{
    config::{SandboxTool, TenantRules},
    keeper::{confine, protocol::Confinement},
};

/// The first version of Landlock that can refuse all writing: before it, files can be truncated.
const FIRST_ABI_FOR_FILES: u32 = 3;

/// Where temporary files go when there is no `TMPDIR`.
const DEFAULT_TMPDIR: &str = "/tmp";

/// The words of a denial, as the C library says them.
const DENIALS: [&[u8]; 3] = [b"Permission denied", b"Operation not permitted", b"Read-only file system"];

/// What the kernel can enforce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Support {
    /// The version of its Landlock; 0: none.
    pub(crate) landlock_abi: u32,
    /// Whether it has seccomp filters.
    pub(crate) filters: bool,
}

impl Support {
    /// What this kernel can do.
    pub(crate) fn of_this_kernel() -> Self {
        Self { landlock_abi: confine::landlock_abi(), filters: confine::has_filters() }
    }

    /// Whether commands run within a fence that no signal leaves. What can gain privileges cannot be fenced in: the kernel asks for
    /// the one to be given up before the other.
    pub(crate) fn has_fence(self, allow_setuid: bool) -> bool {
        !allow_setuid && self.landlock_abi >= confine::FIRST_ABI_FOR_SIGNALS
    }

    /// The modes that can be enforced.
    pub(crate) fn modes(&self, rules: &TenantRules) -> Vec<SandboxMode> {
        SandboxMode::ALL.into_iter().filter(|mode| self.check(rules, *mode).is_ok()).collect()
    }

    /// Whether a mode is allowed and can be enforced. The error says why not.
    fn check(&self, rules: &TenantRules, mode: SandboxMode) -> Result<(), String> {
        if mode > rules.sandbox {
            return Err(format!("this executor allows {} at most", rules.sandbox.as_str()));
        }
        if !rules.network && !self.filters {
            return Err("commands get no network, and this kernel has no seccomp filters to refuse it with".to_owned());
        }
        match self.landlock_abi {
            _ if mode == SandboxMode::DangerFullAccess => Ok(()),
            _ if rules.sandbox_tool == SandboxTool::Bubblewrap => {
                Err("bubblewrap is asked for and this version cannot use it; set sandbox_tool = \"landlock\""
                    .to_owned())
            }
            0 => Err("this kernel has no Landlock, or it is not enabled (lsm=landlock,…)".to_owned()),
            abi if abi < FIRST_ABI_FOR_FILES => Err(format!(
                "this kernel's Landlock (version {abi}) cannot refuse to truncate files; Linux 6.2 or later can"
            )),
            _ => Ok(()),
        }
    }

    /// What is not enforced of a limit that holds here, one sentence each.
    pub(crate) fn gaps(self) -> Vec<String> {
        let mut gaps = Vec::new();
        if self.landlock_abi >= FIRST_ABI_FOR_FILES {
            gaps.push(
                "sandbox modes limit what is written, not what is read; modes, owners and times of files and sockets that have a \
                 path are not covered"
                    .to_owned(),
            );
        }
        if self.landlock_abi >= FIRST_ABI_FOR_FILES && self.landlock_abi < confine::FIRST_ABI_FOR_SIGNALS {
            gaps.push("sandbox modes do not cover abstract Unix sockets: Linux 6.12 or later does".to_owned());
        }
        gaps
    }
}

/// The mode in force and what becomes of it.
///
/// # Errors
/// [`ExecutorError::SandboxUnavailable`] when the mode is wider than allowed, cannot be enforced here, or would limit nothing.
pub(crate) fn confinement(
    rules: &TenantRules,
    support: &Support,
    asked: Option<SandboxMode>,
    workspace: Option<&Path>,
) -> Result<(SandboxMode, Confinement), ExecutorError> {
    let mode = asked.unwrap_or(rules.sandbox);
    let unavailable = |reason| ExecutorError::SandboxUnavailable { mode, reason };
    support.check(rules, mode).map_err(unavailable)?;
    let writable = match mode {
        SandboxMode::DangerFullAccess => None,
        SandboxMode::ReadOnly => Some(Vec::new()),
        SandboxMode::WorkspaceWrite => Some(writable(rules, workspace).map_err(unavailable)?),
    };
    Ok((mode, Confinement { mode: mode.into(), writable, network_off: !rules.network }))
}

/// The outermost of the paths that may be written.
///
/// One that lies below another is left out: it is covered, and a command could have put a link in its place by now.
fn writable(rules: &TenantRules, workspace: Option<&Path>) -> Result<Vec<Vec<u8>>, String> {
    let default = plain(&rules.default_workdir);
    let workspace = workspace.map_or_else(|| default.clone(), plain);
    let roots: Vec<PathBuf> = match rules.workdir_roots.as_slice() {
        [] if rules.sandbox == SandboxMode::DangerFullAccess => Vec::new(),
        [] => vec![default],
        roots => roots.iter().map(|root| plain(root)).collect(),
    };
    if !roots.is_empty() && !roots.iter().any(|root| workspace.starts_with(root)) {
        let listed: Vec<_> = roots.iter().map(|root| root.display().to_string()).collect();
        return Err(format!(
            "the session's workspace {} is outside of what this executor allows ({})",
            workspace.display(),
            listed.join(", ")
        ));
    }
    // Of the executor, not of the caller: else a caller could make anything writable.
    let tmpdir = rules.environment.iter().find(|(name, _)| name == "TMPDIR").map(|(_, value)| Path::new(value));
    let mut paths = vec![workspace, plain(tmpdir.unwrap_or(Path::new(DEFAULT_TMPDIR)))];
    paths.extend(rules.writable_paths.iter().map(|path| plain(path)));
    if let Some(root) = paths.iter().position(|path| path.parent().is_none()) {
        let name = ["the session's workspace", "TMPDIR"].get(root).copied().unwrap_or("one of the writable paths");
        return Err(format!("{name} is /, so nothing would be limited; name a directory below it"));
    }
    paths.sort_unstable();
    // Whatever lies below a path comes after it.
    paths.dedup_by(|path, kept| path.starts_with(kept));
    Ok(paths.into_iter().map(|path| path.into_os_string().into_encoded_bytes()).collect())
}

/// A path without `.` and `..`, as it is written: links in it are refused where it is opened.
fn plain(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::from("/"), |mut plain, part| {
        match part {
            Component::ParentDir => _ = plain.pop(),
            Component::Normal(name) => plain.push(name),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
        plain
    })
}

/// A path of bytes.
pub(crate) fn path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// What a start that failed while the sandbox was set up means.
pub(crate) fn explain(mode: SandboxMode, errno: i32) -> ExecutorError {
    let reason = match errno {
        libc::ELOOP => {
            "the session's workspace, TMPDIR or a writable path is reached through a symbolic link; give its real \
                        path"
                .to_owned()
        }
        libc::E2BIG => "the command is inside of too many sandboxes already".to_owned(),
        other => format!("the kernel refused it ({})", std::io::Error::from_raw_os_error(other)),
    };
    ExecutorError::SandboxUnavailable { mode, reason }
}

/// Whether a command in this mode failed in a way that looks like a denial. No kernel tells, so its words are looked for.
pub(crate) fn denied(mode: SandboxMode, exit: &Exit, stderr_tail: &[u8]) -> Option<SandboxMode> {
    let failed = match exit {
        Exit::Code(code) => *code != 0,
        Exit::Signal(_) => true,
        Exit::Unknown(_) => false,
    };
    let said = || DENIALS.iter().any(|words| stderr_tail.windows(words.len()).any(|window| window == *words));
    (mode < SandboxMode::DangerFullAccess && failed && said()).then_some(mode)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: Support = Support { landlock_abi: 7, filters: true };

    fn rules(sandbox: SandboxMode) -> TenantRules {
        TenantRules { sandbox, ..TenantRules::new("/srv".into(), Vec::new()) }
    }

    fn written(rules: &TenantRules, workspace: Option<&str>) -> Result<Vec<String>, String> {
        match confinement(rules, &FULL, Some(SandboxMode::WorkspaceWrite), workspace.map(Path::new)) {
            Ok((_, confinement)) => {
                let paths = confinement.writable.unwrap_or_default();
                Ok(paths.into_iter().map(|path| String::from_utf8(path).unwrap()).collect())
            }
            Err(ExecutorError::SandboxUnavailable { reason, .. }) => Err(reason),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn a_mode_is_the_widest_where_none_is_asked_for_and_never_wider() {
        for widest in SandboxMode::ALL {
            let rules = rules(widest);
            let (mode, confinement) = super::confinement(&rules, &FULL, None, None).unwrap();
            assert_eq!((mode, confinement.writable.is_none()), (widest, widest == SandboxMode::DangerFullAccess));
            for asked in SandboxMode::ALL {
                let answer = super::confinement(&rules, &FULL, Some(asked), None);
                assert_eq!(answer.is_ok(), asked <= widest, "{asked:?} of {widest:?}");
                if let Err(error) = answer {
                    let text = format!("sandbox mode {} is not available: this executor allows", asked.as_str());
                    assert!(error.to_string().starts_with(&text), "{error}");
                }
            }
            assert_eq!(
                FULL.modes(&rules),
                SandboxMode::ALL.into_iter().filter(|mode| *mode <= widest).collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn a_kernel_that_cannot_refuse_fails_closed() {
        let full = rules(SandboxMode::DangerFullAccess);
        for landlock_abi in 0..=10 {
            let support = Support { landlock_abi, filters: true };
            for mode in SandboxMode::ALL {
                let can = landlock_abi >= 3 || mode == SandboxMode::DangerFullAccess;
                assert_eq!(confinement(&full, &support, Some(mode), None).is_ok(), can, "{mode:?} on {landlock_abi}");
                assert_eq!(support.modes(&full).contains(&mode), can);
            }
        }
        let no_filters = Support { landlock_abi: 7, filters: false };
        assert!(confinement(&full, &no_filters, None, None).is_ok());
        let off = TenantRules { network: false, ..full.clone() };
        assert_eq!(no_filters.modes(&off), []);
        let error = confinement(&off, &no_filters, None, None).unwrap_err();
        assert!(error.to_string().contains("no seccomp filters"), "{error}");
        assert!(confinement(&off, &FULL, None, None).unwrap().1.network_off);
    }

    #[test]
    fn a_tool_that_cannot_be_used_fails_closed() {
        let full = rules(SandboxMode::DangerFullAccess);
        let other = TenantRules { sandbox_tool: SandboxTool::Bubblewrap, ..full };
        assert_eq!(FULL.modes(&other), [SandboxMode::DangerFullAccess]);
        let error = confinement(&other, &FULL, Some(SandboxMode::ReadOnly), None).unwrap_err();
        assert!(error.to_string().contains("bubblewrap"), "{error}");
    }

    #[test]
    fn what_may_be_written_is_said_by_its_outermost_paths() {
        let full = rules(SandboxMode::DangerFullAccess);
        assert_eq!(written(&full, None).unwrap(), ["/srv", "/tmp"]);
        assert_eq!(written(&full, Some("/home/me/./x/../y/")).unwrap(), ["/home/me/y", "/tmp"]);
        assert_eq!(written(&full, Some("/tmp/session")).unwrap(), ["/tmp"]);
        assert_eq!(written(&full, Some("/tmpx")).unwrap(), ["/tmp", "/tmpx"]);
        let writable_paths = ["/var/cache", "/srv/deep", "/var/cache-2", "/var/cache/x"].map(PathBuf::from).into();
        let more = TenantRules { writable_paths, ..full };
        assert_eq!(written(&more, None).unwrap(), ["/srv", "/tmp", "/var/cache", "/var/cache-2"]);
        let environment = vec![("TMPDIR".into(), "/var/tmp/".into())];
        let elsewhere = TenantRules { environment, ..rules(SandboxMode::DangerFullAccess) };
        assert_eq!(written(&elsewhere, None).unwrap(), ["/srv", "/var/tmp"]);
    }

    #[test]
    fn a_limit_that_would_limit_nothing_is_none() {
        let full = rules(SandboxMode::DangerFullAccess);
        for root in ["/", "/..", "/a/..", "//"] {
            assert!(written(&full, Some(root)).unwrap_err().contains("workspace is /"), "{root}");
        }
        let all = TenantRules { writable_paths: vec!["/".into()], ..full };
        assert!(written(&all, None).unwrap_err().contains("writable paths is /"));
    }

    #[test]
    fn under_a_ceiling_the_workspace_lies_within_the_roots() {
        let limited = rules(SandboxMode::WorkspaceWrite);
        assert_eq!(written(&limited, Some("/srv/project")).unwrap(), ["/srv/project", "/tmp"]);
        for outside in ["/home", "/srv/../etc", "/srvx"] {
            assert!(
                written(&limited, Some(outside)).unwrap_err().contains("outside of what this executor allows (/srv)")
            );
        }
        let workdir_roots = vec!["/data".into(), "/home".into()];
        let rooted = TenantRules { workdir_roots, ..rules(SandboxMode::DangerFullAccess) };
        assert_eq!(written(&rooted, Some("/home/x")).unwrap(), ["/home/x", "/tmp"]);
        assert!(written(&rooted, Some("/etc")).unwrap_err().ends_with("(/data, /home)"));
    }

    #[test]
    fn a_denial_is_a_failure_with_its_words_below_full_access() {
        let words = b"bash: /etc/x: Permission denied\n";
        for mode in [SandboxMode::ReadOnly, SandboxMode::WorkspaceWrite] {
            assert_eq!(denied(mode, &Exit::Code(1), words), Some(mode));
            assert_eq!(denied(mode, &Exit::Signal(6), b"Operation not permitted"), Some(mode));
            assert_eq!(denied(mode, &Exit::Code(1), b"Read-only file system"), Some(mode));
            assert_eq!(denied(mode, &Exit::Code(0), words), None);
            assert_eq!(denied(mode, &Exit::Unknown(String::new()), words), None);
            assert_eq!(denied(mode, &Exit::Code(1), b"permission denied"), None);
            assert_eq!(denied(mode, &Exit::Code(1), b""), None);
        }
        assert_eq!(denied(SandboxMode::DangerFullAccess, &Exit::Code(1), words), None);
    }
}
