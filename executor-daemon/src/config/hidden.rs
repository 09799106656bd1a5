//! Which of the daemon's files can be hidden from commands that run as its own user.
//!
//! A fence allows what lies beside a file and leaves the file itself out. That holds as long as nobody within the fence can put
//! anything else in the place of what it was built around, so every directory above the file must be one that the user can neither
//! change nor come to own the right to change.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use nix::unistd::{AccessFlags, access};

use super::credentials::CredentialFiles;
use crate::keeper::confine;

/// What a fence does for the files of a daemon whose commands run as its own user.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Hidden {
    /// What it hides, by real paths.
    pub(super) paths: Vec<PathBuf>,
    /// What it cannot hide.
    pub(super) exposed: Vec<PathBuf>,
}

/// Looks which of these files can be hidden.
pub(super) fn hidden(state_dir: &Path, files: &CredentialFiles, uid: u32) -> Hidden {
    let mut hidden = Hidden::default();
    for path in [state_dir].into_iter().chain(files.secrets()) {
        match real(path).filter(|path| is_out_of_reach(path, uid)) {
            Some(path) => hidden.paths.push(path),
            None => hidden.exposed.push(path.to_owned()),
        }
    }
    // What lies in the state directory shares its fate.
    hidden.exposed.retain(|path| !hidden.paths.iter().any(|above| path.starts_with(above)));
    hidden
}

/// Whether this kernel can fence commands in at all.
pub(super) fn can_fence() -> bool {
    confine::landlock_abi() >= confine::FIRST_ABI_FOR_SIGNALS
}

/// A path without links. The last part need not be there yet.
fn real(path: &Path) -> Option<PathBuf> {
    path.canonicalize().ok().or_else(|| Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?)))
}

/// Whether no directory above it is this process's user's, `uid`, to change.
fn is_out_of_reach(path: &Path, uid: u32) -> bool {
    path.ancestors().skip(1).all(|above| {
        fs::metadata(above).is_ok_and(|metadata| metadata.uid() != uid) && access(above, AccessFlags::W_OK).is_err()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_in_a_directory_of_ones_own_is_within_reach() {
        let own = tempfile::tempdir().expect("a directory");
        let uid = nix::unistd::geteuid().as_raw();
        assert!(!is_out_of_reach(&own.path().join("state"), uid));
        // As another user it would not be ours by its owner, but it still is by its mode.
        assert!(!is_out_of_reach(&own.path().join("state"), uid.wrapping_add(1)));
        assert_eq!(is_out_of_reach(Path::new("/etc/passwd"), uid), uid != 0);
        let link = own.path().join("link");
        std::os::unix::fs::symlink("/etc", &link).expect("made");
        assert_eq!(real(&link.join("none-such")), Some("/etc/none-such".into()));
    }
}
