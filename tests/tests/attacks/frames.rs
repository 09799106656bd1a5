//! HTTP/2 as no client speaks it: floods, and frames that are none. Each over a connection of its own; while it lasts others are
//! served, and what the server has taken for it is little.

use std::{fs, time::Duration};

use executor_proto::transport::BEGIN_LIMIT;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::client::TlsStream;
use tool_client::executor::Executor;

use crate::{
    report::{Outcome, Report},
    rig::{Rig, SOON},
    wire::connect,
};

/// What one connection may cost the server, resident: its windows are a few MiB.
const MOST_KIB: u64 = 48 * 1024;

/// As long as a flood goes on at most.
const FLOOD: Duration = Duration::from_millis(600);

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PUSH_PROMISE: u8 = 5;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// A header as HPACK writes one that is not kept, for names and values below 127 bytes, or longer values.
fn field(name: &[u8], value: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0];
    for text in [name, value] {
        match u8::try_from(text.len()) {
            Ok(short) if short < 127 => bytes.push(short),
            _ => {
                bytes.push(127);
                let mut rest = text.len() - 127;
                while rest > 127 {
                    bytes.push(u8::try_from(rest & 127).expect("seven bits") | 128);
                    rest >>= 7;
                }
                bytes.push(u8::try_from(rest).expect("seven bits"));
            }
        }
        bytes.extend(text);
    }
    bytes
}

/// The headers of a call.
fn request(token: Option<&str>) -> Vec<u8> {
    let mut block = [
        field(b":method", b"POST"),
        field(b":scheme", b"https"),
        field(b":path", b"/executor.v1.Executor/GetInfo"),
        field(b":authority", b"localhost"),
        field(b"content-type", b"application/grpc"),
        field(b"te", b"trailers"),
    ]
    .concat();
    if let Some(token) = token {
        block.extend(field(b"authorization", format!("Bearer {token}").as_bytes()));
    }
    block
}

/// What a flood sends: the bytes of its next step, for step 0, 1, 2 … Streams of clients are odd.
type Step = Box<dyn Fn(u32) -> Vec<u8> + Send>;

struct Flood {
    name: &'static str,
    tried: &'static str,
    /// The daemon ends the connection, however much is sent.
    ended: bool,
    step: Step,
}

fn flood(
    name: &'static str,
    tried: &'static str,
    ended: bool,
    step: impl Fn(u32) -> Vec<u8> + Send + 'static,
) -> Flood {
    Flood { name, tried, ended, step: Box::new(step) }
}

fn odd(step: u32) -> u32 {
    step * 2 + 1
}

