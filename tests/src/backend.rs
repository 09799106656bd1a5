//! The ways to an executor, and what a test may ask of one.

use std::{collections::BTreeMap, ffi::OsString, path::Path, time::Duration};

use executor_daemon::config::Settings;
use executor_proto::types::SandboxMode;
use nix::unistd::Uid;
use tool_client::executor::{connect::Keepalive, local::LocalOptions, remote::Deadlines};

use crate::{binaries, faults::Plan};

/// Where an executor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// The engine in this process, over an embedded keeper.
    InProcess,
    /// A daemon behind a Unix socket.
    Unix,
    /// A daemon behind a TCP port of the loopback interface, with a token.
    Tcp,
    /// The same with TLS, a client certificate and no token.
    Tls,
}

impl Backend {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::InProcess, Self::Unix, Self::Tcp, Self::Tls];

    /// As command lines name it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InProcess => "in-process",
            Self::Unix => "unix",
            Self::Tcp => "tcp",
            Self::Tls => "tls",
        }
    }

    /// The user that an executor can really be given, and a remark where that is not the one asked for.
    #[must_use]
    pub fn give_uid(self, asked: Option<u32>) -> (Option<u32>, Option<String>) {
        let own = Uid::effective();
        match asked {
            Some(uid) if uid == own.as_raw() => (None, None),
            Some(uid) if self == Self::InProcess || !own.is_root() => {
                (None, Some(format!("{} runs as uid {own}, not as {uid}", self.as_str())))
            }
            given => (given, None),
        }
    }
}

/// What a test asks of its executor. The times are short, as in the recorded scenarios.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Timeout of a run that gives none.
    pub timeout_ms: f64,
    /// Longest timeout.
    pub max_timeout_ms: f64,
    /// Tail kept per stream.
    pub max_output_bytes: u64,
    /// Cap of each spill; `None`: the default.
    pub max_spill_bytes: Option<u64>,
    /// SIGTERM to SIGKILL.
    pub grace_ms: u64,
    /// Leftovers per owner; `None`: the default.
    pub max_leftovers_per_owner: Option<u64>,
    /// Running tasks per owner; `None`: the default.
    pub max_tasks_per_owner: Option<u64>,
    /// End what lives on after a shell.
    pub reap_descendants: bool,
    /// Widest sandbox mode, and that of a call that asks for none; `None`: the default.
    pub sandbox: Option<SandboxMode>,
    /// Whether commands reach the network.
    pub network: bool,
    /// Directory that commands start in when none is given; `None`: where the executor was started.
    pub default_workdir: Option<String>,
    /// Added to the executor's own environment, or put in place of what is in it; `${TMP}` stands for the directory.
    pub environment: BTreeMap<String, String>,
    /// Lines for bash that are run in the directory before the executor starts.
    pub prepare: Vec<String>,
    /// The user that the daemon runs as; `None`: who runs the test.
    pub uid: Option<u32>,
    /// The user that a daemon which is root runs commands as. Root, so that all backends run them as the same user.
    pub run_as: &'static str,
    /// Words before the daemon's own command line: a program that becomes or starts it. `${ROOT}` stands for the directory
    /// that holds the daemon's files, `state` among them.
    pub launcher: Vec<String>,
    /// The daemon is a copy of the program, which the test may replace: [`crate::Daemon::program`].
    pub own_program: bool,
    /// The process group that the daemon is started in; `None`: the test's.
    pub group: Option<i32>,
    /// Longest silence on a stream from the daemon; `None`: the default.
    pub heartbeat_ms: Option<u64>,
    /// A proxy between client and daemon that does this; `None`: none.
    pub faults: Option<Plan>,
    /// Kill the daemon's server each time that so long has passed; `None`: never.
    pub kill_server_every: Option<Duration>,
    /// Why a test is played without faults only.
    pub spared: Option<&'static str>,
    /// What the client waits for at most.
    pub deadlines: Deadlines,
    /// How the client watches its connection.
    pub keepalive: Keepalive,
    /// The daemon's program.
    pub program: fn() -> &'static Path,
    /// Where the daemon listens; `None`: a fresh socket, or a port that the kernel picks.
    pub listen: Option<String>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            timeout_ms: 10_000.0,
            max_timeout_ms: 20_000.0,
            max_output_bytes: 64_000,
            max_spill_bytes: None,
            grace_ms: 300,
            max_leftovers_per_owner: None,
            max_tasks_per_owner: None,
            reap_descendants: false,
            sandbox: None,
            network: true,
            default_workdir: None,
            environment: BTreeMap::new(),
            prepare: Vec::new(),
            uid: None,
            run_as: "root",
            launcher: Vec::new(),
            own_program: false,
            group: None,
            heartbeat_ms: None,
            faults: None,
            kill_server_every: None,
            spared: None,
            deadlines: Deadlines::default(),
            keepalive: Keepalive::default(),
            program: binaries::executor_daemon,
            listen: None,
        }
    }
}

