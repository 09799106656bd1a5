//! What `--help` says, as a file that reviewers read. `UPDATE_GOLDENS=1` writes them anew.

use super::*;

const SUBCOMMANDS: [&str; 11] =
    ["bash", "output", "kill", "ps", "logs", "notices", "info", "definitions", "call", "mcp", "completions"];

fn compare(name: &str, said: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/help").join(format!("{name}.txt"));
    if std::env::var_os("UPDATE_GOLDENS").is_some() {
        std::fs::create_dir_all(path.parent().expect("it has one")).expect("made");
        std::fs::write(&path, said).expect("written");
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        said, expected,
        "--help has changed; UPDATE_GOLDENS=1 cargo test -p tool-client --test cli writes {path:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn every_subcommand_has_help_with_examples_and_without_colour() {
    let cli = Cli::new();
    for arguments in std::iter::once(vec!["--help"]).chain(SUBCOMMANDS.map(|name| vec![name, "--help"])) {
        let help = cli.run(&arguments);
        assert_eq!((help.code, help.stderr.as_str()), (Some(0), ""), "{arguments:?}");
        assert!(help.stdout.contains("Examples:\n  tool-client "), "{arguments:?}: {}", help.stdout);
        assert!(!help.stdout.contains('\x1b'), "{arguments:?}");
        let name = if arguments.len() == 1 { "tool-client" } else { arguments[0] };
        compare(name, &help.stdout);
    }
    let help = cli.run(&["--help"]).stdout;
    for name in SUBCOMMANDS {
        assert!(help.contains(&format!("\n  {name} ")), "{name} is not listed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_know_the_subcommands() {
    for shell in ["bash", "zsh", "fish"] {
        let script = Cli::new().run(&["completions", shell]);
        assert_eq!(script.code, Some(0));
        for name in SUBCOMMANDS {
            assert!(script.stdout.contains(name), "{shell} does not know {name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_definitions_are_the_three_tools() {
    let printed = Cli::new().run(&["definitions"]);
    assert_eq!(printed.code, Some(0));
    let definitions: serde_json::Value = serde_json::from_str(&printed.stdout).expect("JSON");
    let names: Vec<_> = definitions.as_array().expect("an array").iter().map(|one| one["name"].clone()).collect();
    assert_eq!(names, ["bash", "bash_kill", "bash_output"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_version_is_told() {
    let version = Cli::new().run(&["--version"]);
    assert_eq!(version.stdout, concat!("tool-client ", env!("CARGO_PKG_VERSION"), "\n"));
}
