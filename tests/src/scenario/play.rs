//! Playing one scenario.

use std::{fs, process::Stdio, time::Duration};

use executor_proto::types::{OwnerId, TaskId};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tool_client::{
    presentation,
    session::Session,
    tools::{Abort, ErrorCode, ToolResult},
};

use super::{Difference, Expectation, ExpectedNotice, Operation, Scenario, Step, StepSession, template::Bindings};
use crate::{
    backend::{Backend, Setup},
    faults::Plan,
    tell,
    world::World,
};

/// Longest wait for a task to end and for notices to come.
const PATIENCE: Duration = Duration::from_secs(30);

/// Wait after the last step of a scenario with tasks that names none, in which a notice too many would come.
const SETTLE_MS: u64 = 100;

/// What is done to a daemon and the connections to it while a scenario is played. The default is nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    /// A proxy does this to every connection.
    pub wire: Option<Plan>,
    /// The server is killed each time that so long has passed.
    pub kill_server_every: Option<Duration>,
}

/// What came of a scenario.
#[derive(Debug, Clone, Default)]
pub struct Played {
    /// What was not as recorded, in order.
    pub differences: Vec<Difference>,
    /// What this backend cannot give the scenario.
    pub remarks: Vec<String>,
    /// It differed at first, and this is what came of it the second time.
    pub replayed: bool,
}

/// Plays a scenario in a fresh world on a backend, a daemon with these faults.
///
/// # Errors
/// When the world cannot be made.
pub async fn play(scenario: &Scenario, backend: Backend, faults: Faults) -> anyhow::Result<Played> {
    let config = &scenario.config;
    let default = Setup::default();
    let (uid, unable) = backend.give_uid(scenario.uid);
    let setup = Setup {
        timeout_ms: config.timeout_ms.unwrap_or(120_000.0),
        max_timeout_ms: config.max_timeout_ms.unwrap_or(600_000.0),
        max_output_bytes: config.max_output_bytes.unwrap_or(64_000),
        grace_ms: config.grace_ms.unwrap_or(3_000),
        default_workdir: config.cwd.clone(),
        environment: scenario.process_env.clone().into_iter().collect(),
        prepare: scenario.setup.clone(),
        uid,
        faults: faults.wire,
        kill_server_every: faults.kill_server_every,
        ..default
    };
    let mut world = World::start(backend, setup).await?;
    let mut played = play_in(scenario, &mut world).await?;
    played.remarks.extend(unable);
    world.finish().await?;
    Ok(played)
}

/// Of the scenarios that live by waits of a few hundred milliseconds, one in so many may be played again: a busy machine
/// disturbs a few, a defect that shows by chance shows in more.
const ONE_REPLAY_IN: usize = 4;

/// Plays scenarios in fresh worlds, `jobs` of them at the same time, and gives back what came of each, in order. One that is
/// timed and differs is played again, once, when no other is; a remark says so. [`check_replays`] says whether that were too
/// many.
pub async fn play_all(
    scenarios: Vec<Scenario>,
    backend: Backend,
    faults: Faults,
    jobs: usize,
) -> Vec<(Scenario, anyhow::Result<Played>)> {
    let mut all: Vec<_> = stream::iter(scenarios)
        .map(|scenario| async move {
            // Each on a task of its own: what one does at length does not hold up another one's waits.
            let playing = tokio::spawn(async move {
                let played = play(&scenario, backend, faults).await;
                (scenario, played)
            });
            playing.await.expect("playing does not panic")
        })
        .buffered(jobs.max(1))
        .collect()
        .await;
    for (scenario, result) in &mut all {
        let Ok(first) = &*result else { continue };
        if first.differences.is_empty() || !scenario.is_timed() {
            continue;
        }
        let places: Vec<_> = first.differences.iter().map(|difference| difference.place.as_str()).collect();
        let remark = format!("played again, alone, because its timing differed: {}", places.join(", "));
        *result = play(scenario, backend, faults).await;
        if let Ok(second) = result {
            second.remarks.push(remark);
            second.replayed = true;
        }
    }
    all
}

