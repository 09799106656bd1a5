//! Spill files: made exclusively, under random names, through a held directory, readable by the commands of one identity
//! and writable by none of them (as far as their uid differs from the keeper's).

use std::{
    collections::HashSet,
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::DirBuilderExt,
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open, openat},
    sys::stat::{Mode, fchmod, fstat},
    unistd::{Gid, Uid, UnlinkatFlags, fchown, unlinkat},
};

use super::protocol::Identity;

/// Random bytes of a name, which is made of twice as many hexadecimal digits.
const RANDOM_BYTES: usize = 8;
/// Longest beginning of a name that is taken from the engine.
const MAX_PREFIX_BYTES: usize = 64;

/// The directories that spill files lie in: the configured one, and below it one for each identity that is changed to.
#[derive(Debug)]
pub(super) struct Spills {
    root: Directory,
    /// Of identities with another uid, by uid.
    others: Vec<(u32, Directory)>,
}

#[derive(Debug)]
struct Directory {
    path: PathBuf,
    held: OwnedFd,
    /// The group that may read, where that is not just the keeper's own user.
    group: Option<Gid>,
}

impl Spills {
    /// Makes or opens the directories: 0700, or where commands run as somebody else 0711 with a 0750 one for each inside.
    ///
    /// # Errors
    /// When one cannot be made, is not a directory, or belongs to somebody else.
    pub(super) fn open(root: &Path, identities: &[Identity]) -> io::Result<Self> {
        let root = std::path::absolute(root)?;
        if root.to_str().is_none() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path is not UTF-8"));
        }
        let shared = identities.iter().any(|identity| identity.change);
        let mode = if shared { 0o711 } else { 0o700 };
        let mut spills = Self { root: Directory::make(root, mode, None)?, others: Vec::new() };
        for identity in identities.iter().filter(|identity| identity.change) {
            if spills.others.iter().all(|(uid, _)| *uid != identity.uid) {
                let path = spills.root.path.join(identity.uid.to_string());
                let directory = Directory::make(path, 0o750, Some(Gid::from_raw(identity.gid)))?;
                spills.others.push((identity.uid, directory));
            }
        }
        Ok(spills)
    }

    /// The directory that all of them lie below.
    pub(super) fn path(&self) -> &Path {
        &self.root.path
    }

    fn directory(&mut self, identity: &Identity) -> &mut Directory {
        let other = self.others.iter_mut().find(|(uid, _)| identity.change && *uid == identity.uid);
        other.map_or(&mut self.root, |(_, directory)| directory)
    }

    /// Makes a spill file for a command of this identity; returns it, open for writing, and its path.
    ///
    /// # Errors
    /// What the file system answers; EINVAL for a beginning that is not a plain file name.
    pub(super) fn open_file(&mut self, identity: &Identity, prefix: &str) -> io::Result<(OwnedFd, PathBuf)> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if prefix.is_empty() || prefix.starts_with('.') || prefix.len() > MAX_PREFIX_BYTES || !prefix.bytes().all(plain)
        {
            return Err(Errno::EINVAL.into());
        }
        let mut random = [0; RANDOM_BYTES];
        getrandom::fill(&mut random).map_err(|error| io::Error::other(error.to_string()))?;
        let name = format!("{prefix}.{:016x}", u64::from_ne_bytes(random));
        let directory = self.directory(identity);
        match directory.create(&name) {
            // Somebody tidied up the directory itself.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let mode = fstat(&directory.held)?.st_mode & 0o777;
                *directory = Directory::make(directory.path.clone(), mode, directory.group)?;
                directory.create(&name)
            }
            created => created,
        }
    }

    /// Opens a spill file for reading.
    ///
    /// # Errors
    /// ENOENT for a path that is not one of ours; what the file system answers.
    pub(super) fn reopen(&self, path: &Path) -> io::Result<OwnedFd> {
        let (directory, name) = self.find(path).ok_or(Errno::ENOENT)?;
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        Ok(openat(directory.held.as_fd(), name, flags, Mode::empty())?)
    }

    /// Removes a spill file; anything that is not one of ours stays.
    pub(super) fn remove(&self, path: &Path) {
        if let Some((directory, name)) = self.find(path) {
            // That it is gone already is as good.
            let _ = unlinkat(&directory.held, name, UnlinkatFlags::NoRemoveDir);
        }
    }

    /// The directory and the name of a path, if it is one of ours.
    fn find<'a>(&self, path: &'a Path) -> Option<(&Directory, &'a str)> {
        let name = path.file_name()?.to_str().filter(|name| is_ours(name))?;
        Some((self.all().find(|directory| Some(directory.path.as_path()) == path.parent())?, name))
    }

    /// Removes all spill files but these: whose the others were is not known any more.
    pub(super) fn sweep(&self, keep: &[PathBuf]) {
        let keep: HashSet<_> = keep.iter().collect();
        for directory in self.all() {
            let Ok(entries) = fs::read_dir(&directory.path) else { continue };
            for path in entries.flatten().map(|entry| entry.path()).filter(|path| !keep.contains(path)) {
                self.remove(&path);
            }
        }
    }

    fn all(&self) -> impl Iterator<Item = &Directory> {
        std::iter::once(&self.root).chain(self.others.iter().map(|(_, directory)| directory))
    }
}

