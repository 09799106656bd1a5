//! The command line: what the program can be asked for, and the values that were given.

use std::{ffi::OsString, path::PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use clap_complete::Shell;

use super::{
    keys::{KEYS, Kind},
    values::Flags,
};

/// What the program was asked for.
#[derive(Debug)]
pub enum Asked {
    /// Become the daemon.
    Serve(ServeFlags),
    /// Ask a daemon how it is.
    Health {
        /// `unix:PATH` or `http://HOST:PORT`.
        endpoint: String,
        /// A token to send along; the check needs none.
        token_file: Option<PathBuf>,
    },
    /// Print a completion script.
    Completions(Shell),
}

/// The values that `serve` was given, as they were written.
#[derive(Debug, Default)]
pub struct ServeFlags {
    pub(super) file: Option<PathBuf>,
    pub(super) flags: Flags,
}

const ABOUT: &str = "Runs agents' commands on this host and serves them over gRPC (executor.v1).";

const EXAMPLES: &str = "\
Examples:
  executor-daemon serve --listen unix:/run/user/1000/executor.sock
  executor-daemon serve --listen tcp:127.0.0.1:7700 --token-file token
  executor-daemon serve --config /etc/executor-daemon.toml --listen tcp:0.0.0.0:7700 --insecure
  executor-daemon health --endpoint unix:/run/user/1000/executor.sock
  executor-daemon completions bash > /etc/bash_completion.d/executor-daemon";

const SERVE_EXAMPLES: &str = "\
Every option but --config is also a key of the file, with underscores for dashes: `grace_ms = 500`.
Options win over the file. SIGTERM ends what runs and then the daemon.

Examples:
  executor-daemon serve --listen unix:/run/user/1000/executor.sock
  executor-daemon serve --listen unix:/run/executor.sock --run-as agent
  executor-daemon serve --listen tcp:127.0.0.1:7700 --token-file token
  executor-daemon serve --listen tcp:0.0.0.0:7700 --token-file /run/secrets/token --insecure

Exit codes: 0 after SIGTERM, 64 for mistakes in options or the file, 125 for its own failures.";

const HEALTH_EXAMPLES: &str = "\
Example:
  HEALTHCHECK CMD [\"executor-daemon\", \"health\", \"--endpoint\", \"unix:/run/executor.sock\"]

Exit codes: 0 when it serves, 1 when it does not or cannot be reached, 64 for mistakes in options.";

/// The whole command line.
#[must_use]
pub fn command() -> Command {
    Command::new("executor-daemon")
        .version(env!("CARGO_PKG_VERSION"))
        .about(ABOUT)
        .after_help(EXAMPLES)
        .subcommand_required(true)
        .arg_required_else_help(false)
        .disable_help_subcommand(true)
        .max_term_width(100)
        .subcommand(serve())
        .subcommand(
            Command::new("health")
                .about("Asks a daemon whether it serves; needs no token")
                .after_help(HEALTH_EXAMPLES)
                .arg(
                    Arg::new("endpoint")
                        .long("endpoint")
                        .value_name("ENDPOINT")
                        .required(true)
                        .help("unix:PATH or http://HOST:PORT"),
                )
                .arg(
                    Arg::new("token-file")
                        .long("token-file")
                        .value_name("FILE")
                        .value_parser(value_parser!(PathBuf))
                        .help("Token to send along, for proxies that want one"),
                ),
        )
        .subcommand(Command::new("completions").about("Prints a completion script for a shell").arg(
            Arg::new("shell").value_name("SHELL").required(true).value_parser(value_parser!(Shell)).help("Which shell"),
        ))
}

fn serve() -> Command {
    let config = Arg::new("config")
        .long("config")
        .value_name("FILE")
        .value_parser(value_parser!(PathBuf))
        .help("TOML file with any of the options below");
    let command = Command::new("serve").about("Runs the daemon").after_help(SERVE_EXAMPLES).arg(config);
    KEYS.iter().fold(command, |command, key| {
        let help = match key.default {
            Some(default) => format!("{} [default: {default}]", key.help),
            None => key.help.to_owned(),
        };
        // Values are texts here and are checked later, all of them, together with those of the file.
        let arg = Arg::new(key.name).long(key.flag).value_name(key.value).help(help).allow_negative_numbers(true);
        command.arg(match key.kind {
            Kind::List => arg.action(ArgAction::Append),
            Kind::Switch => {
                arg.action(ArgAction::Append).num_args(0..=1).require_equals(true).default_missing_value("true")
            }
            Kind::Text | Kind::Whole { .. } | Kind::Milliseconds | Kind::Word(_) => arg.action(ArgAction::Append),
        })
    })
}

/// Parses the command line.
///
/// # Errors
/// What clap found, which is also how it asks for `--help` and `--version` to be printed.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Asked, clap::Error> {
    let matches = command().try_get_matches_from(arguments)?;
    match matches.subcommand() {
        Some(("serve", given)) => Ok(Asked::Serve(serve_flags(given))),
        Some(("health", given)) => Ok(Asked::Health {
            endpoint: given.get_one::<String>("endpoint").cloned().unwrap_or_default(),
            token_file: given.get_one::<PathBuf>("token-file").cloned(),
        }),
        Some(("completions", given)) => {
            Ok(Asked::Completions(given.get_one::<Shell>("shell").copied().unwrap_or(Shell::Bash)))
        }
        Some(_) | None => {
            Err(command().error(clap::error::ErrorKind::MissingSubcommand, "say serve, health or completions"))
        }
    }
}

fn serve_flags(given: &ArgMatches) -> ServeFlags {
    let flags = KEYS
        .iter()
        .filter_map(|key| {
            let texts: Vec<String> = given.get_many::<String>(key.name)?.cloned().collect();
            Some((key.name, texts))
        })
        .collect();
    ServeFlags { file: given.get_one::<PathBuf>("config").cloned(), flags }
}

/// A mistake in the command line as one line: clap's own sentence and its tips, without the usage that follows.
#[must_use]
pub fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let parts: Vec<&str> = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .collect();
    let line = parts.join(" ").replace(" tip: ", "; ");
    format!("{} (see --help)", line.strip_prefix("error: ").unwrap_or(&line))
}
