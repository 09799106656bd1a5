//! `init --apart`: a directory for each party, so that each can be given its own and nothing else.
//!
//! ```text
//!   DIR/ca/      ca.crt, ca.key                       signs; no daemon and no client needs it
//!   DIR/server/  ca.crt, server.crt, server.key       the daemon's
//!   DIR/NAME/    ca.crt, NAME.crt, NAME.key           a client's, one for each tenant
//! ```
//! Certificates only: a token would have to lie in two of them. What is there already stays as it is, so the same call can stand
//! in front of every start: a party that is missing is made, with the authority that is there.

use std::{
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
};

use rcgen::{ExtendedKeyUsagePurpose, Issuer, KeyPair};

use super::{
    CERTIFICATE_DAYS, InitError, InitOptions, ca_params, check_names, clients, make_directory, new_authority,
    remove_all, server_names, signed, write_new,
};

/// Names of an authority's files, in its own directory and beside what it has signed.
const CA_CERTIFICATE: &str = "ca.crt";
const CA_KEY: &str = "ca.key";

/// What is in a party's directory of the files that belong there.
#[derive(Debug, PartialEq, Eq)]
enum There {
    Nothing,
    /// All of them, with this authority.
    Everything(String),
}

/// Makes what is missing. Returns what was done, as it is printed.
///
/// # Errors
/// When a name is none, a directory holds a part of its files or those of another authority, or something cannot be written.
pub(super) fn init(options: &InitOptions) -> Result<String, InitError> {
    check_names(options)?;
    let ca_dir = options.dir.join("ca");
    let mut parties = vec![("server", server_names(options), ExtendedKeyUsagePurpose::ServerAuth)];
    parties.extend(clients(options).into_iter().map(|name| (name, Vec::new(), ExtendedKeyUsagePurpose::ClientAuth)));

    let ca = there(&ca_dir, &[CA_CERTIFICATE, CA_KEY])?;
    let mut missing = Vec::new();
    let mut text = String::new();
    for (name, names, purpose) in parties {
        let dir = options.dir.join(name);
        match (there(&dir, &[CA_CERTIFICATE, &format!("{name}.crt"), &format!("{name}.key")])?, &ca) {
            (There::Nothing, _) => missing.push((name, dir, names, purpose)),
            (There::Everything(of), There::Everything(own)) if of == *own => {
                let _infallible = writeln!(text, "{}: is there, and stays.", dir.display());
            }
            (There::Everything(_), _) => return Err(InitError::OtherAuthority { dir, ca: ca_dir }),
        }
    }
    let (certificate, issuer) = match ca {
        There::Everything(certificate) => {
            let path = ca_dir.join(CA_KEY);
            let key = fs::read_to_string(&path).map_err(|source| InitError::File { path, source })?;
            text.insert_str(0, &format!("{}: is there, and stays.\n", ca_dir.display()));
            (certificate, Issuer::new(ca_params(), KeyPair::from_pem(&key)?))
        }
        There::Nothing => {
            let (certificate, key, issuer) = new_authority()?;
            write_all(&ca_dir, &[(CA_CERTIFICATE, &certificate), (CA_KEY, &key)])?;
            let _infallible = writeln!(text, "{}: made. It is needed to sign only.", ca_dir.display());
            (certificate, issuer)
        }
    };
    for (name, dir, names, purpose) in missing {
        let [(of_certificate, own), (of_key, key)] = signed(name, &issuer, names, purpose)?;
        write_all(&dir, &[(CA_CERTIFICATE, &certificate), (&of_certificate, &own), (&of_key, &key)])?;
        let _infallible = writeln!(text, "{}: made, good for {CERTIFICATE_DAYS} days.", dir.display());
    }
    Ok(text)
}

/// What there is of these files, of which the first is the authority's certificate.
fn there(dir: &Path, names: &[&str]) -> Result<There, InitError> {
    let is_there = |name: &&&str| fs::symlink_metadata(dir.join(name)).is_ok();
    let found: Vec<&&str> = names.iter().filter(is_there).collect();
    match (found.len(), names.iter().find(|name| !found.contains(name))) {
        (0, _) => Ok(There::Nothing),
        (_, Some(missing)) => Err(InitError::Incomplete { dir: dir.to_owned(), missing: (*missing).to_owned() }),
        (_, None) => {
            let path = dir.join(names[0]);
            let authority = fs::read_to_string(&path).map_err(|source| InitError::File { path, source })?;
            Ok(There::Everything(authority))
        }
    }
}

