//! `executor-daemon init`: a configuration that is closed and works, with a certificate authority of its own.
//!
//! ```text
//!   ca.crt, ca.key          the authority: signs the daemon's certificate and the clients'
//!   server.crt, server.key  the daemon's
//!   NAME.crt, NAME.key      a client's, one for each tenant
//!   NAME.token              a token for those that cannot show a certificate
//!   config.toml             what `serve --config` takes
//! ```
//! Nothing is ever overwritten. With an authority that is there already only what it signs is made new: that is how
//! certificates are renewed, and how tenants are added. Deployments in which each party mounts its own files have another layout:
//! see `apart`.

use std::{
    fmt::Write as _,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SerialNumber,
};
use time::{Duration, OffsetDateTime};

mod apart;

/// How long the authority is good: whoever lets it run out has to give every client a new one.
const CA_DAYS: i64 = 3_650;
/// How long what it signs is good. Browsers take no more than 398 days, so tools that look at certificates know the number.
const CERTIFICATE_DAYS: i64 = 397;
/// Certificates are good from this long ago on: clocks of hosts differ.
const CLOCKS_DIFFER: Duration = Duration::hours(1);
/// The only client where no tenant is named.
const CLIENT: &str = "client";
/// The port of the examples.
const PORT: u16 = 7700;
/// The authority's name in what it signs. Always the same, so that its key is enough to sign with again.
const CA_NAME: &str = "executor-daemon CA";

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InitOptions {
    /// Where the files go; made if it is missing. Absolute.
    pub dir: PathBuf,
    /// Names and addresses that clients connect to the daemon by. `localhost` and `127.0.0.1` are always among them.
    pub names: Vec<String>,
    /// The tenants. None: one, without a name in the configuration.
    pub tenants: Vec<String>,
    /// The directory of an earlier `init`, whose authority signs. `None`: a new one is made.
    pub ca: Option<PathBuf>,
    /// A directory for each party, and what is there stays; not together with `ca`.
    pub apart: bool,
}

