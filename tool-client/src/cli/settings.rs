//! Where the executor is and for whom calls are made: flags, then environment, then the config file.

use std::{
    ffi::{OsStr, OsString},
    io::ErrorKind,
    path::{Path, PathBuf},
};

use executor_proto::types::{OwnerId, SandboxMode};

use super::{Failure, arguments::Global};
use crate::executor::connect::{Access, ClientFiles, ClientTls, Endpoint, Token};

/// What a call is made with.
#[derive(Debug)]
pub(super) struct Settings {
    /// Several are the hosts of one executor, none is an embedded one.
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) access: Access,
    pub(super) owner: Option<OwnerId>,
    /// `None`: the executor's default.
    pub(super) sandbox: Option<SandboxMode>,
}

/// What the config file says, as far as it can be read.
#[derive(Debug, Default, PartialEq, Eq)]
struct Config {
    endpoint: Option<String>,
    files: Files,
    owner: Option<String>,
    sandbox: Option<SandboxMode>,
}

/// The files that say who we are and whom we trust, as one source names them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Files {
    token: Option<PathBuf>,
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
}

impl Files {
    /// Each of these, or where it is not named the other.
    fn or(self, other: Self) -> Self {
        Self {
            token: self.token.or(other.token),
            ca: self.ca.or(other.ca),
            cert: self.cert.or(other.cert),
            key: self.key.or(other.key),
        }
    }
}

/// Where settings other than flags come from.
struct Surroundings {
    endpoint: Option<OsString>,
    files: Files,
    config: Option<PathBuf>,
}

impl Surroundings {
    fn of_this_process() -> Self {
        // Set but empty is how shells and compose files say "not set".
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let base = set("XDG_CONFIG_HOME")
            .map(PathBuf::from)
            .filter(|base| base.is_absolute())
            .or_else(|| set("HOME").map(|home| Path::new(&home).join(".config")));
        Self {
            // Empty here is a script whose variable was not set; this host instead would be the wrong one.
            endpoint: std::env::var_os("EXECUTOR_ENDPOINT"),
            files: Files {
                token: set("EXECUTOR_TOKEN_FILE").map(PathBuf::from),
                ca: set("EXECUTOR_CA_FILE").map(PathBuf::from),
                cert: set("EXECUTOR_CERT_FILE").map(PathBuf::from),
                key: set("EXECUTOR_KEY_FILE").map(PathBuf::from),
            },
            config: base.map(|base| base.join("tool-client/config.toml")),
        }
    }
}

impl Settings {
    /// The settings of this call.
    ///
    /// # Errors
    /// One usage error that names everything that is wrong.
    pub(super) fn resolve(flags: Global) -> Result<Self, Failure> {
        Self::from(flags, Surroundings::of_this_process())
    }

    fn from(flags: Global, surroundings: Surroundings) -> Result<Self, Failure> {
        let mut problems = Vec::new();
        let config = surroundings.config.as_deref().map(|path| read(path, &mut problems)).unwrap_or_default();
        let config_name = surroundings.config.as_deref().unwrap_or(Path::new("config file")).display().to_string();

        let endpoint = (flags.endpoint.map(|text| ("--endpoint", text)))
            .or(surroundings.endpoint.map(|text| ("EXECUTOR_ENDPOINT", text)))
            .or(config.endpoint.map(|text| (config_name.as_str(), text.into())));
        let endpoints = endpoint.and_then(|(source, text)| {
            parse_endpoints(&text).map_err(|problem| problems.push(format!("{source}: {problem}"))).ok()
        });
        if endpoints.as_ref().is_none_or(Vec::is_empty) && problems.is_empty() && flags.token_file.is_some() {
            problems
                .push("--token-file is for a daemon: give --endpoint, EXECUTOR_ENDPOINT or a config file".to_owned());
        }
        let endpoints = endpoints.unwrap_or_default();
        let of_flags = Files { token: flags.token_file, ca: flags.ca, cert: flags.cert, key: flags.key };
        let files = of_flags.or(surroundings.files).or(config.files);
        let access = endpoints.first().map(|endpoint| access(endpoint, files, &mut problems)).unwrap_or_default();
        let owner = flags.owner.or(config.owner);
        if let Some(owner) = owner.as_ref().filter(|owner| owner.contains(char::is_control)) {
            problems.push(format!("--owner {owner:?}: an owner has no control characters"));
        }
        if !problems.is_empty() {
            return Err(Failure::Usage(problems.join("; ")));
        }
        let owner = owner.map(OwnerId);
        Ok(Self { endpoints, access, owner, sandbox: flags.sandbox.or(config.sandbox) })
    }
}

