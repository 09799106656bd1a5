//! Values as they were written, from the command line and the file, checked one by one so that every mistake is found.

use std::{collections::BTreeMap, fs, path::Path};

use super::{
    keys::{self, KEYS, Key, Kind},
    problem::{Problem, Source},
};

/// Largest file that is read as a configuration.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// The file's table of tenants, which has no flag.
pub(super) const TENANTS: &str = "tenants";

/// What was given on the command line: the texts of each key, by its name in the file.
pub(super) type Flags = BTreeMap<&'static str, Vec<String>>;

/// A value and where it was written.
#[derive(Debug, Clone)]
pub(super) struct Given<T> {
    pub(super) value: T,
    pub(super) source: Source,
}

impl<T> Given<T> {
    /// What is wrong with it.
    pub(super) fn problem(&self, problem: impl Into<String>) -> Problem {
        Problem::new(self.source.clone(), problem)
    }
}

/// All values that were given, and the mistakes found so far.
#[derive(Debug)]
pub(super) struct Values {
    flags: Flags,
    file: Option<(std::path::PathBuf, toml::Table)>,
    /// What stands before the names of keys in messages: the table that they are in.
    at: String,
    /// The file was named and cannot be used: whatever is missing may be in it.
    file_is_unusable: bool,
    pub(super) problems: Vec<Problem>,
}

impl Values {
    /// Reads the file, if one is named. What cannot be read or parsed is a mistake, and the file then counts as empty, but
    /// nothing counts as missing.
    pub(super) fn read(flags: Flags, file: Option<&Path>) -> Self {
        let mut values = Self { flags, file: None, at: String::new(), file_is_unusable: false, problems: Vec::new() };
        let Some(path) = file else { return values };
        match table(path) {
            Ok(table) => {
                for (name, value) in &table {
                    if keys::find(name).is_none() && name != TENANTS {
                        values.problems.push(unknown_key(path, name, value));
                    }
                }
                values.file = Some((path.to_owned(), table));
            }
            Err(problem) => {
                values.file_is_unusable = true;
                values.problems.push(problem);
            }
        }
        values
    }

    /// The values of one tenant's table, which has keys of the list only. `None`: there is no file.
    pub(super) fn of_tenant(&self, name: &str, table: toml::Table) -> Option<Self> {
        let (file, _) = self.file.as_ref()?;
        Some(Self {
            flags: Flags::new(),
            file: Some((file.clone(), table)),
            at: format!("{TENANTS}.{name}."),
            file_is_unusable: false,
            problems: Vec::new(),
        })
    }

    /// Notes a mistake. That something was not given is none while the file that may give it cannot be used.
    pub(super) fn note(&mut self, problem: Problem) {
        if !(self.file_is_unusable && problem.is_of_something_missing()) {
            self.problems.push(problem);
        }
    }

    /// The file and its table of tenants, if it has one.
    pub(super) fn tenants(&self) -> Option<(&Path, &toml::Value)> {
        let (file, table) = self.file.as_ref()?;
        Some((file, table.get(TENANTS)?))
    }

    /// A text.
    pub(super) fn text(&mut self, name: &str) -> Option<Given<String>> {
        self.one(name, |_, raw| match raw {
            Raw::Text(text) if !text.is_empty() => Some(text.to_owned()),
            Raw::Text(_) | Raw::Toml(_) => None,
        })
    }

    /// A list of texts. In the file a single text is a list of one.
    pub(super) fn list(&mut self, name: &str) -> Vec<Given<String>> {
        self.given_list(name).unwrap_or_default()
    }

    /// A list of texts, which may have been given as an empty one.
    pub(super) fn given_list(&mut self, name: &str) -> Option<Vec<Given<String>>> {
        let key = key(name);
        let mut flags = Vec::new();
        for value in self.flags.get(key.name).cloned().unwrap_or_default() {
            flags.push(Given { source: Source::Flag { flag: key.flag, value: value.clone() }, value });
        }
        let (mut entries, mut is_there) = (Vec::new(), false);
        let mut mistaken = Vec::new();
        if let Some((file, table)) = &self.file {
            is_there = table.contains_key(key.name);
            let all = match table.get(key.name) {
                None => &[][..],
                Some(toml::Value::Array(all)) => all,
                Some(one) => std::slice::from_ref(one),
            };
            for one in all {
                let source = entry(file, &self.at, key.name, one);
                match one.as_str() {
                    Some(text) => entries.push(Given { value: text.to_owned(), source }),
                    None => mistaken.push(Problem::new(source, format!("must be {}", key.allowed()))),
                }
            }
        }
        self.problems.extend(mistaken);
        if flags.is_empty() { is_there.then_some(entries) } else { Some(flags) }
    }

