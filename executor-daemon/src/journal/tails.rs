//! The kept output of finished tasks: one file per stream, `streams/<tenant>.<id>.<stream>`, written once and whole.
//!
//! ```text
//!   magic and version (8) │ length of the head (4) │ CRC-32 of what follows (4) │ head: postcard │ the bytes
//! ```
//! A file that a loss of power cut short is known by its checksum and counts as not there. When the files of all tasks grow
//! above their cap, those that were kept first go; a reader then finds a gap.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use executor_proto::types::StreamName;
use serde::{Deserialize, Serialize};

use super::store::{decode, encode};
use crate::output::{KeptSpill, KeptStream};

/// Bytes that all kept files may have together.
const MAX_BYTES: u64 = 1024 * 1024 * 1024;

/// Longest file that is read: the largest tail there can be, and its head.
const MAX_FILE_BYTES: u64 = 17 * 1024 * 1024;

/// Begins every file; its last byte counts the versions.
const MAGIC: [u8; 8] = *b"exetail\x01";

/// Bytes before the head.
const PREFIX_BYTES: usize = 16;

#[derive(Serialize, Deserialize)]
struct Head {
    start: u64,
    /// Bytes from there to the stream's end: more than follow, where its end is missing.
    length: u64,
    spill: Option<StoredSpill>,
}

/// [`KeptSpill`] as it is stored.
#[derive(Serialize, Deserialize)]
struct StoredSpill {
    path: PathBuf,
    identity: (u64, u64),
    held: u64,
}

impl From<KeptSpill> for StoredSpill {
    fn from(KeptSpill { path, identity, held }: KeptSpill) -> Self {
        Self { path, identity, held }
    }
}

impl From<StoredSpill> for KeptSpill {
    fn from(StoredSpill { path, identity, held }: StoredSpill) -> Self {
        Self { path, identity, held }
    }
}

/// The directory of kept files.
#[derive(Debug)]
pub(super) struct Tails {
    directory: PathBuf,
    max_bytes: u64,
    kept: Mutex<Kept>,
}

/// What is there.
#[derive(Debug, Default)]
struct Kept {
    sizes: HashMap<String, u64>,
    /// By age; may hold names that are gone.
    order: VecDeque<String>,
    bytes: u64,
}

impl Kept {
    fn add(&mut self, name: String, size: u64) {
        self.bytes += size;
        match self.sizes.insert(name.clone(), size) {
            Some(before) => self.bytes -= before,
            None => self.order.push_back(name),
        }
    }

    fn remove(&mut self, name: &str) {
        self.bytes -= self.sizes.remove(name).unwrap_or(0);
        // Names that are gone stay in the order until they are many.
        if self.order.len() > 2 * self.sizes.len() + 16 {
            let Self { sizes, order, .. } = self;
            order.retain(|name| sizes.contains_key(name));
        }
    }

    /// The oldest while there are more bytes than these.
    fn above(&mut self, max_bytes: u64) -> Vec<String> {
        let mut gone = Vec::new();
        while self.bytes > max_bytes {
            let Some(oldest) = self.order.pop_front() else { break };
            if let Some(size) = self.sizes.remove(&oldest) {
                self.bytes -= size;
                gone.push(oldest);
            }
        }
        gone
    }
}

/// The name of a file. A tenant's name is configuration and may hold anything; in hexadecimal it is a file name.
fn name_of(tenant: &str, id: &str, stream: StreamName) -> String {
    let tenant: String = tenant.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("{tenant}.{id}.{}", stream.as_str())
}

