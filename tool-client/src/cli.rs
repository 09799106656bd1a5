//! The command line.
//!
//! This is the only place, with `main`, that prints and decides exit codes. [`arguments`] is what can be written,
//! `settings` where the executor is and for whom calls are made, `backend` the executor that follows from it; the other
//! modules are one subcommand, or a few that belong together, each.
//!
//! Exit codes: the command's own, 128+n when it died of signal n, 124 when it timed out, 125 for failures of our own, 64
//! for usage, 130 after Ctrl-C (143 after SIGTERM, 129 after SIGHUP), 141 when the reader of our output has gone.

use std::{borrow::Cow, process::ExitCode};

use clap::{
    CommandFactory, Parser,
    error::{ContextKind, ContextValue, ErrorKind},
};
use executor_proto::error::ExecutorError;

use self::{
    arguments::{Arguments, Subcommand},
    backend::{Backend, Files},
    interrupt::Interrupt,
    settings::Settings,
};
use crate::text::failure::{Asked, failure};

pub mod arguments;
mod backend;
mod bash;
mod call;
mod info;
mod interrupt;
mod json;
mod logs;
mod mcp;
mod notices;
mod output;
mod settings;
mod tasks;

/// Our own failures.
const EXIT_OWN_FAILURE: u8 = 125;
/// Usage.
const EXIT_USAGE: u8 = 64;
/// A command that timed out.
const EXIT_TIMEOUT: u8 = 124;
/// As if SIGPIPE had ended us, which is what it does to `cat`.
const EXIT_BROKEN_PIPE: u8 = 128 + 13;

/// Why a subcommand has no exit code of its own.
#[derive(Debug)]
enum Failure {
    /// The caller has to write something else. One line.
    Usage(String),
    /// It was not done. One line.
    Own(String),
    /// A signal came first; its exit code.
    Interrupted(u8),
    /// Nobody reads our output any more; there is nobody to tell.
    BrokenPipe,
}

/// What a subcommand comes to: an exit code.
type Outcome = Result<u8, Failure>;

impl Failure {
    /// What the executor said, in the words of SPEC.md §8.
    fn of(error: &ExecutorError, asked: &Asked<'_>) -> Self {
        Self::Own(failure(error, asked))
    }
}

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return ExitCode::from(refuse(&error)),
    };
    // One thread: what is waited for is one connection and one command. Blocking writes have threads of their own.
    let code = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => {
            let outcome = runtime.block_on(run(arguments));
            // A thread that still reads our stdin must not keep us.
            runtime.shutdown_background();
            report(outcome)
        }
        Err(error) => report(Err(Failure::Own(format!("no runtime: {error}")))),
    };
    ExitCode::from(code)
}

async fn run(Arguments { global, subcommand }: Arguments) -> Outcome {
    match subcommand {
        Subcommand::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "tool-client", &mut script);
            output::stdout(script).await.map(|()| 0)
        }
        Subcommand::Definitions => call::definitions().await,
        Subcommand::Bash(bash) => bash::bash(bash, &Settings::resolve(global)?).await,
        Subcommand::Output { id, wait } => {
            let (backend, interrupt) = remote(&Settings::resolve(global)?, "output")?;
            interrupt.or(tasks::output(&backend, &id, wait)).await
        }
        Subcommand::Kill { id } => {
            let (backend, interrupt) = remote(&Settings::resolve(global)?, "kill")?;
            interrupt.or(tasks::kill(&backend, &id)).await
        }
        Subcommand::Ps { json } => {
            let (backend, interrupt) = remote(&Settings::resolve(global)?, "ps")?;
            interrupt.or(tasks::ps(&backend, json)).await
        }
        Subcommand::Logs { id, follow } => {
            let (backend, interrupt) = remote(&Settings::resolve(global)?, "logs")?;
            interrupt.or(logs::logs(&backend, &id, follow)).await
        }
        Subcommand::Notices { follow, json } => {
            let (backend, interrupt) = remote(&Settings::resolve(global)?, "notices")?;
            interrupt.or(notices::notices(&backend, follow, json)).await
        }
        Subcommand::Info => {
            let settings = Settings::resolve(global)?;
            let interrupt = Interrupt::listen()?;
            interrupt.or(async { info::info(&Backend::new(&settings, Files::AreNotTold).await?).await }).await
        }
        Subcommand::Mcp => mcp::mcp(&Settings::resolve(global)?).await,
        Subcommand::Call { tool, arguments } => call::call(&Settings::resolve(global)?, &tool, &arguments).await,
    }
}

/// The executor of a subcommand that starts or names tasks: they live in a daemon.
fn remote(settings: &Settings, what: &str) -> Result<(Backend, Interrupt), Failure> {
    let backend = Backend::remote(settings).ok_or_else(|| needs_endpoint(what))?;
    Ok((backend, Interrupt::listen()?))
}

fn needs_endpoint(what: &str) -> Failure {
    Failure::Usage(format!(
        "{what} needs an executor that goes on after this call: give --endpoint, EXECUTOR_ENDPOINT or a config file"
    ))
}

/// Says why, and gives the exit code.
fn report(outcome: Outcome) -> u8 {
    let (code, line) = match outcome {
        Ok(code) => return code,
        Err(Failure::Interrupted(code)) => return code,
        Err(Failure::BrokenPipe) => return EXIT_BROKEN_PIPE,
        Err(Failure::Usage(line)) => (EXIT_USAGE, line),
        Err(Failure::Own(line)) => (EXIT_OWN_FAILURE, line),
    };
    // Nobody can be told that stderr cannot be written.
    let _ = output::line_now(&cut(&line));
    code
}

