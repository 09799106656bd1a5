//! Every key of the configuration, in the order in which `--help` shows them. The command line, the file and their errors
//! are all made from this list.

use executor_proto::transport;

/// Clients take a stream for lost after three times this, so it cannot be longer.
const LONGEST_HEARTBEAT_MS: u64 = transport::HEARTBEAT.as_secs() * 1_000;

/// A key: `timeout_ms` in the file, `--timeout-ms` on the command line.
#[derive(Debug)]
pub(super) struct Key {
    /// Its name in the file.
    pub(super) name: &'static str,
    /// Its name on the command line, without the dashes: the same with dashes for underscores.
    pub(super) flag: &'static str,
    /// What stands for the value in `--help`.
    pub(super) value: &'static str,
    /// What it takes.
    pub(super) kind: Kind,
    /// What it is for, in one or two lines.
    pub(super) help: &'static str,
    /// What holds when it is not given, as people read it.
    pub(super) default: Option<&'static str>,
}

/// What values a key takes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    /// Any text but the empty one.
    Text,
    /// Several texts.
    List,
    /// `true` or `false`; the flag alone is `true`.
    Switch,
    /// A whole number of something.
    Whole { of: &'static str, min: u64, max: u64 },
    /// A positive number of milliseconds, which may have decimals.
    Milliseconds,
    /// One of these words.
    Word(&'static [&'static str]),
}

impl Key {
    /// What is allowed, as the end of "must be …".
    pub(super) fn allowed(&self) -> String {
        match self.kind {
            Kind::Text => "a text that is not empty".to_owned(),
            Kind::List => "one or more texts".to_owned(),
            Kind::Switch => "true or false".to_owned(),
            Kind::Whole { of, min, max } => format!("a whole number of {of} from {min} to {max}"),
            Kind::Milliseconds => "a positive number of milliseconds".to_owned(),
            Kind::Word(words) => format!("one of {}", words.join(", ")),
        }
    }
}

const fn key(
    name: &'static str,
    flag: &'static str,
    value: &'static str,
    kind: Kind,
    default: Option<&'static str>,
    help: &'static str,
) -> Key {
    Key { name, flag, value, kind, help, default }
}

const fn milliseconds(min: u64, max: u64) -> Kind {
    Kind::Whole { of: "milliseconds", min, max }
}

const fn bytes(min: u64, max: u64) -> Kind {
    Kind::Whole { of: "bytes", min, max }
}

const fn count(of: &'static str) -> Kind {
    Kind::Whole { of, min: 1, max: 1_000_000 }
}

