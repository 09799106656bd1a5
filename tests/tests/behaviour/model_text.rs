//! Every recorded case of what the model reads gives the same text from every backend.

use executor_tests::{
    Backend, binaries, block_on,
    scenario::{self, Faults},
};

/// How many scenarios are played at the same time: they mostly wait.
const AT_ONCE: usize = 8;

#[test]
fn in_process() {
    every_scenario(Backend::InProcess);
}

#[test]
fn unix() {
    every_scenario(Backend::Unix);
}

#[test]
fn tcp() {
    every_scenario(Backend::Tcp);
}

#[test]
fn tls() {
    every_scenario(Backend::Tls);
}

fn every_scenario(backend: Backend) {
    let scenarios =
        scenario::read(&binaries::workspace().join("tests/model-text/scenarios.json")).expect("it is there");
    assert_eq!(scenarios.len(), 87);
    let all = block_on(scenario::play_all(scenarios, backend, Faults::default(), AT_ONCE));
    let failures = scenario::failures(all, backend.as_str());
    assert!(failures.is_empty(), "expected and actual:\n{failures}");
}
