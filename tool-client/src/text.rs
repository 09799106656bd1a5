//! The words that the model reads, made from values and from nothing else.
//!
//! Everything here is pure. [`run`] is the result of a foreground command, [`task`] everything that is said of background
//! tasks, [`failure`] what is said when the executor did not do what it was asked for; [`check`] what is said of arguments
//! before anything is asked. [`number`] and [`signal`] print values as the original harness, a JavaScript program, does.

use std::borrow::Cow;

pub mod check;
pub mod failure;
pub mod number;
pub mod run;
pub mod signal;
pub mod task;

/// The prompt section `tool:bash`.
pub const PROMPT: &str = "Check the `[exit code: N]` marker on every bash result. When a command has failed, look into \
                          the failure before you go on; do not build on its output as if it had worked.";

/// The text of an error result.
#[must_use]
pub fn error(message: &str) -> String {
    format!("Error: {message}")
}

/// A command's bytes as text: UTF-8 as WHATWG decodes it, one U+FFFD for each maximal part of an invalid sequence; a byte
/// order mark, NUL and control characters stay.
#[must_use]
pub fn decode(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// Begins a new line unless the text is at the start of one. Only `\n` ends a line.
fn end_line(text: &mut String) {
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
}

/// Joins the two streams: stdout, then stderr under its heading.
fn join_streams(stdout: String, stderr: &str) -> String {
    let mut body = stdout;
    if !stderr.is_empty() {
        end_line(&mut body);
        body.push_str("[stderr]\n");
        body.push_str(stderr);
    }
    body
}

/// How a spill is named: its path, and how much of the stream it holds where that is not all.
fn spill(spill: &executor_proto::types::Spill) -> String {
    let path = decode(&spill.path);
    match spill.cut_at {
        None => path.into_owned(),
        Some(bytes) => format!("{path} (first {bytes} bytes)"),
    }
}

/// What stands where a complete stream is kept nowhere.
const UNAVAILABLE: &str = "(unavailable)";

/// The marker of processes that could not be ended; `None` when there are none.
fn still_running(survivors: &[u32]) -> Option<String> {
    (!survivors.is_empty()).then(|| format!("[still running: {}]", pids(survivors)))
}

fn pids(pids: &[u32]) -> String {
    pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The recorded cases, and the boundary cases of the Unicode standard's table of maximal subparts.
    #[test]
    fn invalid_bytes_are_replaced_as_whatwg_does() {
        let cases: [(&[u8], &str); 16] = [
            (b"\xff\xfe|", "\u{fffd}\u{fffd}|"),
            (b"a\xe4\xbdb", "a\u{fffd}b"),
            (b"\xc0\xaf|", "\u{fffd}\u{fffd}|"),
            (b"\xed\xa0\x80|", "\u{fffd}\u{fffd}\u{fffd}|"),
            (b"\xf0\x9f\x98|", "\u{fffd}|"),
            (b"\xf4\x90\x80\x80|", "\u{fffd}\u{fffd}\u{fffd}\u{fffd}|"),
            (b"\xf0\x80\x80\x80|", "\u{fffd}\u{fffd}\u{fffd}\u{fffd}|"),
            (b"\xe4\xbd", "\u{fffd}"),
            (b"\x80\x80|", "\u{fffd}\u{fffd}|"),
            (b"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", "\u{fffd}\u{fffd}\u{fffd}\u{fffd}A"),
            (b"\xe0\x9f\x80", "\u{fffd}\u{fffd}\u{fffd}"),
            (b"\xf5\x80", "\u{fffd}\u{fffd}"),
            (b"\xc2", "\u{fffd}"),
            (b"\xef\xbb\xbfhi", "\u{feff}hi"),
            (b"a\0b\r\x1b[0m", "a\0b\r\u{1b}[0m"),
            (b"\xf4\x8f\xbf\xbf", "\u{10ffff}"),
        ];
        for (bytes, text) in cases {
            assert_eq!(decode(bytes), text, "{bytes:02x?}");
        }
    }
}