/// Why nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// Something is there.
    #[error("{}: exists already, and nothing is overwritten", .0.display())]
    Exists(PathBuf),
    /// Something cannot be done with a file.
    #[error("{}: {source}", .path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Others could put files of theirs there.
    #[error("{}: can be written by others (mode {mode:04o}); make it its owner's: chmod 700", .path.display())]
    Open {
        /// The directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// A part of what belongs together is there.
    #[error("{}: {missing} is missing beside what is there; empty the directory, and all of it is made anew", .dir.display())]
    Incomplete {
        /// The directory.
        dir: PathBuf,
        /// The name of the first file that is not there.
        missing: String,
    },
    /// What is there belongs to another authority.
    #[error("{}: is not signed by the CA in {}; empty the directory, and it is made anew", .dir.display(), .ca.display())]
    OtherAuthority {
        /// The directory.
        dir: PathBuf,
        /// Where the authority is, or would be.
        ca: PathBuf,
    },
    /// A name is none.
    #[error("--{option} {name}: {problem}")]
    Name {
        /// `name` or `tenant`.
        option: &'static str,
        /// As it was given.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The cryptography failed.
    #[error("certificates: {0}")]
    Certificates(#[from] rcgen::Error),
}

impl InitError {
    /// Whether the mistake is in what was asked for.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Name { .. })
    }
}

/// Makes the files. Returns what to do next, as it is printed.
///
/// # Errors
/// When a name is none, a file is there already, or cannot be written. Then nothing stays of what was written.
pub fn init(options: &InitOptions) -> Result<String, InitError> {
    if options.apart {
        return apart::init(options);
    }
    let files = files(options)?;
    make_directory(&options.dir)?;
    let existing = files.iter().map(|(name, _)| options.dir.join(name)).find(|path| fs::symlink_metadata(path).is_ok());
    if let Some(path) = existing {
        return Err(InitError::Exists(path));
    }
    let mut written = Vec::new();
    for (name, text) in &files {
        let path = options.dir.join(name);
        if let Err(source) = write_new(&path, text) {
            remove_all(&written);
            return Err(InitError::File { path, source });
        }
        written.push(path);
    }
    Ok(next_steps(options))
}

/// All files with their texts. Nothing is written yet.
fn files(options: &InitOptions) -> Result<Vec<(String, String)>, InitError> {
    check_names(options)?;
    let mut files = Vec::new();
    let issuer = match &options.ca {
        None => {
            let (certificate, key, issuer) = new_authority()?;
            files.push(("ca.crt".to_owned(), certificate));
            files.push(("ca.key".to_owned(), key));
            issuer
        }
        Some(dir) => {
            let read = |name: &str| {
                let path = dir.join(name);
                fs::read_to_string(&path).map_err(|source| InitError::File { path, source })
            };
            files.push(("ca.crt".to_owned(), read("ca.crt")?));
            Issuer::new(ca_params(), KeyPair::from_pem(&read("ca.key")?)?)
        }
    };
    files.extend(signed("server", &issuer, server_names(options), ExtendedKeyUsagePurpose::ServerAuth)?);
    for client in clients(options) {
        files.extend(signed(client, &issuer, Vec::new(), ExtendedKeyUsagePurpose::ClientAuth)?);
        files.push((format!("{client}.token"), format!("{}\n", random_hex()?)));
    }
    files.push(("config.toml".to_owned(), config(options)));
    Ok(files)
}

/// An authority's certificate and key as text, and the authority itself.
fn new_authority() -> Result<(String, String, Issuer<'static, KeyPair>), InitError> {
    let key = KeyPair::generate()?;
    let params = ca_params();
    Ok((params.self_signed(&key)?.pem(), key.serialize_pem(), Issuer::new(params, key)))
}

/// What the daemon's certificate is good for.
fn server_names(options: &InitOptions) -> Vec<String> {
    let mut names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    for name in &options.names {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    names
}

/// A certificate and its key.
fn signed(
    name: &str,
    issuer: &Issuer<'_, KeyPair>,
    names: Vec<String>,
    purpose: ExtendedKeyUsagePurpose,
) -> Result<[(String, String); 2], InitError> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![purpose];
    params.use_authority_key_identifier_extension = true;
    valid_for(&mut params, CERTIFICATE_DAYS);
    let certificate = params.signed_by(&key, issuer)?;
    Ok([(format!("{name}.crt"), certificate.pem()), (format!("{name}.key"), key.serialize_pem())])
}

fn ca_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, CA_NAME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    valid_for(&mut params, CA_DAYS);
    params
}

fn valid_for(params: &mut CertificateParams, days: i64) {
    let now = OffsetDateTime::now_utc();
    params.not_before = now - CLOCKS_DIFFER;
    params.not_after = now + Duration::days(days);
    let mut serial = [0; 16];
    if getrandom::fill(&mut serial).is_ok() {
        serial[0] &= 0x7f;
        params.serial_number = Some(SerialNumber::from_slice(&serial));
    }
}

fn clients(options: &InitOptions) -> Vec<&str> {
    if options.tenants.is_empty() { vec![CLIENT] } else { options.tenants.iter().map(String::as_str).collect() }
}

fn check_names(options: &InitOptions) -> Result<(), InitError> {
    /// Their files would be in the way.
    const TAKEN: [&str; 2] = ["ca", "server"];

    let wrong = |option, name: &String, problem: &str| {
        Err(InitError::Name { option, name: name.clone(), problem: problem.to_owned() })
    };
    for name in &options.names {
        if rustls::pki_types::ServerName::try_from(name.as_str()).is_err() {
            return wrong("name", name, "must be a host's name or an address, without a port");
        }
    }
    for (index, tenant) in options.tenants.iter().enumerate() {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if tenant.is_empty() || tenant.len() > 64 || !tenant.bytes().all(plain) || tenant.starts_with('-') {
            return wrong("tenant", tenant, "must be 1 to 64 small letters, digits or dashes");
        }
        if TAKEN.contains(&tenant.as_str()) || options.tenants[..index].contains(tenant) {
            return wrong("tenant", tenant, "is taken");
        }
    }
    Ok(())
}

