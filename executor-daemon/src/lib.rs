//! Runs agents' commands on this host: the keeper that owns processes, the engine that owns runs, tasks and their
//! output, and the gRPC service over it. See `ARCHITECTURE.md` for the map and the way of one command.
//!
//! A program that embeds the engine (no daemon anywhere) calls [`keeper::enter_if_asked`] as the first line of its
//! `main`, then [`keeper::embedded::start`] and [`engine::Engine::start`].

pub mod config;
pub mod crash;
pub mod engine;
pub mod health;
pub mod ids;
pub mod init;
mod journal;
pub mod keeper;
pub mod limits;
mod output;
mod sandbox;
pub mod server;
mod service;
pub mod telemetry;
pub mod tls;

/// What the fuzz targets call. Built under `--cfg fuzzing` only.
#[cfg(fuzzing)]
pub mod fuzzing {
    pub use crate::{engine::journals, output::deltas_add_up, service::requests};
}