fn floods(token: &str) -> Vec<Flood> {
    let known = request(Some(token));
    let again = known.clone();
    let known_too = known.clone();
    vec![
        flood("rapid-reset", "begin calls and take them back at once", true, move |step| {
            [frame(HEADERS, END_HEADERS, odd(step), &request(None)), frame(RST_STREAM, 0, odd(step), &[0, 0, 0, 8])]
                .concat()
        }),
        flood("rapid-reset-with-a-token", "the same as somebody who is let in", true, move |step| {
            [frame(HEADERS, END_HEADERS, odd(step), &known), frame(RST_STREAM, 0, odd(step), &[0, 0, 0, 8])].concat()
        }),
        flood("made-you-reset", "have the daemon reset calls itself, by frames that are none", true, move |step| {
            [frame(HEADERS, END_HEADERS, odd(step), &again), frame(WINDOW_UPDATE, 0, odd(step), &[0; 4])].concat()
        }),
        flood("continuation", "send headers that never end", true, |step| match step {
            0 => frame(HEADERS, 0, 1, &field(b"a", b"b")),
            _ => frame(CONTINUATION, 0, 1, &field(b"name", &[b'v'; 8_000])),
        }),
        flood("continuation-empty", "send headers that never end and hold nothing", true, |step| match step {
            0 => frame(HEADERS, 0, 1, &[]),
            _ => frame(CONTINUATION, 0, 1, &[]),
        }),
        flood("headers-huge", "send headers of mebibytes", true, |step| match step % 100 {
            0 => frame(HEADERS, 0, odd(step / 100), &field(b":method", b"POST")),
            99 => frame(CONTINUATION, END_HEADERS, odd(step / 100), &field(b"x", &[b'v'; 16_000])),
            _ => frame(CONTINUATION, 0, odd(step / 100), &field(b"x", &[b'v'; 16_000])),
        }),
        flood("header-bomb", "send headers that are small and unfold to much", true, |step| {
            // Kept at place 62 of the table, then named by one byte, again and again.
            let kept = [&[0x40][..], &field(b"x-bomb", &[b'v'; 4_000])[1..]].concat();
            let block = [request(None), kept, vec![0x80 | 62; 8_000]].concat();
            frame(HEADERS, END_HEADERS | END_STREAM, odd(step), &block)
        }),
        flood("settings", "change settings without end", false, |_| frame(SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 100])),
        flood("settings-table", "let the table of headers grow and shrink", false, |step| {
            frame(SETTINGS, 0, 0, &[0, 1, 0, if step % 2 == 0 { 255 } else { 0 }, 0, 0])
        }),
        flood("ping", "ping without end", false, |_| frame(PING, 0, 0, &[7; 8])),
        flood("empty-data", "send empty data without end", false, move |step| match step {
            0 => frame(HEADERS, END_HEADERS, 1, &known_too),
            _ => frame(DATA, 0, 1, &[]),
        }),
        flood("priority", "order streams that do not exist", false, |step| {
            frame(PRIORITY, 0, odd(step), &[0, 0, 0, 0, 1])
        }),
        flood("window-overflow", "open the window beyond what there can be", true, |_| {
            frame(WINDOW_UPDATE, 0, 0, &[0x7f, 0xff, 0xff, 0xff])
        }),
        flood("window-zero", "open the window by nothing", true, |_| frame(WINDOW_UPDATE, 0, 0, &[0; 4])),
        flood("push", "push to the daemon", true, |_| frame(PUSH_PROMISE, END_HEADERS, 1, &[0, 0, 0, 2, 0x82])),
        flood("data-on-no-stream", "send data that belongs to nothing", true, |_| frame(DATA, 0, 0, b"x")),
        flood("data-before-headers", "send data for a call that was not begun", true, |_| frame(DATA, 0, 5, b"x")),
        flood("even-stream", "begin a call with a number of the daemon's", true, |_| {
            frame(HEADERS, END_HEADERS, 2, &request(None))
        }),
        flood("padding", "pad by more than there is", true, |_| frame(DATA, 8, 1, &[200, 1])),
        flood("settings-length", "send settings of an odd length", true, |_| frame(SETTINGS, 0, 0, &[0; 5])),
        flood("settings-window", "name a window beyond what there can be", true, |_| {
            frame(SETTINGS, 0, 0, &[0, 4, 0xff, 0xff, 0xff, 0xff])
        }),
        flood("ping-length", "ping with an odd length", true, |_| frame(PING, 0, 0, &[0; 7])),
        flood("frame-too-large", "send a frame of more than was agreed on", true, |_| {
            let mut bytes = frame(DATA, 0, 1, &[0; 100]);
            bytes[..3].copy_from_slice(&[0xff, 0xff, 0xff]);
            bytes
        }),
        flood("hpack-index", "name a header that is not in the table", true, |_| {
            frame(HEADERS, END_HEADERS, 1, &[0xff, 0xff, 0xff, 0xff, 0x0f])
        }),
        flood("hpack-huffman", "send a header that cannot be unfolded", true, |_| {
            frame(HEADERS, END_HEADERS, 1, &[0, 0x84, 0xff, 0xff, 0xff, 0xff, 1, b'x'])
        }),
        flood("goaway", "say goodbye and go on", false, |step| match step {
            0 => frame(GOAWAY, 0, 0, &[0; 8]),
            _ => frame(HEADERS, END_HEADERS | END_STREAM, odd(step), &request(None)),
        }),
    ]
}

/// Messages that claim to be what they are not; each within one call of somebody who is let in.
fn messages() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let prefixed = |compressed: u8, length: u32, rest: &[u8]| [&[compressed][..], &length.to_be_bytes(), rest].concat();
    vec![
        ("huge-message", "announce a message of 4 GiB", prefixed(0, u32::MAX, b"x")),
        (
            "compressed",
            "send a message that is said to be compressed, by nothing that was named",
            prefixed(1, 4, b"\x1f\x8b\x08\0"),
        ),
        ("flag", "send a message with a flag that is none", prefixed(9, 0, b"")),
        ("no-message", "send half of what comes before a message", vec![0, 0]),
    ]
}

async fn open(rig: &Rig) -> TlsStream<TcpStream> {
    let mut stream = connect(rig, None).await.expect("a connection");
    stream.write_all(PREFACE).await.expect("sent");
    stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.expect("sent");
    stream
}

/// The server's resident memory, in KiB. 0 where it may not be looked at.
fn resident(rig: &Rig) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", rig.server())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().unwrap_or_default()
}

pub(crate) async fn attack(rig: &Rig, report: &mut Report) {
    let ((), slow_begin) = tokio::join!(all_but_slow_begin(rig, report), slow_begin(rig));
    report.add("http2/slow-begin", "keep a place by a beginning that does not end", slow_begin);
}

