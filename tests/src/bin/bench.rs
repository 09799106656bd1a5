//! Prints what a command costs through the daemon over a bare spawn, and what a flood leaves in the daemon's memory.
//!
//! With an endpoint: what a command costs on that daemon over a bare spawn here, which is best in its own container.
//! Prints only: what is fast enough is decided by people who know the machine. Run it in a release build.

use std::{
    io::{self, Write},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::Context;
use clap::Parser;
use executor_proto::types::CommandSpec;
use executor_tests::{Backend, Elsewhere, Setup, World, block_on};

/// Measures a whole call over a Unix socket against a bare spawn, in interleaved pairs, and the memory after 1 GiB of output;
/// with an endpoint, a whole call on the daemon there.
#[derive(Debug, Parser)]
struct Arguments {
    /// Pairs to measure.
    #[arg(long, default_value_t = 1_000)]
    pairs: usize,
    /// Bytes of output of one run.
    #[arg(long, default_value_t = 1 << 30)]
    flood: u64,
    #[command(flatten)]
    daemon: Elsewhere,
}

fn main() -> anyhow::Result<()> {
    executor_daemon::keeper::enter_if_asked();
    let arguments = Arguments::parse();
    let body = async move {
        if let Some(endpoint) = &arguments.daemon.endpoint {
            let world = World::connect(endpoint, arguments.daemon.access()?, &std::env::temp_dir()).await?;
            spawns(&world, endpoint, arguments.pairs).await?;
            return world.finish().await;
        }
        let setup = Setup { timeout_ms: 600_000.0, max_timeout_ms: 600_000.0, ..Setup::default() };
        let world = World::start(Backend::Unix, setup).await?;
        spawns(&world, "the socket", arguments.pairs).await?;
        flood(&world, arguments.flood).await?;
        world.finish().await
    };
    // A harness calls from a task, not from the thread that waits for the runtime.
    block_on(async { tokio::spawn(body).await.context("the task of the calls")? })
}

async fn spawns(world: &World, way: &str, pairs: usize) -> anyhow::Result<()> {
    const WARM_UP: usize = 20;
    let spec = CommandSpec { command: "true".into(), ..CommandSpec::default() };
    let (mut through, mut bare, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..pairs + WARM_UP {
        let daemon = async || {
            let begun = Instant::now();
            world.run(spec.clone()).await.map(|_| begun.elapsed()).context("a run over the socket")
        };
        // Whoever comes second profits from what the first has warmed, so they take turns.
        let (over_socket, spawned) = if pair % 2 == 0 {
            let spawned = spawn()?;
            (daemon().await?, spawned)
        } else {
            (daemon().await?, spawn()?)
        };
        if pair >= WARM_UP {
            through.push(over_socket);
            bare.push(spawned);
            ratios.push(over_socket.as_secs_f64() / spawned.as_secs_f64());
        }
    }
    ratios.sort_by(f64::total_cmp);
    let (through, bare) = (median(through), median(bare));
    print(&format!(
        "true: {through:?} over {way}, {bare:?} by a bare spawn (medians of {pairs} interleaved pairs); \
         ratio of medians {:.3}, median of ratios {:.3}\n",
        through.as_secs_f64() / bare.as_secs_f64(),
        ratios[ratios.len() / 2],
    ))
}

/// `bash -c true` as the standard library starts it: by `posix_spawn`, with two pipes that are read to their end.
#[expect(clippy::disallowed_methods, reason = "the bare spawn that the daemon is measured against")]
fn spawn() -> anyhow::Result<Duration> {
    let begun = Instant::now();
    let mut bash = Command::new("bash");
    bash.args(["-c", "true"]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = bash.output().context("a bare spawn")?;
    anyhow::ensure!(output.status.success(), "{output:?}");
    Ok(begun.elapsed())
}

async fn flood(world: &World, bytes: u64) -> anyhow::Result<()> {
    let daemon = world.daemon().context("it is a daemon's world")?;
    let before = daemon.resident_kib();
    let begun = Instant::now();
    let spec = CommandSpec { command: format!("head -c {bytes} /dev/zero").into(), ..CommandSpec::default() };
    let result = world.run(spec).await.context("the flood")?;
    let elapsed = begun.elapsed();
    anyhow::ensure!(result.stdout.total == bytes, "{} of {bytes} bytes came", result.stdout.total);
    let after = daemon.resident_kib();
    #[expect(clippy::cast_precision_loss, reason = "printed with one decimal")]
    let speed = bytes as f64 / f64::from(1 << 20) / elapsed.as_secs_f64();
    print(&format!(
        "{bytes} bytes of output in {elapsed:?} ({speed:.0} MiB/s): {before} KiB resident before, {after} KiB after\n"
    ))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn print(text: &str) -> anyhow::Result<()> {
    io::stdout().lock().write_all(text.as_bytes()).context("printing")
}
