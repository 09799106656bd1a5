//! What outlives a server: the journal and the kept output on the disk, the keeper with the commands, and the clock.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use executor_proto::types::{Exit, StartKey, TaskId};

use super::{Step, model::Seen, server::pick};
use crate::{
    engine::{reads::Both, registry::Kind},
    ids::{Caller, TenantId},
    journal::{Journal, KeeperInstance, Recovered},
    output,
};

/// The tail of each stream, in bytes: small, so that it overflows.
pub(super) const TAIL_BYTES: u64 = 12;

/// Everything but the server.
#[derive(Debug)]
pub(super) struct World {
    pub(super) now_ms: u64,
    pub(super) journal: Journal,
    /// All that were ever started.
    pub(super) commands: BTreeMap<u64, Command>,
    /// Kept output of finished tasks.
    pub(super) kept: HashMap<(TenantId, TaskId), Both<(u64, Bytes)>>,
    pub(super) seen: Seen,
    counters: HashMap<(TenantId, Kind), u64>,
    boot: u64,
    keeper: u64,
}

/// A command, as the kernel knows it.
#[derive(Debug)]
pub(super) struct Command {
    pub(super) caller: Caller,
    pub(super) key: String,
    pub(super) kind: Kind,
    pub(super) written: Both<Vec<u8>>,
    /// How its shell ended.
    pub(super) exit: Option<Exit>,
    /// Something of it lives, after its shell has ended.
    pub(super) leftover: bool,
    /// The keeper has it.
    pub(super) held: bool,
    /// Somebody asked for its end while it ran.
    pub(super) asked: bool,
    /// Its keeper died before it was released.
    pub(super) lost: bool,
    /// The executor was stopped while it ran.
    pub(super) stopped: bool,
    pub(super) name: Option<TaskId>,
    /// It died with its keeper before the journal had its name.
    pub(super) unnamed: bool,
}

/// Handles of one keeper are below this.
const HANDLES: u64 = 1_000;

/// What commands write: whole characters and parts of some, and bytes that are none.
const PIECES: [&[u8]; 9] = [
    b"a",
    "é".as_bytes(),
    "😀".as_bytes(),
    b"\xe2",
    b"\x89\xa4",
    b"\xf0\x9f",
    b"\x98\x80",
    b"\xff",
    b"0123456789abcdef",
];

impl Command {
    pub(super) fn new(caller: &Caller, key: &StartKey, kind: Kind) -> Self {
        Self {
            caller: caller.clone(),
            key: key.0.clone(),
            kind,
            written: Both::default(),
            exit: None,
            leftover: false,
            held: true,
            asked: false,
            lost: false,
            stopped: false,
            name: None,
            unnamed: false,
        }
    }

    pub(super) fn alive(&self) -> bool {
        self.exit.is_none() || self.leftover
    }

    /// SIGKILL for all of it.
    pub(super) fn die(&mut self) {
        self.exit.get_or_insert(Exit::Signal(9));
        self.leftover = false;
    }
}

/// The end of a stream from an offset on, as far as it is kept.
pub(super) fn window(written: &[u8], from: u64) -> (u64, Bytes) {
    let kept = output::kept_bytes(TAIL_BYTES);
    let start = (written.len() as u64).saturating_sub(kept).max(from).min(written.len() as u64);
    (start, Bytes::copy_from_slice(&written[usize::try_from(start).unwrap()..]))
}

impl World {
    pub(super) fn new() -> Self {
        Self::over(Journal::in_memory("boot 0", KeeperInstance([0; 16]), 0))
    }

    fn over(journal: Journal) -> Self {
        Self {
            now_ms: 1_000_000,
            journal,
            commands: BTreeMap::new(),
            kept: HashMap::new(),
            seen: Seen::default(),
            counters: HashMap::new(),
            boot: 0,
            keeper: 0,
        }
    }

    /// Another world; the journal's database is used again, since making one takes longer than a schedule.
    pub(super) fn begin_anew(&mut self) {
        self.journal.empty();
        *self = Self::over(self.journal.clone());
    }

    /// What a new server finds in the journal.
    pub(super) fn recovered(&self) -> Recovered {
        let mut keeper = [0; 16];
        keeper[..8].copy_from_slice(&self.keeper.to_le_bytes());
        self.journal.reopened(&format!("boot {}", self.boot), KeeperInstance(keeper), self.now_ms)
    }

    /// The next id. The counters are files.
    pub(super) fn next_id(&mut self, tenant: &TenantId, kind: Kind) -> TaskId {
        let counter = self.counters.entry((tenant.clone(), kind)).or_default();
        *counter += 1;
        TaskId(format!("{}-{counter}", super::super::prefix(kind)))
    }

    /// The keeper's name for the next command.
    pub(super) fn next_handle(&self) -> u64 {
        let last = self.commands.keys().next_back().filter(|uid| **uid / HANDLES == self.keeper);
        last.map_or(0, |uid| Self::handle(*uid) + 1)
    }

    /// What no other command has, also under another keeper, which begins to count anew.
    pub(super) fn uid(&self, handle: u64) -> u64 {
        self.keeper * HANDLES + handle
    }

    pub(super) fn handle(uid: u64) -> u64 {
        uid % HANDLES
    }

    pub(super) fn spawn(&mut self, handle: u64, command: Command) {
        let before = self.commands.insert(self.uid(handle), command);
        assert!(before.is_none(), "a handle is used twice");
    }

    /// The command that was given this name.
    pub(super) fn named(&self, tenant: &TenantId, id: &TaskId) -> u64 {
        let named = |command: &Command| command.caller.tenant == *tenant && command.name.as_ref() == Some(id);
        *self.commands.iter().find(|(_, command)| named(command)).expect("only what ran has a name").0
    }

    /// The keeper hands over what it holds, in the order in which it was started.
    pub(super) fn carried(&self) -> Vec<u64> {
        self.commands.iter().filter(|(_, command)| command.held).map(|(uid, _)| *uid).collect()
    }

    /// Something happens to the commands that are alive.
    pub(super) fn happens(&mut self, step: &Step) {
        let (Step::Write { at, .. } | Step::Exit { at, .. } | Step::Empty { at }) = step else { return };
        let mut alive: Vec<_> = self.commands.values_mut().filter(|command| command.alive()).collect();
        let Some(at) = pick(*at, alive.len()) else { return };
        let command = &mut *alive[at];
        match step {
            Step::Write { stream, piece, .. } => {
                let piece = PIECES[usize::from(*piece) % PIECES.len()];
                let Both { stdout, stderr } = &mut command.written;
                if *stream { stdout } else { stderr }.extend_from_slice(piece);
            }
            Step::Exit { how, leftover, .. } if command.exit.is_none() => {
                let exit = if how % 3 == 0 { Exit::Signal(1 + how % 15) } else { Exit::Code(how % 4) };
                (command.exit, command.leftover) = (Some(exit), *leftover);
            }
            _ if command.exit.is_some() => command.leftover = false,
            _ => {}
        }
    }

    /// Nothing outlives a keeper.
    pub(super) fn keeper_dies(&mut self, host: bool) {
        self.keeper += 1;
        self.boot += u64::from(host);
        for command in self.commands.values_mut().filter(|command| command.held) {
            command.die();
            (command.held, command.lost) = (false, true);
            command.unnamed = command.name.is_none();
        }
    }
}
