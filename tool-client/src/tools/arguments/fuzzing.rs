//! What the fuzz target `arguments` does with a model's text. Built under `--cfg fuzzing` only.

use serde_json::Value;

use super::{Arguments, Tool, is_blank};

/// Reads a text as the arguments of every tool.
///
/// # Panics
/// When what was read does not print as something that reads the same, or a refusal is no line of words.
pub fn arguments(text: &str) {
    for tool in Tool::ALL {
        match Arguments::parse(tool, text) {
            Ok(read) => {
                let printed = read.to_map();
                // JSON has no word for an infinite number, so it prints as null, which is of another type.
                if printed.values().any(Value::is_null) {
                    continue;
                }
                let again = Arguments::parse(tool, &Value::Object(printed.clone()).to_string());
                assert_eq!(again.map(|again| again.to_map()), Ok(printed), "as the arguments of {}", tool.name());
            }
            Err(violations) => {
                assert!(!violations.is_empty());
                assert!(violations.iter().all(|violation| !is_blank(violation) && !violation.contains('\n')));
            }
        }
    }
}
