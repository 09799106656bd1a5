//! A process of the daemon dies at each step of a start, an end, a read, a kill and a taking over.
//!
//! The points are those that the daemon's code names (`executor_daemon::crash`); one that is never passed fails the test.

mod keeper;
mod server;

use std::{fs, path::Path, time::Duration};

use executor_daemon::crash::Point;
use executor_tests::World;

/// For what has to happen at all; nothing waits this long when all is well.
const LIMIT: Duration = Duration::from_secs(60);

/// Deaths at the same time; each is of a daemon of its own.
const AT_ONCE: usize = 4;

/// What tells a daemon to die at that pass of that point.
fn variable((point, pass): (Point, u64)) -> (String, String) {
    ("EXECUTOR_CRASH".to_owned(), format!("{} {pass} ${{TMP}}/passes", point.name()))
}

fn lines(path: &Path) -> usize {
    fs::read_to_string(path).unwrap_or_default().lines().count()
}

fn passes(world: &World) -> u64 {
    fs::metadata(world.tmp().join("passes")).map_or(0, |metadata| metadata.len())
}
