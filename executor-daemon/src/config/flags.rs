//! The command line: what the program can be asked for, and the values that were given.

use std::{ffi::OsString, path::PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use clap_complete::Shell;

use super::{
    keys::{KEYS, Kind},
    values::Flags,
};
use crate::{health::HealthOptions, init::InitOptions};

/// What the program was asked for.
#[derive(Debug)]
pub enum Asked {
    /// Become the daemon.
    Serve(ServeFlags),
    /// Make a configuration with certificates.
    Init(InitOptions),
    /// Ask a daemon how it is.
    Health(HealthOptions),
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
  executor-daemon init --dir /etc/executor-daemon --name daemon.example
  executor-daemon serve --config /etc/executor-daemon/config.toml
  executor-daemon health --endpoint unix:/run/user/1000/executor.sock
  executor-daemon completions bash > /etc/bash_completion.d/executor-daemon";

const SERVE_EXAMPLES: &str = "\
Every option but --config is also a key of the file, with underscores for dashes: `grace_ms = 500`.
Options win over the file. SIGTERM ends what runs and then the daemon.

Examples:
  executor-daemon serve --listen unix:/run/user/1000/executor.sock
  executor-daemon serve --listen unix:/run/executor.sock --run-as agent
  executor-daemon serve --listen tcp:127.0.0.1:7700 --token-file token
  executor-daemon serve --config /etc/executor-daemon/config.toml       (made by `executor-daemon init`)
  executor-daemon serve --listen tcp:0.0.0.0:7700 --token-file /run/secrets/token --insecure

The file can also name tenants: [tenants.NAME] with any of token_file, certificate_names and peer_uids, and with what holds
for that tenant in place of what is said for all: run_as, workdir_roots, max_tasks and others (see README.md).
SIGHUP replaces the server, which reads the token and certificate files again.

Exit codes: 0 after SIGTERM, 64 for mistakes in options or the file, 125 for its own failures.";

/// Names the daemon whose health is asked for, as it does for clients.
const ENDPOINT_VARIABLE: &str = "EXECUTOR_ENDPOINT";

const HEALTH_EXAMPLES: &str = "\
Example:
  HEALTHCHECK CMD [\"executor-daemon\", \"health\", \"--endpoint\", \"unix:/run/executor.sock\"]

Exit codes: 0 when it serves, 1 when it does not or cannot be reached, 64 for mistakes in options.";

const INIT_EXAMPLES: &str = "\
Nothing is overwritten. Certificates are good for 397 days, a new CA for ten years. With --ca the CA of an earlier \
`init` signs: put the new server.crt and server.key in place of the old ones, and send the daemon SIGHUP.

Examples:
  executor-daemon init --name daemon.example
  executor-daemon init --dir tls --name 10.0.0.5 --tenant team-a --tenant team-b
  executor-daemon init --dir renewed --ca /etc/executor-daemon --name daemon.example
  executor-daemon init --dir /tls --apart --name daemon                 (before every start)

Exit codes: 0 when it wrote everything, 64 for mistakes in options, 125 when it wrote nothing.";

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
        .subcommand(init())
        .subcommand(
            Command::new("health")
                .about("Asks a daemon whether it serves; needs no token")
                .after_help(HEALTH_EXAMPLES)
                .arg(
                    Arg::new("endpoint")
                        .long("endpoint")
                        .value_name("ENDPOINT")
                        .help("unix:PATH, https://HOST:PORT or http://HOST:PORT; else EXECUTOR_ENDPOINT"),
                )
                .arg(file("ca", "For https://: file with the CA that has signed the daemon's certificate (PEM)"))
                .arg(file("cert", "For https://: file with a certificate to show, where the daemon wants one (PEM)"))
                .arg(file("key", "File with the private key of that certificate (PEM)"))
                .arg(file("token-file", "Token to send along, for proxies that want one")),
        )
        .subcommand(Command::new("completions").about("Prints a completion script for a shell").arg(
            Arg::new("shell").value_name("SHELL").required(true).value_parser(value_parser!(Shell)).help("Which shell"),
        ))
}

/// An option that names a file.
fn file(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name("FILE").value_parser(value_parser!(PathBuf)).help(help)
}

fn init() -> Command {
    let several = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).action(ArgAction::Append).help(help)
    };
    Command::new("init")
        .about("Writes a configuration with a private CA, certificates and tokens")
        .after_help(INIT_EXAMPLES)
        .arg(file("dir", "Where the files go [default: /etc/executor-daemon as root, else $XDG_CONFIG_HOME/executor-daemon or ~/.config/executor-daemon]").value_name("DIR"))
        .arg(several("name", "HOST", "A name or address that clients connect to the daemon by; localhost is always one. May be given several times"))
        .arg(several("tenant", "NAME", "A tenant, with a certificate and a token of its own. May be given several times [default: one, without a name]"))
        .arg(file("ca", "Directory of an earlier `init`, whose CA is to sign").value_name("DIR"))
        .arg(
            Arg::new("apart")
                .long("apart")
                .action(ArgAction::SetTrue)
                .conflicts_with("ca")
                .help("Below DIR a directory for each party: ca, server, and one for each client, with certificates and no tokens. What is there stays, what is missing is made"),
        )
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
        Some(("init", given)) => init_options(given).map(Asked::Init),
        Some(("health", given)) => {
            let file = |name| given.get_one::<PathBuf>(name).cloned();
            let endpoint = given.get_one::<String>("endpoint").cloned();
            let endpoint = endpoint.or_else(|| std::env::var(ENDPOINT_VARIABLE).ok().filter(|text| !text.is_empty()));
            let Some(endpoint) = endpoint else {
                let problem = format!("say which daemon: --endpoint or {ENDPOINT_VARIABLE}");
                return Err(command().error(clap::error::ErrorKind::MissingRequiredArgument, problem));
            };
            Ok(Asked::Health(HealthOptions {
                endpoint,
                token_file: file("token-file"),
                ca: file("ca"),
                cert: file("cert"),
                key: file("key"),
            }))
        }
        Some(("completions", given)) => {
            Ok(Asked::Completions(given.get_one::<Shell>("shell").copied().unwrap_or(Shell::Bash)))
        }
        Some(_) | None => {
            Err(command().error(clap::error::ErrorKind::MissingSubcommand, "say serve, init, health or completions"))
        }
    }
}

