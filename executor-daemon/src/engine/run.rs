//! A foreground run as its caller holds it.

use std::{sync::Arc, time::Instant};

use executor_proto::types::{RunAccepted, RunResult, StartKey, StreamName};

use super::{Engine, StreamReader, entry::Entry, now_ms, task::State};
use crate::{crash::Point, output::ReadUntil};

/// A foreground run. Several callers can hold the same. When the last is dropped before the run has finished, it goes on for
/// the executor's resume window, so that its caller can come back, and is ended then.
#[derive(Debug)]
pub struct Run {
    entry: Arc<Entry>,
    key: StartKey,
    /// The keeper stays as long as a run is waited for.
    engine: Engine,
}

impl Run {
    /// Waits for a run.
    pub(super) fn attach(engine: Engine, entry: Arc<Entry>, key: StartKey) -> Self {
        entry.apply(State::attach);
        Self { entry, key, engine }
    }

    /// What was agreed.
    #[must_use]
    pub fn accepted(&self) -> RunAccepted {
        let facts = &self.entry.facts;
        RunAccepted {
            run_id: facts.id.clone(),
            timeout_ms: facts.timeout_ms,
            workdir: facts.workdir.clone(),
            sandbox_mode: facts.sandbox_mode,
        }
    }

    /// The bytes of one stream from the start, as they come. Ends where the run's result ends, also if leftovers write on.
    #[must_use]
    pub fn output(&self, stream: StreamName) -> StreamReader {
        self.output_from(stream, 0)
    }

    /// The same from an offset on.
    #[must_use]
    pub fn output_from(&self, stream: StreamName, offset: u64) -> StreamReader {
        let until = ReadUntil::Offset(self.entry.result_end(stream));
        StreamReader { reader: self.entry.streams.get(stream).reader(offset, until) }
    }

    /// Waits for the result. Cancel-safe; later calls return the same.
    pub async fn finished(&mut self) -> RunResult {
        self.entry.ended().await;
        self.entry.result().expect("a run's result is set before it has ended").clone()
    }

    /// The caller has had the whole result: it need not be held much longer.
    pub fn taken(&mut self) {
        self.entry.apply(State::taken);
        self.engine.inner.registry().taken(&self.entry.facts.caller, &self.key, now_ms());
        Point::ResultTaken.pass();
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.entry.apply(|state| state.detach(Instant::now()));
        let window = self.engine.inner.resume_window();
        if window.is_zero() && self.entry.look(State::alone_since).is_some() {
            self.entry.caller_gone(window);
        }
    }
}
