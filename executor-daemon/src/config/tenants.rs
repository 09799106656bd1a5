//! The file's `[tenants.NAME]` tables: whom each tenant is known by, and what holds for it.

use std::path::Path;

use super::{
    keys::{self, TENANT_KEYS},
    problem::{Problem, Source},
};
use crate::tls::comparable;

/// Longest name of a tenant. It is a part of file names, twice as long there.
const MAX_NAME_BYTES: usize = 64;

/// The keys that say who a tenant is.
const KNOWN_BY: [&str; 3] = ["token_file", "certificate_names", "peer_uids"];

fn all_keys() -> String {
    [&KNOWN_BY[..], &TENANT_KEYS].concat().join(", ")
}

/// A table as it was written. Each value with where it stands.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TenantTable {
    pub(super) name: String,
    /// Where it stands.
    pub(super) source: Source,
    pub(super) token_file: Option<(String, Source)>,
    pub(super) certificate_names: Vec<(String, Source)>,
    pub(super) peer_uids: Vec<(u32, Source)>,
    /// What else the table says: keys of [`TENANT_KEYS`], not looked at yet.
    pub(super) rules: toml::Table,
}

/// Reads the tables, in the order of their names. Notes everything that is wrong.
pub(super) fn parse(file: &Path, tenants: &toml::Value, problems: &mut Vec<Problem>) -> Vec<TenantTable> {
    let source =
        |key: String, value: &toml::Value| Source::Entry { file: file.to_owned(), key, value: value.to_string() };
    let Some(tables) = tenants.as_table() else {
        problems.push(Problem::new(source("tenants".to_owned(), tenants), "must be tables: [tenants.NAME]"));
        return Vec::new();
    };
    let mut parsed = Vec::new();
    for (name, value) in tables {
        let at = format!("tenants.{name}");
        if !is_name(name) {
            problems.push(Problem::new(
                source(at.clone(), value),
                format!("a tenant's name is 1 to {MAX_NAME_BYTES} letters, digits, dots, dashes or underscores"),
            ));
        }
        let Some(table) = value.as_table() else {
            problems.push(Problem::new(source(at, value), format!("must be a table with any of {}", all_keys())));
            continue;
        };
        let mut tenant = TenantTable {
            name: name.clone(),
            source: source(at.clone(), value),
            token_file: None,
            certificate_names: Vec::new(),
            peer_uids: Vec::new(),
            rules: toml::Table::new(),
        };
        for (key, value) in table {
            let wrong = |problem: &str| Problem::new(source(format!("{at}.{key}"), value), problem);
            let here = || source(format!("{at}.{key}"), value);
            match key.as_str() {
                "token_file" => match value.as_str().filter(|text| !text.is_empty()) {
                    Some(text) => tenant.token_file = Some((text.to_owned(), here())),
                    None => problems.push(wrong("must be a text that is not empty")),
                },
                "certificate_names" => match list(value, |one| one.as_str().filter(|name| !name.is_empty())) {
                    Some(names) => {
                        tenant.certificate_names.extend(names.into_iter().map(|name| (comparable(name), here())));
                    }
                    None => problems.push(wrong("must be one or more texts that are not empty")),
                },
                "peer_uids" => match list(value, |one| one.as_integer().and_then(|uid| u32::try_from(uid).ok())) {
                    Some(uids) => tenant.peer_uids.extend(uids.into_iter().map(|uid| (uid, here()))),
                    None => problems.push(wrong("must be one or more uids, which are numbers")),
                },
                rule if TENANT_KEYS.contains(&rule) => {
                    tenant.rules.insert(rule.to_owned(), value.clone());
                }
                _ => {
                    let known = KNOWN_BY.iter().chain(&TENANT_KEYS).copied();
                    problems.push(wrong(&match keys::nearest(key, known) {
                        Some(meant) => format!("unknown key; did you mean {meant}?"),
                        None => format!("unknown key; the keys are {}", all_keys()),
                    }));
                }
            }
        }
        parsed.push(tenant);
    }
    parsed
}

/// The members of a list, or a single value as a list of one. `None`: one of them is of the wrong kind, or there is none.
fn list<'a, T>(value: &'a toml::Value, read: impl Fn(&'a toml::Value) -> Option<T>) -> Option<Vec<T>> {
    let all = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    all.iter().map(read).collect::<Option<Vec<T>>>().filter(|found| !found.is_empty())
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (Vec<TenantTable>, Vec<String>) {
        let table: toml::Table = text.parse().expect("TOML");
        let mut problems = Vec::new();
        let parsed = parse(Path::new("f"), &table["tenants"], &mut problems);
        (parsed, problems.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn a_tenant_is_known_by_any_of_three_things() {
        let (tenants, problems) = read(
            "[tenants.a]\ntoken_file = 't'\ncertificate_names = ['A.x', 'spiffe://X']\npeer_uids = [5, 6]\n\
             [tenants.b]\ncertificate_names = 'b'\npeer_uids = 7\n[tenants.c]\n",
        );
        assert_eq!(problems, [""; 0]);
        let [a, b, c] = &tenants[..] else { panic!("{tenants:?}") };
        let names =
            |tenant: &TenantTable| tenant.certificate_names.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        let uids = |tenant: &TenantTable| tenant.peer_uids.iter().map(|(uid, _)| *uid).collect::<Vec<_>>();
        assert_eq!((a.token_file.as_ref().map(|(file, _)| file.as_str()), uids(a)), (Some("t"), vec![5, 6]));
        assert_eq!(names(a), ["a.x", "spiffe://X"]);
        assert_eq!((names(b), uids(b)), (vec!["b".to_owned()], vec![7]));
        assert_eq!((c.name.as_str(), &c.token_file, names(c), uids(c)), ("c", &None, vec![], vec![]));
    }

    #[test]
    fn every_mistake_is_one_line_that_says_where() {
        let (_, problems) = read(
            "[tenants.'a b']\ntoken_file = 7\n[tenants.b]\ncertificate_names = []\npeer_uids = [-1]\ncolour = 5\nmax_task = 5\n",
        );
        let starts = [
            "f: tenants.a b = { token_file = 7 }: a tenant's name is 1 to 64",
            "f: tenants.a b.token_file = 7: must be a text",
            "f: tenants.b.certificate_names = []: must be one or more texts",
            "f: tenants.b.colour = 5: unknown key; the keys are token_file, certificate_names, peer_uids, run_as",
            "f: tenants.b.max_task = 5: unknown key; did you mean max_tasks?",
            "f: tenants.b.peer_uids = [-1]: must be one or more uids, which are numbers",
        ];
        assert_eq!(problems.len(), starts.len(), "{problems:?}");
        for (problem, start) in problems.iter().zip(starts) {
            assert!(problem.starts_with(start), "{problem}");
        }
        assert_eq!(read("tenants = 3\n").1, ["f: tenants = 3: must be tables: [tenants.NAME]"]);
        assert_eq!(read("[tenants]\na = 1\n").1.len(), 1);
    }
}