/// All keys.
pub(super) const KEYS: &[Key] = &[
    key(
        "listen",
        "listen",
        "ADDRESS",
        Kind::List,
        None,
        "Where to listen: unix:PATH or tcp:HOST:PORT. May be given several times; at least once",
    ),
    key(
        "state_dir",
        "state-dir",
        "DIR",
        Kind::Text,
        None,
        "Where spill files, the journal and the task counters are kept [default: /var/lib/executor-daemon as root, else $XDG_STATE_HOME/executor-daemon or ~/.local/state/executor-daemon]",
    ),
    key(
        "run_as",
        "run-as",
        "USER",
        Kind::Text,
        None,
        "The user that commands run as, by name or uid. Only root can choose; as root the default is the user `executor`, and root itself must be named",
    ),
    key(
        "uid_range",
        "uid-range",
        "FIRST-LAST",
        Kind::Text,
        None,
        "Uids that commands run as, one for each owner, such as 70000-70063; instead of --run-as. They need no accounts; their group is the first one's number. Only root can choose",
    ),
    key(
        "shares_user",
        "shares-user",
        "BOOL",
        Kind::Switch,
        Some("false"),
        "Let tenants run commands as the same user as others that allow it too, although they can read and end each other's then",
    ),
    key(
        "capabilities",
        "capabilities",
        "NAME",
        Kind::List,
        Some("none"),
        "A capability that commands have, such as CAP_NET_BIND_SERVICE. May be given several times. Only root can choose",
    ),
    key(
        "allow_setuid",
        "allow-setuid",
        "BOOL",
        Kind::Switch,
        Some("false"),
        "Let commands gain privileges by programs that give them, such as sudo",
    ),
    key(
        "server_user",
        "server-user",
        "USER",
        Kind::Text,
        None,
        "The user that the server, the process that faces the network, runs as, by name or uid. Only root can choose; as root the default is the user `executor-server`, or uid 65521 where there is none. Where commands run as root, the server is root too unless this is given",
    ),
    key(
        "token_file",
        "token-file",
        "FILE",
        Kind::Text,
        None,
        "File with the bearer tokens of TCP clients, one of at least 16 characters per line, readable by its owner only. TCP needs it, or --client-ca-file",
    ),
    key(
        "tls_cert_file",
        "tls-cert-file",
        "FILE",
        Kind::Text,
        None,
        "File with the daemon's certificate (PEM), followed by what is between it and its authority. With it TCP speaks TLS only",
    ),
    key(
        "tls_key_file",
        "tls-key-file",
        "FILE",
        Kind::Text,
        None,
        "File with the private key of that certificate (PEM), readable by its owner only",
    ),
    key(
        "client_ca_file",
        "client-ca-file",
        "FILE",
        Kind::Text,
        None,
        "File with the authorities of clients' certificates (PEM): mutual TLS. A client without a certificate is refused, unless there are tokens that it can send instead",
    ),
    key(
        "insecure",
        "insecure",
        "BOOL",
        Kind::Switch,
        Some("false"),
        "Listen on TCP beyond loopback without TLS, though nothing is encrypted then: the network is private",
    ),
    key(
        "default_workdir",
        "default-workdir",
        "DIR",
        Kind::Text,
        Some("the directory the daemon was started in"),
        "Where commands start when the caller names no directory",
    ),
    key(
        "workdir_roots",
        "workdir-roots",
        "DIR",
        Kind::List,
        Some("everywhere"),
        "A directory that commands may start in or below. May be given several times",
    ),
    key(
        "environment_allow",
        "environment-allow",
        "NAME",
        Kind::List,
        Some("all but those that look like credentials"),
        "A variable that commands get of the daemon's environment, or the beginning of names and `*`; no other is passed on then. May be given several times",
    ),
    key(
        "sandbox",
        "sandbox",
        "MODE",
        Kind::Word(&["read-only", "workspace-write", "danger-full-access"]),
        Some("danger-full-access"),
        "The widest access to files that a command may ask for, and that of one that asks for none",
    ),
    key(
        "writable_paths",
        "writable-paths",
        "PATH",
        Kind::List,
        Some("none"),
        "What commands in workspace-write may write besides their workdir. May be given several times",
    ),
    key("network", "network", "BOOL", Kind::Switch, Some("true"), "Whether commands reach the network"),
    key(
        "sandbox_tool",
        "sandbox-tool",
        "TOOL",
        Kind::Word(&["landlock", "bubblewrap"]),
        Some("landlock"),
        "What limits the access of commands to files",
    ),
    key("timeout_ms", "timeout-ms", "MS", Kind::Milliseconds, Some("120000"), "Timeout of a run that names none"),
    key(
        "max_timeout_ms",
        "max-timeout-ms",
        "MS",
        Kind::Milliseconds,
        Some("600000"),
        "Longest timeout that a run can have; longer ones are shortened to it",
    ),
    key(
        "max_output_bytes",
        "max-output-bytes",
        "BYTES",
        bytes(1, 16 * 1024 * 1024),
        Some("64000"),
        "What is kept of each stream for the model: its last bytes",
    ),
    key(
        "max_spill_bytes",
        "max-spill-bytes",
        "BYTES",
        bytes(1, 1 << 40),
        Some("67108864"),
        "Size above which the file with a stream's whole output keeps only its head",
    ),
    key(
        "grace_ms",
        "grace-ms",
        "MS",
        milliseconds(0, 600_000),
        Some("3000"),
        "Time between SIGTERM and SIGKILL when something is ended",
    ),
    key(
        "drain_quiet_ms",
        "drain-quiet-ms",
        "MS",
        milliseconds(0, 60_000),
        Some("250"),
        "Quiet on the pipes after a shell's exit that ends the wait for more",
    ),
    key(
        "drain_total_ms",
        "drain-total-ms",
        "MS",
        milliseconds(0, 60_000),
        Some("1000"),
        "Longest wait for more output after a shell's exit",
    ),
    key(
        "heartbeat_ms",
        "heartbeat-ms",
        "MS",
        milliseconds(10, LONGEST_HEARTBEAT_MS),
        Some("15000"),
        "Longest silence on a stream to a client",
    ),
    key(
        "resume_window_ms",
        "resume-window-ms",
        "MS",
        milliseconds(0, 600_000),
        Some("30000"),
        "How long a run goes on whose client has vanished, so that it can come back; 0: it is ended at once",
    ),
    key(
        "reap_descendants",
        "reap-descendants",
        "BOOL",
        Kind::Switch,
        Some("false"),
        "End what lives on after a shell at once, instead of keeping it as leftovers",
    ),
    key(
        "max_tasks_per_owner",
        "max-tasks-per-owner",
        "N",
        count("tasks"),
        Some("256"),
        "Tasks that may run at the same time for one owner",
    ),
    key(
        "max_tasks",
        "max-tasks",
        "N",
        count("tasks"),
        Some("16384"),
        "Tasks and runs that may run at the same time in all; lowered to what the host's limits allow",
    ),
    key(
        "max_leftovers_per_owner",
        "max-leftovers-per-owner",
        "N",
        count("leftovers"),
        Some("64"),
        "Leftovers that one owner may have before the oldest are ended",
    ),
    key(
        "max_finished_per_owner",
        "max-finished-per-owner",
        "N",
        count("tasks"),
        Some("1000"),
        "Finished tasks kept for one owner",
    ),
    key(
        "finished_kept_seconds",
        "finished-kept-seconds",
        "S",
        Kind::Whole { of: "seconds", min: 1, max: 365 * 24 * 60 * 60 },
        Some("86400"),
        "How long a finished task is kept",
    ),
    key(
        "max_completions_per_owner",
        "max-completions-per-owner",
        "N",
        count("completions"),
        Some("4096"),
        "Completions that wait for one owner before the oldest go",
    ),
    key(
        "max_processes",
        "max-processes",
        "N",
        count("processes"),
        None,
        "Processes that all commands of a tenant may have at the same time; without a control group for each tenant, those of each user that commands run as",
    ),
    key(
        "max_memory_bytes",
        "max-memory-bytes",
        "BYTES",
        bytes(1024 * 1024, 1 << 50),
        None,
        "Memory that all commands of a tenant may have at the same time; holds only where there is a control group for each tenant",
    ),
    key(
        "max_spill_bytes_in_all",
        "max-spill-bytes-in-all",
        "BYTES",
        bytes(1, 1 << 50),
        None,
        "Size of all spill files of a tenant together [default: a tenth of the disk; where that is memory, 5 % of it]",
    ),
    key(
        "max_spill_bytes_per_owner",
        "max-spill-bytes-per-owner",
        "BYTES",
        bytes(1, 1 << 50),
        Some("1073741824"),
        "Size of all spill files of one owner together",
    ),
    key(
        "max_output_bytes_per_second",
        "max-output-bytes-per-second",
        "BYTES",
        bytes(0, 1 << 40),
        None,
        "Output of all commands of a tenant that is taken in a second; a command that writes more waits [default: as it comes]",
    ),
    key(
        "max_watchers",
        "max-watchers",
        "N",
        count("watchers"),
        Some("4096"),
        "Streams that a tenant may have open at the same time to wait for completions or follow output",
    ),
    key(
        "max_requests",
        "max-requests",
        "N",
        count("requests"),
        Some("8192"),
        "Requests of a tenant that may be under way at the same time",
    ),
    key(
        "log_level",
        "log-level",
        "LEVEL",
        Kind::Word(&["error", "warn", "info", "debug", "trace"]),
        Some("info"),
        "How much is logged to stderr; trace includes the text of commands",
    ),
    key(
        "log_format",
        "log-format",
        "FORMAT",
        Kind::Word(&["text", "json"]),
        Some("text"),
        "What a log line looks like",
    ),
];