async fn all_but_slow_begin(rig: &Rig, report: &mut Report) {
    let token = rig.token("a");
    for Flood { name, tried, ended, step } in floods(&token) {
        let before = resident(rig);
        let mut most = before;
        let mut stream = open(rig).await;
        let (mut number, mut closed) = (0, false);
        let begun = tokio::time::Instant::now();
        let mut took = vec![0; 65_536];
        while !closed && begun.elapsed() < FLOOD && number < 40_000 {
            let mut bytes = Vec::new();
            for _ in 0..50 {
                bytes.extend(step(number));
                number += 1;
            }
            // A server that takes no more holds the flood up; what it says is read, so that it is not held up itself.
            closed = matches!(timeout(Duration::from_millis(300), stream.write_all(&bytes)).await, Ok(Err(_)));
            while let Ok(read) = timeout(Duration::from_millis(1), stream.read(&mut took)).await {
                if matches!(read, Ok(0) | Err(_)) {
                    closed = true;
                    break;
                }
            }
            most = most.max(resident(rig));
        }
        let served = timeout(SOON, rig.tenant("b").info()).await;
        let served = matches!(served, Ok(Ok(_)));
        if ended && !closed {
            // It may have said goodbye and wait for ours.
            closed = timeout(SOON, async { while matches!(stream.read(&mut took).await, Ok(1..)) {} }).await.is_ok();
        }
        let grown = most.saturating_sub(before);
        let refused = served && grown < MOST_KIB && (closed || !ended);
        let seen = format!("{number} steps, closed: {closed}, others served: {served}, {grown} KiB more");
        report.add(format_args!("http2/{name}"), tried, Outcome::of(before > 0, refused, seen));
    }
    for (name, tried, message) in messages() {
        let mut stream = open(rig).await;
        let before = resident(rig);
        let bytes = [frame(HEADERS, END_HEADERS, 1, &request(Some(&token))), frame(DATA, END_STREAM, 1, &message)];
        stream.write_all(&bytes.concat()).await.expect("sent");
        let mut answer = Vec::new();
        let mut part = vec![0; 4_096];
        // The answer's last frame has the flag that ends the stream.
        let ended = timeout(SOON, async {
            loop {
                match stream.read(&mut part).await {
                    Ok(0) | Err(_) => break,
                    Ok(read) => answer.extend(&part[..read]),
                }
                if ends(&answer) {
                    break;
                }
            }
        });
        let ended = ended.await.is_ok();
        let whole = answer.windows(7).any(|window| window == b"danger-") || has_data(&answer);
        let grown = resident(rig).saturating_sub(before);
        report.add(
            format_args!("http2/{name}"),
            tried,
            Outcome::of(
                before > 0,
                ended && !whole && grown < MOST_KIB,
                format_args!("ended: {ended}, data: {whole}, {grown} KiB more"),
            ),
        );
    }
    slow(rig, report).await;
}

/// The frames in some bytes: kind, flags, stream.
fn frames(mut bytes: &[u8]) -> Vec<(u8, u8, u32)> {
    let mut all = Vec::new();
    while let [a, b, c, kind, flags, s0, s1, s2, s3, rest @ ..] = bytes {
        all.push((*kind, *flags, u32::from_be_bytes([*s0, *s1, *s2, *s3])));
        let length = usize::try_from(u32::from_be_bytes([0, *a, *b, *c])).expect("24 bits");
        bytes = rest.get(length..).unwrap_or_default();
    }
    all
}

fn ends(bytes: &[u8]) -> bool {
    frames(bytes).iter().any(|(kind, flags, stream)| match *kind {
        HEADERS | DATA => *stream == 1 && flags & END_STREAM != 0,
        RST_STREAM => *stream == 1,
        GOAWAY => true,
        _ => false,
    })
}

/// Whether the call was answered by a message.
fn has_data(bytes: &[u8]) -> bool {
    frames(bytes).iter().any(|(kind, _, _)| *kind == DATA)
}

/// Hundreds who begin and do not go on, and the tenants beside them.
async fn slow(rig: &Rig, report: &mut Report) {
    const STRANGERS: usize = 300;
    let mut silent = Vec::new();
    for number in 0..STRANGERS {
        let mut stranger = TcpStream::connect(("127.0.0.1", rig.port())).await.expect("at least queued");
        if number % 2 == 0 {
            // Half of what begins a TLS handshake.
            stranger.write_all(&[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]).await.expect("sent");
        }
        silent.push(stranger);
    }
    let served = matches!(timeout(SOON, rig.tenant("b").info()).await, Ok(Ok(_)));
    report.add(
        "http2/silent",
        "take places by hundreds of connections that say nothing",
        Outcome::refused_if(served, "nobody else is served"),
    );
    drop(silent);
    let mut idle = Vec::new();
    for _ in 0..50 {
        idle.push(open(rig).await);
    }
    let served = matches!(timeout(SOON, rig.tenant("b").info()).await, Ok(Ok(_)));
    report.add(
        "http2/idle",
        "take places by connections that make no call",
        Outcome::refused_if(served, "nobody else is served"),
    );
}

/// A beginning that does not end keeps its place for no longer than strangers have.
async fn slow_begin(rig: &Rig) -> Outcome {
    let mut byte_by_byte = connect(rig, None).await.expect("a connection");
    for byte in &PREFACE[..PREFACE.len() - 1] {
        byte_by_byte.write_all(&[*byte]).await.expect("sent");
        byte_by_byte.flush().await.expect("sent");
    }
    let begun = tokio::time::Instant::now();
    let mut rest = Vec::new();
    let closed = timeout(BEGIN_LIMIT * 3, byte_by_byte.read_to_end(&mut rest)).await.is_ok();
    Outcome::refused_if(closed, format_args!("open after {:?}", begun.elapsed()))
}
