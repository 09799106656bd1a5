use std::{collections::BTreeMap, fs, os::unix::fs::PermissionsExt};

use super::*;
use crate::config::{CertificateNames, KnownTenant, keys::KEYS, parse};

/// A directory with files in it, removed at the end.
struct Scene {
    dir: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let scene = Self { dir: tempfile::tempdir().expect("a temporary directory") };
        scene.file("token", "0123456789abcdef\n");
        // Whoever the commands run as may enter.
        fs::set_permissions(scene.dir.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
        scene
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.dir.path().join(name);
        fs::write(&path, text).expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("a mode");
        path.to_str().expect("a plain path").to_owned()
    }

    fn around(&self) -> Surroundings {
        Surroundings {
            start_dir: Some(self.dir.path().to_owned()),
            environment: vec![("PATH".into(), "/bin".into()), ("A_TOKEN".into(), "x".into())],
            ..Surroundings::of_this_process()
        }
    }

    /// Loads a command line; commands run as whoever runs this test.
    fn load(&self, arguments: &[&str]) -> Result<Daemon, Vec<String>> {
        let me = nix::unistd::geteuid().to_string();
        let head = ["executor-daemon", "serve", "--run-as", &me, "--state-dir", "state"];
        let asked = parse(head.iter().chain(arguments).map(OsString::from)).expect("a command line");
        let crate::config::Asked::Serve(flags) = asked else { panic!("not serve") };
        let here = format!("{}/", self.dir.path().display());
        load(flags, &self.around())
            .map_err(|problems| problems.iter().map(|problem| problem.to_string().replace(&here, "")).collect())
    }
}

#[test]
fn nothing_but_an_address_gives_the_defaults() {
    let scene = Scene::new();
    let daemon = scene.load(&["--listen", "unix:x.sock"]).expect("a configuration");
    let here = scene.dir.path();
    let environment = Settings::command_environment([("PATH".into(), "/bin".into())]);
    assert_eq!(daemon.server.engine, Settings::new(here.join("state"), here.to_owned(), environment));
    assert_eq!(daemon.listeners, [ListenAddress::Unix(here.join("x.sock"))]);
    let own = KnownTenant {
        name: "default".to_owned(),
        tokens: Vec::new(),
        certificates: CertificateNames::Any,
        peer_uids: if scene.around().uid == 0 { vec![0] } else { vec![scene.around().uid, 0] },
    };
    assert_eq!(daemon.server.tenants, [own]);
    assert!(daemon.server.tls.is_none() && !daemon.sockets_are_shared);
    let decoded = ServerSettings::decode(&daemon.server.encode().expect("it can be handed over"));
    assert_eq!(decoded.expect("and taken"), daemon.server);
}

