//! What can be written on the command line.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{Args, Parser};
use executor_proto::types::SandboxMode;

/// Run shell commands here, or on the host of an executor daemon.
///
/// Without an endpoint a command runs in an executor of its own, on this host, as you. With one it runs where the daemon
/// is. What starts or names a background task needs an endpoint.
#[derive(Debug, Parser)]
#[command(
    name = "tool-client",
    version,
    max_term_width = 100,
    subcommand_required = true,
    arg_required_else_help = false,
    disable_help_subcommand = true,
    after_help = "\
The endpoint is taken from --endpoint, else EXECUTOR_ENDPOINT, else the config file \
$XDG_CONFIG_HOME/tool-client/config.toml (~/.config/tool-client/config.toml), whose keys are endpoint, \
token_file, ca_file, cert_file, key_file, owner and sandbox.

Exit codes: the command's own; 128+n when it died of signal n; 124 when it timed out; 125 for failures of \
tool-client itself; 64 for usage; 130 after Ctrl-C (143 after SIGTERM, 129 when the terminal is gone).

Examples:
  tool-client bash 'uname -a'
  tool-client --endpoint unix:/run/executor.sock bash 'make test' --timeout 5m
  tool-client --endpoint https://daemon:7700 --ca ca.crt --cert me.crt --key me.key ps
  tool-client --endpoint http://daemon:7700 --token-file /run/secrets/token ps"
)]
pub struct Arguments {
    #[command(flatten, next_help_heading = "Where and for whom")]
    pub(super) global: Global,
    #[command(subcommand)]
    pub(super) subcommand: Subcommand,
}

/// Where the executor is, and for whom calls are made.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Where and for whom")]
pub(super) struct Global {
    /// Where the executor is: unix:/path, https://host:port, or on a private network http://host:port. Several https:// (or
    /// http://) with commas between them, or a name with several addresses, are hosts that share the sessions
    #[arg(long, global = true, value_name = "ENDPOINT")]
    pub(super) endpoint: Option<OsString>,
    /// File whose first line is the token that the daemon knows you by; else EXECUTOR_TOKEN_FILE
    #[arg(long, global = true, value_name = "FILE")]
    pub(super) token_file: Option<PathBuf>,
    /// For https://: file with the CA that has signed the daemon's certificate (PEM); else EXECUTOR_CA_FILE
    #[arg(long, global = true, value_name = "FILE")]
    pub(super) ca: Option<PathBuf>,
    /// For https://: file with the certificate that the daemon knows you by (PEM); else EXECUTOR_CERT_FILE
    #[arg(long, global = true, value_name = "FILE")]
    pub(super) cert: Option<PathBuf>,
    /// File with the private key of that certificate (PEM); else EXECUTOR_KEY_FILE
    #[arg(long, global = true, value_name = "FILE")]
    pub(super) key: Option<PathBuf>,
    /// The session that the call is made for: it owns the tasks that it starts. Not given: no session
    #[arg(long, global = true, value_name = "ID")]
    pub(super) owner: Option<String>,
    /// How far a command's access to files reaches: read-only, workspace-write or danger-full-access. Default: the executor's
    #[arg(long, global = true, value_name = "MODE", value_parser = sandbox_mode)]
    pub(super) sandbox: Option<SandboxMode>,
}

