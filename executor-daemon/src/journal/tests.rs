//! What a journal gives back: after a kill at any moment, after a cut at any byte, after compaction, of other versions.

use std::{collections::BTreeMap, path::PathBuf};

use bytes::Bytes;
use proptest::prelude::*;

use super::{record::StatusFact, store::VERSION, *};
use crate::output::KeptSpill;

const BOOT: &str = "boot-1";
const KEEPER: KeeperInstance = KeeperInstance([7; 16]);
const NOW: u64 = 1_700_000_000_000;

fn open(directory: &Path) -> (Journal, Recovered) {
    Journal::open(directory, BOOT, KEEPER, NOW).expect("it opens")
}

/// The files as a kill would leave them now.
fn after_kill(directory: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for name in ["journal.sqlite", "journal.sqlite-wal"] {
        if directory.join(name).exists() {
            fs::copy(directory.join(name), copy.path().join(name)).unwrap();
        }
    }
    copy
}

fn account(number: usize) -> Account {
    Account { tenant: "t".into(), owner: (number > 0).then(|| format!("owner {number}")) }
}

fn start_of(number: i64) -> Start {
    Start {
        account: account(usize::try_from(number % 3).unwrap()),
        key: format!("key {number}"),
        kind: if number % 2 == 0 { Kind::Run } else { Kind::Task },
        digest: [u8::try_from(number % 251).unwrap(); 32],
        // Some need more than one page.
        command: vec![b'c'; usize::try_from(number * 997 % 9_000).unwrap()],
        workdir: b"/w".to_vec(),
        timeout_ms: 120_000.0,
        begun_at_ms: NOW,
        handle: Some(1),
    }
}

fn started_of(number: i64) -> Started {
    let pid = u32::try_from(number).unwrap();
    Started { id: format!("bash-{number}"), handle: 9, pid, pid_started: Some(5), at_ms: NOW }
}

fn ended() -> Ended {
    Ended { exit: ExitFact::Code(3), ended_for: Some(EndCause::Kill), at_ms: NOW, to_be_told: true }
}

fn read_of(number: i64) -> Read {
    let range = ReadRange { from: 1, shown_from: 2, to: number.unsigned_abs() + 2 };
    Read { read_id: format!("read {number}"), status: StatusFact::Running, stdout: range, stderr: range }
}

fn completed_of(sequence: u64) -> Completed {
    Completed { sequence, task: format!("bash-{sequence}"), status: StatusFact::Killed(Some(9)), ended_at_ms: NOW }
}

/// What a journal should hold.
#[derive(Debug, Clone, PartialEq, Default)]
struct Model {
    starts: Vec<RecordedStart>,
    keys: Vec<UsedKey>,
    ledgers: BTreeMap<Account, Ledger>,
}