#[test]
fn the_file_holds_every_key_and_options_win_over_it() {
    let scene = Scene::new();
    scene.file(
        "config.toml",
        "listen = ['unix:a', 'tcp:127.0.0.1:0']\ntoken_file = 'token'\ninsecure = true\ndefault_workdir = '/'\n\
         timeout_ms = 1.5\nmax_timeout_ms = 2\nmax_output_bytes = 1\nmax_spill_bytes = 2\ngrace_ms = 3\n\
         drain_quiet_ms = 4\ndrain_total_ms = 5\nheartbeat_ms = 60\nresume_window_ms = 61\nreap_descendants = true\nmax_tasks_per_owner = 7\n\
         max_tasks = 8\nmax_leftovers_per_owner = 9\nmax_finished_per_owner = 10\nfinished_kept_seconds = 11\n\
         max_completions_per_owner = 12\nlog_level = 'trace'\nlog_format = 'json'\n",
    );
    let config = scene.dir.path().join("config.toml").display().to_string();
    let from_file = scene.load(&["--config", &config]).expect("a configuration");
    assert_eq!(from_file.listeners.len(), 2);
    assert_eq!(from_file.server.tenants[0].tokens, [crate::service::auth::digest(b"0123456789abcdef")]);
    assert_eq!(from_file.server.log, LogSettings { level: LogLevel::Trace, format: LogFormat::Json });
    let engine = &from_file.server.engine;
    let wanted = Settings {
        timeout_ms: 1.5,
        max_timeout_ms: 2.0,
        max_output_bytes: 1,
        max_spill_bytes: 2,
        grace_ms: 3,
        drain_quiet_ms: 4,
        drain_total_ms: 5,
        heartbeat_ms: 60,
        resume_window_ms: 61,
        reap_descendants: true,
        max_tasks: 8,
        max_leftovers_per_owner: 9,
        max_finished_per_owner: 10,
        finished_kept_seconds: 11,
        max_completions_per_owner: 12,
        start_dir: scene.dir.path().to_owned(),
        tenant_defaults: TenantRules {
            max_tasks_per_owner: 7,
            max_tasks: 8,
            ..TenantRules::new("/".into(), engine.tenant_defaults.environment.clone())
        },
        ..Settings::new(engine.state_dir.clone(), "/".into(), Vec::new())
    };
    assert_eq!(*engine, wanted);

    let options = ["--config", &config, "--grace-ms", "500", "--listen", "unix:b", "--reap-descendants=false"];
    let both = scene.load(&options).expect("a configuration");
    assert_eq!(both.server.engine, Settings { grace_ms: 500, reap_descendants: false, ..wanted });
    assert_eq!(both.listeners, [ListenAddress::Unix(scene.dir.path().join("b"))]);
}

#[test]
fn help_states_the_defaults_that_hold() {
    let defaults = Settings::new("/".into(), "/".into(), Vec::new());
    let stated: BTreeMap<_, _> = KEYS.iter().filter_map(|key| Some((key.name, key.default?))).collect();
    for (name, value) in [
        ("timeout_ms", defaults.timeout_ms.to_string()),
        ("max_timeout_ms", defaults.max_timeout_ms.to_string()),
        ("max_output_bytes", defaults.max_output_bytes.to_string()),
        ("max_spill_bytes", defaults.max_spill_bytes.to_string()),
        ("grace_ms", defaults.grace_ms.to_string()),
        ("drain_quiet_ms", defaults.drain_quiet_ms.to_string()),
        ("drain_total_ms", defaults.drain_total_ms.to_string()),
        ("heartbeat_ms", defaults.heartbeat_ms.to_string()),
        ("resume_window_ms", defaults.resume_window_ms.to_string()),
        ("reap_descendants", defaults.reap_descendants.to_string()),
        ("max_tasks_per_owner", defaults.tenant_defaults.max_tasks_per_owner.to_string()),
        ("max_tasks", defaults.max_tasks.to_string()),
        ("max_leftovers_per_owner", defaults.max_leftovers_per_owner.to_string()),
        ("max_finished_per_owner", defaults.max_finished_per_owner.to_string()),
        ("finished_kept_seconds", defaults.finished_kept_seconds.to_string()),
        ("max_completions_per_owner", defaults.max_completions_per_owner.to_string()),
    ] {
        assert_eq!(stated.get(name).copied(), Some(value.as_str()), "{name}");
    }
}

