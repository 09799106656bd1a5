//! What the client and the daemon make of a bad connection: every test goes through the fault proxy. The letter and number
//! that a test's name begins with is its row in the list of what goes wrong when commands run for agents.

#![allow(missing_docs, reason = "tests say what they show by their names")]

mod connections;
mod goaway;
mod model_text;
mod notices;
mod sizes;
mod starts;

use std::time::Duration;

/// Longest wait for what must happen soon.
const SOON: Duration = Duration::from_secs(30);