#[derive(Debug, clap::Subcommand)]
pub(super) enum Subcommand {
    /// Run a command with `bash -c` and pass its output through as it comes
    Bash(Bash),
    /// Print what a task wrote since the last time, with its status on stderr
    #[command(after_help = "\
The exit code is 0 while the task runs, then the task's own.

Examples:
  tool-client output bash-1
  tool-client output bash-1 --wait")]
    Output {
        /// The task, bash-N
        id: String,
        /// Wait until the task has ended
        #[arg(long)]
        wait: bool,
    },
    /// End a task and everything that it started, or what is left over of it
    #[command(after_help = "\
It returns when nothing of the task is alive, or names what could not be ended.

Examples:
  tool-client kill bash-1
  tool-client kill run-7      (what a foreground run left running)")]
    Kill {
        /// The task, bash-N, or run-N for the leftovers of a run
        id: String,
    },
    /// List tasks, and runs that are running or have left something running
    #[command(after_help = "\
With --json: an array of {id, owner, command, workdir, status, exit_code, signal, exit_unknown, started_at_ms, \
ended_at_ms, stdout_bytes, stderr_bytes, shell_pid, leftovers: [{pid, command}]}, where status is running, ended or \
killed. What does not apply is null.

Examples:
  tool-client ps
  tool-client ps --owner session-1 --json | jq -r '.[].id'")]
    Ps {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the whole output of a task or run, as far as it is kept
    #[command(after_help = "\
Stdout goes to stdout and stderr to stderr. On a terminal control characters are shown, not obeyed. It never changes \
what `output` prints next.

Examples:
  tool-client logs bash-1 > out.txt
  tool-client logs -f bash-1")]
    Logs {
        /// The task, bash-N, or the run, run-N
        id: String,
        /// Go on until it has ended
        #[arg(short, long)]
        follow: bool,
    },
    /// Print the notices of an owner's tasks that have ended, and acknowledge them
    #[command(after_help = "\
Needs --owner. A notice is printed once: after that the daemon forgets it.
With --json: a line {owner, sequence, task_id, text, status, exit_code, signal, exit_unknown, ended_at_ms} each.

Examples:
  tool-client notices --owner session-1
  tool-client notices --owner session-1 --follow --json")]
    Notices {
        /// Go on with notices as they come
        #[arg(long)]
        follow: bool,
        /// Print a line of JSON for each
        #[arg(long)]
        json: bool,
    },
    /// Print what the executor is: its version, defaults, caps, and what it does not protect
    #[command(after_help = "\
Examples:
  tool-client info
  tool-client info --endpoint http://daemon:7700 --token-file token")]
    Info,
    /// Print the definitions of the three tools, as they are sent to a model
    #[command(after_help = "\
Examples:
  tool-client definitions | jq '.[].name'")]
    Definitions,
    /// Call a tool as a model does, and print exactly what the model would read
    #[command(after_help = "\
The exit code is 0, or 1 for an error result. As a model's, arguments that the tool does not define are ignored: \
`tool-client definitions` prints those that it does (the timeout is `timeoutMs`, in milliseconds). Without an endpoint, the \
file that a long output is saved to stays where the text says.

Examples:
  tool-client call bash '{\"command\": \"uname -a\", \"description\": \"Print the kernel\"}'
  tool-client call bash_output '{\"task_id\": \"bash-1\"}' --owner session-1")]
    Call {
        /// bash, bash_output or bash_kill
        tool: String,
        /// The arguments, as the model's own JSON text
        #[arg(value_name = "JSON")]
        arguments: String,
    },
    /// Serve the three tools to an agent over stdin and stdout, by the Model Context Protocol
    #[command(after_help = "\
One process is one session. With --owner its tasks can be found again by that name; without, they are ended when stdin ends. Without \
an endpoint commands run on this host, as you. When a task has ended the agent is sent its notice as `notifications/message`.

Examples:
  tool-client mcp
  tool-client mcp --endpoint unix:/run/executor.sock --owner session-1")]
    Mcp,
    /// Print a completion script for a shell
    #[command(after_help = "\
Examples:
  tool-client completions bash > ~/.local/share/bash-completion/completions/tool-client")]
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Args)]
#[command(after_help = "\
Stdout goes to stdout and stderr to stderr, byte for byte. A line on stderr that begins with `tool-client:` says what the \
exit code cannot: a timeout, processes that live on, bytes that were lost.

With --json: one object {exit_code, signal, exit_unknown, timed_out_after_ms, ended_by, aborted, stdout, stdout_bytes, \
stdout_dropped, stdout_file, the same four for stderr, survivors, leftovers, sandbox_denied, duration_ms}. There stdout \
and stderr are the ends of the streams as text, *_dropped is what came before them in bytes, and *_file is the path of \
the whole where it was saved. What does not apply is null.

With --background: the id of the task, or {task_id} with --json.

Examples:
  tool-client bash 'cat photos.tar' > photos.tar
  tool-client bash 'wc -l' --stdin < list.txt
  tool-client bash 'make test' --workdir ~/src/project --timeout 90s
  tool-client bash 'npm run dev' --background --endpoint unix:/run/executor.sock")]
pub(super) struct Bash {
    /// The command, as one argument
    pub(super) command: OsString,
    /// Start it as a background task and print its id
    #[arg(long, conflicts_with = "timeout")]
    pub(super) background: bool,
    /// Directory to start in. Default: this one where the executor is on this host, else the executor's
    #[arg(long, value_name = "DIR")]
    pub(super) workdir: Option<OsString>,
    /// End it after so long: 1500ms, 90s, 5m, 1h, or a number of milliseconds. Default and cap: the executor's
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(super) timeout: Option<Duration>,
    /// Print the result as JSON when it has ended
    #[arg(long)]
    pub(super) json: bool,
    /// Read stdin to its end (at most 8 MiB) and give it to the command, which has none otherwise
    #[arg(long)]
    pub(super) stdin: bool,
}

/// A mode by its word.
fn sandbox_mode(text: &str) -> Result<SandboxMode, String> {
    let words = || SandboxMode::ALL.map(SandboxMode::as_str).join(", ");
    SandboxMode::parse(text).ok_or_else(|| format!("expected one of {}", words()))
}

/// A positive time with an optional unit.
fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let milliseconds = match &text[digits..] {
        "" | "ms" => 1.0,
        "s" => 1_000.0,
        "m" => 60_000.0,
        "h" => 3_600_000.0,
        _ => return Err("expected a time such as 1500ms, 90s, 5m or 1h".to_owned()),
    };
    let number: f64 = text[..digits].parse().map_err(|_no_number| "expected a number first".to_owned())?;
    match Duration::try_from_secs_f64(number * milliseconds / 1_000.0) {
        Ok(time) if !time.is_zero() => Ok(time),
        Ok(_) => Err("expected a time above zero".to_owned()),
        Err(_) => Err("that is too long".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn times_have_units() {
        for (text, milliseconds) in
            [("150", 150), ("1500ms", 1500), ("0.5s", 500), ("90s", 90_000), ("5m", 300_000), ("1h", 3_600_000)]
        {
            assert_eq!(duration(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for bad in ["", "s", "-1", "1d", "0", "0s", "soon", "1e3", "NaN", "1.2.3", "99999999999999999999999h"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
