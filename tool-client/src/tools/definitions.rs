//! What the model is told of the tools: committed JSON, read once.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One of the three tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tool {
    Bash,
    BashKill,
    BashOutput,
}

impl Tool {
    /// In the order in which they are sent to the model.
    pub(crate) const ALL: [Self; 3] = [Self::Bash, Self::BashKill, Self::BashOutput];

    /// The tool with this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tool| tool.name() == name)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bash => "bash",
            Self::BashKill => "bash_kill",
            Self::BashOutput => "bash_output",
        }
    }

    pub(crate) fn definition(self) -> &'static ToolDefinition {
        match self {
            Self::Bash => &DEFINITIONS[0],
            Self::BashKill => &DEFINITIONS[1],
            Self::BashOutput => &DEFINITIONS[2],
        }
    }
}

/// A tool as it is sent to the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolDefinition {
    /// Its name.
    pub name: String,
    /// What it does.
    pub description: String,
    /// The JSON Schema of its arguments; keys in the order type, properties, required.
    pub parameters: Value,
}

/// One property of a tool's arguments.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Property {
    pub(crate) name: &'static str,
    /// Its JSON Schema type: `string`, `number` or `boolean`.
    pub(crate) kind: &'static str,
    pub(crate) required: bool,
}

impl ToolDefinition {
    /// The properties of the arguments in the order of their declaration.
    pub(crate) fn properties(&'static self) -> impl Iterator<Item = Property> {
        let required = self.parameters["required"].as_array();
        self.parameters["properties"].as_object().into_iter().flatten().map(move |(name, schema)| Property {
            name,
            kind: schema["type"].as_str().unwrap_or_default(),
            required: required.is_some_and(|required| required.iter().any(|one| one == name)),
        })
    }
}

static DEFINITIONS: LazyLock<[ToolDefinition; 3]> = LazyLock::new(|| {
    [include_str!("schema/bash.json"), include_str!("schema/bash_kill.json"), include_str!("schema/bash_output.json")]
        .map(|text| serde_json::from_str(text).expect("the committed definitions are valid"))
});

/// The definitions of the tools, in the order in which they are sent to the model.
#[must_use]
pub fn definitions() -> &'static [ToolDefinition] {
    &*DEFINITIONS
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Name, type and whether it is required.
    type Parameter = (&'static str, &'static str, bool);

    /// As the original harness has them.
    const PARAMETERS: [(Tool, &[Parameter]); 3] = [
        (
            Tool::Bash,
            &[
                ("command", "string", true),
                ("description", "string", true),
                ("timeoutMs", "number", false),
                ("workdir", "string", false),
                ("run_in_background", "boolean", false),
            ],
        ),
        (Tool::BashKill, &[("task_id", "string", true)]),
        (Tool::BashOutput, &[("task_id", "string", true)]),
    ];

    #[test]
    fn parameters_and_their_order_are_those_of_the_original() {
        assert_eq!(definitions().iter().map(|one| &one.name).collect::<Vec<_>>(), ["bash", "bash_kill", "bash_output"]);
        for (tool, parameters) in PARAMETERS {
            let definition = tool.definition();
            assert_eq!(definition.name, tool.name());
            let properties: Vec<_> = definition.properties().map(|one| (one.name, one.kind, one.required)).collect();
            assert_eq!(properties, parameters);
            let keys: Vec<_> = definition.parameters.as_object().expect("an object").keys().collect();
            assert_eq!(keys, ["type", "properties", "required"]);
            let required: Vec<_> = parameters.iter().filter(|one| one.2).map(|one| one.0).collect();
            assert_eq!(definition.parameters["required"], serde_json::json!(required));
            assert_eq!(definition.parameters["type"], "object");
        }
    }

    /// What is sent is what is committed, up to its layout.
    #[test]
    fn definitions_are_sent_as_they_are_committed() {
        let committed = [
            include_str!("schema/bash.json"),
            include_str!("schema/bash_kill.json"),
            include_str!("schema/bash_output.json"),
        ];
        for (definition, committed) in definitions().iter().zip(committed) {
            let sent = serde_json::to_string_pretty(definition).expect("definitions can be printed");
            assert_eq!(sent, committed.trim_end());
        }
    }

    /// The facts that a model must be told, each in the words that name it.
    #[test]
    fn descriptions_tell_what_a_model_must_know() {
        let bash = &Tool::Bash.definition().description;
        let words = [
            "`bash -c`",
            "fresh",
            "no state",
            "`workdir`",
            "`[exit code: N]`",
            "tail",
            "file",
            "path",
            "`run_in_background`",
            "task id",
            "`bash_output`",
            "`bash_kill`",
        ];
        for word in words {
            assert!(bash.contains(word), "{word}");
        }
        assert!(Tool::BashOutput.definition().description.contains("since the last call"));
        assert!(Tool::BashKill.definition().description.contains("id"));
    }
}