/// Writes a party's files, all or none.
fn write_all(dir: &Path, files: &[(&str, &str)]) -> Result<(), InitError> {
    make_directory(dir)?;
    let mut written: Vec<PathBuf> = Vec::new();
    for (name, text) in files {
        let path = dir.join(name);
        let done: io::Result<()> = write_new(&path, text);
        if let Err(source) = done {
            remove_all(&written);
            return Err(InitError::File { path, source });
        }
        written.push(path);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, os::unix::fs::PermissionsExt};

    use super::*;
    use crate::tls::ServerTls;

    fn options(dir: &Path, tenants: &[&str]) -> InitOptions {
        let tenants = tenants.iter().map(|&name| name.to_owned()).collect();
        InitOptions { dir: dir.to_owned(), names: vec!["daemon".to_owned()], tenants, ca: None, apart: true }
    }

    /// Every file below a directory with what is in it.
    fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
        let mut files = BTreeMap::new();
        for party in fs::read_dir(dir).expect("it is there").map(|party| party.expect("a directory")) {
            for file in fs::read_dir(party.path()).expect("a directory").map(|file| file.expect("a file")) {
                assert_eq!(file.metadata().expect("there").permissions().mode() & 0o777, 0o600, "{file:?}");
                let name = format!("{}/{}", party.file_name().display(), file.file_name().display());
                files.insert(name, fs::read(file.path()).expect("it can be read"));
            }
        }
        files
    }

    #[test]
    fn each_party_has_its_own_files_and_they_fit_together() {
        let dir = tempfile::tempdir().expect("a directory");
        let text = super::super::init(&options(dir.path(), &[])).expect("made");
        assert_eq!(text.matches(": made").count(), 3, "{text}");
        let files = files(dir.path());
        let names: Vec<&str> = files.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            [
                "ca/ca.crt",
                "ca/ca.key",
                "client/ca.crt",
                "client/client.crt",
                "client/client.key",
                "server/ca.crt",
                "server/server.crt",
                "server/server.key"
            ]
        );
        let tls = ServerTls {
            chain: files["server/server.crt"].clone(),
            key: files["server/server.key"].clone(),
            client_ca: Some(files["server/ca.crt"].clone()),
            certificate_required: true,
        };
        tls.acceptor().expect("they fit");
    }

    #[test]
    fn what_is_there_stays_and_what_is_missing_is_signed_by_the_same_authority() {
        let dir = tempfile::tempdir().expect("a directory");
        init(&options(dir.path(), &["a"])).expect("made");
        let before = files(dir.path());
        let text = init(&options(dir.path(), &["a"])).expect("nothing to do");
        assert_eq!((files(dir.path()), text.matches("is there, and stays").count()), (before.clone(), 3), "{text}");

        fs::remove_dir_all(dir.path().join("server")).expect("removed");
        init(&options(dir.path(), &["a", "b"])).expect("made");
        let after = files(dir.path());
        assert_eq!(after["ca/ca.key"], before["ca/ca.key"]);
        assert_eq!(after["a/a.key"], before["a/a.key"]);
        assert_ne!(after["server/server.key"], before["server/server.key"]);
        for party in ["server", "a", "b"] {
            assert_eq!(after[&format!("{party}/ca.crt")], before["ca/ca.crt"], "{party}");
        }
    }

    #[test]
    fn half_a_party_and_another_authority_are_named_and_left_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        init(&options(dir.path(), &[])).expect("made");
        fs::remove_file(dir.path().join("client/client.key")).expect("removed");
        let before = files(dir.path());
        let error = init(&options(dir.path(), &[])).expect_err("half of it is there").to_string();
        assert!(error.contains("/client: client.key is missing"), "{error}");
        assert_eq!(files(dir.path()), before);

        fs::remove_dir_all(dir.path().join("client")).expect("removed");
        fs::remove_dir_all(dir.path().join("ca")).expect("removed");
        let error = init(&options(dir.path(), &[])).expect_err("no authority for the server").to_string();
        assert!(error.contains("/server: is not signed by the CA in"), "{error}");
        assert!(!dir.path().join("ca").exists(), "nothing is made");
    }
}
