//! The daemon's command line: reads the configuration, then becomes the keeper. The only place that prints or exits.

use std::{fmt::Display, io::Write, process::ExitCode};

use clap::error::ErrorKind;
use clap_complete::Shell;
use executor_daemon::{
    config::{
        self, Asked, CredentialFiles, Credentials, Daemon, ListenAddress, ServeFlags, ServerSettings, StateDir,
        Surroundings,
    },
    health::{self, HealthOptions},
    init::{self, InitOptions},
    keeper,
};

/// Exit code for mistakes in options or the file.
const USAGE: u8 = 64;

/// Exit code for the daemon's own failures.
const OWN_FAILURE: u8 = 125;

/// Exit code of `health` for a daemon that does not serve.
const NOT_SERVING: u8 = 1;

pub(crate) fn main() -> ExitCode {
    keeper::enter_if_asked();
    match config::parse(std::env::args_os()) {
        Ok(Asked::Serve(flags)) => serve(flags),
        Ok(Asked::Init(options)) => init(&options),
        Ok(Asked::Health(options)) => check_health(&options),
        Ok(Asked::Completions(shell)) => completions(shell),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match error.print() {
                Ok(()) => ExitCode::SUCCESS,
                Err(_nobody_reads) => ExitCode::from(OWN_FAILURE),
            },
            _mistake => {
                complain(&config::one_line(&error));
                ExitCode::from(USAGE)
            }
        },
    }
}

/// Says on stderr, in one line, what is wrong.
fn complain(problem: &dyn Display) {
    // Where stderr is closed there is nobody to tell; the exit code still says it.
    let _ = writeln!(std::io::stderr(), "executor-daemon: {problem}");
}

fn serve(flags: ServeFlags) -> ExitCode {
    let daemon = match config::load(flags, &Surroundings::of_this_process()) {
        Ok(daemon) => daemon,
        Err(problems) => {
            for problem in &problems {
                complain(problem);
            }
            return ExitCode::from(USAGE);
        }
    };
    let Daemon {
        server,
        credentials,
        sockets_are_shared,
        listeners,
        identities,
        server_user,
        state_dir,
        hidden,
        unprotected,
        drain_limit,
    } = daemon;
    // Held until the keeper ends, so that no second daemon works on the same state.
    let taken = match StateDir::take(&state_dir, &identities, server_user) {
        Ok(taken) => taken,
        Err(error) => {
            complain(&error);
            return ExitCode::from(OWN_FAILURE);
        }
    };
    if let Some(line) = &taken.left_aside {
        complain(line);
    }
    let server_settings = match server.encode() {
        Ok(settings) => settings,
        Err(error) => {
            complain(&format_args!("the settings cannot be handed over: {error}"));
            return ExitCode::from(OWN_FAILURE);
        }
    };
    // Directories that the daemon was started in may be removed or unmounted while it runs.
    if let Err(error) = std::env::set_current_dir("/") {
        complain(&format_args!("/: {error}"));
        return ExitCode::from(OWN_FAILURE);
    }
    keeper::serve(keeper::KeeperOptions {
        identities,
        groups: server.engine.group_limits(),
        listeners: listeners
            .into_iter()
            .map(|address| match address {
                ListenAddress::Unix(path) if sockets_are_shared => keeper::Listener::SharedUnix(path),
                ListenAddress::Unix(path) => keeper::Listener::Unix(path),
                ListenAddress::Tcp(address) => keeper::Listener::Tcp(address),
            })
            .collect(),
        server_user,
        server_settings,
        renewal: keeper::Renewal(Box::new(move || renewed(&server, &credentials))),
        spill_dir: state_dir.join("spill"),
        hidden,
        drain_limit,
        unprotected,
    })
}

/// The server's settings with what the files say now of who may call.
fn renewed(server: &ServerSettings, files: &CredentialFiles) -> Result<Vec<u8>, Vec<String>> {
    let lines = |problems: Vec<config::Problem>| problems.iter().map(ToString::to_string).collect::<Vec<_>>();
    let Credentials { tenants, tls } = files.read().map_err(lines)?;
    let settings = ServerSettings { tenants, tls, ..server.clone() };
    settings.encode().map_err(|error| vec![format!("the settings cannot be handed over: {error}")])
}

fn init(options: &InitOptions) -> ExitCode {
    match init::init(options) {
        Ok(next_steps) => print(next_steps.as_bytes()),
        Err(error) => {
            complain(&error);
            ExitCode::from(if error.is_usage() { USAGE } else { OWN_FAILURE })
        }
    }
}

fn check_health(options: &HealthOptions) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            complain(&error);
            return ExitCode::from(OWN_FAILURE);
        }
    };
    match runtime.block_on(health::check(options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::from(if error.is_usage() { USAGE } else { NOT_SERVING })
        }
    }
}

fn completions(shell: Shell) -> ExitCode {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut config::command(), "executor-daemon", &mut script);
    print(&script)
}

fn print(text: &[u8]) -> ExitCode {
    match std::io::stdout().write_all(text) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::from(OWN_FAILURE)
        }
    }
}
