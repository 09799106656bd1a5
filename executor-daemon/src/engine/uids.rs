//! Which user of a tenant's range an owner's commands run as: one for each owner, and the same as long as anything of the owner is
//! alive or kept, also for the next process and the next daemon.
//!
//! A file for each range holds 32 bytes for each of its uids, in their order: the digest of the owner that has it, or zeros. Owners
//! may be secrets, so they are not written down themselves. A uid is given to another owner only when none is free and nothing of
//! its owner is known any more; then the one after that which was given out last is the first to be looked at.

use std::{
    collections::{BTreeMap, HashSet},
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use executor_proto::types::OwnerId;
use sha2::{Digest, Sha256};

/// The digest of an owner; zeros: of none.
type OwnerDigest = [u8; 32];

const NOBODY: OwnerDigest = [0; 32];

/// The users of one range.
#[derive(Debug)]
pub(super) struct Uids {
    file: File,
    first: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    owners: Vec<OwnerDigest>,
    /// Starts under way, of which nothing is known elsewhere yet, by index.
    starting: BTreeMap<usize, u32>,
    /// The index that was given out last.
    latest: usize,
}

/// The right to start a command as a user. Held until what was started is known elsewhere.
#[derive(Debug)]
pub(super) struct UidLease {
    uids: Arc<Uids>,
    index: usize,
}

impl UidLease {
    /// The user.
    pub(super) fn uid(&self) -> u32 {
        // An index below the number of uids of the range, which is one of 32 bits.
        self.uids.first + u32::try_from(self.index).unwrap_or(0)
    }
}

impl Drop for UidLease {
    fn drop(&mut self) {
        let mut state = self.uids.lock();
        if let Some(starting) = state.starting.get_mut(&self.index) {
            *starting -= 1;
            if *starting == 0 {
                state.starting.remove(&self.index);
            }
        }
    }
}

fn digest(owner: Option<&OwnerId>) -> OwnerDigest {
    let mut hash = Sha256::new();
    hash.update([u8::from(owner.is_some())]);
    hash.update(owner.map_or("", |owner| owner.0.as_str()));
    hash.finalize().into()
}

impl Uids {
    /// Opens the file of a range, or makes it.
    pub(super) fn open(path: &Path, first: u32, count: u32) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let mut owners = Vec::with_capacity(count as usize);
        for index in 0..u64::from(count) {
            let mut owner = NOBODY;
            match file.read_exact_at(&mut owner, index * NOBODY.len() as u64) {
                Ok(()) => owners.push(owner),
                // Cut short, or not written yet.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error),
            }
        }
        owners.resize(count as usize, NOBODY);
        Ok(Self { file, first, state: Mutex::new(State { owners, starting: BTreeMap::new(), latest: 0 }) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The user of an owner: the one that it has, else a free one, else one of an owner that is not among those of whom something
    /// is known, which is asked for only then. `None`: there is none. It is written down when this returns.
    pub(super) fn take(
        self: &Arc<Self>,
        owner: Option<&OwnerId>,
        known: impl FnOnce() -> HashSet<Option<OwnerId>>,
    ) -> io::Result<Option<UidLease>> {
        let wanted = digest(owner);
        let mut state = self.lock();
        let index = match state.owners.iter().position(|owner| *owner == wanted) {
            Some(index) => index,
            None => {
                let Some(index) = state.free(known) else { return Ok(None) };
                self.file.write_all_at(&wanted, index as u64 * NOBODY.len() as u64)?;
                state.owners[index] = wanted;
                state.latest = index;
                index
            }
        };
        *state.starting.entry(index).or_default() += 1;
        Ok(Some(UidLease { uids: Arc::clone(self), index }))
    }
}

impl State {
    fn free(&self, known: impl FnOnce() -> HashSet<Option<OwnerId>>) -> Option<usize> {
        if let Some(unused) = self.owners.iter().position(|owner| *owner == NOBODY) {
            return Some(unused);
        }
        let known: HashSet<OwnerDigest> = known().iter().map(|owner| digest(owner.as_ref())).collect();
        let count = self.owners.len();
        (1..=count)
            .map(|step| (self.latest + step) % count)
            .find(|index| !self.starting.contains_key(index) && !known.contains(&self.owners[*index]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(name: &str) -> Option<OwnerId> {
        Some(OwnerId(name.to_owned()))
    }

    #[test]
    fn an_owner_keeps_its_user_while_something_of_it_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("uids");
        let open = || Arc::new(Uids::open(&path, 70_000, 3).unwrap());
        let take = |uids: &Arc<Uids>, owner: &Option<OwnerId>, known: &[Option<OwnerId>]| {
            let known = known.iter().cloned().collect();
            uids.take(owner.as_ref(), || known).unwrap().map(|lease| lease.uid())
        };
        let uids = open();
        let (a, b, none, empty) = (owner("a"), owner("b"), None, owner(""));
        assert_eq!(take(&uids, &a, &[]), Some(70_000));
        assert_eq!(take(&uids, &none, &[]), Some(70_001));
        assert_eq!(take(&uids, &a, &[]), Some(70_000));
        // The next process gives the same.
        let uids = open();
        assert_eq!(take(&uids, &none, &[]), Some(70_001));
        assert_eq!(take(&uids, &empty, &[]), Some(70_002), "an owner without a name is one");
        assert_eq!(take(&uids, &b, &[a.clone(), none.clone(), empty.clone()]), None);
        assert_eq!(take(&uids, &b, &[a.clone(), empty.clone()]), Some(70_001));
        assert_eq!(take(&uids, &none, &[b.clone(), empty.clone()]), Some(70_000));
        assert_eq!(take(&open(), &b, &[]), Some(70_001));
    }

    #[test]
    fn a_start_under_way_keeps_the_user_of_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let uids = Arc::new(Uids::open(&dir.path().join("uids"), 9, 1).unwrap());
        let first = uids.take(owner("a").as_ref(), HashSet::new).unwrap().expect("it is free");
        let second = uids.take(owner("a").as_ref(), HashSet::new).unwrap().expect("its own");
        drop(first);
        assert!(uids.take(owner("b").as_ref(), HashSet::new).unwrap().is_none());
        drop(second);
        assert_eq!(uids.take(owner("b").as_ref(), HashSet::new).unwrap().expect("nobody has it").uid(), 9);
    }
}
