//! What is said of a call before anything is asked of the executor. Without the `Error: ` in front.

use executor_proto::types::SandboxMode;

use super::number;

/// A tool that does not exist.
#[must_use]
pub fn unknown_tool(name: &str) -> String {
    format!("unknown tool \"{name}\"")
}

/// Arguments that do not fit the schema, all violations in the order of its declaration.
#[must_use]
pub fn invalid_arguments(violations: &[String]) -> String {
    format!("invalid arguments: {}", violations.join("; "))
}

/// Arguments that are no JSON object.
pub const NOT_AN_OBJECT: &str = "\"arguments\" must be an object";

/// A property that must be there and is not.
#[must_use]
pub fn missing_property(name: &str) -> String {
    format!("missing required property \"{name}\"")
}

/// A property of another type than `kind`, a JSON Schema type.
#[must_use]
pub fn wrong_type(name: &str, kind: &str) -> String {
    format!("\"{name}\" must be a {kind}")
}

/// A text that must hold more than blanks.
#[must_use]
pub fn blank(name: &str) -> String {
    format!("invalid {name}: expected a non-empty string")
}

/// A timeout that is not above zero, or infinite.
#[must_use]
pub fn invalid_timeout(milliseconds: f64) -> String {
    format!("invalid timeoutMs: expected a positive number, got {}", number::json(milliseconds))
}

/// A text that the kernel cannot take.
#[must_use]
pub fn nul_byte(name: &str) -> String {
    format!("invalid {name}: contains a NUL byte")
}

/// A task id that is the empty text.
pub const EMPTY_TASK_ID: &str = "invalid task_id: expected a string, got \"\"";

/// A person is asked whether a call may run in a wider sandbox mode than its session's.
#[must_use]
pub fn wider_sandbox(asked: SandboxMode, session: SandboxMode) -> String {
    format!("run in sandbox mode {} instead of the session's {}?", asked.as_str(), session.as_str())
}

/// A call in a wider sandbox mode than its session's, which nobody is there to allow.
#[must_use]
pub fn nobody_allows(asked: SandboxMode, session: SandboxMode) -> String {
    format!(
        "sandbox mode {} is wider than the session's {}, and nothing here may allow it",
        asked.as_str(),
        session.as_str()
    )
}

/// A call that was aborted before its command was started.
#[must_use]
pub fn aborted_before_spawn(reason: Option<&str>) -> String {
    format!("aborted before spawn: {}", reason.unwrap_or("cancelled"))
}
