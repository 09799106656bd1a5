//! From what was written to what holds: every value checked, every mistake reported.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use executor_proto::types::SandboxMode;
use nix::unistd::Uid;

use super::{
    SandboxTool, ServerSettings, Settings, allowed,
    credentials::{CredentialFiles, Credentials, TlsFiles},
    fence::{self, Fenced},
    flags::ServeFlags,
    hidden::{self, Hidden},
    identity,
    listen::ListenAddress,
    problem::{Problem, Source},
    rules::{TenantRules, Who},
    state_dir::{self, StateDir},
    tenants,
    values::{Given, Values},
};
use crate::{
    ids::TenantId,
    keeper::{ServerUser, protocol::Identity},
    server,
    telemetry::{LogFormat, LogLevel, LogSettings},
};

/// What the daemon finds around it when it is started.
#[derive(Debug, Clone)]
pub struct Surroundings {
    /// Its effective user.
    pub uid: u32,
    /// The directory that it was started in. `None`: it is gone, or cannot be named.
    pub start_dir: Option<PathBuf>,
    /// Its environment.
    pub environment: Vec<(OsString, OsString)>,
}

impl Surroundings {
    /// Those of this process.
    #[must_use]
    pub fn of_this_process() -> Self {
        Self {
            uid: nix::unistd::geteuid().as_raw(),
            start_dir: std::env::current_dir().ok(),
            environment: std::env::vars_os().collect(),
        }
    }

    /// A path as it was written, made absolute.
    pub(super) fn absolute(&self, path: &str) -> PathBuf {
        self.start_dir.as_deref().unwrap_or(Path::new("/")).join(path)
    }
}

/// A configuration without mistakes.
#[derive(Debug)]
pub struct Daemon {
    /// What the server is told.
    pub server: ServerSettings,
    /// The files that it says who may call from, to be read again.
    pub credentials: CredentialFiles,
    /// Whether users other than the daemon's own are tenants, who have to be able to connect to the Unix sockets.
    pub sockets_are_shared: bool,
    /// Where to listen; at least one.
    pub listeners: Vec<ListenAddress>,
    /// Who commands run as; not empty, and index 0 is the default. [`TenantRules::identity`] is an index into it.
    pub identities: Vec<Identity>,
    /// Who the server runs as. `None`: as the daemon itself.
    pub server_user: Option<ServerUser>,
    /// The state directory; what the server keeps is in [`StateDir::of_server`](super::StateDir::of_server) of it.
    pub state_dir: PathBuf,
    /// What the fence around commands hides from them, where they run as the daemon's own user.
    pub hidden: Vec<PathBuf>,
    /// What is unprotected in this mode, as one clause. `None`: nothing to state.
    pub unprotected: Option<String>,
    /// Longest time from SIGTERM to the end.
    pub drain_limit: Duration,
}

