//! A model's arguments, checked against a tool's schema.

#[cfg(fuzzing)]
pub(super) mod fuzzing;

use serde_json::{Map, Value};

use super::{
    definitions::{Property, Tool},
    json::{self, Json},
};
use crate::text::{check, number};

/// The arguments that a tool knows, each present with its right type or absent where it may be.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Arguments(Vec<(&'static str, Argument)>);

#[derive(Debug, Clone, PartialEq)]
enum Argument {
    String(String),
    Number(f64),
    Bool(bool),
}

impl Arguments {
    /// Reads a model's text. `Err`: the violations in the order of the schema's declaration.
    pub(crate) fn parse(tool: Tool, text: &str) -> Result<Self, Vec<String>> {
        let parsed = if text.is_empty() { Some(Json::Object(Vec::new())) } else { json::parse(text) };
        let Some(Json::Object(mut members)) = parsed else {
            return Err(vec![check::NOT_AN_OBJECT.to_owned()]);
        };
        let mut known = Vec::new();
        let mut violations = Vec::new();
        for Property { name, kind, required } in tool.definition().properties() {
            let Some(last) = members.iter().rposition(|(key, _)| key == name) else {
                if required {
                    violations.push(check::missing_property(name));
                }
                continue;
            };
            match (kind, std::mem::replace(&mut members[last].1, Json::Null)) {
                ("string", Json::String(value)) => known.push((name, Argument::String(value))),
                ("number", Json::Number(value)) => known.push((name, Argument::Number(value))),
                ("boolean", Json::Bool(value)) => known.push((name, Argument::Bool(value))),
                (kind, _) => violations.push(check::wrong_type(name, kind)),
            }
        }
        if violations.is_empty() { Ok(Self(known)) } else { Err(violations) }
    }

    /// A text. Absent ones that are not required, and names that the schema does not have, are `None`.
    pub(crate) fn string(&self, name: &str) -> Option<&str> {
        self.find(name).and_then(|value| if let Argument::String(text) = value { Some(text.as_str()) } else { None })
    }

    pub(crate) fn number(&self, name: &str) -> Option<f64> {
        self.find(name).and_then(|value| if let Argument::Number(number) = value { Some(*number) } else { None })
    }

    pub(crate) fn bool(&self, name: &str) -> Option<bool> {
        self.find(name).and_then(|value| if let Argument::Bool(bool) = value { Some(*bool) } else { None })
    }

    /// All of them as JSON, in the order of the schema's declaration.
    pub(crate) fn to_map(&self) -> Map<String, Value> {
        let value = |argument: &Argument| match argument {
            Argument::String(text) => Value::String(text.clone()),
            Argument::Number(value) => number::value(*value),
            Argument::Bool(value) => Value::Bool(*value),
        };
        self.0.iter().map(|(name, argument)| ((*name).to_owned(), value(argument))).collect()
    }

    fn find(&self, name: &str) -> Option<&Argument> {
        self.0.iter().find(|(key, _)| *key == name).map(|(_, value)| value)
    }
}

/// Whether a text is blank after JavaScript's `trim`: its white space is Unicode's and U+FEFF, without U+0085.
pub(crate) fn is_blank(text: &str) -> bool {
    text.chars().all(|character| (character.is_whitespace() && character != '\u{85}') || character == '\u{feff}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn violations(text: &str) -> String {
        Arguments::parse(Tool::Bash, text).expect_err("it has violations").join("; ")
    }

    #[test]
    fn violations_come_in_the_order_of_the_declaration() {
        let cases = [
            ("", "missing required property \"command\"; missing required property \"description\""),
            (r#"{"command":1}"#, "\"command\" must be a string; missing required property \"description\""),
            (
                r#"{"timeoutMs":"x","description":null,"command":"x","run_in_background":1,"workdir":["a"]}"#,
                "\"description\" must be a string; \"timeoutMs\" must be a number; \"workdir\" must be a string; \
                 \"run_in_background\" must be a boolean",
            ),
            ("null", "\"arguments\" must be an object"),
            ("[]", "\"arguments\" must be an object"),
            ("\"{}\"", "\"arguments\" must be an object"),
            ("{\"command\": \"x\"", "\"arguments\" must be an object"),
            (" ", "\"arguments\" must be an object"),
        ];
        for (text, joined) in cases {
            assert_eq!(violations(text), joined, "{text}");
        }
    }

    #[test]
    fn the_last_of_equal_keys_counts_and_unknown_ones_do_not() {
        let text = r#"{"command":1,"env":{"A":"b"},"description":"d","command":"x","timeoutMs":1e999,"stdin":"s"}"#;
        let arguments = Arguments::parse(Tool::Bash, text).expect("valid");
        assert_eq!(arguments.string("command"), Some("x"));
        assert_eq!(arguments.number("timeoutMs"), Some(f64::INFINITY));
        assert_eq!(arguments.string("stdin"), None);
        assert_eq!(arguments.bool("run_in_background"), None);
        assert_eq!(
            serde_json::to_string(&arguments.to_map()).expect("printable"),
            r#"{"command":"x","description":"d","timeoutMs":null}"#
        );
        assert_eq!(violations(r#"{"command":"x","description":"d","command":1}"#), "\"command\" must be a string");
    }

    #[test]
    fn blank_is_what_javascript_trims() {
        for text in
            ["", "  \t\n", "\u{feff}", "\u{a0}\u{2003}\u{3000}\u{2028}\u{2029}", "\u{b}\u{c}\r", "\u{1680}\u{202f}"]
        {
            assert!(is_blank(text), "{text:?}");
        }
        for text in ["\u{85}", "\u{200b}", "\u{180e}", "\u{1c}", "\0", " x "] {
            assert!(!is_blank(text), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn arguments_reach_the_tool_as_they_were_written(command in any::<String>(), timeout in any::<f64>(), background: bool) {
            let text = serde_json::json!({"x": 1, "command": command, "description": "d", "timeoutMs": timeout,
                "run_in_background": background}).to_string();
            match Arguments::parse(Tool::Bash, &text) {
                Ok(arguments) => {
                    prop_assert_eq!(arguments.string("command"), Some(command.as_str()));
                    prop_assert_eq!(arguments.number("timeoutMs"), Some(timeout));
                    prop_assert_eq!(arguments.bool("run_in_background"), Some(background));
                }
                // What is not finite is printed as null.
                Err(violations) => {
                    prop_assert!(!timeout.is_finite());
                    prop_assert_eq!(violations, vec!["\"timeoutMs\" must be a number".to_owned()]);
                }
            }
        }
    }
}