#[test]
fn every_mistake_is_reported_at_once() {
    let scene = Scene::new();
    scene.file(
        "bad.toml",
        "listen = ['https://0.0.0.0:1', 7]\ntoken_file = 'none'\ntimeout_ms = -5\nmax_output_bytes = '64k'\n\
         gracems = 3\ncolour = 'red'\nlog_level = 'loud'\nreap_descendants = 1\ndefault_workdir = 'none'\n",
    );
    let config = scene.dir.path().join("bad.toml").display().to_string();
    let problems = scene
        .load(&[
            "--config",
            &config,
            "--max-tasks",
            "0",
            "--heartbeat-ms",
            "-1",
            "--timeout-ms",
            "soon",
            "--log-format",
            "xml",
        ])
        .expect_err("mistakes");
    let keys = KEYS.iter().map(|key| key.name).collect::<Vec<_>>().join(", ");
    let wanted = [
        "bad.toml: gracems = 3: unknown key; did you mean grace_ms?".to_owned(),
        format!("bad.toml: colour = \"red\": unknown key; the keys are {keys}"),
        "bad.toml: listen = 7: must be one or more texts".to_owned(),
        "bad.toml: listen = \"https://0.0.0.0:1\": must be unix:PATH or tcp:HOST:PORT, which speaks TLS when \
         --tls-cert-file is given"
            .to_owned(),
        "bad.toml: token_file = \"none\": cannot be read: No such file or directory (os error 2)".to_owned(),
        "bad.toml: default_workdir = \"none\": must be a directory that exists".to_owned(),
        "bad.toml: log_level = \"loud\": must be one of error, warn, info, debug, trace".to_owned(),
        "--log-format xml: must be one of text, json".to_owned(),
        "bad.toml: max_output_bytes = \"64k\": must be a whole number of bytes from 1 to 16777216".to_owned(),
        "--heartbeat-ms -1: must be a whole number of milliseconds from 10 to 15000".to_owned(),
        "--max-tasks 0: must be a whole number of tasks from 1 to 1000000".to_owned(),
        "--timeout-ms soon: must be a positive number of milliseconds".to_owned(),
        "bad.toml: timeout_ms = -5: must be a positive number of milliseconds".to_owned(),
        "bad.toml: reap_descendants = 1: must be true or false".to_owned(),
    ];
    let mut problems = problems;
    let mut wanted = wanted.to_vec();
    problems.sort();
    wanted.sort();
    assert_eq!(problems, wanted);
}

#[test]
fn tcp_needs_tokens_and_beyond_loopback_a_word_for_it() {
    let scene = Scene::new();
    let problems = scene.load(&["--listen", "tcp:127.0.0.1:0"]).expect_err("no tokens");
    assert_eq!(problems.len(), 1);
    assert!(problems[0].starts_with("--token-file: must be given to listen on TCP"), "{problems:?}");

    let problems = scene.load(&["--listen", "tcp:0.0.0.0:0", "--token-file", "token"]).expect_err("not insecure");
    assert_eq!(
        problems,
        ["--listen tcp:0.0.0.0:0: other hosts can reach it and nothing is encrypted; give --tls-cert-file and \
          --tls-key-file (`executor-daemon init` makes them), or --insecure if the network is private"]
    );
    scene.load(&["--listen", "tcp:127.0.0.1:0", "--token-file", "token"]).expect("loopback needs no more");
    scene.load(&["--listen", "tcp:0.0.0.0:0", "--token-file", "token", "--insecure"]).expect("it was said");
}

/// The files that `init` makes, below `tls` of the scene's directory.
fn with_certificates() -> (Scene, impl Fn(&str) -> String) {
    let scene = Scene::new();
    let dir = scene.dir.path().join("tls");
    let options =
        crate::init::InitOptions { dir: dir.clone(), names: Vec::new(), tenants: Vec::new(), ca: None, apart: false };
    crate::init::init(&options).expect("made");
    (scene, move |name: &str| dir.join(name).display().to_string())
}

#[test]
fn tls_needs_a_caller_who_is_known_and_then_no_word_for_other_hosts() {
    let (scene, tls) = with_certificates();
    let (chain, key, ca) = (tls("server.crt"), tls("server.key"), tls("ca.crt"));
    let pair = ["--listen", "tcp:0.0.0.0:0", "--tls-cert-file", &chain, "--tls-key-file", &key];
    let with = |more: &[&str]| scene.load(&[&pair, more].concat());
    let problems = with(&[]).expect_err("nobody is known");
    assert!(
        matches!(&problems[..], [one] if one.starts_with("--token-file: must be given to listen on TCP")),
        "{problems:?}"
    );
    let required = |more: &[&str]| with(more).expect("closed").server.tls.expect("TLS").certificate_required;
    assert!(!required(&["--token-file", "token"]));
    assert!(required(&["--client-ca-file", &ca]), "nobody without a certificate");
    assert!(!required(&["--client-ca-file", &ca, "--token-file", "token"]), "a token does too");
}

