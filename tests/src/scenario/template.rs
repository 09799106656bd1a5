//! Comparing a text with a recorded one that has placeholders in it.
//!
//! `<SPILL:…>` stands for the path of a spill file: the first time for any path that no other placeholder has, from then on
//! for that one. `<PID>` stands for a process id. `<TMP>` has been put into the actual text before.

use std::{collections::BTreeMap, path::PathBuf};

use serde_json::Value;

/// What the placeholders have turned out to be.
#[derive(Debug, Clone, Default)]
pub(super) struct Bindings {
    /// Path by placeholder, e.g. `<SPILL:stdout#2>`.
    pub(super) spills: BTreeMap<String, String>,
    /// The directory that `${TMP}` and `<TMP>` stand for.
    pub(super) tmp: PathBuf,
    /// Task id by name.
    pub(super) tasks: BTreeMap<String, String>,
}

impl Bindings {
    /// An input with its `${…}` placeholders filled in. Others (shell variables) stay.
    pub(super) fn fill(&self, input: &str) -> String {
        let mut filled = input.replace("${TMP}", &self.tmp.to_string_lossy());
        for (name, id) in &self.tasks {
            filled = filled.replace(&format!("${{{name}}}"), id);
        }
        for (placeholder, path) in &self.spills {
            let name = placeholder.trim_start_matches('<').trim_end_matches('>');
            filled = filled.replace(&format!("${{{name}}}"), path);
        }
        filled
    }

    /// A JSON input with its placeholders filled in.
    pub(super) fn fill_json(&self, input: &Value) -> Value {
        map_strings(input, &|text| self.fill(text))
    }

    /// An actual text as it would have been recorded, as far as the placeholders are known.
    pub(super) fn record(&self, actual: &str) -> String {
        let mut recorded = actual.to_owned();
        for (placeholder, path) in &self.spills {
            recorded = recorded.replace(path, placeholder);
        }
        recorded.replace(&*self.tmp.to_string_lossy(), "<TMP>")
    }

    /// Whether an actual text is the recorded one; learns the spills that it names for the first time.
    pub(super) fn matches(&mut self, expected: &str, actual: &str) -> bool {
        let actual = self.record(actual);
        let mut learned = self.clone();
        let fits = learned.fits(expected, &actual);
        if fits {
            *self = learned;
        }
        fits
    }

    /// Whether an actual text ends as recorded; learns like [`Bindings::matches`].
    pub(super) fn matches_end(&mut self, expected: &str, actual: &str) -> bool {
        let recorded = self.record(actual);
        // A path is longer or shorter than its placeholder, so where the end begins is found by its first literal piece.
        let literal = expected.split('<').next().unwrap_or_default();
        let starts: Vec<usize> = recorded.rmatch_indices(literal).map(|(start, _)| start).collect();
        let near = starts.into_iter().take(MOST_STARTS);
        near.into_iter().any(|start| self.matches(expected, &recorded[start..]))
    }

    /// Whether an actual JSON value is the recorded one.
    pub(super) fn matches_json(&mut self, expected: &Value, actual: &Value) -> bool {
        match (expected, actual) {
            (Value::String(expected), Value::String(actual)) => self.matches(expected, actual),
            (Value::Array(expected), Value::Array(actual)) => {
                expected.len() == actual.len()
                    && expected.iter().zip(actual).all(|(expected, actual)| self.matches_json(expected, actual))
            }
            (Value::Object(expected), Value::Object(actual)) => {
                expected.len() == actual.len()
                    && expected
                        .iter()
                        .all(|(key, value)| actual.get(key).is_some_and(|actual| self.matches_json(value, actual)))
            }
            (expected, actual) => expected == actual,
        }
    }

    fn fits(&mut self, expected: &str, actual: &str) -> bool {
        let Some((literal, placeholder, rest)) = split_at_placeholder(expected) else { return expected == actual };
        let Some(after) = actual.strip_prefix(literal) else { return false };
        if let Some(after) = after.strip_prefix(placeholder) {
            // Known: `record` has put the placeholder there.
            return self.fits(rest, after);
        }
        if placeholder == "<PID>" {
            // Bash pads it to five places.
            let id = after.trim_start_matches(' ');
            let digits = id.bytes().take_while(u8::is_ascii_digit).count();
            return digits > 0 && self.fits(rest, &id[digits..]);
        }
        if self.spills.contains_key(placeholder) || !(after.starts_with('/') || after.starts_with("<TMP>/")) {
            return false;
        }
        let end = after.find([']', ',', ' ', '\n', '"']).unwrap_or(after.len());
        let path = after[..end].replace("<TMP>", &self.tmp.to_string_lossy());
        if self.spills.values().any(|known| *known == path) {
            return false;
        }
        let rest_of_actual = after[end..].replace(&after[..end], placeholder);
        self.spills.insert(placeholder.to_owned(), path);
        self.fits(rest, &rest_of_actual)
    }
}

/// More places than this where the recorded end could begin are not tried.
const MOST_STARTS: usize = 64;

/// The text before the first placeholder, the placeholder, and the text after it.
fn split_at_placeholder(text: &str) -> Option<(&str, &str, &str)> {
    let mut from = 0;
    while let Some(start) = text[from..].find('<').map(|start| from + start) {
        if text[start..].starts_with("<PID>") || text[start..].starts_with("<SPILL:") {
            let end = start + text[start..].find('>')? + 1;
            return Some((&text[..start], &text[start..end], &text[end..]));
        }
        from = start + 1;
    }
    None
}

fn map_strings(value: &Value, change: &dyn Fn(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(change(text)),
        Value::Array(items) => Value::Array(items.iter().map(|item| map_strings(item, change)).collect()),
        Value::Object(entries) => {
            Value::Object(entries.iter().map(|(key, value)| (key.clone(), map_strings(value, change))).collect())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bindings() -> Bindings {
        Bindings { tmp: "/tmp/w/t".into(), ..Bindings::default() }
    }

    #[test]
    fn a_spill_is_learned_once_and_then_known() {
        let mut bindings = bindings();
        assert!(bindings.matches("a\n[full output: <SPILL:stdout>]", "a\n[full output: /s/x]"));
        assert!(bindings.matches("<SPILL:stdout>", "/s/x"));
        assert!(!bindings.matches("<SPILL:stdout>", "/s/y"));
        assert!(!bindings.matches("<SPILL:stdout#2>", "/s/x"), "two placeholders never have one path");
        assert!(bindings.matches("<SPILL:stdout#2>, <TMP>/a", "/s/y, /tmp/w/t/a"));
        assert_eq!(bindings.fill("wc ${SPILL:stdout#2} ${HOME} ${TMP}"), "wc /s/y ${HOME} /tmp/w/t");
    }

    #[test]
    fn what_does_not_fit_teaches_nothing() {
        let mut bindings = bindings();
        assert!(!bindings.matches("<SPILL:stdout>] and more", "/s/x]"));
        assert!(bindings.spills.is_empty());
        assert!(bindings.matches("line 1: <PID> Killed", "line 1: 47110 Killed"));
        assert!(bindings.matches("line 1: <PID> Killed", "line 1:  4711 Killed"));
        assert!(!bindings.matches("<PID>", ""));
    }

    #[test]
    fn the_end_of_a_long_text() {
        let mut bindings = bindings();
        assert!(bindings.matches_end("aa\n[full output: <SPILL:stderr>]", "aaaaaa\n[full output: /s/x]"));
        assert_eq!(bindings.record("/s/x"), "<SPILL:stderr>");
        assert!(!bindings.matches_end("aa", "aaab"));
    }
}