/// Whether a name is one that [`Spills::open_file`] makes.
fn is_ours(name: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(_, random)| {
        random.len() == 2 * RANDOM_BYTES
            && random.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    })
}

impl Directory {
    fn make(path: PathBuf, mode: u32, group: Option<Gid>) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(mode).create(&path)?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let held = open(&path, flags, Mode::empty())?;
        if fstat(&held)?.st_uid != Uid::effective().as_raw() {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the directory belongs to another user"));
        }
        if group.is_some() {
            fchown(&held, None, group)?;
        }
        fchmod(&held, Mode::from_bits_truncate(mode))?;
        Ok(Self { path, held, group })
    }

    fn create(&self, name: &str) -> io::Result<(OwnedFd, PathBuf)> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = openat(self.held.as_fd(), name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?;
        let mut mode = Mode::S_IRUSR | Mode::S_IWUSR;
        if self.group.is_some() {
            fchown(&file, None, self.group)?;
            mode |= Mode::S_IRGRP;
        }
        // Whatever the umask has left of it.
        fchmod(&file, mode)?;
        Ok((file, self.path.join(name)))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn own(change: bool) -> Identity {
        let (uid, gid) = (Uid::effective().as_raw(), Gid::effective().as_raw());
        let (name, home) = ("me".into(), "/".into());
        Identity { name, uid, uids: 1, gid, groups: vec![], home, change, capabilities: None, allow_setuid: true }
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("exists").permissions().mode() & 0o777
    }

    #[test]
    fn modes_are_private_or_for_the_group() {
        let parent = tempfile::tempdir().expect("temporary directory");
        let private = own(false);
        let mut spills = Spills::open(&parent.path().join("a/b"), std::slice::from_ref(&private)).expect("made");
        let (_, path) = spills.open_file(&private, "bash-1.stdout").expect("made");
        assert_eq!((mode(&path), mode(path.parent().expect("has one"))), (0o600, 0o700));

        let other = own(true);
        let mut spills = Spills::open(&parent.path().join("c"), std::slice::from_ref(&other)).expect("made");
        let (_, path) = spills.open_file(&other, "bash-1.stdout").expect("made");
        assert_eq!((mode(&path), mode(path.parent().expect("has one"))), (0o640, 0o750));
        assert_eq!(mode(&parent.path().join("c")), 0o711);
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let root = tempfile::tempdir().expect("temporary directory");
        let mut spills = Spills::open(root.path(), &[own(false)]).expect("made");
        for prefix in ["", ".hidden", "../x", "a/b", "a\0b", &"x".repeat(65)] {
            let refused = spills.open_file(&own(false), prefix).expect_err("not a plain name");
            assert_eq!(refused.raw_os_error(), Some(libc::EINVAL), "{prefix:?}");
        }
    }

    #[test]
    fn only_spill_files_are_opened_removed_and_swept() {
        let root = tempfile::tempdir().expect("temporary directory");
        let mut spills = Spills::open(root.path(), &[own(false)]).expect("made");
        let (_, first) = spills.open_file(&own(false), "bash-1.stdout").expect("made");
        let (_, second) = spills.open_file(&own(false), "bash-1.stderr").expect("made");
        let stranger = root.path().join("notes.txt");
        fs::write(&stranger, "mine").expect("written");
        let elsewhere = tempfile::tempdir().expect("temporary directory");
        let victim = elsewhere.path().join("x.0123456789abcdef");
        fs::write(&victim, "safe").expect("written");

        for path in [&stranger, &victim, &root.path().join("none.0123456789abcdef")] {
            let refused = spills.reopen(path).expect_err("not one of ours");
            assert_eq!(refused.kind(), io::ErrorKind::NotFound, "{}", path.display());
        }
        let reopened = fs::File::from(spills.reopen(&first).expect("one of ours"));
        let inode = |metadata: fs::Metadata| std::os::unix::fs::MetadataExt::ino(&metadata);
        assert_eq!(inode(reopened.metadata().expect("open")), inode(fs::metadata(&first).expect("there")));
        spills.remove(&stranger);
        spills.remove(&victim);
        spills.remove(&root.path().join("..").join(victim.strip_prefix("/").expect("absolute")));
        spills.remove(&first);
        assert!(stranger.exists() && victim.exists() && second.exists() && !first.exists());
        symlink(&victim, root.path().join("x.0123456789abcdef")).expect("linked");
        spills.reopen(&root.path().join("x.0123456789abcdef")).expect_err("links are not followed");
        let (_, third) = spills.open_file(&own(false), "bash-2.stdout").expect("made");
        spills.sweep(std::slice::from_ref(&third));
        assert!(stranger.exists() && victim.exists() && third.exists() && !second.exists());
    }

    #[test]
    fn a_directory_that_was_removed_is_made_again() {
        let parent = tempfile::tempdir().expect("temporary directory");
        let root = parent.path().join("spill");
        let mut spills = Spills::open(&root, &[own(false)]).expect("made");
        fs::remove_dir(&root).expect("empty");
        let (_, path) = spills.open_file(&own(false), "run-1.stdout").expect("made again");
        assert_eq!((path.parent(), mode(&root)), (Some(root.as_path()), 0o700));
    }
}