/// Reads the file, if one is named, and makes a configuration of it and the command line.
///
/// # Errors
/// All mistakes, in the order of the keys.
pub fn load(given: ServeFlags, around: &Surroundings) -> Result<Daemon, Vec<Problem>> {
    let ServeFlags { file, flags } = given;
    let mut values = Values::read(flags, file.as_deref());
    let insecure = values.switch("insecure").unwrap_or(false);
    let tls = tls_files(&mut values, around);
    let listeners = listeners(&mut values, around, insecure || tls.is_some());
    let state_dir = state_directory(&mut values, around);
    let for_all = Who::read(&mut values, around);
    let identity = default_identity(&mut values, around, &for_all);
    let files = credential_files(&mut values, around, tls);
    let credentials = files.read().unwrap_or_else(|problems| {
        problems.into_iter().for_each(|problem| values.note(problem));
        Credentials { tenants: Vec::new(), tls: None }
    });
    let environment = allowed::environment(&around.environment, None);
    let rules = TenantRules::new(PathBuf::new(), environment).with(&mut values, around);
    let mut identities = Vec::new();
    let rules = placed(&mut values, around, rules, &for_all, identity.clone(), &mut identities);
    let mut tenants = BTreeMap::new();
    let mut shares_user = BTreeMap::new();
    for table in files.tenants.iter().flatten() {
        let Some(mut values_of_it) = values.of_tenant(&table.name, table.rules.clone()) else { continue };
        let who = Who::read(&mut values_of_it, around).or(&for_all);
        let its = who.identity(identity.as_ref());
        let its_rules = rules.clone().with(&mut values_of_it, around);
        let its_rules = placed(&mut values_of_it, around, its_rules, &who, its, &mut identities);
        shares_user.insert(table.name.clone(), who.shares_user());
        values_of_it.problems.into_iter().for_each(|problem| values.note(problem));
        tenants.insert(table.name.clone(), its_rules);
    }
    check_sandbox_tools(&mut values, &rules, &tenants);
    let server_user = server_user(&mut values, around, &identities);
    if around.uid == 0 && values.problems.is_empty() {
        // Who is no root has one user only; the daemon says what that leaves open.
        let source = Source::Missing("run-as");
        let default = TenantId::default_tenant();
        // Without a token it is whoever started the daemon, who needs no fence.
        let default = (!tenants.contains_key(&default.0) && files.token_file.is_some()).then_some(default);
        let fenced = |name, rules: &TenantRules, shares_user, source| {
            let identity = identities.get(usize::try_from(rules.identity).ok()?)?;
            Some(Fenced { name, identity, shares_user, source })
        };
        let for_default =
            default.iter().filter_map(|default| fenced(&default.0, &rules, for_all.shares_user(), &source));
        let tables = files.tenants.iter().flatten().filter_map(|table| {
            let shares_user = shares_user.get(&table.name).copied().unwrap_or(false);
            fenced(&table.name, tenants.get(&table.name)?, shares_user, &table.source)
        });
        let all: Vec<_> = if files.tenants.is_some() { for_default.chain(tables).collect() } else { Vec::new() };
        let problems = fence::problems(&all);
        problems.into_iter().for_each(|problem| values.note(problem));
    }
    check_callers(&mut values, &files, &listeners, &identities);
    let log = log_settings(&mut values);
    // As with the default workdir: what cannot travel as text, or is gone, is no start.
    let start_dir = around.start_dir.clone().filter(|dir| dir.to_str().is_some());
    let defaults = Settings {
        start_dir: start_dir.unwrap_or_else(|| rules.default_workdir.clone()),
        max_tasks: rules.max_tasks,
        tenant_defaults: rules,
        tenants,
        ..Settings::new(StateDir::of_server(&state_dir, server_user), PathBuf::new(), Vec::new())
    };
    let mut settings = settings(&mut values, defaults);
    let hidden = hidden::hidden(&mut settings, &state_dir, &files, around.uid);
    match identity {
        Some(_) if values.problems.is_empty() => Ok(Daemon {
            drain_limit: drain_limit(&settings),
            unprotected: all_unprotected(&settings, &identities, server_user, (around.uid, hidden.as_ref())),
            hidden: hidden.unwrap_or_default().paths,
            sockets_are_shared: credentials
                .tenants
                .iter()
                .any(|tenant| tenant.peer_uids.iter().any(|uid| *uid != 0 && *uid != around.uid)),
            server: ServerSettings { engine: settings, tenants: credentials.tenants, tls: credentials.tls, log },
            credentials: files,
            listeners,
            identities,
            server_user,
            state_dir,
        }),
        Some(_) | None => Err(values.problems),
    }
}

/// Rules with who commands run as, and with a default workdir that these can enter.
fn placed(
    values: &mut Values,
    around: &Surroundings,
    mut rules: TenantRules,
    who: &Who,
    identity: Option<Identity>,
    identities: &mut Vec<Identity>,
) -> TenantRules {
    rules.default_workdir = default_workdir(values, around, identity.as_ref(), &rules);
    rules.allow_setuid = who.allow_setuid();
    if let Some(mut identity) = identity {
        if identity.uids > 1 {
            identity.home.clone_from(&rules.default_workdir);
        }
        let known = identities.iter().position(|known| *known == identity).unwrap_or_else(|| {
            identities.push(identity);
            identities.len() - 1
        });
        // There are fewer tenants than bytes in a file that is read.
        rules.identity = u32::try_from(known).unwrap_or(u32::MAX);
    }
    rules
}