/// Whether few enough of a file's timed scenarios had to be played again; one always may.
///
/// # Errors
/// Which they were, if they were too many.
pub fn check_replays(all: &[(Scenario, anyhow::Result<Played>)]) -> Result<(), String> {
    let timed = all.iter().filter(|(scenario, _)| scenario.is_timed()).count();
    let replayed: Vec<_> = all
        .iter()
        .filter(|(_, result)| result.as_ref().is_ok_and(|played| played.replayed))
        .map(|(scenario, _)| scenario.name.as_str())
        .collect();
    if replayed.len() <= (timed / ONE_REPLAY_IN).max(1) {
        return Ok(());
    }
    Err(format!("{} of {timed} timed scenarios differed at first: {}", replayed.len(), replayed.join(", ")))
}

/// What went wrong with these, in lines for people; empty when nothing did. Remarks are told past the capture of tests, with
/// `place` beside the scenario's name.
#[must_use]
pub fn failures(all: Vec<(Scenario, anyhow::Result<Played>)>, place: &str) -> String {
    let mut failures = Vec::new();
    failures.extend(check_replays(&all).err());
    for (Scenario { name, .. }, result) in all {
        match result {
            Ok(Played { differences, remarks, .. }) => {
                remarks.iter().for_each(|remark| tell(format_args!("{name} ({place}): {remark}")));
                failures.extend(differences.into_iter().map(|Difference { place, expected, actual }| {
                    format!("{name}: {place}\n  {expected:?}\n  {actual:?}")
                }));
            }
            Err(error) => failures.push(format!("{name}: {error:#}")),
        }
    }
    failures.join("\n")
}

/// Plays a scenario in a world that is already there: its configuration, environment and user are the maker's to give.
///
/// # Errors
/// When a line that is to be run outside the executor fails.
pub async fn play_in(scenario: &Scenario, world: &mut World) -> anyhow::Result<Played> {
    let bindings = Bindings { tmp: world.tmp().to_owned(), ..Bindings::default() };
    let mut player = Player { world, bindings, differences: Vec::new(), place: String::new() };
    for (index, step) in scenario.steps.iter().enumerate() {
        let what = step.tool.as_deref().map_or_else(|| format!("{:?}", step.op), ToOwned::to_owned);
        player.place = format!("step {} ({what})", index + 1);
        player.step(step).await?;
    }
    player.notices(scenario).await;
    player.spills(scenario);
    Ok(Played { differences: player.differences, ..Played::default() })
}

struct Player<'a> {
    world: &'a mut World,
    bindings: Bindings,
    differences: Vec<Difference>,
    place: String,
}

