//! Writing to stdout and stderr: all bytes, in order, without holding up what else goes on.

use std::{
    fmt::Write as _,
    io::{self, ErrorKind, IsTerminal, Write},
    os::fd::AsFd,
};

use bytes::Bytes;
use executor_proto::types::StreamName;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use super::Failure;

/// Writes bytes to stdout.
pub(super) async fn stdout(bytes: impl Into<Bytes>) -> Result<(), Failure> {
    raw(StreamName::Stdout, bytes.into()).await
}

/// Writes bytes as they are. They are written by another thread, so that signals are heard while nobody reads; one call
/// after the other keeps the order.
pub(super) async fn raw(stream: StreamName, bytes: Bytes) -> Result<(), Failure> {
    let written = tokio::task::spawn_blocking(move || match stream {
        StreamName::Stdout => write_all(io::stdout(), &bytes),
        StreamName::Stderr => write_all(io::stderr(), &bytes),
    });
    match written.await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(Errno::EPIPE)) => Err(Failure::BrokenPipe),
        Ok(Err(errno)) => Err(Failure::Own(format!("cannot write {}: {}", stream.as_str(), errno.desc()))),
        Err(_panicked) => Err(Failure::Own(format!("cannot write {}", stream.as_str()))),
    }
}

/// Writes past the buffers of the standard library. The descriptor may be in non-blocking mode, which it shares with
/// whoever gave it to us.
fn write_all(to: impl AsFd, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match nix::unistd::write(&to, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => {
                poll(&mut [PollFd::new(to.as_fd(), PollFlags::POLLOUT)], PollTimeout::NONE)?;
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// A remark of our own.
pub(super) async fn line(text: &str) -> Result<(), Failure> {
    raw(StreamName::Stderr, framed(text).into()).await
}

/// The same, where nothing else runs any more.
pub(super) fn line_now(text: &str) -> io::Result<()> {
    match io::stderr().write_all(framed(text).as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn framed(text: &str) -> String {
    format!("tool-client: {}\n", Visible::text(text.as_bytes()))
}

/// Whether a stream of ours is a terminal.
pub(super) fn is_terminal(stream: StreamName) -> bool {
    match stream {
        StreamName::Stdout => io::stdout().is_terminal(),
        StreamName::Stderr => io::stderr().is_terminal(),
    }
}

/// A stream of a command for people to look at: a terminal must show its control characters, not obey them; a file or a
/// pipe gets every byte as it is.
#[derive(Debug)]
pub(super) struct Viewed {
    stream: StreamName,
    visible: Option<Visible>,
}

impl Viewed {
    pub(super) fn new(stream: StreamName) -> Self {
        Self { stream, visible: is_terminal(stream).then(Visible::default) }
    }

    pub(super) async fn write(&mut self, bytes: Bytes) -> Result<(), Failure> {
        let bytes = match &mut self.visible {
            Some(visible) => visible.next(&bytes).into(),
            None => bytes,
        };
        raw(self.stream, bytes).await
    }

    /// Whatever was held back for its rest.
    pub(super) async fn finish(self) -> Result<(), Failure> {
        match self.visible {
            Some(visible) => raw(self.stream, visible.end().into()).await,
            None => Ok(()),
        }
    }
}

/// Makes bytes safe to show. Newlines and tabs stay.
#[derive(Debug, Default)]
pub(super) struct Visible {
    /// The beginning of a character whose rest has not come.
    held: Vec<u8>,
}

impl Visible {
    /// A text as a whole.
    pub(super) fn text(bytes: &[u8]) -> String {
        let mut visible = Self::default();
        visible.next(bytes) + &visible.end()
    }

    fn next(&mut self, bytes: &[u8]) -> String {
        let mut all = std::mem::take(&mut self.held);
        all.extend_from_slice(bytes);
        let mut shown = String::with_capacity(all.len());
        let mut rest = &all[..];
        loop {
            let (valid, after) = match std::str::from_utf8(rest) {
                Ok(text) => (text, None),
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    (
                        std::str::from_utf8(valid).expect("the decoder has just said so"),
                        Some((after, error.error_len())),
                    )
                }
            };
            valid.chars().for_each(|c| show(c, &mut shown));
            match after {
                None => return shown,
                Some((incomplete, None)) => {
                    self.held = incomplete.to_vec();
                    return shown;
                }
                Some((after, Some(invalid))) => {
                    show_bytes(&after[..invalid], &mut shown);
                    rest = &after[invalid..];
                }
            }
        }
    }

    fn end(self) -> String {
        let mut shown = String::new();
        show_bytes(&self.held, &mut shown);
        shown
    }
}

fn show(c: char, shown: &mut String) {
    match c {
        '\n' | '\t' => shown.push(c),
        // Controls as `cat -v` shows them; what turns the direction of text around is as deceiving as an escape code.
        '\0'..='\x1f' => {
            shown.push('^');
            shown.push(char::from(c as u8 + b'@'));
        }
        '\x7f' => shown.push_str("^?"),
        '\u{80}'..='\u{9f}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
            let _ = write!(shown, "\\u{{{:x}}}", c as u32);
        }
        _ => shown.push(c),
    }
}

fn show_bytes(bytes: &[u8], shown: &mut String) {
    for byte in bytes {
        let _ = write!(shown, "\\x{byte:02x}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_not_obeyed() {
        for (bytes, shown) in [
            (&b"plain\ttext\n"[..], "plain\ttext\n"),
            (b"\x1b[2J\x1b]0;owned\x07", "^[[2J^[]0;owned^G"),
            (b"a\rb\x7f\0", "a^Mb^?^@"),
            (b"\xc2\x9b2J", "\\u{9b}2J"),
            ("\u{202e}evil \u{e9}\u{4e2d}".as_bytes(), "\\u{202e}evil \u{e9}\u{4e2d}"),
            (b"a\xffb\xe2\x89", "a\\xffb\\xe2\\x89"),
        ] {
            assert_eq!(Visible::text(bytes), shown, "{bytes:?}");
        }
    }

    #[test]
    fn a_character_that_comes_in_pieces_is_shown_whole() {
        let mut visible = Visible::default();
        let shown: String = b"x\xe2\x89\xa4\xf0\x9f\x98\x80\xff".iter().map(|byte| visible.next(&[*byte])).collect();
        assert_eq!(shown + &visible.end(), "x\u{2264}\u{1f600}\\xff");
    }
}