impl Model {
    fn of(recovered: Recovered) -> Self {
        let ledgers = recovered.ledgers.into_iter().map(|ledger| (ledger.account.clone(), ledger)).collect();
        Self { starts: recovered.starts, keys: recovered.keys, ledgers }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Begin,
    Started(usize),
    Failed(usize),
    Asked(usize, EndCause),
    Ended(usize),
    Read(usize),
    Forgotten(usize),
    Completed(usize, u64),
    Acknowledged(usize, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let any = 0_usize..8;
    let cause = prop_oneof![Just(EndCause::Kill), Just(EndCause::Timeout), Just(EndCause::Leftovers)];
    prop_oneof![
        4 => Just(Step::Begin),
        3 => any.clone().prop_map(Step::Started),
        1 => any.clone().prop_map(Step::Failed),
        1 => (any.clone(), cause).prop_map(|(at, cause)| Step::Asked(at, cause)),
        2 => any.clone().prop_map(Step::Ended),
        1 => any.clone().prop_map(Step::Read),
        2 => any.clone().prop_map(Step::Forgotten),
        2 => (any.clone(), 1_u64..4).prop_map(|(at, cap)| Step::Completed(at, cap)),
        1 => (any, 0_u64..6).prop_map(|(at, up_to)| Step::Acknowledged(at, up_to)),
    ]
}

/// Does a step to the journal and to the model.
fn apply(journal: &Journal, model: &mut Model, step: &Step) {
    let place = |at: usize, model: &Model| (!model.starts.is_empty()).then(|| at % model.starts.len());
    match *step {
        Step::Begin => {
            let guess = model.starts.last().map_or(1, |last| last.number.0 + 1);
            let number = journal.begin(&start_of(guess));
            model.starts.push(RecordedStart {
                number,
                world: World::ThisKeeper,
                start: start_of(guess),
                started: None,
                asked_to_end: Vec::new(),
                ended: None,
                told: false,
                reads: Vec::new(),
            });
        }
        Step::Completed(at, cap) => {
            let account = account(at % 3);
            let ledger = model.ledgers.entry(account.clone()).or_insert_with(|| Ledger {
                account: account.clone(),
                latest: 0,
                waiting: Vec::new(),
            });
            ledger.latest += 1;
            ledger.waiting.push(completed_of(ledger.latest));
            let first_kept = (ledger.latest + 1).saturating_sub(cap);
            ledger.waiting.retain(|completed| completed.sequence >= first_kept);
            let start = model.starts.get_mut(at);
            let number = start.as_ref().map(|start| start.number);
            if let Some(start) = start {
                start.told = true;
            }
            journal.completed(&account, &completed_of(ledger.latest), first_kept, number);
        }
        Step::Acknowledged(at, up_to) => {
            let account = account(at % 3);
            journal.acknowledged(&account, up_to);
            if let Some(ledger) = model.ledgers.get_mut(&account) {
                ledger.waiting.retain(|completed| completed.sequence > up_to);
            }
        }
        Step::Failed(at) | Step::Forgotten(at) => {
            let Some(place) = place(at, model) else { return };
            let start = model.starts.remove(place);
            if matches!(step, Step::Failed(_)) {
                return journal.failed(start.number);
            }
            journal.forgotten(start.number, NOW);
            model.keys.push(UsedKey {
                account: start.start.account,
                key: start.start.key,
                kind: start.start.kind,
                digest: start.start.digest,
                id: start.started.map(|started| started.id),
                end_known: start.ended.is_some(),
                forgotten_at_ms: NOW,
            });
        }
        Step::Started(at) | Step::Asked(at, _) | Step::Ended(at) | Step::Read(at) => {
            if let Some(place) = place(at, model) {
                change(journal, &mut model.starts[place], step);
            }
        }
    }
}

/// Does a step to one start.
fn change(journal: &Journal, start: &mut RecordedStart, step: &Step) {
    let number = start.number;
    match *step {
        Step::Started(_) => {
            journal.started(number, &started_of(number.0));
            start.started = Some(started_of(number.0));
        }
        Step::Asked(_, cause) => {
            journal.asked_to_end(number, cause);
            if start.asked_to_end.len() < 7 {
                start.asked_to_end.push(cause);
            }
        }
        Step::Ended(_) => {
            journal.ended(number, &ended());
            start.ended = Some(ended());
        }
        _ => {
            let count = i64::try_from(start.reads.len()).unwrap();
            start.reads.insert(0, read_of(number.0 + count));
            start.reads.truncate(MAX_READS);
            journal.read(number, &start.reads);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// After every call a kill loses nothing; and however the log is cut or spoilt afterwards, what comes back is what was
    /// there after some call.
    #[test]
    fn what_is_recovered_is_a_prefix_of_what_was_written(
        steps in prop::collection::vec(step(), 1..40),
        damage in prop::collection::vec((any::<prop::sample::Index>(), prop::option::of(1_u8..)), 6),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let (journal, empty) = open(directory.path());
        prop_assert_eq!(&empty, &Recovered::default());
        let mut states = vec![Model::default()];
        for (at, step) in steps.iter().enumerate() {
            let mut model = states[at].clone();
            apply(&journal, &mut model, step);
            states.push(model);
            if at % 7 == 0 || at + 1 == steps.len() {
                let killed = after_kill(directory.path());
                prop_assert_eq!(&Model::of(open(killed.path()).1), &states[at + 1]);
            }
        }
        for (at, flip) in damage {
            let killed = after_kill(directory.path());
            let path = killed.path().join("journal.sqlite-wal");
            let mut log = fs::read(&path).unwrap();
            let at = at.index(log.len());
            match flip {
                Some(flip) => log[at] ^= flip,
                None => log.truncate(at),
            }
            fs::write(&path, log).unwrap();
            let (_journal, recovered) = open(killed.path());
            prop_assert!(recovered.set_aside.is_none());
            prop_assert!(states.contains(&Model::of(recovered)), "cut or spoilt at {at}");
        }
    }

    /// A database that is cut or spoilt is known as damaged, or reads as it was; it never panics and is never taken for empty.
    #[test]
    fn a_damaged_database_is_set_aside_or_whole(
        at in any::<prop::sample::Index>(),
        flip in prop::option::of(1_u8..),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let mut model = Model::default();
        let (journal, _) = open(directory.path());
        for step in [Step::Begin, Step::Started(0), Step::Begin, Step::Completed(1, 3)] {
            apply(&journal, &mut model, &step);
        }
        journal.inner.shared.state().store.restart_log().unwrap();
        let killed = after_kill(directory.path());
        let path = killed.path().join("journal.sqlite");
        let mut file = fs::read(&path).unwrap();
        let at = at.index(file.len());
        match flip {
            Some(flip) => file[at] ^= flip,
            None => file.truncate(at),
        }
        fs::write(&path, file).unwrap();
        if let Ok((journal, recovered)) = Journal::open(killed.path(), BOOT, KEEPER, NOW) {
            if let Some(aside) = &recovered.set_aside {
                prop_assert!(aside.exists());
                prop_assert_eq!(recovered.first_sequence, NOW);
                journal.begin(&start_of(1));
                drop(journal);
                let again = open(killed.path()).1;
                prop_assert_eq!((again.starts.len(), again.first_sequence), (1, NOW));
            } else {
                // What was hit is not in use, or one record that is told to be unreadable.
                prop_assert!(flip.is_some());
                prop_assert!(recovered.starts.len() + recovered.ledgers.len() >= 2);
            }
        }
    }
}

#[test]
fn a_copied_and_restarted_log_keeps_everything() {
    let directory = tempfile::tempdir().unwrap();
    let (journal, _) = open(directory.path());
    let mut model = Model::default();
    for round in 0..60 {
        for step in [Step::Begin, Step::Started(round), Step::Begin, Step::Ended(round), Step::Completed(round, 3)] {
            apply(&journal, &mut model, &step);
        }
        apply(&journal, &mut model, &Step::Forgotten(round));
        match round % 3 {
            0 => journal.inner.shared.state().store.copy_log().unwrap(),
            1 => journal.inner.shared.state().store.restart_log().unwrap(),
            _ => {}
        }
    }
    assert_eq!(Model::of(open(after_kill(directory.path()).path()).1), model);
    // Also where it was closed in order.
    drop(journal);
    assert_eq!(Model::of(open(directory.path()).1), model);
}

#[test]
fn short_lives_leave_a_bounded_log() {
    let mut directory = tempfile::tempdir().unwrap();
    for life in 0..60 {
        let (journal, _) = open(directory.path());
        // Fewer records than those after which the log is copied.
        for round in 0..20 {
            let number = journal.begin(&start_of(life * 1_000 + round));
            journal.started(number, &started_of(round));
            journal.forgotten(number, 1);
        }
        let log = journal.inner.shared.state().store.log_bytes();
        assert!(log < MAX_LOG_BYTES / 2, "{log} bytes in life {life}");
        directory = after_kill(directory.path());
    }
}

#[test]
fn a_hundred_thousand_records_leave_a_bounded_file() {
    let directory = tempfile::tempdir().unwrap();
    let (journal, _) = open(directory.path());
    let mut sequence = 0;
    for round in 0..20_000 {
        let number = journal.begin(&Start { command: vec![b'c'; 200], ..start_of(round) });
        journal.started(number, &started_of(round));
        journal.ended(number, &ended());
        sequence += 1;
        journal.completed(&account(1), &completed_of(sequence), sequence.saturating_sub(9), Some(number));
        journal.forgotten(number, NOW);
    }
    assert_eq!(journal.inner.shared.failures.load(Ordering::Relaxed), 0);
    let size = |name: &str| fs::metadata(directory.path().join(name)).map_or(0, |metadata| metadata.len());
    // The keys that three owners may have, of about 100 bytes each, and the log's own bound with what came meanwhile.
    let (database, log) = (size("journal.sqlite"), size("journal.sqlite-wal"));
    assert!(database < 4 * 1024 * 1024 && log < 2 * MAX_LOG_BYTES, "{database} {log}");
    drop(journal);
    let recovered = open(directory.path()).1;
    assert_eq!((recovered.starts.len(), recovered.keys.len()), (0, 3 * keys::MAX_PER_OWNER));
    assert_eq!((recovered.ledgers[0].latest, recovered.ledgers[0].waiting.len()), (20_000, 10));
}

#[test]
fn other_keepers_and_boots_are_told_apart_and_numbers_go_on_behind_a_loss_of_power() {
    let directory = tempfile::tempdir().unwrap();
    let (journal, _) = open(directory.path());
    let number = journal.begin(&start_of(1));
    journal.completed(&account(1), &completed_of(1), 1, None);
    drop(journal);
    let reopened = |boot: &str, keeper| Journal::open(directory.path(), boot, keeper, NOW).unwrap();
    let world = |recovered: &Recovered| recovered.starts[0].world;
    let (journal, recovered) = reopened(BOOT, KEEPER);
    assert_eq!((world(&recovered), recovered.first_sequence), (World::ThisKeeper, 0));
    drop(journal);
    let (journal, recovered) = reopened(BOOT, KeeperInstance([8; 16]));
    assert_eq!((world(&recovered), recovered.ledgers[0].latest), (World::SamePids, 1));
    assert!(journal.begin(&start_of(2)) > number);
    drop(journal);
    let (journal, recovered) = reopened("boot-2", KEEPER);
    assert_eq!((world(&recovered), recovered.starts.len()), (World::OtherBoot, 2));
    assert_eq!((recovered.first_sequence, recovered.ledgers[0].latest), (SEQUENCES_PER_BOOT, 1 + SEQUENCES_PER_BOOT));
    assert_eq!(recovered.ledgers[0].waiting, [completed_of(1)]);
    drop(journal);
    assert_eq!(reopened("boot-2", KEEPER).1.first_sequence, SEQUENCES_PER_BOOT);
}

#[test]
fn another_version_and_another_program_are_refused_and_left_as_they_are() {
    for (pragma, told) in [
        (format!("pragma user_version = {}", VERSION + 1), "of version 2, this program knows version 1"),
        ("pragma application_id = 1".to_owned(), "not a journal of this program"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let (journal, _) = open(directory.path());
        // No thread of the other one is about to copy its log there.
        let directory = after_kill(directory.path());
        drop(journal);
        let path = directory.path().join("journal.sqlite");
        rusqlite::Connection::open(&path).unwrap().execute_batch(&pragma).unwrap();
        let before = fs::read(&path).unwrap();
        let error = Journal::open(directory.path(), BOOT, KEEPER, NOW).map(|_| ()).unwrap_err().to_string();
        assert!(error.starts_with("journal.sqlite: ") && error.ends_with(told), "{error}");
        assert_eq!(fs::read(&path).unwrap(), before);
    }
}

#[test]
fn only_so_many_damaged_journals_are_kept() {
    let directory = tempfile::tempdir().unwrap();
    for round in 0..6 {
        fs::write(directory.path().join("journal.sqlite"), vec![b'x'; 5_000 * (round % 2)]).unwrap();
        let recovered = Journal::open(directory.path(), BOOT, KEEPER, NOW + round as u64).unwrap().1;
        assert!(recovered.set_aside.is_some_and(|path| path.exists()));
    }
    let names = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path());
    let kept = names
        .filter(|name| {
            name.extension().is_some_and(|after| {
                let after = after.to_string_lossy();
                after.starts_with("damaged-") && after.len() == "damaged-".len() + 16
            })
        })
        .count();
    assert_eq!(kept, 3);
}

#[test]
fn nobody_else_can_read_it() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let (journal, _) = open(directory.path());
    let tail = KeptStream { start: 5, bytes: Bytes::from_static(b"end"), missing: 0, spill: None };
    journal.keep_tail("t", "bash-1", StreamName::Stdout, &tail);
    let mode = |name: &str| fs::metadata(directory.path().join(name)).unwrap().permissions().mode() & 0o777;
    for name in ["journal.sqlite", "journal.sqlite-wal", "streams/74.bash-1.stdout"] {
        assert_eq!(mode(name), 0o600, "{name}");
    }
    assert_eq!(mode("streams"), 0o700);
}

#[test]
fn kept_tails_go_with_their_task_and_damaged_ones_are_not_shown() {
    let directory = tempfile::tempdir().unwrap();
    let (journal, _) = open(directory.path());
    let spill = KeptSpill { path: PathBuf::from("/spill/x"), identity: (1, 2), held: 3 };
    let tail = KeptStream { start: 5, bytes: Bytes::from_static(b"the end"), missing: 7, spill: Some(spill) };
    let number = journal.begin(&start_of(1));
    journal.started(number, &Started { id: "bash-1".into(), ..started_of(1) });
    for id in ["bash-1", "bash-2"] {
        journal.keep_tail("t", id, StreamName::Stdout, &tail);
    }
    drop(journal);
    // The other's task is not in the journal.
    let (journal, _) = open(directory.path());
    assert_eq!(journal.tail("t", "bash-1", StreamName::Stdout).as_ref(), Some(&tail));
    assert_eq!(journal.tail("t", "bash-1", StreamName::Stderr), None);
    assert_eq!(journal.tail("t", "bash-2", StreamName::Stdout), None);
    let path = directory.path().join("streams/74.bash-1.stdout");
    let file = fs::read(&path).unwrap();
    for at in 0..file.len() {
        assert_eq!(tails::parse(Bytes::copy_from_slice(&file[..at])), None);
        let mut spoilt = file.clone();
        spoilt[at] ^= 0x40;
        assert_eq!(tails::parse(Bytes::from(spoilt)), None, "{at}");
    }
    journal.forgotten(number, NOW);
    assert!(!path.exists());
}

#[test]
fn the_oldest_tails_go_above_the_cap() {
    let directory = tempfile::tempdir().unwrap();
    let tails = Tails::with_cap(directory.path(), 1_000).unwrap();
    let tail = KeptStream { start: 0, bytes: Bytes::from(vec![b'x'; 400]), missing: 0, spill: None };
    for id in ["bash-1", "bash-2", "bash-3"] {
        tails.keep("t", id, StreamName::Stderr, &tail).unwrap();
    }
    let there = |id| tails.read("t", id, StreamName::Stderr).is_some();
    assert_eq!([there("bash-1"), there("bash-2"), there("bash-3")], [false, true, true]);
}

#[test]
fn records_keep_their_format() {
    let hex = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let start = Start { command: b"true".to_vec(), ..start_of(1) };
    let digest = "01".repeat(32);
    let expected =
        format!("017401076f776e65722031056b6579203101{digest}0474727565022f7700000000004cfd4080d095ffbc310101");
    assert_eq!(hex(encode(&start)), expected);
    assert_eq!(hex(encode(&started_of(2))), "06626173682d320902010580d095ffbc31");
    assert_eq!(hex(encode(&ended())), "0003010280d095ffbc3101");
    assert_eq!(hex(encode(&completed_of(3))), "0306626173682d3302010980d095ffbc31");
    assert_eq!(hex(encode(&read_of(4))), "0672656164203400010206010206");
    let key = UsedKey {
        account: account(0),
        key: "k".into(),
        kind: Kind::Run,
        digest: [2; 32],
        id: Some("run-1".into()),
        end_known: true,
        forgotten_at_ms: NOW,
    };
    assert_eq!(hex(encode(&key)), format!("017400016b00{}010572756e2d310180d095ffbc31", "02".repeat(32)));
}
