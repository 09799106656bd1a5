//! Random schedules of what clients ask and what goes wrong, over the rules that do no I/O: start keys, task states, the
//! registry, read positions, completions, and what a new server makes of the journal and of what the keeper hands over. There
//! is no clock, no file and no thread; the journal is the real one, in memory.
//!
//! [`server`] does to the rules what the engine does, one step at a time, so that a death can come between any two;
//! [`world`] is what outlives it; [`model`] knows what the promises are and looks at every answer.
//!
//! `SCHEDULES` is how many are played, if not 10,000.

mod model;
mod server;
mod task;
mod world;

use std::cell::RefCell;

use executor_proto::types::OwnerId;
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};

use self::{model::Model, server::Server, world::World};
use super::registry::Kind;
use crate::ids::{Caller, TenantId};

/// Schedules that are played where the environment does not say how many.
const SCHEDULES: u32 = 10_000;

/// Longest schedule, in steps; the end of all that runs comes after them.
const STEPS: usize = 60;

/// What may happen. Numbers are taken modulo what there is to choose from.
#[derive(Debug, Clone)]
enum Step {
    /// A client starts something, for the first time or again; the start gets as far as `stages`.
    Start { by: u8, key: u8, kind: Kind, other: bool, stages: u8, spawn: Spawn },
    /// A start under way gets further.
    Advance { at: u8, stages: u8, spawn: Spawn },
    /// A client takes a run back.
    Cancel { by: u8, key: u8 },
    /// A client has had a run's result.
    Take { by: u8, key: u8 },
    /// A client reads; the same again where the reply before was lost, or, with `again`, although it was not.
    Read { at: u8, lost: bool, again: bool },
    /// Somebody asks for a task by a name that may be another's.
    Ask { by: u8, of: u8, at: u8 },
    /// A task is killed.
    Kill { at: u8 },
    /// A client watches its completions, and acknowledges so many of them.
    Watch { by: u8, acknowledge: u8 },
    /// A client acknowledges what it was told long ago, or never.
    Acknowledge { by: u8, up_to: u8 },
    /// A command writes.
    Write { at: u8, stream: bool, piece: u8 },
    /// A command ends; with `leftover` something of it stays.
    Exit { at: u8, how: u8, leftover: bool },
    /// What was left of it ends.
    Empty { at: u8 },
    /// The engine does its next steps for one command.
    Drive { at: u8, steps: u8 },
    /// Nobody came back for a run.
    Alone { at: u8 },
    /// Time passes; then the engine looks for what is to be forgotten.
    Sweep { minutes: u16 },
    /// The server is killed; another one takes over.
    ServerDies,
    /// The keeper dies and takes everything along.
    KeeperDies,
    /// The host is started again.
    HostRestarts,
    /// SIGTERM, and another start.
    Stop,
}

/// What becomes of a spawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spawn {
    /// It runs.
    Runs,
    /// Nothing ran.
    Fails,
    /// It ran, and could not be kept.
    Lost,
}