/// What is unprotected where commands run as root, or as the daemon itself, or where the server is root.
fn unprotected(command_uid: u32, server_user: Option<ServerUser>, daemon_uid: u32) -> Option<&'static str> {
    match command_uid {
        0 => {
            Some("commands run as root and can read and change everything here, the daemon's tokens and state included")
        }
        uid if uid == daemon_uid => {
            Some("commands share the daemon's user and can end it, read its token file and change its state")
        }
        _ if daemon_uid == 0 && server_user.is_none() => Some("the server, which faces the network, runs as root"),
        _ => None,
    }
}

/// What a fence leaves open where commands run as the daemon's own user.
fn exposed(hidden: &Hidden) -> Option<String> {
    let paths: Vec<_> = hidden.exposed.iter().map(|path| path.display().to_string()).collect();
    (!paths.is_empty()).then(|| {
        format!(
            "commands share the daemon's user and can read and change {}: that user may write a directory above; put what is to \
             be hidden where only other users may write",
            paths.join(" and ")
        )
    })
}

/// What is unprotected in this mode: by how all commands run, and by what single tenants were given.
fn all_unprotected(
    settings: &Settings,
    identities: &[Identity],
    server_user: Option<ServerUser>,
    (daemon_uid, hidden): (u32, Option<&Hidden>),
) -> Option<String> {
    let of = |rules: &TenantRules| identities.get(usize::try_from(rules.identity).ok()?);
    let default = of(&settings.tenant_defaults);
    let mut clauses: Vec<String> = default
        .and_then(|identity| match hidden {
            Some(hidden) if daemon_uid != 0 && identity.uid == daemon_uid => exposed(hidden),
            _ => unprotected(identity.uid, server_user, daemon_uid).map(str::to_owned),
        })
        .into_iter()
        .collect();
    if daemon_uid != 0 && settings.tenants.len() > 1 {
        let and_end = if hidden.is_some() { "" } else { " and end" };
        clauses.push(format!("the commands of all tenants share a user and can read{and_end} each other's"));
    }
    for (name, rules) in &settings.tenants {
        let Some(identity) = of(rules).filter(|identity| Some(*identity) != default) else { continue };
        if identity.uid == 0 && daemon_uid == 0 {
            clauses.push(format!("commands of tenant {name} run as root and can read and change everything here"));
        } else {
            clauses.extend(identity.gains().map(|gains| format!("commands of tenant {name} {gains}")));
        }
    }
    if let Some(gains) = default.filter(|identity| identity.uid != 0 && daemon_uid == 0).and_then(Identity::gains) {
        clauses.push(format!("commands {gains}"));
    }
    Some(clauses.join("; ")).filter(|text| !text.is_empty())
}

fn listeners(values: &mut Values, around: &Surroundings, encrypted_or_private: bool) -> Vec<ListenAddress> {
    let given = values.list("listen");
    if given.is_empty() {
        values.note(Problem::new(
            Source::Missing("listen"),
            "must be given at least once, as an option or in the file: unix:PATH or tcp:HOST:PORT",
        ));
    }
    let base = around.absolute("");
    let mut listeners = Vec::new();
    for one in given {
        match ListenAddress::parse(&one.value, &base) {
            Ok(address) if address.is_beyond_loopback() && !encrypted_or_private => values.note(one.problem(
                "other hosts can reach it and nothing is encrypted; give --tls-cert-file and --tls-key-file \
                 (`executor-daemon init` makes them), or --insecure if the network is private",
            )),
            Ok(address) => listeners.push(address),
            Err(problem) => values.note(one.problem(problem)),
        }
    }
    listeners
}

fn state_directory(values: &mut Values, around: &Surroundings) -> PathBuf {
    match values.text("state_dir") {
        Some(given) => around.absolute(&given.value),
        None => state_dir::default_path(around.uid == 0).unwrap_or_else(|problem| {
            values.note(Problem::new(Source::Missing("state-dir"), problem));
            PathBuf::new()
        }),
    }
}

/// Who commands run as where a tenant's table does not say.
fn default_identity(values: &mut Values, around: &Surroundings, for_all: &Who) -> Option<Identity> {
    if for_all.was_said() {
        return for_all.identity(None);
    }
    match identity::resolve(None, Uid::from_raw(around.uid)) {
        Ok(otherwise) => for_all.identity(Some(&otherwise)),
        Err(problem) => {
            values.note(Problem::new(Source::Missing("run-as"), problem));
            None
        }
    }
}

