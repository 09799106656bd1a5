//! Every recorded case of what the model reads gives the same text over connections that are cut, replies that are lost and
//! servers that are killed, again and again.

use std::time::Duration;

use executor_tests::{
    Backend, Setup, World, binaries, block_on,
    faults::Plan,
    on_backend,
    scenario::{self, Faults},
    wait_for,
};

use crate::SOON;

/// How old a connection gets: less than most scenarios take, more than a call of a moment on a busy machine.
const EVERY: Duration = Duration::from_millis(400);

/// The same for servers, whose connections wait for the next one: a few times what that takes to be there.
const KILLED_EVERY: Duration = Duration::from_millis(250);

/// One in so many calls loses its reply.
const LOST_OF: u32 = 3;

/// How many scenarios are played at the same time: they mostly wait.
const AT_ONCE: usize = 4;

#[test]
fn every_scenario_reads_the_same_through_cuts() {
    every_scenario(Faults { wire: Some(Plan::cut_every(EVERY)), ..Faults::default() }, "cut");
}

#[test]
fn every_scenario_reads_the_same_with_lost_replies() {
    every_scenario(Faults { wire: Some(Plan::lose_every(LOST_OF)), ..Faults::default() }, "lost replies");
}

#[test]
fn every_scenario_reads_the_same_through_kills_of_the_server() {
    every_scenario(Faults { kill_server_every: Some(KILLED_EVERY), ..Faults::default() }, "kills");
}

fn every_scenario(faults: Faults, place: &str) {
    let file = binaries::workspace().join("tests/model-text/scenarios.json");
    let scenarios = scenario::read(&file).expect("it is there");
    assert_eq!(scenarios.len(), 87);
    let all = block_on(scenario::play_all(scenarios, Backend::Unix, faults, AT_ONCE));
    let failures = scenario::failures(all, place);
    assert!(failures.is_empty(), "expected and actual:\n{failures}");
}

on_backend!(Backend::Unix, the_lost_replies_of_the_scenarios_happen with Setup::through(Plan::lose_every(LOST_OF)));
async fn the_lost_replies_of_the_scenarios_happen(world: &World) {
    echo(world).await;
    let seen = world.faults().seen();
    // Two in three times three, of twenty calls and those that were made again.
    assert!(seen.lost_replies >= 4 && seen.calls > 20, "{seen:?}");
}

// Not both at once: a reply that is lost together with the server that has handed it over leaves an unknown outcome.
on_backend!(Backend::Unix, the_kills_of_the_scenarios_happen
    with Setup { kill_server_every: Some(KILLED_EVERY), ..Setup::default() });
async fn the_kills_of_the_scenarios_happen(world: &World) {
    echo(world).await;
    let killed = || world.daemon().expect("there is one").log().matches("was ended by signal 9").count();
    wait_for("two kills", SOON, || killed() >= 2).await;
}

async fn echo(world: &World) {
    for number in 0..20 {
        assert_eq!(world.bash(&format!("echo {number}")).await, format!("{number}\n"));
    }
}
