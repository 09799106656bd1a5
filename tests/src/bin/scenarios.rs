//! Plays a file of recorded scenarios and prints every difference.

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::Context;
use clap::{Parser, ValueEnum};
use executor_tests::{
    Backend, Elsewhere, World, block_on,
    faults::Plan,
    scenario::{self, Faults, Played, Scenario},
};

/// Plays scenarios against an executor and compares every word that the model reads.
#[derive(Debug, Parser)]
#[command(after_help = "Exit code: 0 when all passed, 1 when one failed, 2 when they could not be played.")]
struct Arguments {
    /// A JSON file of scenarios.
    file: PathBuf,
    /// Where the commands run. `connect`: on a daemon that is already running, which then plays one scenario.
    #[arg(long, value_enum, default_value = "in-process")]
    backend: Where,
    /// Plays only the scenario of this name.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Cuts every connection to the daemon when it is so old, in milliseconds.
    #[arg(long, value_name = "MS")]
    cut_every: Option<u64>,
    /// Lets every so many-th call reach the daemon and loses its reply.
    #[arg(long, value_name = "CALLS")]
    lose_replies: Option<u32>,
    /// Kills the daemon's server each time that so long has passed, in milliseconds.
    #[arg(long, value_name = "MS")]
    kill_every: Option<u64>,
    /// How many are played at the same time.
    #[arg(long, value_name = "N", default_value_t = 4)]
    jobs: usize,
    /// With `connect`.
    #[command(flatten)]
    daemon: Elsewhere,
    /// With `connect`: the directory that is `${TMP}`, shared with the daemon under the same path.
    #[arg(long, value_name = "DIR", required_if_eq("backend", "connect"))]
    tmp: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Where {
    InProcess,
    Unix,
    Tcp,
    Tls,
    Connect,
}

fn main() -> ExitCode {
    executor_daemon::keeper::enter_if_asked();
    match block_on(play(Arguments::parse())) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            print(&mut io::stderr().lock(), &format!("scenarios: {error:#}\n"));
            ExitCode::from(2)
        }
    }
}

async fn play(arguments: Arguments) -> anyhow::Result<bool> {
    let mut scenarios = scenario::read(&arguments.file)?;
    if let Some(only) = &arguments.only {
        scenarios.retain(|scenario| scenario.name == *only);
        anyhow::ensure!(!scenarios.is_empty(), "{} has no scenario {only:?}", arguments.file.display());
    }
    let count = scenarios.len();
    anyhow::ensure!(
        arguments.backend != Where::Connect || count == 1,
        "one running daemon plays one scenario: name it with --only"
    );
    let plan = Plan {
        cut_every: arguments.cut_every.map(Duration::from_millis),
        lose_every: arguments.lose_replies,
        ..Plan::PASS
    };
    let faults = Faults {
        wire: Some(plan).filter(|plan| *plan != Plan::PASS),
        kill_server_every: arguments.kill_every.map(Duration::from_millis),
    };
    anyhow::ensure!(
        (faults.wire.is_none() && faults.kill_server_every.is_none())
            || matches!(arguments.backend, Where::Unix | Where::Tcp),
        "--cut-every, --lose-replies and --kill-every need --backend unix or tcp"
    );
    let played = match arguments.backend {
        Where::InProcess => scenario::play_all(scenarios, Backend::InProcess, faults, arguments.jobs).await,
        Where::Unix => scenario::play_all(scenarios, Backend::Unix, faults, arguments.jobs).await,
        Where::Tcp => scenario::play_all(scenarios, Backend::Tcp, faults, arguments.jobs).await,
        Where::Tls => scenario::play_all(scenarios, Backend::Tls, faults, arguments.jobs).await,
        Where::Connect => {
            let scenario = scenarios.remove(0);
            let played = play_there(&scenario, &arguments).await;
            vec![(scenario, played)]
        }
    };
    let failed = played.iter().filter(|(scenario, result)| !report(&scenario.name, result)).count();
    print(&mut io::stdout().lock(), &format!("{} passed, {failed} failed\n", count - failed));
    let replays = scenario::check_replays(&played);
    if let Err(too_many) = &replays {
        print(&mut io::stdout().lock(), &format!("FAILED {too_many}\n"));
    }
    Ok(failed == 0 && replays.is_ok())
}

/// Plays a scenario on a daemon that is already running with its configuration.
async fn play_there(scenario: &Scenario, arguments: &Arguments) -> anyhow::Result<Played> {
    let endpoint = arguments.daemon.endpoint.as_deref().context("--endpoint is missing")?;
    let tmp = arguments.tmp.as_deref().context("--tmp is missing")?;
    let mut world = World::connect(endpoint, arguments.daemon.access()?, tmp).await?;
    let played = scenario::play_in(scenario, &mut world).await?;
    world.finish().await?;
    Ok(played)
}

/// Prints what came of one scenario; returns whether it passed.
fn report(name: &str, result: &anyhow::Result<Played>) -> bool {
    let mut out = io::stdout().lock();
    let played = match result {
        Ok(played) => played,
        Err(error) => {
            print(&mut out, &format!("FAILED {name}: it could not be played: {error:#}\n"));
            return false;
        }
    };
    for remark in &played.remarks {
        print(&mut out, &format!("note   {name}: {remark}\n"));
    }
    for difference in &played.differences {
        let (expected, actual) = (difference.expected.escape_debug(), difference.actual.escape_debug());
        print(&mut out, &format!("FAILED {name}: {}\n  expected {expected}\n  actual   {actual}\n", difference.place));
    }
    played.differences.is_empty()
}

fn print(out: &mut dyn Write, text: &str) {
    if out.write_all(text.as_bytes()).is_err() {
        // Nobody reads it; the exit code still tells.
    }
}