fn init_options(given: &ArgMatches) -> Result<InitOptions, clap::Error> {
    let texts = |name| given.get_many::<String>(name).map(|all| all.cloned().collect()).unwrap_or_default();
    // The configuration names its files by where they are, wherever the daemon is started.
    let absolute = |path: PathBuf| {
        std::path::absolute(path).map_err(|error| command().error(clap::error::ErrorKind::ValueValidation, error))
    };
    let dir = match given.get_one::<PathBuf>("dir").cloned().or_else(default_config_dir) {
        Some(dir) => absolute(dir)?,
        None => {
            let problem = "--dir must be given: neither XDG_CONFIG_HOME nor HOME is set";
            return Err(command().error(clap::error::ErrorKind::MissingRequiredArgument, problem));
        }
    };
    let ca = given.get_one::<PathBuf>("ca").cloned();
    Ok(InitOptions { dir, names: texts("name"), tenants: texts("tenant"), ca, apart: given.get_flag("apart") })
}

fn default_config_dir() -> Option<PathBuf> {
    if nix::unistd::geteuid().is_root() {
        return Some("/etc/executor-daemon".into());
    }
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base =
        set("XDG_CONFIG_HOME").filter(|base| base.is_absolute()).or_else(|| Some(set("HOME")?.join(".config")))?;
    Some(base.join("executor-daemon"))
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