/// What the files hold, as far as the endpoint has a use for it: an embedded executor knows its caller, and what is set for
/// other endpoints need not even be there.
fn access(endpoint: &Endpoint, files: Files, problems: &mut Vec<String>) -> Access {
    let Files { token, ca, cert, key } = files;
    let token = token.and_then(|path| Token::read(&path).map_err(|error| problems.push(error.to_string())).ok());
    if !endpoint.is_tls() {
        return Access { token, tls: None };
    }
    let identity = match (cert, key) {
        (Some(cert), Some(key)) => Some((cert, key)),
        (None, None) => None,
        (Some(_), None) => {
            problems.push("a certificate needs its key: --key FILE, EXECUTOR_KEY_FILE or key_file".to_owned());
            None
        }
        (None, Some(_)) => {
            problems.push("a key needs its certificate: --cert FILE, EXECUTOR_CERT_FILE or cert_file".to_owned());
            None
        }
    };
    let Some(ca) = ca else {
        problems.push(format!(
            "{endpoint}: https:// needs the CA that has signed the daemon's certificate: --ca FILE, EXECUTOR_CA_FILE or \
             ca_file{}",
            if token.is_none() && identity.is_none() {
                "; and what the daemon knows you by: --cert FILE and --key FILE, or --token-file FILE"
            } else {
                ""
            }
        ));
        return Access { token, tls: None };
    };
    let tls = ClientTls::read(&ClientFiles { ca, identity });
    Access { token, tls: tls.map_err(|error| problems.push(error.to_string())).ok() }
}

fn parse_endpoints(text: &OsStr) -> Result<Vec<Endpoint>, String> {
    let text = text.to_str().ok_or_else(|| format!("endpoint {text:?} is not UTF-8"))?;
    Endpoint::parse_list(text).map_err(|error| error.to_string())
}

/// A file that is not there says nothing.
fn read(path: &Path, problems: &mut Vec<String>) -> Config {
    let name = path.display();
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Config::default();
        }
        Err(error) => {
            problems.push(format!("{name}: {error}"));
            return Config::default();
        }
    };
    let base = path.parent().unwrap_or(Path::new("/"));
    let mut found = Vec::new();
    let config = parse(&text, base, &mut found);
    problems.extend(found.into_iter().map(|problem| format!("{name}: {problem}")));
    config
}

