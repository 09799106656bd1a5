//! Every recorded case of what the model reads gives the same text from every backend.

use std::fmt::Write;

use executor_tests::{Backend, binaries, block_on, scenario, tell};

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

fn every_scenario(backend: Backend) {
    let scenarios =
        scenario::read(&binaries::workspace().join("tests/model-text/scenarios.json")).expect("it is there");
    assert_eq!(scenarios.len(), 87);
    let mut failures = String::new();
    let all = block_on(scenario::play_all(scenarios, backend, AT_ONCE));
    if let Err(too_many) = scenario::check_replays(&all) {
        writeln!(failures, "{too_many}").expect("it is memory");
    }
    for (scenario, result) in all {
        let name = scenario.name;
        match result {
            Ok(played) => {
                for remark in played.remarks {
                    tell(format_args!("{name} ({}): {remark}", backend.as_str()));
                }
                for difference in played.differences {
                    let (expected, actual) = (difference.expected, difference.actual);
                    writeln!(failures, "{name}: {}\n  {expected:?}\n  {actual:?}", difference.place)
                        .expect("it is memory");
                }
            }
            Err(error) => writeln!(failures, "{name}: {error:#}").expect("it is memory"),
        }
    }
    assert!(failures.is_empty(), "expected and actual:\n{failures}");
}