/// The keys that a tenant's table may have, too: what it says there holds for that tenant, what is said for all is the default.
pub(super) const TENANT_KEYS: [&str; 21] = [
    "run_as",
    "uid_range",
    "shares_user",
    "capabilities",
    "allow_setuid",
    "workdir_roots",
    "default_workdir",
    "environment_allow",
    "sandbox",
    "writable_paths",
    "network",
    "sandbox_tool",
    "max_tasks",
    "max_tasks_per_owner",
    "max_processes",
    "max_memory_bytes",
    "max_spill_bytes_in_all",
    "max_spill_bytes_per_owner",
    "max_output_bytes_per_second",
    "max_watchers",
    "max_requests",
];

/// The key with this name in the file.
pub(super) fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// The name of a key that somebody may have meant by this one.
pub(super) fn meant(name: &str) -> Option<&'static str> {
    nearest(name, KEYS.iter().map(|key| key.name).chain(["tenants"]))
}

/// The one of these names that differs from a name by few letters, or by dashes for underscores.
pub(super) fn nearest(name: &str, known: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    /// More differences than this are another word.
    const MAX_DIFFERENCES: usize = 3;

    let name = name.to_ascii_lowercase().replace('-', "_");
    known
        .map(|known| (differences(&name, known), known))
        .filter(|(differences, known)| *differences <= MAX_DIFFERENCES && *differences < known.len())
        .min_by_key(|(differences, _)| *differences)
        .map(|(_, known)| known)
}

/// Letters to add, drop or change to make one word of the other.
fn differences(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in other.iter().enumerate() {
            let changed = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_the_keys_with_dashes() {
        for key in KEYS {
            assert_eq!(key.flag, key.name.replace('_', "-"));
        }
    }

    #[test]
    fn a_misspelt_key_finds_the_one_that_was_meant() {
        assert_eq!(meant("timeout-ms"), Some("timeout_ms"));
        assert_eq!(meant("tiemout_ms"), Some("timeout_ms"));
        assert_eq!(meant("max_output"), None);
        assert_eq!(meant("listens"), Some("listen"));
        assert_eq!(meant("colour"), None);
    }
}