/// Notes each mode that commands would be held to and that the chosen tool cannot enforce.
fn check_sandbox_tools(values: &mut Values, for_all: &TenantRules, tenants: &BTreeMap<String, TenantRules>) {
    let of_tenants = tenants.iter().map(|(name, rules)| (format!(" of tenant {name}"), rules));
    for (whose, rules) in [(String::new(), for_all)].into_iter().chain(of_tenants) {
        if rules.sandbox_tool == SandboxTool::Bubblewrap && rules.sandbox != SandboxMode::DangerFullAccess {
            values.note(Problem::new(
                Source::Missing("sandbox-tool"),
                format!(
                    "bubblewrap cannot enforce the mode {}{whose}, so no command could run; only landlock can",
                    rules.sandbox.as_str()
                ),
            ));
        }
    }
}

fn server_user(values: &mut Values, around: &Surroundings, identities: &[Identity]) -> Option<ServerUser> {
    let given = values.text("server_user");
    let asked = given.as_ref().map(|given| given.value.as_str());
    if identities.is_empty() {
        return None;
    }
    identity::resolve_server(asked, Uid::from_raw(around.uid), identities).unwrap_or_else(|problem| {
        values.note(match given {
            Some(given) => given.problem(problem),
            None => Problem::new(Source::Missing("server-user"), problem),
        });
        None
    })
}

/// The files of TLS; both or none.
fn tls_files(values: &mut Values, around: &Surroundings) -> Option<TlsFiles> {
    let mut named = |name| {
        let given = values.text(name)?;
        Some((around.absolute(&given.value), given.source))
    };
    let (chain, key, client_ca) = (named("tls_cert_file"), named("tls_key_file"), named("client_ca_file"));
    match (chain, key, client_ca) {
        (Some(chain), Some(key), client_ca) => Some(TlsFiles { chain, key, client_ca }),
        (None, None, None) => None,
        (chain, key, client_ca) => {
            let why = match (&chain, &key, &client_ca) {
                (None, None, Some(_)) => "certificates of clients are looked at in TLS",
                (Some(_), _, _) => "it belongs to --tls-cert-file",
                (None, _, _) => "it belongs to --tls-key-file",
            };
            for (flag, missing) in [("tls-cert-file", chain.is_none()), ("tls-key-file", key.is_none())] {
                if missing {
                    values.note(Problem::new(Source::Missing(flag), format!("must be given too: {why}")));
                }
            }
            None
        }
    }
}

fn credential_files(values: &mut Values, around: &Surroundings, tls: Option<TlsFiles>) -> CredentialFiles {
    let token_file = values.text("token_file").map(|given| (around.absolute(&given.value), given.source));
    let mut problems = Vec::new();
    let tenants = values.tenants().map(|(file, table)| tenants::parse(file, table, &mut problems));
    problems.into_iter().for_each(|problem| values.note(problem));
    let tenant_token_files = tenants.iter().flatten().enumerate().filter_map(|(index, table)| {
        let (path, source) = table.token_file.as_ref()?;
        Some((index, (around.absolute(path), source.clone())))
    });
    let tenant_token_files = tenant_token_files.collect();
    CredentialFiles { daemon_uid: around.uid, token_file, tls, tenants, tenant_token_files }
}

/// Nobody comes in whom nobody has named, and nobody is named who could not come in.
fn check_callers(values: &mut Values, files: &CredentialFiles, listeners: &[ListenAddress], identities: &[Identity]) {
    let client_ca = files.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
    // A mistake in the TLS files was noted where it was found, and is the reason that there is no authority.
    if listeners.iter().any(ListenAddress::is_tcp) && !files.has_tokens() && !client_ca {
        values.note(Problem::new(
            Source::Missing("token-file"),
            "must be given to listen on TCP (or a client CA with TLS), on loopback too: every local user and every \
             command can connect there",
        ));
    }
    for table in files.tenants.iter().flatten() {
        if let Some((_, source)) = table.certificate_names.first().filter(|_| !client_ca) {
            values.note(Problem::new(source.clone(), "nobody can show a certificate without --client-ca-file"));
        }
        for (uid, source) in &table.peer_uids {
            if identities.iter().any(|identity| identity.has_uid(*uid) && identity.change) {
                values.note(Problem::new(
                    source.clone(),
                    format!("commands run as uid {uid}, and what they hand to others could call as this tenant"),
                ));
            }
        }
    }
}

