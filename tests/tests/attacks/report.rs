//! What came of each attack.

use std::fmt::Display;

use executor_tests::tell;

use crate::rig::Mode;

/// What came of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// What it is about was there, and was not got.
    Refused,
    /// It was got.
    Succeeded(String),
    /// It was not shown that there was anything to be had, so nothing was shown.
    Unproven(String),
    /// It was not made, for this reason.
    NotTried(String),
}

impl Outcome {
    /// Refused if that holds.
    pub(crate) fn refused_if(refused: bool, otherwise: impl Display) -> Self {
        if refused { Self::Refused } else { Self::Succeeded(otherwise.to_string()) }
    }

    /// Of a control that has to hold and an attempt that has to fail; each with what was seen.
    pub(crate) fn of(control: bool, refused: bool, seen: impl Display) -> Self {
        if !refused {
            Self::Succeeded(seen.to_string())
        } else if control {
            Self::Refused
        } else {
            Self::Unproven(seen.to_string())
        }
    }
}

/// A row.
#[derive(Debug)]
struct Row {
    name: String,
    tried: String,
    outcome: Outcome,
}

/// The table.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) mode: Mode,
    rows: Vec<Row>,
}

impl Report {
    pub(crate) fn new(mode: Mode) -> Self {
        Self { mode, rows: Vec::new() }
    }

    /// Adds a row: its name, and what was tried.
    pub(crate) fn add(&mut self, name: impl Display, tried: impl Display, outcome: Outcome) {
        let name = name.to_string();
        assert!(self.rows.iter().all(|row| row.name != name), "two attacks are called {name}");
        self.rows.push(Row { name, tried: tried.to_string(), outcome });
    }

    /// Prints the table, and fails if a row does.
    #[expect(clippy::print_stdout, reason = "for whoever asks for the table, with --nocapture")]
    pub(crate) fn finish(self) {
        let mut failed = Vec::new();
        let (mut refused, mut tried) = (0, 0);
        for Row { name, tried: what, outcome } in &self.rows {
            tried += usize::from(!matches!(outcome, Outcome::NotTried(_)));
            match outcome {
                Outcome::Refused => {
                    refused += 1;
                    println!("refused    {name}: {what}");
                }
                Outcome::Succeeded(seen) => failed.push(format!("SUCCEEDED  {name}: {what}: {}", short(seen))),
                Outcome::Unproven(seen) => failed.push(format!("UNPROVEN   {name}: {what}: {}", short(seen))),
                Outcome::NotTried(reason) => {
                    tell(format_args!("not tried on a daemon that is {}: {name}: {what}: {reason}", self.mode));
                }
            }
        }
        tell(format_args!("{refused} of {tried} attacks refused by a daemon that is {}", self.mode));
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    }
}

/// The beginning of what was seen, which says enough.
fn short(seen: &str) -> String {
    seen.chars().take(1_000).collect()
}
