//! How much of a disk spills may take: a part of its size, and never its last room.

use std::{fs, io, os::fd::AsFd, path::Path};

use nix::sys::statfs::{Statfs, TMPFS_MAGIC, fstatfs, statfs};

/// Of a disk's bytes, spills may have one in so many, in all.
const PART_OF_DISK: u64 = 10;

/// Of the memory's bytes, where the "disk" is memory, one in so many.
const PART_OF_MEMORY: u64 = 20;

/// What stays free: one in so many of a disk's bytes …
const PART_KEPT_FREE: u64 = 20;

/// … or this much, whichever is less.
const MOST_KEPT_FREE_BYTES: u64 = 1024 * 1024 * 1024;

/// What a file system has, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Disk {
    size: u64,
    available: u64,
    /// It lies in memory.
    in_memory: bool,
}

impl Disk {
    /// The one that this path is on.
    ///
    /// # Errors
    /// What the kernel answers.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::of(&statfs(path)?))
    }

    /// The one that this file is on.
    ///
    /// # Errors
    /// What the kernel answers.
    pub(crate) fn under(file: &impl AsFd) -> io::Result<Self> {
        Ok(Self::of(&fstatfs(file)?))
    }

    fn of(told: &Statfs) -> Self {
        let block = u64::try_from(told.block_size()).unwrap_or(0);
        Self {
            size: told.blocks().saturating_mul(block),
            available: told.blocks_available().saturating_mul(block),
            in_memory: told.filesystem_type() == TMPFS_MAGIC,
        }
    }

    /// Of so many bytes, how many may be written so that enough stays free.
    pub(crate) fn room(self, bytes: u64) -> u64 {
        let kept_free = (self.size / PART_KEPT_FREE).min(MOST_KEPT_FREE_BYTES);
        bytes.min(self.available.saturating_sub(kept_free))
    }

    /// What spills may have in all, where the memory has so many bytes.
    fn for_spills(self, memory: Option<u64>) -> u64 {
        let of_disk = self.size / PART_OF_DISK;
        let of_memory = memory.filter(|_| self.in_memory).map(|memory| memory / PART_OF_MEMORY);
        of_memory.map_or(of_disk, |of_memory| of_memory.min(of_disk))
    }
}

/// What spills in this directory, or in one that is yet to be made there, may have in all. `None`: the kernel does not say.
pub(crate) fn for_spills(directory: &Path) -> Option<u64> {
    let disk = directory.ancestors().find_map(|path| Disk::at(path).ok())?;
    Some(disk.for_spills(memory_bytes()))
}

/// The memory that this process can have: the host's, or its control group's.
fn memory_bytes() -> Option<u64> {
    let of_host = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1_024)
    });
    let of_group = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
        .into_iter()
        .filter_map(|path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok());
    of_host.into_iter().chain(of_group).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1024 * 1024;
    const GIB: u64 = 1024 * MIB;

    fn disk(size: u64, available: u64) -> Disk {
        Disk { size, available, in_memory: false }
    }

    #[test]
    fn the_last_twentieth_or_gibibyte_stays_free() {
        assert_eq!(disk(100 * MIB, 50 * MIB).room(MIB), MIB);
        assert_eq!(disk(100 * MIB, 5 * MIB + 7).room(MIB), 7);
        assert_eq!(disk(100 * MIB, 5 * MIB).room(MIB), 0);
        assert_eq!(disk(1_000 * GIB, GIB + 9).room(MIB), 9);
        assert_eq!(disk(0, 0).room(MIB), 0);
    }

    #[test]
    fn spills_have_a_tenth_of_a_disk_and_less_of_memory() {
        assert_eq!(disk(100 * GIB, 0).for_spills(Some(GIB)), 10 * GIB);
        let in_memory = Disk { in_memory: true, ..disk(100 * GIB, 0) };
        assert_eq!(in_memory.for_spills(Some(20 * GIB)), GIB);
        assert_eq!(Disk { size: MIB, ..in_memory }.for_spills(Some(20 * GIB)), MIB / 10);
        assert_eq!(in_memory.for_spills(None), 10 * GIB);
    }

    #[test]
    fn this_host_says_what_it_has() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::at(dir.path()).unwrap();
        assert!(disk.size > 0 && disk.available <= disk.size);
        let file = tempfile::tempfile_in(dir.path()).unwrap();
        assert_eq!(Disk::under(&file).unwrap().size, disk.size);
        assert!(for_spills(&dir.path().join("not/there/yet")).unwrap() > 0);
        assert!(memory_bytes().unwrap() > MIB);
    }
}
