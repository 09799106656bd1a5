//! Every recorded case of what the model reads gives the same text over connections that are cut again and again.

use std::time::Duration;

use executor_tests::{Backend, binaries, block_on, faults::Plan, scenario};

/// How old a connection gets: shorter than most scenarios, longer than a call of a moment takes on a busy machine.
const CUT_EVERY: Duration = Duration::from_millis(400);

/// How many scenarios are played at the same time: they mostly wait.
const AT_ONCE: usize = 4;

#[test]
fn every_scenario_reads_the_same_through_cuts() {
    let file = binaries::workspace().join("tests/model-text/scenarios.json");
    let scenarios = scenario::read(&file).expect("it is there");
    assert_eq!(scenarios.len(), 87);
    let all = block_on(scenario::play_all(scenarios, Backend::Unix, Some(Plan::cut_every(CUT_EVERY)), AT_ONCE));
    let failures = scenario::failures(all, "cut");
    assert!(failures.is_empty(), "expected and actual:\n{failures}");
}
