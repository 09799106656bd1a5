//! The daemon and the client in containers, as the `Dockerfile` and `docker-compose.yml` make them.
//!
//! Needs an engine and Compose and fails without: run it with `just e2e`. `EXECUTOR_TEST_CONTAINERS=off` is the one way to do
//! without, and each test then says so. Everything that it makes carries a label or a project's name of this run and is
//! removed again, also after a failure.
#![expect(clippy::disallowed_methods, reason = "tests start the programs that drive the engine")]
#![expect(clippy::print_stdout, reason = "what is measured is read by people")]

/// Makes a function a test over containers.
macro_rules! over_containers {
    ($name:ident) => {
        mod $name {
            #[test]
            fn over_containers() {
                if !$crate::engine::switched_off() {
                    let begun = std::time::Instant::now();
                    super::$name();
                    println!("{}: {:.1?}", stringify!($name), begun.elapsed());
                }
            }
        }
    };
}

mod client;
mod deployment;
mod engine;
mod failures;
mod file;
mod image;
mod limits;
mod model_text;
mod numbers;
mod swarm;
mod tenants;