#[test]
fn mistakes_in_tls_are_reported_at_once_each_where_it_is() {
    let (scene, tls) = with_certificates();
    let (chain, key, ca) = (tls("server.crt"), tls("server.key"), tls("ca.crt"));
    let open = scene.dir.path().join("open.key");
    fs::copy(&key, &open).expect("a copy");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o644)).expect("a mode");
    let base = ["--listen", "tcp:0.0.0.0:0", "--token-file", "token"];
    let wrong = |more: &[&str]| scene.load(&[&base, more].concat()).expect_err("it is wrong");
    let problems = wrong(&["--tls-cert-file", &chain]);
    assert!(problems.iter().any(|one| one.starts_with("--tls-key-file: must be given too")), "{problems:?}");
    let problems = wrong(&["--client-ca-file", &ca]);
    assert!(problems.iter().any(|one| one.starts_with("--tls-cert-file: must be given too")), "{problems:?}");
    let problems = wrong(&["--tls-cert-file", "none", "--tls-key-file", "open.key", "--client-ca-file", "token"]);
    let says = ["--tls-cert-file none: cannot be read", "--tls-key-file open.key: can be read by others (mode 0644)"];
    assert_eq!(problems.len(), says.len(), "{problems:?}");
    assert!(problems.iter().zip(says).all(|(problem, says)| problem.starts_with(says)), "{problems:?}");
    let problems = wrong(&["--tls-cert-file", &chain, "--tls-key-file", "token", "--client-ca-file", "token"]);
    let says = ["--tls-key-file token: holds no private key", "--client-ca-file token: holds no certificate"];
    assert_eq!(problems.len(), says.len(), "{problems:?}");
    assert!(problems.iter().zip(says).all(|(problem, says)| problem.starts_with(says)), "{problems:?}");
    let problems = wrong(&["--tls-cert-file", &chain, "--tls-key-file", &tls("client.key")]);
    assert!(problems[0].ends_with("tls/client.key: is not the certificate's"), "{problems:?}");
}

#[test]
fn tenants_share_nothing_that_they_are_known_by() {
    let (scene, tls) = with_certificates();
    scene.file("a", "0123456789abcde-a\nnext-0123456789abcde-a\n");
    scene.file("b", "0123456789abcde-b\n");
    let ready = format!(
        "shares_user = true\nlisten = 'tcp:0.0.0.0:0'\ntls_cert_file = {:?}\ntls_key_file = {:?}\nclient_ca_file = {:?}\n",
        tls("server.crt"),
        tls("server.key"),
        tls("ca.crt")
    );
    let load = |tenants: &str| {
        let config = scene.file("config.toml", &format!("{ready}{tenants}"));
        scene.load(&["--config", &config])
    };
    let daemon = load(
        "[tenants.a]\ntoken_file = 'a'\ncertificate_names = 'A.x'\npeer_uids = 3000001\n\
         [tenants.b]\ntoken_file = 'b'\ncertificate_names = ['b.x', 'B.y']\n",
    )
    .expect("closed");
    assert!(daemon.sockets_are_shared, "another user is a tenant");
    let names: Vec<_> =
        daemon.server.tenants.iter().map(|tenant| (tenant.name.as_str(), tenant.tokens.len())).collect();
    assert_eq!(names, [("default", 0), ("a", 2), ("b", 1)]);
    assert_eq!(daemon.server.tenants[0].certificates, CertificateNames::These(vec![]), "who is not named is nobody");

    // What is read again is checked again.
    scene.file("b", "next-0123456789abcde-a\n");
    let problems: Vec<_> = daemon.credentials.read().expect_err("shared").iter().map(ToString::to_string).collect();
    assert!(matches!(&problems[..], [one] if one.ends_with("a token in it is also one of tenant a's")), "{problems:?}");
    scene.file("b", "0123456789abcde-b\n");
    daemon.credentials.read().expect("not shared");

    let problems = load(
        "token_file = 'b'\n[tenants.a]\ntoken_file = 'a'\ncertificate_names = 'x'\npeer_uids = [3000001]\n\
         [tenants.b]\ntoken_file = 'b'\ncertificate_names = 'X'\npeer_uids = [3000002, 3000001]\n",
    )
    .expect_err("all three");
    let ends =
        ["a token in it is also one of tenant default's", "x is also tenant a's", "uid 3000001 is also tenant a's"];
    assert_eq!(problems.len(), ends.len(), "{problems:?}");
    for end in ends {
        assert!(problems.iter().any(|problem| problem.ends_with(end)), "{end}: {problems:?}");
    }
}