impl Player<'_> {
    async fn step(&mut self, step: &Step) -> anyhow::Result<()> {
        pause(step.sleep_ms).await;
        if let Some(task) = &step.await_task {
            self.await_task(task).await;
        }
        match step.op {
            None => self.call(step).await,
            Some(Operation::Present) => self.present_stored(step),
            Some(Operation::Sh) => self.shell(step.command.as_deref().unwrap_or_default())?,
            Some(Operation::Sleep) => pause(step.ms).await,
            Some(Operation::AwaitTask) => self.await_task(step.task.as_deref().unwrap_or_default()).await,
            Some(Operation::DisposeSession) => {
                let id = step.session.as_ref().map(|session| session.id.clone()).unwrap_or_default();
                self.world.dispose(&OwnerId(id)).await;
            }
            Some(Operation::ReloadToolBash) => self.world.reload().await,
        }
        pause(step.sleep_after_ms).await;
        Ok(())
    }

    async fn call(&mut self, step: &Step) {
        let tool = step.tool.as_deref().unwrap_or_default();
        let arguments = match (&step.raw_args, &step.args) {
            (Some(raw), _) => self.bindings.fill(raw),
            (None, Some(args)) => self.bindings.fill_json(args).to_string(),
            (None, None) => String::new(),
        };
        let session = step.session.as_ref().map(|session| self.session(session));
        let abort = Abort { reason: step.abort_reason.clone(), ..Abort::default() };
        if step.abort_before {
            abort.token.cancel();
        }
        if let Some(after) = step.abort_after_ms {
            let token = abort.token.clone();
            tokio::spawn(async move {
                pause(Some(after)).await;
                token.cancel();
            });
        }
        let result = self.world.call(session.as_ref(), tool, &arguments, &abort).await;
        if let Some(name) = &step.save_task_as
            && let Some(id) = result.text.split_whitespace().last()
        {
            self.bindings.tasks.insert(name.clone(), id.to_owned());
        }
        self.compare_result(&step.expect, &result);
        let stored = json!({"content": [{"type": "text", "text": result.text}], "isError": result.is_error});
        self.compare_presentation(&step.expect, tool, &arguments, &stored);
    }

    fn session(&self, session: &StepSession) -> Session {
        Session {
            id: OwnerId(session.id.clone()),
            cwd: session.cwd.as_ref().map(|cwd| self.bindings.fill(cwd).into()),
            sandbox: None,
        }
    }

    fn compare_result(&mut self, expect: &Expectation, result: &ToolResult) {
        if let Some(text) = &expect.text
            && !self.bindings.matches(text, &result.text)
        {
            let actual = self.bindings.record(&result.text);
            self.differ("text", text, actual);
        }
        if let Some(end) = &expect.text_end
            && !self.bindings.matches_end(end, &result.text)
        {
            let actual = self.bindings.record(&result.text);
            let shown = actual.chars().rev().take(end.chars().count() + 80);
            let shown: String = shown.collect::<Vec<_>>().into_iter().rev().collect();
            self.differ("end of text", end, shown);
        }
        let recorded = self.bindings.record(&result.text);
        if let Some(bytes) = expect.text_bytes
            && bytes != recorded.len()
        {
            self.differ("text bytes", &bytes.to_string(), recorded.len().to_string());
        }
        if let Some(digest) = &expect.text_sha256
            && *digest != sha256(recorded.as_bytes())
        {
            self.differ("text sha256", digest, sha256(recorded.as_bytes()));
        }
        if let Some(is_error) = expect.is_error
            && is_error != result.is_error
        {
            self.differ("isError", &is_error.to_string(), format!("{} ({})", result.is_error, recorded));
        }
        if let Some(error) = &expect.error {
            let actual = result.code.map_or("none", code);
            if error.code != actual {
                self.differ("error code", &error.code, actual.to_owned());
            }
        }
    }

    fn present_stored(&mut self, step: &Step) {
        let tool = step.tool.as_deref().unwrap_or_default();
        let arguments = step.args.as_ref().map(|args| self.bindings.fill_json(args).to_string()).unwrap_or_default();
        let stored = step.result.as_ref().map_or(Value::Null, |result| self.bindings.fill_json(result));
        self.compare_presentation(&step.expect, tool, &arguments, &stored);
    }

    fn compare_presentation(&mut self, expect: &Expectation, tool: &str, arguments: &str, stored: &Value) {
        if let Some(expected) = &expect.present_call {
            let actual = presentation::present_call(tool, arguments).unwrap_or(Value::Null);
            self.compare_json("presentCall", expected, &actual);
        }
        let Some(expected) = &expect.present_result else { return };
        let mut actual = presentation::present_result(tool, arguments, stored).unwrap_or(Value::Null);
        if expect.present_result_output_is_text {
            let output = actual.as_object_mut().and_then(|actual| actual.shift_remove("output"));
            if output.as_ref() != stored.pointer("/content/0/text") {
                self.differ("output in presentResult", "the text", "another text".to_owned());
            }
        }
        self.compare_json("presentResult", expected, &actual);
    }

    fn compare_json(&mut self, what: &str, expected: &Value, actual: &Value) {
        if !self.bindings.matches_json(expected, actual) {
            let actual = self.bindings.record(&actual.to_string());
            self.differ(what, &expected.to_string(), actual);
        }
    }

    #[expect(clippy::disallowed_methods, reason = "the format has lines that run outside the executor")]
    fn shell(&self, line: &str) -> anyhow::Result<()> {
        let mut bash = std::process::Command::new("bash");
        bash.arg("-c").arg(self.bindings.fill(line)).current_dir(self.world.tmp()).stdin(Stdio::null());
        let status = bash.status()?;
        anyhow::ensure!(status.success(), "{}: {line}: {status}", self.place);
        Ok(())
    }

    async fn await_task(&mut self, task: &str) {
        let id = TaskId(self.bindings.fill(task));
        if let Err(error) = self.world.ended(&id, PATIENCE).await {
            self.differ("end of the task", "it ends", error.to_string());
        }
    }

    async fn notices(&mut self, scenario: &Scenario) {
        "notices".clone_into(&mut self.place);
        let taken = |player: &Self| {
            let taken = player.world.mailbox().taken().into_iter();
            let mut taken: Vec<ExpectedNotice> = taken
                .map(|notice| ExpectedNotice { session: notice.owner.0, text: player.bindings.record(&notice.text) })
                .collect();
            taken.sort();
            taken
        };
        let mut expected = scenario.notices.clone();
        expected.sort();
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while taken(self).len() < expected.len() && tokio::time::Instant::now() < deadline {
            pause(Some(5)).await;
        }
        let has_tasks = !self.bindings.tasks.is_empty();
        pause(scenario.settle_ms.or(has_tasks.then_some(SETTLE_MS))).await;
        let actual = taken(self);
        if actual != expected {
            self.differ("all", &format!("{expected:#?}"), format!("{actual:#?}"));
        }
    }

    fn spills(&mut self, scenario: &Scenario) {
        "spills".clone_into(&mut self.place);
        for spill in &scenario.spills {
            let expected = format!("{} bytes, sha256 {}", spill.bytes, spill.sha256);
            let actual = match self.bindings.spills.get(&spill.placeholder).map(fs::read) {
                None => "no text named it".to_owned(),
                Some(Err(error)) => error.to_string(),
                Some(Ok(bytes)) => format!("{} bytes, sha256 {}", bytes.len(), sha256(&bytes)),
            };
            if actual != expected {
                self.differ(&spill.placeholder, &expected, actual);
            }
        }
    }

    fn differ(&mut self, what: &str, expected: &str, actual: String) {
        let place = format!("{}: {what}", self.place);
        self.differences.push(Difference { place, expected: expected.to_owned(), actual });
    }
}

