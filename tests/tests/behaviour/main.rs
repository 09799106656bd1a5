//! What the executor does, seen from outside, on every backend. One file per behaviour; the letter and number that a test's
//! name begins with is its row in the list of what goes wrong when commands run for agents.

mod bytes;
mod descriptors;
mod ending;
mod exits;
mod fence;
mod finding;
mod floods;
mod long_commands;
mod model_text;
mod outcomes;
mod people;
mod promises;
mod reaping;
mod resumed;
mod returns;
mod sandbox;
mod spec_rows;
mod state;
mod stdin;
mod truncation;
mod victims;
mod workdir;
