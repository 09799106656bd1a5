//! Files that say who is who: tokens of TCP clients, keys, certificates.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
};

use crate::service::auth::{TokenDigest, digest};

/// Shortest token: below this one can be guessed.
const MIN_TOKEN_CHARS: usize = 16;

/// Largest such file.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// Where container engines put secrets. They choose the modes of the files there, and nobody else is in the container.
const SECRETS: &str = "/run/secrets";

/// Who may read a file besides its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Secrecy {
    /// Nobody: whoever reads it is who it says.
    Secret,
    /// Everybody. But nobody else may write it.
    Public,
}

/// Reads the tokens. The error ends the sentence that the file begins; it never holds a part of a token.
pub(super) fn tokens(path: &Path, euid: u32) -> Result<Vec<TokenDigest>, String> {
    let text = read(path, euid, Secrecy::Secret)?;
    parse(&String::from_utf8(text).map_err(|_no_text| "is no text".to_owned())?)
}

/// Reads a file that says who is who. The error ends the sentence that the file begins.
pub(super) fn read(path: &Path, euid: u32, secrecy: Secrecy) -> Result<Vec<u8>, String> {
    let unreadable = |error: io::Error| format!("cannot be read: {error}");
    // What is no file is not waited for: the keeper reads these again while commands run.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    let file = file.map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() {
        return Err("cannot be read: not a regular file".to_owned());
    }
    let engine_s = path.canonicalize().is_ok_and(|real| real.starts_with(SECRETS)) || path.starts_with(SECRETS);
    if !engine_s {
        let mode = metadata.mode() & 0o7777;
        match secrecy {
            Secrecy::Secret if mode & 0o077 != 0 => {
                return Err(format!(
                    "can be read by others (mode {mode:04o}); make it readable by its owner only: chmod 600"
                ));
            }
            Secrecy::Public if mode & 0o022 != 0 => {
                return Err(format!("can be written by others (mode {mode:04o}); make it its owner's: chmod 644"));
            }
            Secrecy::Secret | Secrecy::Public => {}
        }
        if metadata.uid() != euid && metadata.uid() != 0 {
            return Err(format!("belongs to uid {}, not to uid {euid} or root", metadata.uid()));
        }
    }
    let mut text = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut text).map_err(unreadable)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(format!("is larger than {MAX_FILE_BYTES} bytes"));
    }
    Ok(text)
}

fn parse(text: &str) -> Result<Vec<TokenDigest>, String> {
    let mut tokens = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let token = line.trim();
        if token.is_empty() {
            continue;
        }
        if token.len() < MIN_TOKEN_CHARS {
            return Err(format!("line {}: a token has at least {MIN_TOKEN_CHARS} characters", number + 1));
        }
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(format!("line {}: a token is made of visible ASCII characters", number + 1));
        }
        tokens.push(digest(token.as_bytes()));
    }
    if tokens.is_empty() {
        return Err("holds no token".to_owned());
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn tokens_are_trimmed_lines_of_some_length() {
        assert_eq!(
            parse("  0123456789abcdef \r\n\n0123456789abcdeg"),
            Ok(vec![digest(b"0123456789abcdef"), digest(b"0123456789abcdeg")])
        );
        assert_eq!(parse("0123456789abcdef\nshort"), Err("line 2: a token has at least 16 characters".to_owned()));
        assert_eq!(parse("0123456789 abcdef"), Err("line 1: a token is made of visible ASCII characters".to_owned()));
        assert_eq!(parse("\n \n"), Err("holds no token".to_owned()));
    }

    #[test]
    fn a_file_that_others_can_read_or_write_is_refused() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("token");
        fs::write(&path, "0123456789abcdef\n").expect("a token file");
        let me = nix::unistd::geteuid().as_raw();
        for (mode, secret, public) in [
            (0o600, true, true),
            (0o400, true, true),
            (0o640, false, true),
            (0o604, false, true),
            (0o644, false, true),
            (0o620, false, false),
            (0o666, false, false),
        ] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
            assert_eq!(tokens(&path, me).is_ok(), secret, "{mode:o}");
            assert_eq!(read(&path, me, Secrecy::Secret).is_ok(), secret, "{mode:o}");
            assert_eq!(read(&path, me, Secrecy::Public).is_ok(), public, "{mode:o}");
        }
        let pipe = dir.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::from_bits_truncate(0o600)).expect("a pipe");
        let pipe = read(&pipe, me, Secrecy::Secret).expect_err("it is not waited for");
        assert!(pipe.contains("not a regular file"), "{pipe}");
        let missing = tokens(&dir.path().join("none"), me).expect_err("a missing file");
        assert!(missing.starts_with("cannot be read: No such file"), "{missing}");
    }
}
