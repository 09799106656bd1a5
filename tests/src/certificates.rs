//! Certificates for daemons under test: those that `executor-daemon init` makes, and others that it would not.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

pub use rcgen::ExtendedKeyUsagePurpose as Purpose;
use rcgen::{CertificateParams, DnType, Issuer, KeyPair};
use time::OffsetDateTime;

use crate::binaries;

/// What `executor-daemon init` makes, in a directory.
///
/// # Panics
/// When it does not.
#[expect(clippy::disallowed_methods, reason = "tests start the program that they test")]
pub fn init(dir: &Path, options: &[&str]) {
    let mut command = Command::new(binaries::executor_daemon());
    let made = command.arg("init").arg("--dir").arg(dir).args(options).output().expect("it can be started");
    assert!(made.status.success(), "{made:?}");
}

/// A certificate and its key that an authority made by [`init`] has signed, for a host or a client of this name, good until then
/// (in seconds since 1970).
///
/// # Panics
/// When they cannot be made.
pub fn sign(ca: &Path, to: &Path, name: &str, purpose: Purpose, until: i64) {
    let ca_key = KeyPair::from_pem(&fs::read_to_string(ca.join("ca.key")).expect("a key")).expect("a key");
    let mut authority = CertificateParams::default();
    authority.distinguished_name = rcgen::DistinguishedName::new();
    authority.distinguished_name.push(DnType::CommonName, "executor-daemon CA");
    let issuer = Issuer::new(authority, ca_key);
    let key = KeyPair::generate().expect("a key");
    let params = params(name, purpose, until);
    private(&to.with_extension("crt"), &params.signed_by(&key, &issuer).expect("signed").pem());
    private(&to.with_extension("key"), &key.serialize_pem());
}

/// The same, signed by nobody but itself.
///
/// # Panics
/// When they cannot be made.
pub fn sign_itself(to: &Path, name: &str, purpose: Purpose, until: i64) {
    let key = KeyPair::generate().expect("a key");
    private(&to.with_extension("crt"), &params(name, purpose, until).self_signed(&key).expect("signed").pem());
    private(&to.with_extension("key"), &key.serialize_pem());
}

fn params(name: &str, purpose: Purpose, until: i64) -> CertificateParams {
    let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
    params.extended_key_usages = vec![purpose];
    params.not_before = OffsetDateTime::UNIX_EPOCH;
    params.not_after = OffsetDateTime::from_unix_timestamp(until).expect("a time");
    params
}

/// A file that its owner alone can read.
///
/// # Panics
/// When it cannot be written.
pub fn private(path: &Path, text: &str) {
    fs::write(path, text).expect("written");
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("a mode");
}
