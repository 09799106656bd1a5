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

use super::{Settings, credentials::CredentialFiles};
use crate::keeper::confine;

/// What a fence does for the files of a daemon whose commands run as its own user.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Hidden {
    /// What it hides, by real paths.
    pub(super) paths: Vec<PathBuf>,
    /// What it cannot hide.
    pub(super) exposed: Vec<PathBuf>,
}

/// Looks which files of a daemon of this user can be hidden, and says in the settings whether all can. `None`: there is no fence
/// to hide them, or no need, since root has other means.
pub(super) fn hidden(settings: &mut Settings, state_dir: &Path, files: &CredentialFiles, uid: u32) -> Option<Hidden> {
    let can_fence = confine::landlock_abi() >= confine::FIRST_ABI_FOR_SIGNALS;
    if uid == 0 || !can_fence || settings.all_rules().any(|rules| rules.allow_setuid) {
        return None;
    }
    let mut hidden = Hidden::default();
    for path in [state_dir].into_iter().chain(files.secrets()) {
        match real(path).filter(|path| is_out_of_reach(path, uid)) {
            Some(path) => hidden.paths.push(path),
            None => hidden.exposed.push(path.to_owned()),
        }
    }
    // What lies in the state directory shares its fate.
    hidden.exposed.retain(|path| !hidden.paths.iter().any(|above| path.starts_with(above)));
    settings.files_are_hidden = hidden.exposed.is_empty();
    Some(hidden)
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