/// Help and version go to stdout. A usage error is one line, without the summary that `--help` has.
fn refuse(error: &clap::Error) -> u8 {
    if !error.use_stderr() {
        return match error.print() {
            Ok(()) => 0,
            Err(_closed) => EXIT_BROKEN_PIPE,
        };
    }
    report(Err(Failure::Usage(one_line(error))))
}

/// The paragraphs before the usage: what is wrong, and a tip where it is one.
fn one_line(error: &clap::Error) -> String {
    let rendered = error.render().to_string();
    let end = ["\n\nUsage:", "\n\nFor more information"].iter().filter_map(|mark| rendered.find(mark)).min();
    let mut said = rendered[..end.unwrap_or(rendered.len())].split("\n\n").flat_map(|part| part.split("\n  tip: "));
    let problem = words(said.next().unwrap_or_default());
    let mut line = problem.strip_prefix("error: ").unwrap_or(&problem).to_owned();
    for tip in said.map(words) {
        let tip = tip.strip_prefix("tip: ").unwrap_or(&tip);
        // To somebody who has misspelt an option, neither how to pass it as a value nor another option is a tip.
        let misleads = tip.starts_with("to pass '") || (tip.starts_with("a similar argument") && !is_similar(error));
        if !misleads {
            line = format!("{line}; {tip}");
        }
    }
    if is_unquoted(error, &rendered) {
        line.push_str("; a command is one argument: quote it, as in tool-client bash 'ls -la'");
    }
    format!("{line}; see tool-client --help")
}

/// Whether the words of a command were given to `bash` one by one: what it does not know is no option of ours misspelt.
fn is_unquoted(error: &clap::Error, rendered: &str) -> bool {
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else { return false };
    let of_bash = rendered.contains("\n\nUsage: tool-client bash ");
    error.kind() == ErrorKind::UnknownArgument && of_bash && !argument.starts_with("--")
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether the argument that is suggested is likely to be the one that was meant.
fn is_similar(error: &clap::Error) -> bool {
    /// Of the letters, how many must be the same.
    const LEAST: f64 = 0.5;

    let argument = |kind| match error.get(kind) {
        Some(ContextValue::String(argument)) => Some(argument.trim_start_matches('-')),
        _ => None,
    };
    match (argument(ContextKind::InvalidArg), argument(ContextKind::SuggestedArg)) {
        (Some(given), Some(suggested)) => strsim::normalized_damerau_levenshtein(given, suggested) >= LEAST,
        _ => true,
    }
}

/// A longer line for people loses its middle: what it is about is at its beginning, what is wrong at its end.
const MAX_LINE_CHARS: usize = 1000;
/// How many of these are its end.
const LINE_END_CHARS: usize = 300;

fn cut(line: &str) -> Cow<'_, str> {
    let chars = line.chars().count();
    if chars <= MAX_LINE_CHARS {
        return Cow::Borrowed(line);
    }
    let head: String = line.chars().take(MAX_LINE_CHARS - LINE_END_CHARS - 1).collect();
    let end: String = line.chars().skip(chars - LINE_END_CHARS).collect();
    Cow::Owned(format!("{head}…{end}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usage_error_is_one_line() {
        for arguments in [
            &["tool-client"][..],
            &["tool-client", "bahs", "x"],
            &["tool-client", "bash"],
            &["tool-client", "bash", "x", "--tiemout", "1"],
            &["tool-client", "bash", "x", "--timeout", "soon"],
            &["tool-client", "call", "bash"],
            &["tool-client", "completions", "powerbash"],
        ] {
            let error = Arguments::try_parse_from(arguments).expect_err("it is no usage");
            let line = one_line(&error);
            assert!(!line.contains('\n') && line.ends_with("; see tool-client --help"), "{line}");
            assert!(!line.contains("Usage:") && !line.starts_with("error"), "{line}");
        }
    }

    #[test]
    fn what_is_wrong_and_a_tip_are_told_apart() {
        for (arguments, line) in [
            (&["bash", "--nope", "x"][..], "unexpected argument '--nope' found"),
            (
                &["bash", "x", "--tiemout", "1"],
                "unexpected argument '--tiemout' found; a similar argument exists: '--timeout'",
            ),
            (&["bahs", "x"], "unrecognized subcommand 'bahs'; a similar subcommand exists: 'bash'"),
            (&["bash"], "the following required arguments were not provided: <COMMAND>"),
            (
                &["bash", "ls", "-la"],
                "unexpected argument '-l' found; a command is one argument: quote it, as in tool-client bash 'ls -la'",
            ),
            (
                &["bash", "echo", "hi"],
                "unexpected argument 'hi' found; a command is one argument: quote it, as in tool-client bash 'ls -la'",
            ),
            (&["ps", "-l"], "unexpected argument '-l' found"),
        ] {
            let error = Arguments::try_parse_from([&["tool-client"], arguments].concat()).expect_err("it is no usage");
            assert_eq!(one_line(&error), format!("{line}; see tool-client --help"));
        }
    }

    #[test]
    fn a_long_line_loses_its_middle() {
        let line = |middle: usize| format!("begin {}: the end", "\u{e9}".repeat(middle));
        assert_eq!(cut(&line(100)), line(100));
        let short = cut(&line(100_000)).into_owned();
        assert_eq!(short.chars().count(), MAX_LINE_CHARS);
        assert!(short.starts_with("begin \u{e9}") && short.contains('…') && short.ends_with("\u{e9}: the end"));
    }
}