#[test]
fn certificate_names_without_a_client_ca_are_a_mistake() {
    let scene = Scene::new();
    let config = scene.file("config.toml", "listen = 'unix:x'\n[tenants.a]\ncertificate_names = 'x'\n");
    let problems = scene.load(&["--config", &config]).expect_err("nobody can show one");
    assert!(matches!(&problems[..], [one] if one.ends_with("without --client-ca-file")), "{problems:?}");
}

#[test]
fn a_configuration_without_an_address_is_one_line() {
    let scene = Scene::new();
    assert_eq!(
        scene.load(&[]).expect_err("no address"),
        ["--listen: must be given at least once, as an option or in the file: unix:PATH or tcp:HOST:PORT"]
    );
}

#[test]
fn a_file_that_cannot_be_used_is_the_only_thing_reported() {
    let scene = Scene::new();
    let broken = scene.file("broken.toml", "grace_ms = 1\ntimeout_ms = = 2\n");
    let latin = scene.file("latin.toml", "");
    fs::write(&latin, b"run_as = 'J\xf6rg'\n").expect("a file");
    fs::create_dir(scene.dir.path().join("dir.toml")).expect("a directory");
    let directory = scene.dir.path().join("dir.toml").display().to_string();
    for (file, says) in [
        ("/nowhere.toml", "/nowhere.toml: cannot be read: No such file or directory (os error 2)"),
        (&directory, "dir.toml: cannot be read: not a regular file"),
        (&latin, "latin.toml: cannot be read: stream did not contain valid UTF-8"),
        (&broken, "broken.toml: line 2: "),
    ] {
        // An address on TCP makes a token file needed, none makes an address needed: either may be in the file.
        for more in [&[][..], &["--listen", "tcp:127.0.0.1:0"], &["--listen", "unix:x"]] {
            let problems = scene.load(&[&["--config", file], more].concat()).expect_err("no file");
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].starts_with(says), "{problems:?}");
        }
        // What is written on the command line is wrong whatever the file says.
        let problems = scene.load(&["--config", file, "--grace-ms", "soon"]).expect_err("two mistakes");
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[1].starts_with("--grace-ms soon: "), "{problems:?}");
    }
    // Which user commands run as may be in the file too. Only root is asked for one.
    let mut values = Values::read(BTreeMap::new(), Some(Path::new("/nowhere.toml")));
    let around = Surroundings { uid: 0, ..scene.around() };
    let for_all = Who::read(&mut values, &around);
    default_identity(&mut values, &around, &for_all);
    assert_eq!(values.problems.len(), 1, "{:?}", values.problems);
}

