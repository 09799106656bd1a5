//! Log lines on their way to stderr, through a thread of their own.
//!
//! Whoever reads stderr may stop reading, and a write then blocks. That must hold up nobody but this thread: lines that do
//! not fit into its queue are dropped, and their number is told when there is room again.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

use tracing_subscriber::fmt::MakeWriter;

/// Lines that may wait for stderr.
const QUEUED_LINES: usize = 1_024;

/// Longest wait for the lines that are queued when the process ends.
const LAST_LINES: Duration = Duration::from_millis(500);

enum Message {
    Line(Vec<u8>),
    /// Answered when everything before it has been written.
    Flush(SyncSender<()>),
}

/// Takes lines for the thread. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Lines {
    queue: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

impl Lines {
    /// Starts the thread, which writes to `out` until every clone is dropped.
    ///
    /// # Errors
    /// When there can be no more threads.
    pub(super) fn start(out: impl Write + Send + 'static) -> io::Result<Self> {
        let (queue, lines) = sync_channel(QUEUED_LINES);
        let dropped = Arc::new(AtomicU64::new(0));
        let lost = dropped.clone();
        thread::Builder::new().name("log".to_owned()).spawn(move || write_all(&lines, &lost, out))?;
        Ok(Self { queue, dropped })
    }

    /// Waits, for a bounded time, until what has been logged is written.
    pub(crate) fn flush(&self) {
        let (written, wait) = sync_channel(1);
        // A queue that is full is one whose reader has stopped: there is nothing to wait for.
        if self.queue.try_send(Message::Flush(written)).is_ok() {
            let _ = wait.recv_timeout(LAST_LINES);
        }
    }
}

fn write_all(lines: &Receiver<Message>, lost: &AtomicU64, mut out: impl Write) {
    while let Ok(message) = lines.recv() {
        // Where stderr is closed there is nobody to tell.
        let _ = match message {
            Message::Line(line) => out.write_all(&line),
            Message::Flush(written) => written.send(()).map_err(io::Error::other),
        };
        let dropped = lost.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            let _ = writeln!(out, "executor-daemon: {dropped} log lines were dropped, since nobody read them");
        }
    }
}

/// One line that is being made; it is queued when it is dropped.
#[derive(Debug)]
pub(crate) struct Line {
    lines: Lines,
    bytes: Vec<u8>,
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.bytes.is_empty() {
            return;
        }
        match self.lines.queue.try_send(Message::Line(std::mem::take(&mut self.bytes))) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.lines.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line { lines: self.clone(), bytes: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Somebody who reads when the lock is free.
    #[derive(Clone, Default)]
    struct Reader(Arc<Mutex<Vec<u8>>>);

    impl Write for Reader {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no reader panics").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_stops_costs_lines_and_no_time() {
        let reader = Reader::default();
        let lines = Lines::start(reader.clone()).expect("a thread");
        let log = |text: &str| writeln!(lines.make_writer(), "{text}").expect("it is queued");
        log("first");
        lines.flush();
        assert_eq!(*reader.0.lock().expect("no reader panics"), b"first\n");

        let stopped = reader.0.lock().expect("no reader panics");
        // One line may be in the thread's hands; all others have to fit into the queue.
        for _ in 0..QUEUED_LINES + 100 {
            log("x");
        }
        drop(stopped);
        // Until the thread has taken a line the queue is full, and a flush returns at once.
        let text = loop {
            lines.flush();
            let text = String::from_utf8(reader.0.lock().expect("no reader panics").clone()).expect("UTF-8");
            if text.matches("x\n").count() >= QUEUED_LINES && text.contains("dropped") {
                break text;
            }
            thread::yield_now();
        };
        let written = text.matches("x\n").count();
        let told: usize = text
            .lines()
            .find_map(|line| {
                line.strip_prefix("executor-daemon: ")?.strip_suffix(" log lines were dropped, since nobody read them")
            })
            .expect("the loss is told")
            .parse()
            .expect("a number");
        assert!(told >= 99, "{told}");
        assert_eq!(written + told, QUEUED_LINES + 100);
    }
}