/// The first user that tenants get. Distributions and systemd give out none from here to 100000, where those of containers begin.
const FIRST_UID: u32 = 70_000;

/// The users of each tenant: sessions that have something running or kept.
const UIDS_PER_TENANT: u32 = 64;

fn config(options: &InitOptions) -> String {
    let path = |name: &str| toml::Value::from(options.dir.join(name).display().to_string()).to_string();
    let mut text = format!(
        "# Made by `executor-daemon init`. Every option of `executor-daemon serve` can stand here.\n\
         listen = [\"tcp:0.0.0.0:{PORT}\"]\n\
         tls_cert_file = {}\ntls_key_file = {}\nclient_ca_file = {}\n",
        path("server.crt"),
        path("server.key"),
        path("ca.crt"),
    );
    if options.tenants.is_empty() {
        let _infallible = writeln!(text, "token_file = {}", path("client.token"));
    }
    for (tenant, first) in options.tenants.iter().zip((FIRST_UID..).step_by(UIDS_PER_TENANT as usize)) {
        let _infallible = write!(
            text,
            "\n[tenants.{tenant}]\ncertificate_names = [\"{tenant}\"]\ntoken_file = {}\n",
            path(&format!("{tenant}.token"))
        );
        let range = format!("{first}-{}", first + UIDS_PER_TENANT - 1);
        if crate::config::can_run_as(&range) {
            let _infallible = write!(
                text,
                "# Its commands run as these users, one for each session. Nobody else on this host may be one of them.\n\
                 uid_range = \"{range}\"\n"
            );
        }
    }
    text
}

fn next_steps(options: &InitOptions) -> String {
    let dir = options.dir.display();
    let host = options.names.first().map_or("localhost", String::as_str);
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let mut text = format!("Wrote {dir}: certificates good for {CERTIFICATE_DAYS} days, ");
    text += &match &options.ca {
        None => format!("a CA of their own for {CA_DAYS}.\n"),
        Some(ca) => format!("signed by the CA of {}.\n", ca.display()),
    };
    let run_as = if crate::config::has_default_user() { "" } else { " --run-as nobody" };
    let _infallible = write!(text, "\nStart the daemon:\n  executor-daemon serve --config {dir}/config.toml{run_as}\n");
    text += "\nConnect, with ca.crt and a client's two files at hand (ca.key stays here):\n";
    for client in clients(options) {
        let _infallible = writeln!(
            text,
            "  tool-client --endpoint https://{host}:{PORT} --ca {dir}/ca.crt --cert {dir}/{client}.crt --key \
             {dir}/{client}.key info"
        );
    }
    text
}

fn make_directory(path: &Path) -> Result<(), InitError> {
    let failed = |source| InitError::File { path: path.to_owned(), source };
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
    let mode = fs::metadata(path).map_err(failed)?.mode() & 0o7777;
    if mode & 0o022 != 0 { Err(InitError::Open { path: path.to_owned(), mode }) } else { Ok(()) }
}

/// Writes a file that was not there, readable by its owner only, and sees that it is on the disk.
fn write_new(path: &Path, text: &str) -> io::Result<()> {
    let mut file: File = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    if written.is_err() {
        // It is ours, and no use to anybody.
        let _ = fs::remove_file(path);
    }
    written
}

/// Takes back what was written. What stays behind is in the way of the next attempt, which says so.
fn remove_all(written: &[PathBuf]) {
    for path in written {
        let _ = fs::remove_file(path);
    }
}

