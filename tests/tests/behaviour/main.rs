//! What the executor does, seen from outside, on every backend. One file per behaviour.

mod model_text;
