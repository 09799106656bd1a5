//! Recorded cases of what the model reads, and how they are played against an executor.
//!
//! The format is described in `model-text/SPEC.md` §9 of the contract: a file is a list of [`Scenario`]s. [`play`] makes a
//! fresh world for one and gives back every [`Difference`]; none means that it passed.

use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;
use serde_json::Value;

mod play;
mod template;

pub use play::{Faults, Played, check_replays, failures, play, play_all, play_in};

/// One recorded case.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Its name, unique in the file.
    pub name: String,
    /// What it shows.
    #[serde(default)]
    pub about: String,
    /// The executor's configuration.
    #[serde(default)]
    pub config: Config,
    /// Shell lines that are run in `${TMP}` before the executor starts.
    #[serde(default)]
    pub setup: Vec<String>,
    /// Added to the executor's own environment.
    #[serde(default, rename = "processEnv")]
    pub process_env: BTreeMap<String, String>,
    /// The user that the executor runs as.
    #[serde(default)]
    pub uid: Option<u32>,
    /// Milliseconds to wait after the last step before notices are compared.
    #[serde(default, rename = "settleMs")]
    pub settle_ms: Option<u64>,
    /// What is done, in order.
    pub steps: Vec<Step>,
    /// What the sessions are told, in any order.
    #[serde(default)]
    pub notices: Vec<ExpectedNotice>,
    /// What the spill files hold.
    #[serde(default)]
    pub spills: Vec<ExpectedSpill>,
}

/// The executor's configuration; what is absent is at its default.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Config {
    /// Timeout of a run that gives none.
    pub timeout_ms: Option<f64>,
    /// Longest timeout.
    pub max_timeout_ms: Option<f64>,
    /// Tail kept per stream.
    pub max_output_bytes: Option<u64>,
    /// SIGTERM to SIGKILL.
    pub grace_ms: Option<u64>,
    /// Directory that commands start in when none is given.
    pub cwd: Option<String>,
}

/// One step.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Step {
    /// What is done, where it is not a tool call.
    pub op: Option<Operation>,
    /// The tool.
    pub tool: Option<String>,
    /// Its arguments, sent as JSON.
    #[serde(deserialize_with = "present")]
    pub args: Option<Value>,
    /// Its arguments as the model's own text.
    pub raw_args: Option<String>,
    /// The calling agent. `None`: no agent.
    pub session: Option<StepSession>,
    /// Wait before.
    pub sleep_ms: Option<u64>,
    /// Wait after.
    pub sleep_after_ms: Option<u64>,
    /// Wait before, until this task has ended.
    pub await_task: Option<String>,
    /// The call's abort is already raised.
    pub abort_before: bool,
    /// Why.
    pub abort_reason: Option<String>,
    /// The call's abort is raised after so long.
    pub abort_after_ms: Option<u64>,
    /// Name the task id in the answer.
    pub save_task_as: Option<String>,
    /// The task that an operation is about.
    pub task: Option<String>,
    /// How long to sleep.
    pub ms: Option<u64>,
    /// The shell line to run outside the executor.
    #[serde(alias = "sh", alias = "line")]
    pub command: Option<String>,
    /// The stored result to present: `content` and `isError`.
    pub result: Option<Value>,
    /// What must be seen.
    pub expect: Expectation,
}

/// What a step does, where it is not a tool call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Operation {
    /// Presentation of a stored call.
    Present,
    /// A shell line outside the executor.
    Sh,
    /// Wait.
    Sleep,
    /// Wait until a task has ended.
    AwaitTask,
    /// The session's agent leaves the registry.
    DisposeSession,
    /// The tool layer is built anew over the same executor.
    ReloadToolBash,
}

/// A calling agent.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepSession {
    /// Its session.
    pub id: String,
    /// Its directory.
    pub cwd: Option<String>,
}

/// What must be seen; what is absent is not compared.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Expectation {
    /// Whether the result is an error.
    pub is_error: Option<bool>,
    /// The whole text.
    pub text: Option<String>,
    /// Its length in UTF-8, when it is long.
    pub text_bytes: Option<usize>,
    /// Its digest in UTF-8, when it is long.
    pub text_sha256: Option<String>,
    /// How it ends, when it is long.
    pub text_end: Option<String>,
    /// What people see of the call.
    pub present_call: Option<Value>,
    /// What people see of the result.
    pub present_result: Option<Value>,
    /// The output in `presentResult` equals the text.
    pub present_result_output_is_text: bool,
    /// The machine-readable kind of the error.
    pub error: Option<ExpectedError>,
}

/// The machine-readable kind of an error.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpectedError {
    /// `INVALID_ARGS` or `UNKNOWN_TOOL`.
    pub code: String,
}

/// A notice that a session must get.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpectedNotice {
    /// The session.
    pub session: String,
    /// Its words.
    pub text: String,
}

/// A spill file that must be there.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpectedSpill {
    /// Its name in texts.
    pub placeholder: String,
    /// Its size.
    pub bytes: u64,
    /// Its digest.
    pub sha256: String,
}

impl Scenario {
    /// Whether its texts depend on when things happen: it was recorded with waits between the steps, which on a busy machine
    /// are too short.
    #[must_use]
    pub fn is_timed(&self) -> bool {
        self.steps.iter().any(|step| {
            let waits = [step.sleep_ms, step.sleep_after_ms, step.abort_after_ms, step.ms];
            waits.iter().any(Option::is_some)
        })
    }
}

/// Something that was not as recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Where: a step and what of it.
    pub place: String,
    /// As recorded.
    pub expected: String,
    /// As seen.
    pub actual: String,
}

/// Reads a file of scenarios.
///
/// # Errors
/// When it cannot be read or does not have the format.
pub fn read(path: &Path) -> anyhow::Result<Vec<Scenario>> {
    use anyhow::Context as _;
    let text = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is not a file of scenarios", path.display()))
}

/// Keeps `null` apart from absent: the arguments of a stored call may be `null`.
fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}