    /// `true` or `false`.
    pub(super) fn switch(&mut self, name: &str) -> Option<bool> {
        self.one(name, |_, raw| match raw {
            Raw::Text(text) => text.parse().ok(),
            Raw::Toml(value) => value.as_bool(),
        })
        .map(|given| given.value)
    }

    /// A whole number within the key's range.
    pub(super) fn whole(&mut self, name: &str) -> Option<u64> {
        self.one(name, |key, raw| {
            let number = match raw {
                Raw::Text(text) => text.parse().ok()?,
                Raw::Toml(value) => u64::try_from(value.as_integer()?).ok()?,
            };
            match key.kind {
                Kind::Whole { min, max, .. } => (min..=max).contains(&number).then_some(number),
                Kind::Text | Kind::List | Kind::Switch | Kind::Milliseconds | Kind::Word(_) => None,
            }
        })
        .map(|given| given.value)
    }

    /// A positive, finite number of milliseconds.
    pub(super) fn milliseconds(&mut self, name: &str) -> Option<f64> {
        self.one(name, |_, raw| {
            let number: f64 = match raw {
                Raw::Text(text) => text.parse().ok()?,
                #[expect(clippy::cast_precision_loss, reason = "milliseconds beyond 2^53 are 285 000 years")]
                Raw::Toml(toml::Value::Integer(number)) => *number as f64,
                Raw::Toml(value) => value.as_float()?,
            };
            (number > 0.0 && number.is_finite()).then_some(number)
        })
        .map(|given| given.value)
    }

    /// One of some words.
    pub(super) fn word<T: Copy>(&mut self, name: &str, words: &[(&str, T)]) -> Option<T> {
        self.one(name, |_, raw| match raw {
            Raw::Text(text) => words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value),
            Raw::Toml(_) => None,
        })
        .map(|given| given.value)
    }

    /// Parses the value of the command line and that of the file, notes what cannot be parsed, and takes the former if there
    /// is one.
    fn one<T>(&mut self, name: &str, parse: impl Fn(&'static Key, Raw<'_>) -> Option<T>) -> Option<Given<T>> {
        let key = key(name);
        let flag = self.flags.get(key.name).and_then(|texts| texts.last()).map(|text| {
            let source = Source::Flag { flag: key.flag, value: text.clone() };
            (parse(key, Raw::Text(text)), source)
        });
        let entry = self.file.as_ref().and_then(|(file, table)| {
            let value = table.get(key.name)?;
            let raw = value.as_str().map_or(Raw::Toml(value), Raw::Text);
            // In the file a number is a number: `"5"` is a mistake there.
            let parsed = match (key.kind, raw) {
                (Kind::Switch | Kind::Whole { .. } | Kind::Milliseconds, Raw::Text(_)) => None,
                (_, raw) => parse(key, raw),
            };
            Some((parsed, entry(file, &self.at, key.name, value)))
        });
        let mut taken = None;
        for (parsed, source) in [flag, entry].into_iter().flatten() {
            match parsed {
                Some(value) if taken.is_none() => taken = Some(Given { value, source }),
                Some(_) => {}
                None => self.problems.push(Problem::new(source, format!("must be {}", key.allowed()))),
            }
        }
        taken
    }
}

/// A value as it was written.
#[derive(Clone, Copy)]
enum Raw<'a> {
    Text(&'a str),
    Toml(&'a toml::Value),
}

fn key(name: &str) -> &'static Key {
    keys::find(name).expect("only keys of the list are asked for")
}

fn entry(file: &Path, at: &str, key: &str, value: &toml::Value) -> Source {
    Source::Entry { file: file.to_owned(), key: format!("{at}{key}"), value: value.to_string() }
}

fn table(path: &Path) -> Result<toml::Table, Problem> {
    let problem = |text: String| Problem::new(Source::File(path.to_owned()), text);
    let metadata = fs::metadata(path).map_err(|error| problem(format!("cannot be read: {error}")))?;
    if !metadata.is_file() {
        return Err(problem("cannot be read: not a regular file".to_owned()));
    }
    if metadata.len() > MAX_FILE_BYTES {
        return Err(problem(format!("is larger than {MAX_FILE_BYTES} bytes, so it is no configuration")));
    }
    let text = fs::read_to_string(path).map_err(|error| problem(format!("cannot be read: {error}")))?;
    text.parse::<toml::Table>().map_err(|error| {
        let line = error.span().map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
        problem(format!("line {line}: {}", error.message()))
    })
}

fn unknown_key(file: &Path, name: &str, value: &toml::Value) -> Problem {
    let hint = match keys::meant(name) {
        Some(meant) => format!("unknown key; did you mean {meant}?"),
        None => {
            let names: Vec<_> = KEYS.iter().map(|key| key.name).collect();
            format!("unknown key; the keys are {}", names.join(", "))
        }
    };
    Problem::new(entry(file, "", name, value), hint)
}
