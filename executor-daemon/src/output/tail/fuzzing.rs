//! What the fuzz target `tail` does with the tail's positions. Built under `--cfg fuzzing` only.

use super::{Window, kept_bytes};

/// Lets `whole` come in steps and reads a delta after each, from a tail of so many bytes (at least 1).
///
/// # Panics
/// When a byte is doubled or lost without being counted, a delta is larger than the tail, or a character is split that was
/// whole.
pub fn deltas_add_up(whole: &[u8], tail_bytes: u64, steps: &[u8]) {
    let kept = usize::try_from(kept_bytes(tail_bytes)).unwrap_or(usize::MAX);
    let window = |seen: usize| {
        let start = seen.saturating_sub(kept);
        Window { start: start as u64, bytes: &whole[start..seen] }
    };
    let at = |offset: u64| usize::try_from(offset).expect("the whole is in memory");
    let (mut seen, mut cursor, mut dropped) = (0, 0, 0);
    let mut shown = Vec::new();
    let closing = steps.iter().map(|step| (usize::from(*step), false)).chain([(usize::MAX, true)]);
    for (step, closed) in closing {
        seen = whole.len().min(usize::saturating_add(seen, step));
        let window = window(seen);
        let tail = window.tail(tail_bytes);
        assert!(tail.end == seen as u64 && tail.end - tail.start <= tail_bytes);
        assert!(
            tail.end - tail.start + 3 >= tail_bytes.min(seen as u64),
            "more than the rest of a character is missing"
        );
        let delta = window.delta(cursor, tail_bytes, closed);
        assert!(delta.start >= cursor && delta.end >= delta.start && delta.end <= seen as u64);
        assert!(delta.end - delta.start <= tail_bytes);
        dropped += delta.start - cursor;
        shown.extend_from_slice(&whole[at(delta.start)..at(delta.end)]);
        cursor = delta.end;
    }
    assert_eq!(cursor, whole.len() as u64, "the end was not shown");
    assert_eq!(shown.len() as u64 + dropped, whole.len() as u64, "the counts do not add up");
    if dropped == 0 {
        assert!(shown == whole, "other bytes were shown");
    } else if std::str::from_utf8(whole).is_ok() {
        assert!(std::str::from_utf8(&shown).is_ok(), "a character was split");
    }
}
