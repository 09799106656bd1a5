//! The three tools that a model has for running commands, over an executor that is in this process or on another host.
//!
//! Read in this order: [`executor`] is the trait and its contract; [`session`] and [`permissions`] say for whom and
//! whether; [`tools`] turn the model's arguments into calls; [`text`] turns results into the words that the model reads;
//! [`presentation`] is for people; [`notices`] carry completions into sessions.

pub mod cli;
pub mod executor;
pub mod notices;
pub mod permissions;
pub mod presentation;
pub mod session;
pub mod text;
pub mod tools;

/// What the fuzz targets call. Built under `--cfg fuzzing` only.
#[cfg(fuzzing)]
pub mod fuzzing {
    pub use crate::{
        executor::{answers, start},
        tools::fuzz_arguments as arguments,
    };
}
