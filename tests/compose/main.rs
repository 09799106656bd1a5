//! The daemon and the client in containers, as the `Dockerfile` and `docker-compose.yml` make them.
//!
//! Needs an engine and Compose and fails without: run it with `just e2e`. Everything that it makes carries a label of
//! this run and is removed again, also after a failure.
#![expect(clippy::disallowed_methods, reason = "tests start the programs that drive the engine")]

mod deployment;
mod engine;
mod model_text;
