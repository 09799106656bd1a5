//! What the fuzz target `journal` does. Built for tests and under `--cfg fuzzing` only.

use std::{path::Path, sync::Arc, time::Instant};

use bytes::Bytes;
use executor_proto::types::{OwnerId, ReadId, StartKey, TaskId};

use super::{
    carry::{self, Compared},
    completions::Completions,
    reads::{Asked, Both, Reads},
    recall,
    registry::{Recalled, Registry},
};
use crate::{ids::Caller, journal, output};

/// Replays a journal: one whose records hold these bytes, or one whose files these bytes damage.
///
/// # Panics
/// When what is recovered is not kept apart, or cannot be used.
pub fn journals(bytes: &[u8], directory: &Path) {
    match bytes {
        [0..=127, bodies @ ..] => replay(bodies),
        [_, edits @ ..] => journal::fuzzing::of_damaged_files(edits, directory),
        [] => {}
    }
}

fn replay(bodies: &[u8]) {
    let (journal, recovered) = journal::fuzzing::of_bodies(bodies);
    let mut registry: Registry<i64> = recall::keys(recovered.keys);
    let owners: Vec<_> = recovered.ledgers.iter().map(|ledger| Caller::from(&ledger.account)).collect();
    let completions = Completions::recalled(3, journal.clone(), recovered.ledgers, recovered.first_sequence);
    for Caller { tenant, owner } in &owners {
        let Some(owner) = owner else { continue };
        drop(completions.watch(tenant, owner));
        completions.acknowledge(tenant, owner, 2);
    }
    let Compared { go_on, nobodys, never_ran, over } = carry::compare(recovered.starts, vec![1, 2], |handle| *handle);
    assert!(go_on.len() + nobodys.len() == 2, "whatever is handed over is somebody's or nobody's");
    let all = go_on.iter().map(|(recorded, _)| recorded).chain(&over);
    for recorded in all {
        let state = carry::state_of(recorded, Instant::now());
        let (ended, _seen) = recall::end_of(recorded, 5);
        let _ = (state.status(), recall::to_be_told(recorded, &ended));
        read_again(recorded);
        let Some(started) = &recorded.started else { continue };
        let caller = Caller::from(&recorded.start.account);
        registry.recall(Recalled {
            number: recorded.number,
            caller: caller.clone(),
            key: StartKey(recorded.start.key.clone()),
            command: recorded.start.digest,
            id: TaskId(started.id.clone()),
            finished_at_ms: Some(ended.at_ms),
            entry: Arc::new(recorded.number.0),
        });
        assert!(registry.access(&caller, &TaskId(started.id.clone())).is_ok());
    }
    registry.forget_above(1, 5);
    for recorded in over.iter().chain(&never_ran) {
        journal.forgotten(recorded.number, 5);
    }
}

/// Reads again what a journal says that was read, out of a stream of three bytes.
fn read_again(recorded: &journal::RecordedStart) {
    let caller = Caller { owner: Some(OwnerId("a".to_owned())), ..Caller::from(&recorded.start.account) };
    let mut reads = Reads::recalled(recorded.reads.clone(), recorded.start.account.owner.is_none());
    let bytes = Bytes::from_static(b"abc");
    let delta = |cursor: u64| {
        let start = usize::try_from(output::needed_from(cursor).min(3)).unwrap_or(3);
        output::delta_of(start as u64, &bytes.slice(start..), cursor, 2, true)
    };
    let known = recorded.reads.iter().map(|read| ReadId(read.read_id.clone()));
    for read_id in known.chain([ReadId("another".to_owned())]) {
        match reads.ask(&caller, &read_id) {
            Asked::Answered(_) => {}
            Asked::Before(before) => {
                let Both { stdout, stderr } = before.begins();
                reads.answer_again(&caller, &before, Both { stdout: delta(stdout), stderr: delta(stderr) });
            }
            Asked::New(Both { stdout, stderr }) => {
                let deltas = Both { stdout: delta(stdout), stderr: delta(stderr) };
                reads.answer(&caller, &read_id, executor_proto::types::TaskStatus::Running, deltas);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What the fuzz target begins with.
    fn seeds() -> Vec<Vec<u8>> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/journal");
        let files = std::fs::read_dir(directory).expect("seeds are kept");
        files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect()
    }

    #[test]
    fn the_seeds_are_about_every_table_and_both_files() {
        let directory = tempfile::tempdir().unwrap();
        let (mut starts, mut keys, mut ledgers) = (0, 0, 0);
        for seed in seeds() {
            journals(&seed, directory.path());
            if let [0..=127, bodies @ ..] = &seed[..] {
                let (_, recovered) = journal::fuzzing::of_bodies(bodies);
                starts += recovered.starts.iter().filter(|start| start.started.is_some()).count();
                keys += recovered.keys.len();
                ledgers += recovered.ledgers.iter().filter(|ledger| !ledger.waiting.is_empty()).count();
            }
        }
        assert!(starts >= 2 && keys >= 2 && ledgers >= 1, "{starts} {keys} {ledgers}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

        #[test]
        fn records_that_are_spoilt_do_no_harm(
            seed in prop::sample::select(seeds()),
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            more in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut bytes = seed;
            bytes.extend(more);
            bytes[0] = 0;
            for (at, turned) in edits {
                let at = 1 + at.index(bytes.len() - 1);
                bytes[at] ^= turned;
            }
            journals(&bytes, Path::new("/nowhere"));
        }
    }
}
