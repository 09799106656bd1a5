//! Where text may be cut: never inside a valid UTF-8 character, and nowhere else is anything held back or dropped.
//!
//! UTF-8 synchronises itself: whether a character reaches over a cut is decided by the three bytes before it, whether the
//! last one is incomplete by the last three, whatever else the bytes hold.

/// Most bytes of a character on one side of a cut through it.
pub(super) const MAX_PART: usize = 3;

/// How many bytes after `cut` belong to a valid character that begins before it. 0 to 3.
pub(super) fn rest_of_cut_character(bytes: &[u8], cut: usize) -> usize {
    (1..=MAX_PART.min(cut))
        .find_map(|before| {
            let from = &bytes[cut - before..];
            let length = character_length(from[0])?;
            let whole = length > before && from.get(..length).is_some_and(|c| std::str::from_utf8(c).is_ok());
            whole.then(|| length - before)
        })
        .unwrap_or(0)
}

/// How many bytes at the end are the beginning of a character that more bytes could complete. 0 to 3.
pub(super) fn incomplete_at_end(bytes: &[u8]) -> usize {
    (1..=MAX_PART.min(bytes.len()))
        .find(|&part| {
            let end = &bytes[bytes.len() - part..];
            std::str::from_utf8(end).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
        })
        .unwrap_or(0)
}

/// The length that a first byte promises; `None` for ASCII, continuation bytes and bytes that UTF-8 does not use.
fn character_length(first: u8) -> Option<usize> {
    match first {
        0xC2..=0xDF => Some(2),
        0xE0..=0xEF => Some(3),
        0xF0..=0xF4 => Some(4),
        _ => None,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bytes that are text, nearly text, and noise around the places where the rules differ.
    pub(in crate::output) fn awkward_bytes() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            4 => any::<char>().prop_map(|c| c.to_string().into_bytes()),
            2 => prop::sample::select(vec!["a", "é", "≤", "😀", "\u{feff}", "\0"]).prop_map(|s| s.as_bytes().to_vec()),
            2 => prop::sample::select(vec![0x80u8, 0xBF, 0xC0, 0xC3, 0xE0, 0xE2, 0xED, 0xF0, 0xF4, 0xF5, 0xFF, 0x9F, 0xA0])
                .prop_map(|b| vec![b]),
        ];
        prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
    }

    #[test]
    fn only_valid_characters_hold_a_cut_back() {
        let cases: [(&[u8], usize, usize); 9] = [
            ("a≤b".as_bytes(), 1, 0),
            ("a≤b".as_bytes(), 2, 2),
            ("a≤b".as_bytes(), 3, 1),
            ("😀".as_bytes(), 1, 3),
            // A stray continuation byte belongs to nothing and is kept.
            (b"a\x80b", 1, 0),
            // A surrogate is not a character, nor is an overlong form.
            (b"\xed\xa0\x80", 1, 0),
            (b"\xe0\x80\x80", 1, 0),
            // Neither is one that the end cuts off.
            (b"\xe2\x89", 1, 0),
            (b"\xc3\xa9\xa9", 2, 0),
        ];
        for (bytes, cut, rest) in cases {
            assert_eq!(rest_of_cut_character(bytes, cut), rest, "{bytes:x?} cut at {cut}");
        }
    }

    #[test]
    fn only_what_can_be_completed_waits() {
        let cases: [(&[u8], usize); 10] = [
            (b"", 0),
            (b"a", 0),
            (b"a\xe2", 1),
            (b"a\xe2\x89", 2),
            ("a≤".as_bytes(), 0),
            (b"\xf0\x9f\x98", 3),
            (b"a\xff", 0),
            (b"a\x80", 0),
            // No character begins like these.
            (b"\xe0\x80", 0),
            (b"\xed\xa0", 0),
        ];
        for (bytes, part) in cases {
            assert_eq!(incomplete_at_end(bytes), part, "{bytes:x?}");
        }
    }

    proptest! {
        #[test]
        fn pieces_cut_by_the_rules_read_like_the_whole(bytes in awkward_bytes(), at in any::<prop::sample::Index>()) {
            let at = at.index(bytes.len() + 1);
            let first = at - incomplete_at_end(&bytes[..at]);
            let text = format!("{}{}", String::from_utf8_lossy(&bytes[..first]), String::from_utf8_lossy(&bytes[first..]));
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn a_start_moved_by_the_rule_is_inside_no_character(bytes in awkward_bytes(), at in any::<prop::sample::Index>()) {
            let at = at.index(bytes.len() + 1);
            let rest = rest_of_cut_character(&bytes, at);
            prop_assert!(rest <= MAX_PART);
            let start = at + rest;
            // Every valid character of the whole lies on one side.
            let mut position = 0;
            for chunk in bytes.utf8_chunks() {
                for c in chunk.valid().chars() {
                    prop_assert!(start <= position || start >= position + c.len_utf8());
                    // And nothing was dropped but the rest of one.
                    if rest > 0 && position < at && at < position + c.len_utf8() {
                        prop_assert_eq!(start, position + c.len_utf8());
                    }
                    position += c.len_utf8();
                }
                if rest > 0 {
                    let invalid = position..position + chunk.invalid().len();
                    prop_assert!(!invalid.contains(&at));
                }
                position += chunk.invalid().len();
            }
        }
    }
}
