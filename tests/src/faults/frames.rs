//! Reads the frames of HTTP/2 as they pass: where calls begin and end, how large frames and messages are.
//!
//! It looks and changes nothing; [`go_away`] is for a connection's other end. Padding and frames of header blocks that are continued do not occur between the two ends
//! that are tested here; a direction that does not begin as HTTP/2 does is not looked at any further.

use std::collections::HashMap;

/// What a client sends before its first frame.
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Length, type, flags and stream.
const HEAD_BYTES: usize = 9;
/// Before each message of gRPC: whether it is compressed, and its length.
const MESSAGE_HEAD_BYTES: usize = 5;

const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
pub(super) const END_STREAM: u8 = 1;
const ACK: u8 = 1;

/// Something that began or ended in the bytes that were looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// The head of a frame that belongs to a call: headers or data.
    Call {
        /// The call's stream.
        stream: u32,
        /// These are its first headers in this direction.
        begins: bool,
        /// Nothing follows it in this direction.
        ends: bool,
        /// Bytes after the head.
        length: u32,
    },
    /// A message of gRPC of so many bytes has begun.
    Message(u32),
    /// A ping that asks.
    Ping,
    /// The sender takes no new calls.
    GoAway,
}

/// The state of one direction of one connection.
#[derive(Debug)]
pub(super) struct Frames {
    at: At,
    calls: HashMap<u32, Messages>,
}

#[derive(Debug)]
enum At {
    Preface {
        seen: usize,
    },
    Head {
        head: [u8; HEAD_BYTES],
        seen: usize,
        first: bool,
    },
    Payload {
        left: u32,
        of: Option<u32>,
        ends: Option<u32>,
    },
    /// It is not HTTP/2.
    Elsewhere,
}

/// Where the data of one call stands among its messages.
#[derive(Debug, Default)]
struct Messages {
    head: [u8; MESSAGE_HEAD_BYTES],
    seen: usize,
    left: u32,
}

impl Frames {
    /// Of what a client sends.
    pub(super) fn of_client() -> Self {
        Self { at: At::Preface { seen: 0 }, calls: HashMap::new() }
    }

    /// Of what a server sends.
    pub(super) fn of_server() -> Self {
        Self { at: At::Head { head: [0; HEAD_BYTES], seen: 0, first: true }, calls: HashMap::new() }
    }

    /// Looks at the next bytes.
    pub(super) fn look(&mut self, mut bytes: &[u8], mut event: impl FnMut(Event)) {
        while let Some(byte) = bytes.first() {
            match &mut self.at {
                At::Elsewhere => return,
                At::Preface { seen } => {
                    if *byte != PREFACE[*seen] {
                        self.at = At::Elsewhere;
                        return;
                    }
                    *seen += 1;
                    bytes = &bytes[1..];
                    if *seen == PREFACE.len() {
                        self.at = At::Head { head: [0; HEAD_BYTES], seen: 0, first: true };
                    }
                }
                At::Head { head, seen, first } => {
                    head[*seen] = *byte;
                    *seen += 1;
                    bytes = &bytes[1..];
                    if *seen == HEAD_BYTES {
                        let (head, first) = (*head, *first);
                        if first && head[3] != SETTINGS {
                            self.at = At::Elsewhere;
                        } else {
                            self.begin(head, &mut event);
                        }
                    }
                }
                At::Payload { left, of, .. } => {
                    let now = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    if let Some(messages) = of.map(|stream| self.calls.entry(stream).or_default()) {
                        messages.look(&bytes[..now], |length| event(Event::Message(length)));
                    }
                    *left -= u32::try_from(now).unwrap_or(*left);
                    bytes = &bytes[now..];
                    self.end_if_over();
                }
            }
        }
    }

    /// Whether another frame may be put in here: the last byte was the last of one, and it was not the first of all.
    pub(super) fn between(&self) -> bool {
        matches!(self.at, At::Head { seen: 0, first: false, .. })
    }

