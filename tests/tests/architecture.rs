//! The house keeps its shape: imports point one way, `unsafe` and signals have one place, and texts have no clock.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use executor_tests::binaries;

/// A source file without its comments, by its path from the workspace.
fn sources(below: &str) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut directories = vec![binaries::workspace().join(below)];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).expect("it can be read") {
            let path = entry.expect("it can be read").path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("sources are text");
                let code = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>();
                let path = path.strip_prefix(binaries::workspace()).expect("it lies there").to_owned();
                found.insert(path, code.join("\n"));
            }
        }
    }
    assert!(!found.is_empty(), "{below} has sources");
    found
}

/// The room that a file of the daemon lies in: the first part of its path below `src`.
fn room(path: &Path) -> String {
    let below = path.components().skip_while(|part| part.as_os_str() != "src").nth(1).expect("it lies below src");
    below.as_os_str().to_string_lossy().trim_end_matches(".rs").to_owned()
}

/// Whatever follows `crate::` in a file, also in the braces of a `use crate::{…}`.
fn imports(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (start, _) in code.match_indices("crate::") {
        if code[..start].ends_with(|before: char| before.is_alphanumeric() || before == '_' || before == '$') {
            continue;
        }
        let rest = &code[start + "crate::".len()..];
        if let Some(list) = rest.strip_prefix('{') {
            let mut depth = 0;
            let mut word = String::new();
            for letter in list.chars() {
                match letter {
                    '{' => depth += 1,
                    '}' if depth == 0 => break,
                    '}' => depth -= 1,
                    ',' if depth == 0 => found.push(std::mem::take(&mut word)),
                    letter if depth == 0 => word.push(letter),
                    _ => {}
                }
            }
            found.push(word);
        } else {
            found.push(rest.chars().take_while(|letter| letter.is_alphanumeric() || "_:".contains(*letter)).collect());
        }
    }
    let first = |path: String| path.trim().split("::").next().unwrap_or_default().trim().to_owned();
    found.into_iter().map(first).filter(|name| !name.is_empty()).collect()
}

/// What a room may not know of, since it lies below it.
const ABOVE: [(&str, &[&str]); 9] = [
    ("ids", &["server", "service", "engine", "keeper", "output", "config", "limits"]),
    ("limits", &["server", "service", "engine", "keeper", "output"]),
    ("output", &["server", "service", "engine"]),
    ("journal", &["server", "service", "engine"]),
    ("sandbox", &["server", "service", "engine"]),
    ("keeper", &["service", "engine", "output"]),
    ("engine", &["server", "service"]),
    ("service", &["server"]),
    ("telemetry", &["server", "engine", "keeper", "output"]),
];

#[test]
fn imports_of_the_daemon_point_one_way() {
    let mut wrong = Vec::new();
    for (path, code) in sources("executor-daemon/src") {
        let room = room(&path);
        let above = ABOVE.iter().find(|(name, _)| *name == room).map_or(&[][..], |(_, above)| above);
        let bad = imports(&code).into_iter().filter(|import| above.contains(&import.as_str()));
        wrong.extend(bad.map(|import| format!("{}: crate::{import}", path.display())));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn crates_point_one_way() {
    for (below, never) in [
        ("proto/src", &["executor_daemon", "tool_client"][..]),
        ("executor-daemon/src", &["tool_client", "executor_tests"]),
        ("tool-client/src", &["executor_tests"]),
    ] {
        for (path, code) in sources(below) {
            for name in never {
                assert!(!code.contains(name), "{} knows {name}", path.display());
            }
        }
    }
}

#[test]
fn unsafe_code_is_in_the_keeper_only() {
    for below in ["proto/src", "executor-daemon", "tool-client", "tests"] {
        for (path, code) in sources(below) {
            let keeper =
                path.starts_with("executor-daemon/src/keeper") || path.ends_with("executor-daemon/src/keeper.rs");
            let words = code.split(|letter: char| !(letter.is_alphanumeric() || letter == '_'));
            let found = words.into_iter().any(|word| word == concat!("un", "safe"));
            assert!(keeper || !found, "{} has it", path.display());
        }
    }
}

#[test]
fn the_words_that_a_model_reads_are_made_without_clock_lock_or_waiting() {
    for (path, code) in sources("tool-client/src") {
        if room(&path) != "text" {
            continue;
        }
        let code = code.split("#[cfg(test)]").next().unwrap_or_default();
        for impure in ["async ", ".await", "Instant::", "SystemTime", "Mutex", "tokio", "std::fs", "std::env"] {
            assert!(!code.contains(impure), "{} has {impure}", path.display());
        }
    }
}

#[test]
fn the_keeper_knows_no_runtime() {
    for (path, code) in sources("executor-daemon/src/keeper") {
        // The engine's end of the pair lives in the server, not in the keeper.
        let link = path.starts_with("executor-daemon/src/keeper/link") || path.ends_with("keeper/link.rs");
        if !link && !path.ends_with("keeper/embedded.rs") {
            let code = code.split("#[cfg(test)]").next().unwrap_or_default();
            assert!(!code.contains("tokio") && !code.contains("tonic"), "{}", path.display());
        }
    }
}

#[test]
fn imports_are_found() {
    let code = "use crate::{a::B, c::{d, e}, f};\nfn x() { crate::g::h(); mycrate::no(); }\nuse crate::i;";
    assert_eq!(imports(code), ["a", "c", "f", "g", "i"]);
}
