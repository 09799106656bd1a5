//! Random reads, losses, retries and kills: what a reader has had, put together, is what the command wrote, once and in order.
//!
//! `READS_SEED` plays one schedule again, `READS_SCHEDULES` says how many are played.

use std::{fmt::Write as _, time::Duration};

use bytes::Bytes;
use executor_proto::types::{CommandSpec, OwnerId, StreamDelta, TaskStatus};
use executor_tests::{
    Backend, Setup, World,
    faults::{CutAfter, Direction, Plan},
    run, tell,
};
use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;
use tool_client::executor::{Executor, ExecutorError};

/// Schedules, unless it is to take longer.
const SCHEDULES: u64 = 4;

/// Tasks of one schedule, each with a reader of its own.
const TASKS: usize = 4;

/// Pieces that a task writes to each stream.
const PIECES: usize = 100;

/// Kills of the server in one schedule.
const KILLS: u32 = 3;

/// What is written: whole characters, and characters whose bytes come in two writes.
const TEXTS: [&[&[u8]]; 6] = [
    &[b"line\n"],
    &["é".as_bytes()],
    &[b"\xe2", b"\x89\xa4"],
    &[b"\xf0\x9f", b"\x98\x80"],
    &[b"\xf0", b"\x9f\x98\x80", b"."],
    &[b"0123456789abcdef0123456789abcdef"],
];

/// Numbers that a seed decides (splitmix64).
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % bound as u64).expect("below a bound that fits")
    }
}

/// A command that writes for a second or two, and what it writes to stdout and stderr.
fn writing(random: &mut Random) -> (String, [Vec<u8>; 2]) {
    let mut script = "exec 3<>fifo; w() { printf \"$1\"; read -t \"$2\" -u 3; }\n".to_owned();
    let mut written = [Vec::new(), Vec::new()];
    for _ in 0..PIECES {
        let stream = random.below(3) / 2;
        for bytes in TEXTS[random.below(TEXTS.len())] {
            let octal = bytes.iter().fold(String::new(), |text, byte| text + &format!("\\{byte:03o}"));
            let to = if stream == 1 { " >&2" } else { "" };
            writeln!(script, "w '{octal}' .0{:02}{to}", random.below(30)).expect("memory");
            written[stream].extend_from_slice(bytes);
        }
    }
    (script + "exit 0", written)
}

/// What one reader has had of one stream.
struct Had<'a> {
    written: &'a [u8],
    position: usize,
}

impl Had<'_> {
    fn take(&mut self, what: &str, delta: &StreamDelta) {
        let start = usize::try_from(delta.start).expect("small");
        assert_eq!(delta.dropped, 0, "{what}: the tail holds everything");
        assert_eq!(start, self.position, "{what}: a gap, or something twice");
        assert!(str::from_utf8(&delta.data).is_ok(), "{what}: a character is split");
        self.position = start + delta.data.len();
        assert_eq!(delta.data, self.written[start..self.position], "{what}: other bytes");
    }
}

async fn read_all(world: &World, client: &dyn Executor, mut random: Random) {
    let owner = OwnerId(format!("reader {}", random.below(1 << 30)));
    let (command, written) = writing(&mut random);
    let spec = CommandSpec {
        command: Bytes::from(command),
        workdir: Some(Bytes::from(world.tmp().to_string_lossy().into_owned())),
        ..CommandSpec::default()
    };
    let id = client.start_task(Some(&owner), spec).await.expect("it starts");
    let [mut stdout, mut stderr] = written.each_ref().map(|written| Had { written, position: 0 });
    loop {
        let wait = (random.below(3) == 0).then(|| Duration::from_millis(random.below(40) as u64));
        let output = match client.read_output(Some(&owner), &id, wait).await {
            Ok(output) => output,
            // Five attempts in a row were lost: the next read has what was in their answer.
            Err(ExecutorError::Unavailable { .. }) => {
                tell(format_args!("a read of {} was given up", id.0));
                continue;
            }
            Err(error) => panic!("{}: {error}", id.0),
        };
        stdout.take(&format!("stdout of {}", id.0), &output.stdout);
        stderr.take(&format!("stderr of {}", id.0), &output.stderr);
        if output.status != TaskStatus::Running {
            break;
        }
        tokio::time::sleep(Duration::from_millis(random.below(25) as u64)).await;
    }
    for had in [stdout, stderr] {
        assert_eq!(had.position, had.written.len(), "{} was not read to its end", id.0);
    }
}

/// Lost replies, cut connections and kills, until it is enough.
async fn disturb(world: &World, mut random: Random, enough: &CancellationToken) {
    let mut kills = 0;
    while !enough.is_cancelled() {
        match random.below(8) {
            0..=3 => world.faults().lose_next_reply(),
            4 | 5 => {
                let bytes = random.below(400) as u64;
                world.faults().cut_once(CutAfter { direction: Direction::ToClient, bytes });
            }
            6 => world.faults().cut(),
            _ if kills < KILLS => {
                kills += 1;
                world.daemon().expect("there is one").kill_server().await.expect("it is killed");
                // Whoever cuts every attempt until then shows nothing.
                world.direct().info().await.expect("it answers again");
            }
            _ => {}
        }
        let pause = tokio::time::sleep(Duration::from_millis(40 + random.below(120) as u64));
        tokio::select! {
            () = pause => {}
            () = enough.cancelled() => {}
        }
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

#[test]
fn reads_through_losses_retries_and_kills_bring_every_byte_once() {
    let seed = number("READS_SEED");
    let schedules = seed.map_or_else(|| number("READS_SCHEDULES").unwrap_or(SCHEDULES), |_| 1);
    let first = seed.unwrap_or_else(|| getrandom::u64().expect("randomness") >> 1);
    for seed in first..first + schedules {
        tell(format_args!("READS_SEED={seed}"));
        run(Backend::Unix, Setup::through(Plan::PASS), async |world| {
            let fifo = world.tmp().join("fifo");
            nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a fifo");
            let mut random = Random(seed);
            let mut next = || Random(random.below(usize::MAX) as u64);
            let enough = CancellationToken::new();
            let disturbance = disturb(world, next(), &enough);
            let readers = join_all((0..TASKS).map(|_| read_all(world, &**world.executor(), next())));
            let readers = async {
                readers.await;
                enough.cancel();
            };
            tokio::join!(readers, disturbance);
            let seen = world.faults().seen();
            tell(format_args!("{} lost replies, {} cuts", seen.lost_replies, seen.cuts));
            assert!(seen.lost_replies > 0 && seen.cuts > 0, "{seen:?}");
        });
    }
}