/// 256 random bits, as a token.
fn random_hex() -> Result<String, InitError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| InitError::File {
        path: "/dev/urandom".into(),
        source: io::Error::other(error.to_string()),
    })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::tls::{ServerTls, names};

    fn options(dir: &Path) -> InitOptions {
        InitOptions { dir: dir.to_owned(), names: Vec::new(), tenants: Vec::new(), ca: None, apart: false }
    }

    #[test]
    fn the_files_are_private_and_fit_together() {
        let dir = tempfile::tempdir().expect("a directory");
        let here = dir.path().join("new/tls");
        let tenants = vec!["a".to_owned(), "b".to_owned()];
        init(&InitOptions { tenants, names: vec!["daemon.example".to_owned()], ..options(&here) }).expect("made");
        assert_eq!(fs::metadata(&here).expect("there").permissions().mode() & 0o777, 0o700);
        let files: Vec<_> = fs::read_dir(&here).expect("there").map(|file| file.expect("a file")).collect();
        assert_eq!(files.len(), 2 + 2 + 2 * 3 + 1);
        for file in &files {
            assert_eq!(file.metadata().expect("there").permissions().mode() & 0o777, 0o600, "{file:?}");
        }
        let read = |name: &str| fs::read(here.join(name)).expect("there");
        let tls = ServerTls {
            chain: read("server.crt"),
            key: read("server.key"),
            client_ca: Some(read("ca.crt")),
            certificate_required: true,
        };
        tls.acceptor().expect("they fit");
        let certificate = executor_proto::tls::certificates(&read("a.crt")).expect("one");
        assert_eq!(names(&certificate[0]), ["a"]);
        assert_ne!(read("a.token"), read("b.token"));
    }

    #[test]
    fn nothing_is_overwritten_and_nothing_is_left_half_done() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join("client.key"), "mine").expect("written");
        let error = init(&options(dir.path())).expect_err("a file is there").to_string();
        assert_eq!(error, format!("{}/client.key: exists already, and nothing is overwritten", dir.path().display()));
        assert_eq!(fs::read_dir(dir.path()).expect("there").count(), 1);
        // Also a link to nowhere is there.
        fs::remove_file(dir.path().join("client.key")).expect("removed");
        std::os::unix::fs::symlink("/nowhere/x", dir.path().join("ca.key")).expect("a link");
        assert!(matches!(init(&options(dir.path())), Err(InitError::Exists(_))));
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).expect("a mode");
        assert!(matches!(init(&options(dir.path())), Err(InitError::Open { mode: 0o777, .. })));
    }

    #[test]
    fn an_authority_that_is_there_signs_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let [old, new] = ["old", "new"].map(|name| dir.path().join(name));
        init(&options(&old)).expect("made");
        init(&InitOptions { ca: Some(old.clone()), ..options(&new) }).expect("made");
        assert!(!new.join("ca.key").exists(), "the authority's key stays where it is");
        let read = |dir: &Path, name: &str| fs::read(dir.join(name)).expect("there");
        assert_eq!(read(&old, "ca.crt"), read(&new, "ca.crt"));
        let certificate =
            |dir: &Path| executor_proto::tls::certificates(&read(dir, "client.crt")).expect("one").remove(0);
        let roots = executor_proto::tls::roots(&read(&old, "ca.crt")).expect("a root");
        let verifier =
            rustls::server::WebPkiClientVerifier::builder_with_provider(roots.into(), executor_proto::tls::provider());
        let verifier = verifier.build().expect("a verifier");
        for dir in [&old, &new] {
            let now = rustls::pki_types::UnixTime::now();
            verifier.verify_client_cert(&certificate(dir), &[], now).expect("signed by the same");
        }
    }

    #[test]
    fn names_that_are_none_are_refused_before_anything_is_written() {
        let dir = tempfile::tempdir().expect("a directory");
        let here = dir.path().join("x");
        for (names, tenants) in [
            (vec!["a b"], vec![]),
            (vec!["host:7700"], vec![]),
            (vec![], vec!["A"]),
            (vec![], vec!["../x"]),
            (vec![], vec!["server"]),
            (vec![], vec!["a", "a"]),
            (vec![], vec![""]),
        ] {
            let own = |list: Vec<&str>| list.into_iter().map(str::to_owned).collect();
            let asked = InitOptions { names: own(names), tenants: own(tenants), ..options(&here) };
            let error = init(&asked).expect_err("no name");
            assert!(error.is_usage(), "{error}");
        }
        assert!(!here.exists());
    }
}