fn step() -> impl Strategy<Value = Step> {
    let kind = prop_oneof![3 => Just(Kind::Task), 1 => Just(Kind::Run)];
    let spawn = || prop_oneof![12 => Just(Spawn::Runs), 1 => Just(Spawn::Fails), 1 => Just(Spawn::Lost)].boxed();
    let n = any::<u8>;
    prop_oneof![
        12 => (n(), n(), kind, prop::bool::weighted(0.1), 0_u8..9, spawn())
            .prop_map(|(by, key, kind, other, stages, spawn)| Step::Start { by, key, kind, other, stages, spawn }),
        4 => (n(), 1_u8..5, spawn()).prop_map(|(at, stages, spawn)| Step::Advance { at, stages, spawn }),
        2 => (n(), n()).prop_map(|(by, key)| Step::Cancel { by, key }),
        2 => (n(), n()).prop_map(|(by, key)| Step::Take { by, key }),
        14 => (n(), any::<bool>(), prop::bool::weighted(0.2))
            .prop_map(|(at, lost, again)| Step::Read { at, lost, again }),
        4 => (n(), n(), n()).prop_map(|(by, of, at)| Step::Ask { by, of, at }),
        4 => n().prop_map(|at| Step::Kill { at }),
        5 => (n(), n()).prop_map(|(by, acknowledge)| Step::Watch { by, acknowledge }),
        1 => (n(), n()).prop_map(|(by, up_to)| Step::Acknowledge { by, up_to }),
        24 => (n(), any::<bool>(), n()).prop_map(|(at, stream, piece)| Step::Write { at, stream, piece }),
        8 => (n(), n(), prop::bool::weighted(0.3)).prop_map(|(at, how, leftover)| Step::Exit { at, how, leftover }),
        2 => n().prop_map(|at| Step::Empty { at }),
        14 => (n(), 1_u8..9).prop_map(|(at, steps)| Step::Drive { at, steps }),
        1 => n().prop_map(|at| Step::Alone { at }),
        2 => prop_oneof![3 => 0_u16..20, 1 => 0_u16..3_000].prop_map(|minutes| Step::Sweep { minutes }),
        6 => Just(Step::ServerDies),
        1 => Just(Step::KeeperDies),
        1 => Just(Step::HostRestarts),
        1 => Just(Step::Stop),
    ]
}

/// Sessions of one tenant, nobody in particular of it, and a session of the same name of another tenant.
fn caller(by: u8) -> Caller {
    let (tenant, owner) = match by % 8 {
        0 => ("t", Some("b")),
        1 => ("t", None),
        2 | 3 => ("u", Some("a")),
        _ => ("t", Some("a")),
    };
    Caller { tenant: TenantId(tenant.to_owned()), owner: owner.map(|owner| OwnerId(owner.to_owned())) }
}

/// All callers that there are.
fn callers() -> [Caller; 4] {
    [0, 1, 2, 4].map(caller)
}

/// Plays a schedule and then lets everything end.
fn play(world: &mut World, steps: &[Step]) {
    world.begin_anew();
    let mut model = Model::default();
    let mut server = Server::take_over(world, &mut model);
    for step in steps {
        world.now_ms += 1;
        match step {
            Step::ServerDies => {
                drop(server);
                model.server_died(false);
                server = Server::take_over(world, &mut model);
            }
            Step::KeeperDies | Step::HostRestarts => {
                drop(server);
                world.keeper_dies(matches!(step, Step::HostRestarts));
                model.server_died(true);
                server = Server::take_over(world, &mut model);
            }
            Step::Stop => {
                server.stop(world, &mut model);
                drop(server);
                world.keeper_dies(false);
                model.server_died(true);
                server = Server::take_over(world, &mut model);
            }
            step => server.step(world, &mut model, step),
        }
        server.check_caps(&mut model);
    }
    server.let_everything_end(world, &mut model);
    model.check_told(world);
    assert_eq!(world.journal.failures(), 0, "a record could not be written");
}

#[test]
fn ten_thousand_schedules_of_faults_keep_the_promises() {
    let schedules = std::env::var("SCHEDULES").map_or(SCHEDULES, |text| text.parse().expect("a number"));
    let world = RefCell::new(World::new());
    let (played, seen) = (RefCell::new(0_u32), RefCell::new(model::Seen::default()));
    // `failure_persistence`: a failure prints the shortest schedule that shows it, which is kept as a test of its own.
    let config = Config { cases: schedules, failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(&prop::collection::vec(step(), 1..STEPS), |steps| {
        play(&mut world.borrow_mut(), &steps);
        *played.borrow_mut() += 1;
        seen.borrow_mut().add(&world.borrow().seen);
        Ok(())
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
    let (played, seen) = (played.into_inner(), seen.into_inner());
    println!("{played} schedules: {seen:?}");
    assert_eq!(played, schedules);
    seen.assert_not_idle();
}
