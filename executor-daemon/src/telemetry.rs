//! Structured logs: one line per decision, never output, never secrets.
