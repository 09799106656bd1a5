//! From what a tenant's table says, or what is said for all, to the rules that hold.

use std::path::{Path, PathBuf};

use executor_proto::types::SandboxMode;
use nix::unistd::Uid;

use super::{
    super::{
        allowed::{self, AllowedName},
        identity,
        load::Surroundings,
        values::{Given, Values},
    },
    SandboxTool, TenantRules,
};
use crate::keeper::protocol::Identity;

/// Who commands run as, as far as it was said in one place. What was not said is taken from what is said for all.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Who {
    /// By user or by range. `None`: not said, or said wrongly.
    user: Option<Identity>,
    was_said: bool,
    capabilities: Option<u64>,
    allow_setuid: Option<bool>,
    shares_user: Option<bool>,
}

impl Who {
    /// Reads it, and notes what is wrong.
    pub(in super::super) fn read(values: &mut Values, around: &Surroundings) -> Self {
        let uid = Uid::from_raw(around.uid);
        let run_as = values.text("run_as");
        let range = values.text("uid_range");
        if let (Some(_), Some(range)) = (&run_as, &range) {
            values.note(range.problem("cannot be given together with run_as: commands run as the one or the others"));
        }
        let was_said = run_as.is_some() || range.is_some();
        let mut resolved = |given: Option<Given<String>>, resolve: &dyn Fn(&str) -> Result<Identity, String>| {
            let given = given?;
            resolve(&given.value).map_err(|problem| values.note(given.problem(problem))).ok()
        };
        let user = resolved(run_as, &|asked| identity::resolve(Some(asked), uid));
        let range = resolved(range, &|asked| identity::range(asked, uid));
        let capabilities = values.given_list("capabilities").map(|names| {
            let mut all = 0;
            for given in names {
                match identity::capability(&given.value, uid) {
                    Ok(one) => all |= one,
                    Err(problem) => values.note(given.problem(problem)),
                }
            }
            all
        });
        Self {
            user: user.or(range),
            was_said,
            capabilities,
            allow_setuid: values.switch("allow_setuid"),
            shares_user: values.switch("shares_user"),
        }
    }

    /// With what is said for all where nothing is said here.
    pub(in super::super) fn or(self, for_all: &Self) -> Self {
        Self {
            user: if self.was_said { self.user } else { for_all.user.clone() },
            was_said: self.was_said || for_all.was_said,
            capabilities: self.capabilities.or(for_all.capabilities),
            allow_setuid: self.allow_setuid.or(for_all.allow_setuid),
            shares_user: self.shares_user.or(for_all.shares_user),
        }
    }

    /// The identity that comes of it. `otherwise`: who commands run as where nobody was named.
    pub(in super::super) fn identity(&self, otherwise: Option<&Identity>) -> Option<Identity> {
        let mut identity = self.user.as_ref().or(otherwise)?.clone();
        identity.capabilities = self.capabilities.or(identity.capabilities);
        // Who runs commands as itself takes nothing away from them that was not named.
        identity.allow_setuid = self.allow_setuid.unwrap_or(!identity.change);
        Some(identity)
    }

    /// Whether a user was named, be it one that is not there: somebody else does not take that one's place.
    pub(in super::super) fn was_said(&self) -> bool {
        self.was_said
    }

    /// Whether others that allow it too may have the same user.
    pub(in super::super) fn shares_user(&self) -> bool {
        self.shares_user.unwrap_or(false)
    }

    /// Whether commands may gain privileges.
    pub(in super::super) fn allow_setuid(&self) -> bool {
        self.allow_setuid.unwrap_or(false)
    }
}

impl TenantRules {
    /// These rules with what was given in place of them, but for who commands run as and the default workdir. Notes what is
    /// wrong.
    pub(in super::super) fn with(self, values: &mut Values, around: &Surroundings) -> Self {
        let environment = match values.given_list("environment_allow") {
            Some(names) => {
                let names: Vec<_> = names
                    .into_iter()
                    .filter_map(|given| {
                        AllowedName::parse(&given.value).map_err(|problem| values.note(given.problem(problem))).ok()
                    })
                    .collect();
                allowed::environment(&around.environment, Some(&names))
            }
            None => self.environment,
        };
        let modes = SandboxMode::ALL.map(|mode| (mode.as_str(), mode));
        Self {
            environment,
            workdir_roots: paths(values, around, "workdir_roots", Path::is_dir, "must be directories that exist")
                .unwrap_or(self.workdir_roots),
            sandbox: values.word("sandbox", &modes).unwrap_or(self.sandbox),
            writable_paths: paths(values, around, "writable_paths", Path::exists, "must exist")
                .unwrap_or(self.writable_paths),
            network: values.switch("network").unwrap_or(self.network),
            sandbox_tool: values.word("sandbox_tool", &SandboxTool::WORDS).unwrap_or(self.sandbox_tool),
            max_tasks: values.whole("max_tasks").unwrap_or(self.max_tasks),
            max_tasks_per_owner: values.whole("max_tasks_per_owner").unwrap_or(self.max_tasks_per_owner),
            max_processes: values.whole("max_processes").or(self.max_processes),
            max_memory_bytes: values.whole("max_memory_bytes").or(self.max_memory_bytes),
            max_spill_bytes_in_all: values.whole("max_spill_bytes_in_all").or(self.max_spill_bytes_in_all),
            max_spill_bytes_per_owner: values.whole("max_spill_bytes_per_owner").or(self.max_spill_bytes_per_owner),
            max_output_bytes_per_second: values
                .whole("max_output_bytes_per_second")
                .or(self.max_output_bytes_per_second),
            max_watchers: values.whole("max_watchers").or(self.max_watchers),
            max_requests: values.whole("max_requests").or(self.max_requests),
            identity: self.identity,
            allow_setuid: self.allow_setuid,
            default_workdir: self.default_workdir,
        }
    }

    /// Whether a directory is one of the roots or below one, as it is now.
    pub(in super::super) fn has_workdir(&self, directory: &Path) -> bool {
        self.workdir_roots.is_empty()
            || directory.canonicalize().is_ok_and(|directory| {
                let below = |root: &PathBuf| root.canonicalize().is_ok_and(|root| directory.starts_with(root));
                self.workdir_roots.iter().any(below)
            })
    }
}

/// Paths, made absolute. `None`: none were given.
fn paths(
    values: &mut Values,
    around: &Surroundings,
    key: &str,
    holds: fn(&Path) -> bool,
    otherwise: &str,
) -> Option<Vec<PathBuf>> {
    let given = values.given_list(key)?;
    let mut paths = Vec::with_capacity(given.len());
    for one in given {
        // As the kernel names it, which knows no symbolic links.
        let path = around.absolute(&one.value);
        let path = path.canonicalize().unwrap_or(path);
        if one.value.is_empty() || !holds(&path) {
            values.note(one.problem(otherwise));
        } else {
            paths.push(path);
        }
    }
    Some(paths)
}
