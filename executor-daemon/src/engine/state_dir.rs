//! What outlives the engine in the state directory: the name of this world of task ids, and the numbers that were used.
//!
//! A counter file holds two slots of 16 bytes, each a number (big-endian) and its complement, written in turn: a write that is
//! cut short can spoil only the older one. The number is written before anybody is told the id that is made from it.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use super::uids::Uids;
use crate::ids::TenantId;

const INSTANCE_ID: &str = "instance-id";

/// Bytes of one slot of a counter file: the number and its complement.
const SLOT_BYTES: usize = 16;

/// The state directory as the engine uses it.
#[derive(Debug, Clone)]
pub(super) struct StateDir {
    path: PathBuf,
}

impl StateDir {
    /// Makes the directory (0700) where it is missing.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        Ok(Self { path: path.to_owned() })
    }

    /// The random name of this directory's world of ids, made at first use.
    pub(super) fn instance_id(&self) -> io::Result<String> {
        let path = self.path.join(INSTANCE_ID);
        match fs::read_to_string(&path) {
            Ok(id) if id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()) => return Ok(id),
            Ok(_) => tracing::warn!(path = %path.display(), "the instance id is damaged, a new one is made"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let id = random_hex()?;
        // Written beside and renamed, so that it is never there in part.
        let beside = self.path.join(format!("{INSTANCE_ID}.{id}"));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
        file.write_all(id.as_bytes())?;
        fs::rename(&beside, &path)?;
        Ok(id)
    }

    /// The counter of one kind of id of one tenant.
    pub(super) fn counter(&self, tenant: &TenantId, kind: &str) -> io::Result<Counter> {
        Counter::open(&self.path.join(counter_name(tenant, kind)))
    }

    /// The users of a tenant's range.
    pub(super) fn uids(&self, tenant: &TenantId, first: u32, count: u32) -> io::Result<Uids> {
        Uids::open(&self.path.join(format!("uids-{}-{first}", file_name(tenant))), first, count)
    }

    /// Whether the instance id of a directory, and the counters of these kinds of ids of a tenant, can be used as far as they
    /// are there. Another process may be using them; nothing is changed.
    pub(super) fn probe(path: &Path, tenant: &TenantId, kinds: &[&str]) -> io::Result<()> {
        let probe = |name: &str, probed: io::Result<()>| match probed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(io::Error::new(error.kind(), format!("{name}: {error}")))
            }
            Ok(()) | Err(_) => Ok(()),
        };
        probe(INSTANCE_ID, File::open(path.join(INSTANCE_ID)).and_then(|mut file| file.read(&mut [0]).map(drop)))?;
        for kind in kinds {
            let name = counter_name(tenant, kind);
            let file = OpenOptions::new().read(true).write(true).open(path.join(&name));
            probe(&name, file.and_then(|file| latest_and_filled(&file).map(drop)))?;
        }
        Ok(())
    }
}

/// The file of a counter.
fn counter_name(tenant: &TenantId, kind: &str) -> String {
    format!("{kind}-counter-{}", file_name(tenant))
}

/// A tenant's name is configuration and may hold anything; in hexadecimal it is a part of file names.
fn file_name(tenant: &TenantId) -> String {
    tenant.0.bytes().map(|byte| format!("{byte:02x}")).collect()
}

/// Random letters that nobody can guess.
fn random_hex() -> io::Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Hands out 1, 2, 3 … and never a number twice, also by the next process.
#[derive(Debug)]
pub(super) struct Counter {
    file: File,
    latest: Mutex<u64>,
}

impl Counter {
    fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let (latest, filled) = latest_and_filled(&file)?;
        if filled < 2 * SLOT_BYTES {
            // Takes its place on the disk now: on one that is full later, written places can still be written.
            let unused = if latest % 2 == 1 { SLOT_BYTES } else { 0 };
            file.write_all_at(&encode(0), unused as u64)?;
            file.write_all_at(&encode(latest), (SLOT_BYTES - unused) as u64)?;
        }
        Ok(Self { file, latest: Mutex::new(latest) })
    }

    /// The next number. When it could not be written down it was not used.
    pub(super) fn next(&self) -> io::Result<u64> {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let next = *latest + 1;
        let slot = if next % 2 == 1 { 0 } else { SLOT_BYTES as u64 };
        self.file.write_all_at(&encode(next), slot)?;
        *latest = next;
        Ok(next)
    }
}