#[test]
fn what_is_unprotected_is_stated_unless_commands_have_a_user_of_their_own() {
    let starts = |command, server, daemon| {
        unprotected(command, server, daemon).and_then(|clause| clause.split(" and can ").next()?.split(',').next())
    };
    let server = Some(ServerUser { uid: 9, gid: 9 });
    assert_eq!(starts(0, None, 0), Some("commands run as root"));
    assert_eq!(starts(0, server, 0), Some("commands run as root"));
    assert_eq!(starts(7, None, 7), Some("commands share the daemon's user"));
    assert_eq!(starts(7, None, 0), Some("the server"));
    assert_eq!(starts(7, server, 0), None);
    let daemon = Scene::new().load(&["--listen", "unix:x.sock"]).expect("a configuration");
    let me = nix::unistd::geteuid().as_raw();
    assert_eq!(daemon.unprotected.as_deref(), unprotected(me, None, me), "commands run as whoever runs this test");
}

#[test]
fn a_start_directory_that_commands_cannot_enter_is_replaced_by_their_home() {
    let scene = Scene::new();
    let home = scene.dir.path().join("home");
    fs::create_dir(&home).expect("a directory");
    let private = scene.dir.path().join("private");
    fs::create_dir(&private).expect("a directory");
    fs::set_permissions(&private, fs::Permissions::from_mode(0o700)).expect("a mode");
    let identity = Identity {
        name: "x".into(),
        uid: 3_999_999,
        uids: 1,
        gid: 3_999_999,
        groups: Vec::new(),
        home: home.clone(),
        change: true,
        capabilities: Some(0),
        allow_setuid: false,
    };
    let rules = TenantRules::new(PathBuf::new(), Vec::new());
    let around = Surroundings { start_dir: Some(private), ..scene.around() };
    let mut values = Values::read(BTreeMap::new(), None);
    assert_eq!(default_workdir(&mut values, &around, Some(&identity), &rules), home);
    let homeless = Identity { home: "/nowhere".into(), ..identity };
    assert_eq!(default_workdir(&mut values, &around, Some(&homeless), &rules), Path::new("/"));
    assert!(values.problems.is_empty());
}

/// Loads a file that listens on a Unix socket.
fn load_file(scene: &Scene, rest: &str) -> Result<Daemon, Vec<String>> {
    let config = scene.file("config.toml", &format!("listen = 'unix:x'\n{rest}"));
    scene.load(&["--config", &config])
}

#[test]
fn what_a_tenants_table_says_wins_over_what_is_said_for_all() {
    let scene = Scene::new();
    let here = scene.dir.path().to_owned();
    for name in ["work", "other"] {
        fs::create_dir(here.join(name)).expect("a directory");
    }
    let daemon = load_file(
        &scene,
        "shares_user = true\nmax_tasks_per_owner = 7\nworkdir_roots = 'work'\nnetwork = false\nmax_watchers = 4\n\
         [tenants.a]\nworkdir_roots = ['other', 'work']\ndefault_workdir = 'other'\nenvironment_allow = ['A_*', 'A_TOKEN']\n\
         sandbox = 'workspace-write'\nwritable_paths = ['token']\nnetwork = true\nsandbox_tool = 'landlock'\nmax_tasks = 1\n\
         max_tasks_per_owner = 2\nmax_processes = 3\nmax_memory_bytes = 1048576\nmax_spill_bytes_in_all = 5\n\
         max_spill_bytes_per_owner = 6\nmax_output_bytes_per_second = 7\nmax_watchers = 8\nmax_requests = 9\nallow_setuid = true\n\
         [tenants.b]\nworkdir_roots = []\n[tenants.default]\nenvironment_allow = []\n",
    )
    .expect("a configuration");
    let engine = &daemon.server.engine;
    let rules = |name: &str| engine.rules(&crate::ids::TenantId(name.to_owned()));
    let for_all = &engine.tenant_defaults;
    assert_eq!((&for_all.workdir_roots, &for_all.default_workdir), (&vec![here.join("work")], &here.join("work")));
    assert_eq!((for_all.network, for_all.max_tasks_per_owner, for_all.max_watchers), (false, 7, Some(4)));
    assert_eq!(rules("unheard-of"), for_all);
    let environment =
        allowed::environment(&[("A_TOKEN".into(), "x".into())], Some(&[allowed::AllowedName::This("A_TOKEN".into())]));
    let a = TenantRules {
        identity: rules("a").identity,
        allow_setuid: true,
        workdir_roots: vec![here.join("other"), here.join("work")],
        default_workdir: here.join("other"),
        environment,
        sandbox: SandboxMode::WorkspaceWrite,
        writable_paths: vec![here.join("token")],
        network: true,
        sandbox_tool: SandboxTool::Landlock,
        max_tasks: 1,
        max_tasks_per_owner: 2,
        max_processes: Some(3),
        max_memory_bytes: Some(1_048_576),
        max_spill_bytes_in_all: Some(5),
        max_spill_bytes_per_owner: Some(6),
        max_output_bytes_per_second: Some(7),
        max_watchers: Some(8),
        max_requests: Some(9),
    };
    assert_eq!(*rules("a"), a);
    let b = TenantRules { workdir_roots: Vec::new(), ..for_all.clone() };
    assert_eq!(*rules("b"), b, "an empty list is one");
    assert_eq!(*rules("default"), TenantRules { environment: allowed::environment(&[], Some(&[])), ..for_all.clone() });
    let decoded = ServerSettings::decode(&daemon.server.encode().expect("it can be handed over"));
    assert_eq!(decoded.expect("and taken"), daemon.server);
}

