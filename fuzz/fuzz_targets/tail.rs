//! The tail of a stream: nothing is doubled, what is missing is counted, no character is split.
//!
//! The first byte is the size of the tail, the second the number of steps, then the steps; the rest is the stream.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let [tail_bytes, steps, rest @ ..] = bytes else { return };
    let (steps, whole) = rest.split_at(usize::from(*steps).min(rest.len()));
    executor_daemon::fuzzing::deltas_add_up(whole, u64::from(*tail_bytes).max(1), steps);
});