fn code(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::InvalidArgs => "INVALID_ARGS",
        ErrorCode::UnknownTool => "UNKNOWN_TOOL",
    }
}

/// Waits, where the recording waited.
async fn pause(ms: Option<u64>) {
    if let Some(ms) = ms {
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_timed_scenarios_may_be_replayed_and_one_always() {
        let path = crate::binaries::workspace().join("tests/model-text/scenarios.json");
        let recorded = super::super::read(&path).expect("it is there");
        // Twice, for a list that is long enough.
        let timed = || recorded.iter().chain(&recorded).filter(|scenario| scenario.is_timed()).cloned();
        let of = |count, replayed| {
            let played = |(index, scenario)| (scenario, Ok(Played { replayed: index < replayed, ..Played::default() }));
            check_replays(&timed().take(count).enumerate().map(played).collect::<Vec<_>>())
        };
        assert!(timed().count() >= 20, "{} would show nothing", timed().count());
        for (count, allowed) in [(1, 1), (7, 1), (8, 2), (20, 5)] {
            assert_eq!(of(count, allowed), Ok(()), "{allowed} of {count}");
            if allowed < count {
                let error = of(count, allowed + 1).expect_err("one too many");
                assert!(error.starts_with(&format!("{} of {count} timed scenarios", allowed + 1)), "{error}");
            }
        }
    }
}