/// The number that a counter file gave out last, and how many bytes of its slots are there.
fn latest_and_filled(file: &File) -> io::Result<(u64, usize)> {
    let mut slots = [0; 2 * SLOT_BYTES];
    let mut filled = 0;
    while filled < slots.len() {
        match file.read_at(&mut slots[filled..], filled as u64)? {
            0 => break,
            bytes => filled += bytes,
        }
    }
    let latest = slots[..filled].chunks(SLOT_BYTES).filter_map(decode).max();
    // A first write that was cut short was never told to anybody; anything longer that does not read back is damage.
    if latest.is_none() && filled > SLOT_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the counter is damaged"));
    }
    Ok((latest.unwrap_or(0), filled))
}

fn encode(number: u64) -> [u8; SLOT_BYTES] {
    let mut slot = [0; SLOT_BYTES];
    slot[..8].copy_from_slice(&number.to_be_bytes());
    slot[8..].copy_from_slice(&(!number).to_be_bytes());
    slot
}

fn decode(slot: &[u8]) -> Option<u64> {
    let (number, check) = slot.split_at_checked(8)?;
    let number = u64::from_be_bytes(number.try_into().ok()?);
    let check = u64::from_be_bytes(check.try_into().ok()?);
    (check == !number).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(directory: &tempfile::TempDir) -> Counter {
        StateDir::open(directory.path()).unwrap().counter(&TenantId::default_tenant(), "bash").unwrap()
    }

    #[test]
    fn numbers_go_on_where_the_process_before_left_off() {
        let directory = tempfile::tempdir().unwrap();
        let counter = open(&directory);
        assert_eq!([counter.next().unwrap(), counter.next().unwrap(), counter.next().unwrap()], [1, 2, 3]);
        assert_eq!(open(&directory).next().unwrap(), 4);
        assert_eq!(open(&directory).next().unwrap(), 5);
    }

    #[test]
    fn a_counter_has_its_place_before_its_first_number() {
        let directory = tempfile::tempdir().unwrap();
        let counter = open(&directory);
        assert_eq!(counter.file.metadata().unwrap().len(), 2 * SLOT_BYTES as u64);
        assert_eq!(counter.next().unwrap(), 1);
        counter.file.set_len(SLOT_BYTES as u64).unwrap();
        assert_eq!(open(&directory).next().unwrap(), 2);
        assert_eq!(counter.file.metadata().unwrap().len(), 2 * SLOT_BYTES as u64);
    }

    #[test]
    fn a_write_that_was_cut_short_gives_no_number_twice() {
        for last in 1..6_u64 {
            for cut in 0..SLOT_BYTES {
                let directory = tempfile::tempdir().unwrap();
                let counter = open(&directory);
                for _ in 1..last {
                    counter.next().unwrap();
                }
                // The write of `last` stops in the middle; the id was not told.
                let slot = if last % 2 == 1 { 0 } else { SLOT_BYTES as u64 };
                counter.file.write_all_at(&encode(last)[..cut], slot).unwrap();
                assert!(open(&directory).next().unwrap() >= last, "{last} cut at {cut}");
            }
        }
    }

    #[test]
    fn damage_is_an_error_and_not_a_second_bash_1() {
        let directory = tempfile::tempdir().unwrap();
        let counter = open(&directory);
        counter.next().unwrap();
        counter.next().unwrap();
        counter.file.write_all_at(&[7; 2 * SLOT_BYTES], 0).unwrap();
        let state = StateDir::open(directory.path()).unwrap();
        assert!(state.counter(&TenantId::default_tenant(), "bash").is_err());
    }

    #[test]
    fn the_instance_id_stays() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDir::open(directory.path()).unwrap();
        let id = state.instance_id().unwrap();
        assert_eq!(id.len(), 32);
        assert_eq!(StateDir::open(directory.path()).unwrap().instance_id().unwrap(), id);
    }
}
