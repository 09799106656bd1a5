//! Journals that no program of this version has written. Built for tests and under `--cfg fuzzing` only.

use std::{fs, path::Path, sync::OnceLock};

use super::{Account, Completed, Journal, KeeperInstance, Kind, Recovered, Start, record::StatusFact};

const KEEPER: KeeperInstance = KeeperInstance([7; 16]);
const BOOT: &str = "boot";
const NOW_MS: u64 = 1_700_000_000_000;

/// What is recovered where the records hold these bytes: each record is its table (one byte), its length (one byte), and its body.
pub(crate) fn of_bodies(mut bytes: &[u8]) -> (Journal, Recovered) {
    // Emptied and used again: making one takes longer than everything else.
    thread_local!(static JOURNAL: Journal = Journal::in_memory(BOOT, KEEPER, NOW_MS));
    let journal = JOURNAL.with(Clone::clone);
    journal.empty();
    {
        let state = journal.inner.shared.state();
        let (store, world) = (&state.store, state.world);
        let mut account: &[u8] = &[];
        let mut number = 0_i64;
        while let [table, length, rest @ ..] = bytes {
            let (body, rest) = rest.split_at(usize::from(*length).min(rest.len()));
            bytes = rest;
            let integer = body.iter().fold(0_i64, |sum, byte| (sum << 8) | i64::from(*byte));
            let column =
                |name: &str| store.execute(&format!("update starts set {name} = ?2 where number = ?1"), (number, body));
            // What the tables do not take is not there.
            let _ = match table % 9 {
                0 => {
                    number += 1;
                    let of = world + i64::from(*table / 9 % 2);
                    store.execute("insert into starts(number, world, start) values(?1, ?2, ?3)", (number, of, body))
                }
                1 => column("started"),
                2 => column("ended"),
                3 => column("read"),
                4 => store.execute("update starts set asked = ?2 where number = ?1", (number, integer)),
                5 => store.execute("insert into keys select coalesce(max(number), 0) + 1, ?1 from keys", (body,)),
                6 => {
                    account = body;
                    store.execute("insert into ledgers values(?1, ?2)", (body, i64::from(*table) - 100))
                }
                7 => store.execute("insert into completions values(?1, ?2, ?3)", (account, i64::from(*table), body)),
                _ => store.execute("insert or replace into meta values('first_sequence', ?1)", (integer,)),
            };
        }
    }
    let recovered = journal.reopened(BOOT, KEEPER, NOW_MS);
    (journal, recovered)
}

/// Opens a journal whose file is damaged by these edits (place, 2 bytes; what is turned over, 1 byte): the first byte says whether
/// that file is the database or its log. It is as it was, set aside, or refused, and what was opened once can be opened again.
///
/// # Panics
/// When it is otherwise.
pub(crate) fn of_damaged_files(bytes: &[u8], directory: &Path) {
    let [which, edits @ ..] = bytes else { return };
    let _ = fs::remove_dir_all(directory);
    fs::create_dir_all(directory).expect("a directory can be made");
    let whole = whole_files(directory);
    for (at, (name, file)) in ["journal.sqlite", "journal.sqlite-wal"].iter().zip(whole).enumerate() {
        let mut file = file.clone();
        if at == usize::from(which % 2) {
            for edit in edits.chunks_exact(3) {
                let place = usize::from(u16::from_be_bytes([edit[0], edit[1]])) % file.len().max(1);
                match edit[2] {
                    0 => file.truncate(place),
                    turned => file.iter_mut().skip(place).take(1).for_each(|byte| *byte ^= turned),
                }
            }
        }
        fs::write(directory.join(name), file).expect("it can be written");
    }
    let open = || Journal::open(directory, BOOT, KEEPER, NOW_MS);
    if let Ok((journal, _recovered)) = open() {
        journal.begin(&start());
        drop(journal);
        assert!(open().is_ok(), "it was opened once");
    }
}

/// A database and its log, with records in both.
fn whole_files(directory: &Path) -> &'static [Vec<u8>; 2] {
    static FILES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    FILES.get_or_init(|| {
        let beside = directory.join("whole");
        fs::create_dir_all(&beside).expect("a directory can be made");
        let (journal, _) = Journal::open(&beside, BOOT, KEEPER, NOW_MS).expect("a new one can be opened");
        journal.begin(&start());
        journal.inner.shared.state().store.restart_log().expect("it can be copied");
        let number = journal.begin(&start());
        let completed =
            Completed { sequence: 1, task: "bash-1".into(), status: StatusFact::Killed(None), ended_at_ms: NOW_MS };
        journal.completed(&start().account, &completed, 1, Some(number));
        let read = |name: &str| fs::read(beside.join(name)).expect("it is there");
        [read("journal.sqlite"), read("journal.sqlite-wal")]
    })
}

fn start() -> Start {
    Start {
        account: Account { tenant: "t".into(), owner: Some("a".into()) },
        key: "k".into(),
        kind: Kind::Task,
        digest: [1; 32],
        command: b"true".to_vec(),
        workdir: b"/".to_vec(),
        timeout_ms: 1.0,
        begun_at_ms: NOW_MS,
        handle: Some(1),
    }
}