    fn begin(&mut self, head: [u8; HEAD_BYTES], event: &mut impl FnMut(Event)) {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let (kind, flags) = (head[3], head[4]);
        let stream = u32::from_be_bytes([head[5] & 0x7f, head[6], head[7], head[8]]);
        let ends = flags & END_STREAM != 0;
        match kind {
            DATA | HEADERS => {
                let begins = kind == HEADERS && !self.calls.contains_key(&stream);
                self.calls.entry(stream).or_default();
                event(Event::Call { stream, begins, ends, length });
            }
            RST_STREAM => {
                self.calls.remove(&stream);
                event(Event::Call { stream, begins: false, ends: true, length });
            }
            PING if flags & ACK == 0 => event(Event::Ping),
            GOAWAY => event(Event::GoAway),
            _ => {}
        }
        let of_a_call = matches!(kind, DATA | HEADERS);
        self.at = At::Payload {
            left: length,
            of: (kind == DATA).then_some(stream),
            ends: (of_a_call && ends).then_some(stream),
        };
        self.end_if_over();
    }

    /// After the last byte of a frame comes the next head.
    fn end_if_over(&mut self) {
        if let At::Payload { left: 0, ends, .. } = self.at {
            if let Some(stream) = ends {
                self.calls.remove(&stream);
            }
            self.at = At::Head { head: [0; HEAD_BYTES], seen: 0, first: false };
        }
    }
}

impl Messages {
    fn look(&mut self, mut bytes: &[u8], mut begun: impl FnMut(u32)) {
        while let Some(byte) = bytes.first() {
            if self.left > 0 {
                let now = bytes.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
                self.left -= u32::try_from(now).unwrap_or(self.left);
                bytes = &bytes[now..];
                continue;
            }
            self.head[self.seen] = *byte;
            self.seen += 1;
            bytes = &bytes[1..];
            if self.seen == MESSAGE_HEAD_BYTES {
                let [_compressed, length @ ..] = self.head;
                self.left = u32::from_be_bytes(length);
                self.seen = 0;
                begun(self.left);
            }
        }
    }
}

/// The frame in which a server says, without an error, that it takes no more calls on this connection, and that it has seen none
/// above this stream.
pub(super) fn go_away(last: u32) -> Vec<u8> {
    const NO_ERROR: u32 = 0;
    frame(GOAWAY, 0, 0, &[last.to_be_bytes(), NO_ERROR.to_be_bytes()].concat())
}

/// A frame.
pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("frames made here are small").to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(frames: &mut Frames, bytes: &[u8], step: usize) -> Vec<Event> {
        let mut events = Vec::new();
        bytes.chunks(step).for_each(|bytes| frames.look(bytes, |event| events.push(event)));
        events
    }

    #[test]
    fn calls_and_messages_are_seen_however_the_bytes_are_cut() {
        let mut bytes = PREFACE.to_vec();
        bytes.extend(frame(SETTINGS, 0, 0, &[0; 12]));
        bytes.extend(frame(HEADERS, 4, 1, b"path"));
        bytes.extend(frame(DATA, 0, 1, b"\0\0\0\0\x06abc"));
        bytes.extend(frame(PING, 0, 0, &[0; 8]));
        bytes.extend(frame(PING, ACK, 0, &[0; 8]));
        bytes.extend(frame(DATA, END_STREAM, 1, b"def\0\0\0\0\0"));
        bytes.extend(frame(GOAWAY, 0, 0, &[0; 8]));
        bytes.extend(frame(HEADERS, 4 | END_STREAM, 3, b""));
        let call = |stream, begins, ends, length| Event::Call { stream, begins, ends, length };
        for step in [1, 2, 7, 1_000] {
            let events = look(&mut Frames::of_client(), &bytes, step);
            let expected = [
                call(1, true, false, 4),
                call(1, false, false, 8),
                Event::Message(6),
                Event::Ping,
                call(1, false, true, 8),
                Event::Message(0),
                Event::GoAway,
                call(3, true, true, 0),
            ];
            assert_eq!(events, expected, "in steps of {step}");
        }
    }

    #[test]
    fn what_is_not_http2_is_not_looked_at() {
        assert_eq!(look(&mut Frames::of_client(), &[b'x'; 100_000], 512), []);
        assert_eq!(look(&mut Frames::of_server(), &[b'x'; 100_000], 512), []);
    }
}
