//! What a reader gets of a window of the stream's last bytes. Pure: positions in, positions out.

#[cfg(fuzzing)]
pub(super) mod fuzzing;

use std::ops::Range;

use super::text;

/// The last bytes of a stream as they were at one moment: the tail, and what is needed before it to tell whether its first
/// bytes belong to a character that was cut.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window<'a> {
    /// Offset in the stream of the first byte.
    pub(super) start: u64,
    /// Up to the stream's end.
    pub(super) bytes: &'a [u8],
}

/// Bytes that must be kept so that a tail of this size can be cut rightly.
pub(crate) fn kept_bytes(tail_bytes: u64) -> u64 {
    tail_bytes.saturating_add(text::MAX_PART as u64)
}

impl Window<'_> {
    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// Index of an offset, which lies in the window.
    fn index(&self, offset: u64) -> usize {
        usize::try_from(offset - self.start).expect("a window is in memory")
    }

    /// Where a part begins that may start at `offset`: there, or behind the valid character that reaches over it.
    fn whole_from(&self, offset: u64) -> u64 {
        offset + text::rest_of_cut_character(self.bytes, self.index(offset)) as u64
    }

    /// The tail: at most the last `tail_bytes`.
    pub(super) fn tail(&self, tail_bytes: u64) -> Range<u64> {
        let from = self.end().saturating_sub(tail_bytes).max(self.start);
        self.whole_from(from)..self.end()
    }

    /// What is new since `cursor` and still in the tail. While the stream goes on (not `closed`), an incomplete character at
    /// the end waits. The next delta begins at the end of the range.
    pub(super) fn delta(&self, cursor: u64, tail_bytes: u64, closed: bool) -> Range<u64> {
        let cursor = cursor.min(self.end());
        let from = self.whole_from(self.end().saturating_sub(tail_bytes).max(self.start).max(cursor));
        let waits = if closed { 0 } else { text::incomplete_at_end(self.bytes) as u64 };
        from..(self.end() - waits).max(from)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::text::tests::awkward_bytes, *};

    /// The window that a stream keeps of everything that it has seen.
    fn window(whole: &[u8], tail_bytes: u64) -> Window<'_> {
        let kept = usize::try_from(kept_bytes(tail_bytes)).unwrap();
        let start = whole.len().saturating_sub(kept);
        Window { start: start as u64, bytes: &whole[start..] }
    }

    fn slice(whole: &[u8], range: Range<u64>) -> &[u8] {
        &whole[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()]
    }

    #[test]
    fn exactly_the_cap_is_not_cut_and_one_more_is() {
        assert_eq!(window(b"12345", 5).tail(5), 0..5);
        assert_eq!(window(b"123456", 5).tail(5), 1..6);
    }

    #[test]
    fn the_rest_of_a_cut_character_is_dropped_and_nothing_else() {
        assert_eq!(window("a≤b".as_bytes(), 3).tail(3), 4..5);
        assert_eq!(window(b"a\x80\x80b", 3).tail(3), 1..4);
    }

    #[test]
    fn an_incomplete_character_waits_for_its_rest_or_the_end() {
        let whole = "a≤".as_bytes();
        assert_eq!(window(&whole[..2], 100).delta(0, 100, false), 0..1);
        assert_eq!(window(whole, 100).delta(1, 100, false), 1..4);
        assert_eq!(window(&whole[..2], 100).delta(1, 100, true), 1..2);
        // The tail is shorter than the character: its start is gone, so it is.
        assert_eq!(window(&whole[..3], 1).delta(0, 1, false), 2..2);
        assert_eq!(window(whole, 1).delta(2, 1, false), 4..4);
    }

    #[test]
    fn an_invalid_byte_does_not_wait() {
        assert_eq!(window(b"a\xff", 100).delta(0, 100, false), 0..2);
    }

    proptest! {
        #[test]
        fn the_tail_is_the_end_of_the_stream(whole in awkward_bytes(), tail_bytes in 1u64..40) {
            let range = window(&whole, tail_bytes).tail(tail_bytes);
            prop_assert_eq!(range.end, whole.len() as u64);
            let shown = range.end - range.start;
            prop_assert!(shown <= tail_bytes);
            // At most a character's rest is missing.
            prop_assert!(shown + 3 >= tail_bytes.min(whole.len() as u64));
            if whole.len() as u64 <= tail_bytes {
                prop_assert_eq!(range.start, 0);
            }
            let text = String::from_utf8_lossy(&whole).into_owned();
            let tail = String::from_utf8_lossy(slice(&whole, range)).into_owned();
            if std::str::from_utf8(&whole).is_ok() {
                prop_assert!(text.ends_with(&tail));
            }
        }

        /// However the bytes come and whenever they are read, nothing is doubled, what is missing is counted, and where
        /// nothing is missing the pieces read like the whole.
        #[test]
        fn deltas_add_up(
            whole in awkward_bytes(),
            tail_bytes in 1u64..40,
            steps in prop::collection::vec(1usize..9, 0..40),
        ) {
            let (mut seen, mut cursor, mut dropped, mut shown) = (0usize, 0u64, 0u64, 0u64);
            let mut text = String::new();
            let mut bytes = Vec::new();
            for step in steps {
                seen = (seen + step).min(whole.len());
                let range = window(&whole[..seen], tail_bytes).delta(cursor, tail_bytes, false);
                prop_assert!(range.start >= cursor && range.end >= range.start);
                dropped += range.start - cursor;
                shown += range.end - range.start;
                cursor = range.end;
                text.push_str(&String::from_utf8_lossy(slice(&whole, range.clone())));
                bytes.extend_from_slice(slice(&whole, range));
            }
            let range = window(&whole, tail_bytes).delta(cursor, tail_bytes, true);
            dropped += range.start - cursor;
            shown += range.end - range.start;
            prop_assert_eq!(range.end, whole.len() as u64);
            prop_assert_eq!(shown + dropped, whole.len() as u64);
            text.push_str(&String::from_utf8_lossy(slice(&whole, range.clone())));
            bytes.extend_from_slice(slice(&whole, range));
            if dropped == 0 {
                prop_assert_eq!(&bytes, &whole);
                prop_assert_eq!(text, String::from_utf8_lossy(&whole));
            } else if std::str::from_utf8(&whole).is_ok() {
                prop_assert!(std::str::from_utf8(&bytes).is_ok(), "{:x?}", bytes);
            }
        }
    }
}