/// The tenant and the id in a file's name.
fn parts_of(name: &str) -> Option<(String, String)> {
    let mut parts = name.split('.');
    let (tenant, id) = (parts.next()?, parts.next()?);
    let byte = |at| tenant.get(at..at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
    let tenant: Option<Vec<u8>> = (0..tenant.len()).step_by(2).map(byte).collect();
    Some((String::from_utf8(tenant?).ok()?, id.to_owned()))
}

impl Tails {
    /// Makes the directory (0700) where it is missing.
    pub(super) fn open(state_dir: &Path) -> io::Result<Self> {
        let directory = state_dir.join("streams");
        DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700))?;
        Ok(Self { directory, max_bytes: MAX_BYTES, kept: Mutex::default() })
    }

    /// Whether [`Tails::open`] could use what is there. Changes nothing.
    pub(super) fn probe(state_dir: &Path) -> io::Result<()> {
        match super::probe_directory(&state_dir.join("streams")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            probed => probed,
        }
    }

    #[cfg(test)]
    pub(super) fn with_cap(state_dir: &Path, max_bytes: u64) -> io::Result<Self> {
        Ok(Self { max_bytes, ..Self::open(state_dir)? })
    }

    /// Where nothing is kept.
    #[cfg(any(test, fuzzing))]
    pub(super) fn nowhere() -> Self {
        Self { directory: PathBuf::new(), max_bytes: 0, kept: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes every file whose task (tenant, id) is not known, and learns what the others take.
    pub(super) fn keep_only(&self, known: &HashSet<(String, String)>) {
        let files = fs::read_dir(&self.directory).into_iter().flatten().filter_map(Result::ok);
        let mut found = Vec::new();
        for file in files {
            let name = file.file_name().into_string().unwrap_or_default();
            let size_and_age = file.metadata().and_then(|metadata| Ok((metadata.len(), metadata.modified()?)));
            match size_and_age {
                Ok((size, age)) if parts_of(&name).is_some_and(|parts| known.contains(&parts)) => {
                    found.push((age, name, size));
                }
                // Left by a task that is forgotten, or in the middle of a write.
                Ok(_) | Err(_) => self.delete(&file.file_name().to_string_lossy()),
            }
        }
        found.sort_unstable();
        let mut kept = self.lock();
        for (_, name, size) in found {
            kept.add(name, size);
        }
    }

    /// Writes a file, all of it or nothing. The oldest go above the cap.
    pub(super) fn keep(&self, tenant: &str, id: &str, stream: StreamName, tail: &KeptStream) -> io::Result<()> {
        let KeptStream { start, bytes, missing, spill } = tail;
        if bytes.is_empty() && *start == 0 && *missing == 0 {
            // What is not there reads the same.
            return Ok(());
        }
        let length = bytes.len() as u64 + missing;
        let head = encode(&Head { start: *start, length, spill: spill.clone().map(StoredSpill::from) });
        let mut file = Vec::with_capacity(PREFIX_BYTES + head.len() + bytes.len());
        file.extend_from_slice(&MAGIC);
        file.extend_from_slice(&u32::try_from(head.len()).map_err(io::Error::other)?.to_be_bytes());
        file.extend_from_slice(&checksum(&head, bytes).to_be_bytes());
        file.extend_from_slice(&head);
        file.extend_from_slice(bytes);
        let name = name_of(tenant, id, stream);
        let beside = self.directory.join(format!("{name}.new"));
        // What lies there is the rest of a write that a kill cut short.
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let written = options.open(&beside).and_then(|mut to| to.write_all(&file));
        if let Err(error) = written.and_then(|()| fs::rename(&beside, self.directory.join(&name))) {
            self.delete(&format!("{name}.new"));
            return Err(error);
        }
        let gone = {
            let mut kept = self.lock();
            kept.add(name, file.len() as u64);
            kept.above(self.max_bytes)
        };
        for name in &gone {
            tracing::warn!(file = name, cap = self.max_bytes, "kept output goes: finished tasks have too much of it");
            self.delete(name);
        }
        Ok(())
    }

    /// Reads a file; `None`: it is not there, or not whole.
    pub(super) fn read(&self, tenant: &str, id: &str, stream: StreamName) -> Option<KeptStream> {
        let path = self.directory.join(name_of(tenant, id, stream));
        let length = fs::metadata(&path).ok()?.len();
        let file = (length <= MAX_FILE_BYTES).then(|| fs::read(&path).ok()).flatten();
        let tail = file.and_then(|file| parse(Bytes::from(file)));
        if tail.is_none() {
            tracing::warn!(path = %path.display(), "kept output is damaged and cannot be shown");
        }
        tail
    }

    /// Removes the files of a task.
    pub(super) fn remove(&self, tenant: &str, id: &str) {
        for stream in StreamName::BOTH {
            let name = name_of(tenant, id, stream);
            let known = {
                let mut kept = self.lock();
                let known = kept.sizes.contains_key(&name);
                kept.remove(&name);
                known
            };
            if known {
                self.delete(&name);
            }
        }
    }

    fn delete(&self, name: &str) {
        match fs::remove_file(self.directory.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, file = name, "kept output could not be removed");
            }
            Ok(()) | Err(_) => {}
        }
    }
}

fn checksum(head: &[u8], bytes: &[u8]) -> u32 {
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(head);
    checksum.update(bytes);
    checksum.finalize()
}

/// What a file holds; `None`: it is not whole, or of another version.
pub(super) fn parse(file: Bytes) -> Option<KeptStream> {
    let prefix = file.get(..PREFIX_BYTES)?;
    let number = |at: usize| Some(u32::from_be_bytes(prefix.get(at..at + 4)?.try_into().ok()?));
    let (head_bytes, sum) = (usize::try_from(number(8)?).ok()?, number(12)?);
    let body = PREFIX_BYTES.checked_add(head_bytes)?;
    if prefix[..8] != MAGIC || file.len() < body {
        return None;
    }
    let (head, bytes) = (file.slice(PREFIX_BYTES..body), file.slice(body..));
    if checksum(&head, &bytes) != sum {
        return None;
    }
    let Head { start, length, spill } = decode(&head)?;
    start.checked_add(length)?;
    let missing = length.checked_sub(bytes.len() as u64)?;
    Some(KeptStream { start, bytes, missing, spill: spill.map(KeptSpill::from) })
}