#[test]
fn every_mistake_in_a_tenants_rules_is_one_line_that_says_where() {
    let scene = Scene::new();
    fs::create_dir(scene.dir.path().join("work")).expect("a directory");
    let problems = load_file(
        &scene,
        "max_requests = 0\n[tenants.a]\nrun_as = 'no-such-user'\nuid_range = '9-5'\ncapabilities = 'CAP_FLY'\nallow_setuid = 1\n\
         shares_user = 'no'\nworkdir_roots = ['work', 'none']\ndefault_workdir = '/'\nenvironment_allow = ['A=B']\nsandbox = 'none'\n\
         writable_paths = 'gone'\nnetwork = 'off'\nsandbox_tool = 'docker'\nmax_tasks = 0\nmax_tasks_per_owner = '1'\nmax_processes = -1\n\
         max_memory_bytes = 5\nmax_spill_bytes_in_all = 0\nmax_spill_bytes_per_owner = 0\nmax_output_bytes_per_second = -1\n\
         max_watchers = 0\nmax_requests = 0\ncolour = 5\n",
    )
    .expect_err("mistakes");
    let says = [
        ("max_requests = 0", "must be a whole number of requests from 1 to 1000000"),
        ("tenants.a.allow_setuid = 1", "must be true or false"),
        ("tenants.a.capabilities = \"CAP_FLY\"", "is no capability"),
        ("tenants.a.colour = 5", "unknown key; the keys are token_file, certificate_names, peer_uids, run_as"),
        ("tenants.a.default_workdir = \"/\"", "must lie in one of workdir_roots"),
        ("tenants.a.environment_allow = \"A=B\"", "must be the name of a variable"),
        ("tenants.a.max_memory_bytes = 5", "must be a whole number of bytes from 1048576"),
        ("tenants.a.max_output_bytes_per_second = -1", "must be a whole number of bytes from 0"),
        ("tenants.a.max_processes = -1", "must be a whole number of processes from 1"),
        ("tenants.a.max_requests = 0", "must be a whole number of requests from 1"),
        ("tenants.a.max_spill_bytes_in_all = 0", "must be a whole number of bytes from 1"),
        ("tenants.a.max_spill_bytes_per_owner = 0", "must be a whole number of bytes from 1"),
        ("tenants.a.max_tasks = 0", "must be a whole number of tasks from 1"),
        ("tenants.a.max_tasks_per_owner = \"1\"", "must be a whole number of tasks from 1"),
        ("tenants.a.max_watchers = 0", "must be a whole number of watchers from 1"),
        ("tenants.a.network = \"off\"", "must be true or false"),
        ("tenants.a.run_as = \"no-such-user\"", "there is no such user on this host"),
        ("tenants.a.sandbox = \"none\"", "must be one of read-only, workspace-write, danger-full-access"),
        ("tenants.a.sandbox_tool = \"docker\"", "must be one of landlock, bubblewrap"),
        ("tenants.a.shares_user = \"no\"", "must be true or false"),
        ("tenants.a.uid_range = \"9-5\"", "cannot be given together with run_as"),
        ("tenants.a.uid_range = \"9-5\"", "must go up"),
        ("tenants.a.workdir_roots = \"none\"", "must be directories that exist"),
        ("tenants.a.writable_paths = \"gone\"", "must exist"),
    ];
    let mut problems: Vec<_> = problems.iter().map(|one| one.replace("config.toml: ", "")).collect();
    problems.sort();
    assert_eq!(problems.len(), says.len(), "{problems:#?}");
    for (problem, (place, says)) in problems.iter().zip(says) {
        assert!(problem.starts_with(&format!("{place}: {says}")), "{problem}\n{place}: {says}");
    }
}