/// Takes what is right, and notes everything that is not.
fn parse(text: &str, base: &Path, problems: &mut Vec<String>) -> Config {
    let mut config = Config::default();
    let table = match text.parse::<toml::Table>() {
        Ok(table) => table,
        Err(error) => {
            let line = error.span().map_or(1, |span| text[..span.start.min(text.len())].lines().count().max(1));
            problems.push(format!("line {line}: {}", error.message().replace('\n', " ")));
            return config;
        }
    };
    for (key, value) in table {
        let taken = match (key.as_str(), value) {
            ("endpoint", toml::Value::String(text)) => {
                if let Err(error) = Endpoint::parse_list(&text) {
                    problems.push(error.to_string());
                } else {
                    config.endpoint = Some(text);
                }
                true
            }
            ("token_file" | "ca_file" | "cert_file" | "key_file", toml::Value::String(text)) if !text.is_empty() => {
                let file = match key.as_str() {
                    "token_file" => &mut config.files.token,
                    "ca_file" => &mut config.files.ca,
                    "cert_file" => &mut config.files.cert,
                    _ => &mut config.files.key,
                };
                *file = Some(base.join(text));
                true
            }
            ("owner", toml::Value::String(text)) => {
                config.owner = Some(text);
                true
            }
            ("sandbox", toml::Value::String(word)) => {
                config.sandbox = SandboxMode::parse(&word);
                if config.sandbox.is_none() {
                    let words = SandboxMode::ALL.map(SandboxMode::as_str).join(", ");
                    problems.push(format!("sandbox is {word:?}; expected one of {words}"));
                }
                true
            }
            ("endpoint" | "token_file" | "ca_file" | "cert_file" | "key_file" | "owner" | "sandbox", _) => false,
            _ => {
                problems.push(format!(
                    "unknown key {key:?}; known are endpoint, token_file, ca_file, cert_file, key_file, owner and sandbox"
                ));
                true
            }
        };
        if !taken {
            problems.push(format!("{key} must be a string that is not empty"));
        }
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(endpoint: Option<&str>) -> Global {
        Global { endpoint: endpoint.map(OsString::from), ..Global::default() }
    }

    fn none() -> Files {
        Files { token: Some("/none".into()), ..Files::default() }
    }

    fn problems(failure: Failure) -> String {
        match failure {
            Failure::Usage(line) => line,
            other => panic!("not a usage error: {other:?}"),
        }
    }

    #[test]
    fn flags_win_over_the_environment_and_that_over_the_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config.toml");
        std::fs::write(&path, "endpoint = \"unix:/file\"\nowner = \"me\"\nsandbox = \"read-only\"\n").expect("written");
        let resolve = |flag, variable: Option<&str>, config| {
            let surroundings = Surroundings { endpoint: variable.map(OsString::from), files: Files::default(), config };
            Settings::from(flags(flag), surroundings).expect("all is right")
        };
        let file = || Some(path.clone());
        let endpoint = |settings: &Settings| settings.endpoints.first().map(ToString::to_string);
        let of_flag = resolve(Some("unix:/flag"), Some("unix:/variable"), file());
        assert_eq!(endpoint(&of_flag).as_deref(), Some("unix:/flag"));
        assert_eq!(of_flag.owner, Some(OwnerId("me".into())));
        assert_eq!(of_flag.sandbox, Some(SandboxMode::ReadOnly));
        assert_eq!(endpoint(&resolve(None, Some("unix:/variable"), file())).as_deref(), Some("unix:/variable"));
        assert_eq!(endpoint(&resolve(None, None, file())).as_deref(), Some("unix:/file"));
        assert_eq!(endpoint(&resolve(None, None, Some(dir.path().join("none")))), None);
    }

    #[test]
    fn everything_that_is_wrong_is_said_at_once_in_one_line() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config.toml");
        let wrong = "endpoint = \"ftp://x\"\ntoken_file = 3\nowner = [\"a\"]\ntimeout = 1\nsandbox = \"none\"\n";
        std::fs::write(&path, wrong).expect("written");
        let surroundings = Surroundings { endpoint: None, files: none(), config: Some(path.clone()) };
        let line = problems(Settings::from(flags(Some("https://x:1")), surroundings).expect_err("all is wrong"));
        let parts = [
            "ftp://x",
            "sandbox is \"none\"; expected one of read-only,",
            "token_file must be",
            "owner must be",
            "unknown key \"timeout\"",
            "token file /none",
            "--ca",
        ];
        for part in parts {
            assert!(line.contains(part), "{part}: {line}");
        }
        assert!(!line.contains('\n'), "{line}");

        std::fs::write(&path, "owner = \"a\"\nendpoint = \n").expect("written");
        let surroundings = Surroundings { endpoint: None, files: Files::default(), config: Some(path.clone()) };
        let line = problems(Settings::from(flags(None), surroundings).expect_err("it is no TOML"));
        assert!(line.contains("config.toml: line 2: ") && !line.contains('\n'), "{line}");

        let surroundings =
            Surroundings { endpoint: None, files: Files::default(), config: Some(dir.path().to_owned()) };
        let line = problems(Settings::from(flags(None), surroundings).expect_err("it is a directory"));
        assert!(line.contains("directory"), "{line}");
    }

    #[test]
    fn a_token_file_matters_only_with_an_endpoint_and_is_relative_to_the_config_file() {
        let surroundings = || Surroundings { endpoint: None, files: none(), config: None };
        assert!(Settings::from(flags(None), surroundings()).is_ok());
        let line = problems(Settings::from(flags(Some("unix:/x")), surroundings()).expect_err("no such file"));
        assert!(line.starts_with("token file /none: "), "{line}");

        let text = "token_file = \"token\"\nca_file = \"ca\"\ncert_file = \"/c\"\nkey_file = \"key\"\n";
        let config = parse(text, Path::new("/etc/x"), &mut Vec::new());
        let path = |path: &str| Some(PathBuf::from(path));
        let files =
            Files { token: path("/etc/x/token"), ca: path("/etc/x/ca"), cert: path("/c"), key: path("/etc/x/key") };
        assert_eq!(config.files, files);
    }

    #[test]
    fn what_was_meant_for_another_host_does_not_run_here() {
        let refused = |flags, endpoint: Option<&str>| {
            let surroundings =
                Surroundings { endpoint: endpoint.map(OsString::from), files: Files::default(), config: None };
            problems(Settings::from(flags, surroundings).expect_err("wrong"))
        };
        let line = refused(flags(None), Some(""));
        assert!(line.starts_with("EXECUTOR_ENDPOINT: endpoint \"\""), "{line}");
        let line = refused(Global { token_file: Some("/none".into()), ..flags(None) }, None);
        assert!(line.starts_with("--token-file is for a daemon: give --endpoint"), "{line}");
        let line = refused(Global { owner: Some("a\nb".to_owned()), ..flags(None) }, None);
        assert_eq!(line, "--owner \"a\\nb\": an owner has no control characters");
    }

    #[test]
    fn https_needs_a_ca_and_a_certificate_its_key_and_other_endpoints_neither() {
        let surroundings = || Surroundings {
            endpoint: None,
            files: Files { ca: Some("/none/ca".into()), cert: Some("/none/cert".into()), ..Files::default() },
            config: None,
        };
        for endpoint in [None, Some("unix:/x"), Some("http://x:1")] {
            assert!(Settings::from(flags(endpoint), surroundings()).is_ok(), "{endpoint:?}");
        }
        let https =
            |surroundings| problems(Settings::from(flags(Some("https://x:1")), surroundings).expect_err("wrong"));
        let line = https(surroundings());
        assert!(line.contains("--key FILE") && line.contains("CA file /none/ca: No such file"), "{line}");
        let line = https(Surroundings { endpoint: None, files: Files::default(), config: None });
        assert!(line.starts_with("https://x:1: https:// needs the CA") && line.contains("--ca FILE"), "{line}");
        assert!(line.contains("--cert FILE and --key FILE, or --token-file FILE"), "{line}");
    }
}