impl Setup {
    /// Through a proxy that does this.
    #[must_use]
    pub fn through(plan: Plan) -> Self {
        Self { faults: Some(plan), ..Self::default() }
    }

    /// The whole environment of the executor.
    pub(crate) fn executor_environment(&self, tmp: &Path) -> BTreeMap<String, String> {
        let tmp = tmp.to_string_lossy().into_owned();
        let mut environment: BTreeMap<String, String> = [
            ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
            ("HOME", &tmp),
            ("LANG", "C.UTF-8"),
            ("TZ", "UTC"),
            ("USER", "oracle"),
            ("SHELL", "/bin/bash"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        let own = self.environment.iter().map(|(name, value)| (name.clone(), value.replace("${TMP}", &tmp)));
        environment.extend(own);
        environment
    }

    /// For an engine in this process: what the same configuration makes of a daemon.
    pub(crate) fn local_options(&self, tmp: &Path, state: &Path) -> LocalOptions {
        let own = self.executor_environment(tmp).into_iter().map(|(name, value)| (OsString::from(name), value.into()));
        let setup = self.clone();
        // The tests' own directory is not the one that the recorded executor was started in.
        let start_dir = tmp.to_owned();
        LocalOptions {
            program: Some(binaries::executor_daemon().to_owned()),
            environment: Some(own.collect()),
            default_workdir: Some(self.default_workdir.as_deref().map_or(tmp, Path::new).to_owned()),
            state_dir: Some(state.to_owned()),
            keep_spills: false,
            adjust: Some(Box::new(move |settings| {
                settings.start_dir = start_dir;
                setup.adjust(settings);
            })),
        }
    }

    fn adjust(&self, settings: &mut Settings) {
        settings.timeout_ms = self.timeout_ms;
        settings.max_timeout_ms = self.max_timeout_ms;
        settings.max_output_bytes = self.max_output_bytes;
        settings.grace_ms = self.grace_ms;
        settings.tenant_defaults.sandbox = self.sandbox.unwrap_or(settings.tenant_defaults.sandbox);
        settings.tenant_defaults.network = self.network;
        settings.reap_descendants = self.reap_descendants;
        settings.max_spill_bytes = self.max_spill_bytes.unwrap_or(settings.max_spill_bytes);
        settings.max_leftovers_per_owner = self.max_leftovers_per_owner.unwrap_or(settings.max_leftovers_per_owner);
        let rules = &mut settings.tenant_defaults;
        rules.max_tasks_per_owner = self.max_tasks_per_owner.unwrap_or(rules.max_tasks_per_owner);
    }

    /// For a daemon: its configuration file.
    pub(crate) fn config_file(&self) -> String {
        let mut lines = vec![
            format!("timeout_ms = {:?}", self.timeout_ms),
            format!("max_timeout_ms = {:?}", self.max_timeout_ms),
            format!("max_output_bytes = {}", self.max_output_bytes),
            format!("grace_ms = {}", self.grace_ms),
            format!("reap_descendants = {}", self.reap_descendants),
        ];
        lines.extend(self.sandbox.map(|mode| format!("sandbox = {:?}", mode.as_str())));
        lines.push(format!("network = {}", self.network));
        lines.extend(self.default_workdir.as_ref().map(|path| format!("default_workdir = {path:?}")));
        let numbers = [
            ("heartbeat_ms", self.heartbeat_ms),
            ("max_spill_bytes", self.max_spill_bytes),
            ("max_leftovers_per_owner", self.max_leftovers_per_owner),
            ("max_tasks_per_owner", self.max_tasks_per_owner),
        ];
        lines.extend(numbers.iter().filter_map(|(name, value)| value.map(|value| format!("{name} = {value}"))));
        lines.join("\n") + "\n"
    }
}