/// The configured directory; else the one that the daemon was started in; else, where commands cannot enter that, their
/// user's home; else the root. What lies outside of the roots is none of them; the first root is the last resort then.
fn default_workdir(
    values: &mut Values,
    around: &Surroundings,
    identity: Option<&Identity>,
    rules: &TenantRules,
) -> PathBuf {
    let enters = |path: &Path| identity.is_none_or(|identity| identity::can_enter(identity, path));
    if let Some(Given { value, source }) = values.text("default_workdir") {
        let path = around.absolute(&value);
        if !path.is_dir() {
            values.note(Problem::new(source, "must be a directory that exists"));
        } else if !enters(&path) {
            values.note(Problem::new(source, "the user that commands run as cannot enter it"));
        } else if !rules.has_workdir(&path) {
            values.note(Problem::new(source, "must lie in one of workdir_roots"));
        }
        return path;
    }
    let home = identity.map(|identity| identity.home.clone());
    // Of a tenant: what holds for all.
    let for_all = Some(rules.default_workdir.clone()).filter(|path| path.is_absolute());
    let candidates = [for_all, around.start_dir.clone(), home, rules.workdir_roots.first().cloned()];
    // Paths travel between the daemon's processes as text.
    let usable = |path: &PathBuf| path.to_str().is_some() && path.is_dir() && enters(path) && rules.has_workdir(path);
    let last = || rules.workdir_roots.first().cloned().unwrap_or_else(|| "/".into());
    candidates.into_iter().flatten().find(usable).unwrap_or_else(last)
}

fn log_settings(values: &mut Values) -> LogSettings {
    let LogSettings { level, format } = LogSettings::default();
    LogSettings {
        level: values.word("log_level", &LogLevel::WORDS).unwrap_or(level),
        format: values.word("log_format", &LogFormat::WORDS).unwrap_or(format),
    }
}

/// The defaults with what was given in place of them.
fn settings(values: &mut Values, defaults: Settings) -> Settings {
    let mut whole = |name, default| values.whole(name).unwrap_or(default);
    let defaults = Settings {
        max_output_bytes: whole("max_output_bytes", defaults.max_output_bytes),
        max_spill_bytes: whole("max_spill_bytes", defaults.max_spill_bytes),
        grace_ms: whole("grace_ms", defaults.grace_ms),
        drain_quiet_ms: whole("drain_quiet_ms", defaults.drain_quiet_ms),
        drain_total_ms: whole("drain_total_ms", defaults.drain_total_ms),
        heartbeat_ms: whole("heartbeat_ms", defaults.heartbeat_ms),
        resume_window_ms: whole("resume_window_ms", defaults.resume_window_ms),
        max_leftovers_per_owner: whole("max_leftovers_per_owner", defaults.max_leftovers_per_owner),
        max_finished_per_owner: whole("max_finished_per_owner", defaults.max_finished_per_owner),
        finished_kept_seconds: whole("finished_kept_seconds", defaults.finished_kept_seconds),
        max_completions_per_owner: whole("max_completions_per_owner", defaults.max_completions_per_owner),
        ..defaults
    };
    Settings {
        timeout_ms: values.milliseconds("timeout_ms").unwrap_or(defaults.timeout_ms),
        max_timeout_ms: values.milliseconds("max_timeout_ms").unwrap_or(defaults.max_timeout_ms),
        reap_descendants: values.switch("reap_descendants").unwrap_or(defaults.reap_descendants),
        ..defaults
    }
}

/// What ending everything takes at the longest, as far as it can be bounded, with the server's closing.
fn drain_limit(settings: &Settings) -> Duration {
    /// Proof of the end after the grace, and scheduling.
    const ALLOWANCE: Duration = Duration::from_secs(3);

    Duration::from_millis(settings.grace_ms + settings.drain_total_ms) + server::LONGEST_CLOSING + ALLOWANCE
}

#[cfg(test)]
mod tests;