#[test]
fn tenants_of_one_user_are_refused_as_root_unless_all_of_them_say_so() {
    let scene = Scene::new();
    let load = |rest: &str| load_file(&scene, rest);
    let root = scene.around().uid == 0;
    let refused = |given: Result<Daemon, Vec<String>>, end: &str| match given {
        // There is one user only, which is said where the daemon says what is unprotected.
        Ok(daemon) => assert!(!root && daemon.unprotected.is_some_and(|what| what.contains("share a user"))),
        Err(problems) => {
            assert!(matches!(&problems[..], [one] if root && one.contains(end)), "{problems:?}");
        }
    };
    refused(load("[tenants.a]\n[tenants.b]\n"), "uid 0, as those of tenant a, and");
    refused(load("[tenants.a]\nshares_user = true\n[tenants.b]\n"), "uid 0, as those of tenant a, and");
    load("[tenants.a]\nshares_user = true\n[tenants.b]\nshares_user = true\n").expect("both say so");
    load("[tenants.a]\n").expect("whoever started the daemon needs no fence");
    if root {
        refused(load("token_file = 'token'\n[tenants.a]\n"), "uid 0, as those of tenant default, and");
        let ranges = "[tenants.a]\nuid_range = '70000-70063'\n[tenants.b]\nuid_range = ";
        refused(load(&format!("{ranges}'70063-70099'\n")), "uid 70063, as those of tenant a, and");
        let daemon = load(&format!("{ranges}'70064-70099'\n")).expect("one each");
        let uids: Vec<_> = daemon.identities.iter().map(|one| (one.uid, one.uids, one.capabilities)).collect();
        assert_eq!(uids, [(0, 1, None), (70_000, 64, Some(0)), (70_064, 36, Some(0))]);
        refused(load(&format!("server_user = '70001'\n{ranges}'70064-70099'\n")), "must not be the user");
        let peer = "[tenants.a]\nuid_range = '70000-70063'\n[tenants.b]\nrun_as = 'nobody'\npeer_uids = 70001\n";
        refused(load(peer), "commands run as uid 70001");
    }
}

#[test]
fn a_tool_that_cannot_enforce_the_mode_is_no_start() {
    let scene = Scene::new();
    let problems = load_file(
        &scene,
        "sandbox_tool = 'bubblewrap'\nshares_user = true\n[tenants.a]\nsandbox = 'read-only'\n[tenants.b]\n",
    );
    let lines = problems.expect_err("refused");
    let line = "--sandbox-tool: bubblewrap cannot enforce the mode read-only of tenant a, so no command could run; only landlock can";
    assert!(lines.iter().any(|one| one == line), "{lines:?}");
    assert_eq!(lines.iter().filter(|one| one.contains("bubblewrap")).count(), 1, "{lines:?}");
}
