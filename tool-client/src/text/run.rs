//! The result of a foreground command.

use executor_proto::types::{EndedBy, Exit, RunResult, SandboxMode, StreamResult};

use super::{UNAVAILABLE, decode, end_line, join_streams, number, signal, spill, still_running};

/// The text of a run that was not aborted: its output, then the markers, each on a line of its own.
#[must_use]
pub fn result(result: &RunResult) -> String {
    let mut body = join_streams(stream(&result.stdout), &stream(&result.stderr));
    if body.is_empty() {
        body.push_str("(no output)");
    }
    let markers = markers(result);
    if !markers.is_empty() {
        end_line(&mut body);
        body.push_str(&markers.join("\n"));
    }
    body
}

/// What is said of a run that its caller aborted: its output is discarded, what could not be ended is named.
#[must_use]
pub fn aborted(result: &RunResult) -> String {
    let mut text = "command aborted".to_owned();
    if let Some(marker) = still_running(&result.survivors) {
        end_line(&mut text);
        text.push_str(&marker);
    }
    text
}

/// The marker of a denial by the sandbox.
#[must_use]
pub fn sandbox_denied(mode: SandboxMode) -> String {
    format!("[sandbox: file access denied under {} mode]", mode.as_str())
}

fn stream(stream: &StreamResult) -> String {
    let mut text = decode(&stream.tail).into_owned();
    if stream.dropped > 0 {
        let path = stream.spill.as_ref().map_or_else(|| UNAVAILABLE.to_owned(), spill);
        text.push_str(&format!("\n[output truncated; full output: {path}]"));
    }
    text
}

fn markers(result: &RunResult) -> Vec<String> {
    let RunResult {
        exit,
        timed_out_after_ms,
        ended_by,
        aborted: _,
        stdout: _,
        stderr: _,
        survivors,
        leftovers: _,
        sandbox_denied: denied,
        duration_ms: _,
    } = result;
    let denied = denied.map(sandbox_denied);
    let timed_out = timed_out_after_ms.map(|after| format!("[timed out after {}ms]", number::plain(after)));
    let ended = ended_by.map(|by| match by {
        EndedBy::CallerGone => "[ended: caller gone]".to_owned(),
        EndedBy::ExecutorStopping => "[ended: executor stopping]".to_owned(),
    });
    let exit = match exit {
        Exit::Code(0) => None,
        Exit::Code(code) => Some(format!("[exit code: {code}]")),
        Exit::Signal(number) => Some(format!("[killed by signal: {}]", signal::name(*number))),
        Exit::Unknown(reason) => Some(format!("[exit unknown: {reason}]")),
    };
    [denied, timed_out, ended, exit, still_running(survivors)].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use executor_proto::types::Spill;
    use proptest::prelude::*;

    use super::*;

    fn run(stdout: &[u8], stderr: &[u8], exit: Exit) -> RunResult {
        let stream = |bytes: &[u8]| StreamResult {
            total: bytes.len() as u64,
            tail: Bytes::copy_from_slice(bytes),
            ..StreamResult::default()
        };
        RunResult {
            exit,
            timed_out_after_ms: None,
            ended_by: None,
            aborted: false,
            stdout: stream(stdout),
            stderr: stream(stderr),
            survivors: Vec::new(),
            leftovers: vec![77],
            sandbox_denied: None,
            duration_ms: 1.0,
        }
    }

    #[test]
    fn streams_and_exit_markers_are_joined_without_inventing_newlines() {
        let cases: [(&[u8], &[u8], Exit, &str); 18] = [
            (b"", b"", Exit::Code(0), "(no output)"),
            (b"", b"", Exit::Code(3), "(no output)\n[exit code: 3]"),
            (b"\n", b"", Exit::Code(0), "\n"),
            (b"\n", b"", Exit::Code(1), "\n[exit code: 1]"),
            (b"hello", b"", Exit::Code(0), "hello"),
            (b"hello", b"", Exit::Code(3), "hello\n[exit code: 3]"),
            (b"hello\n", b"", Exit::Code(3), "hello\n[exit code: 3]"),
            (b"a\n\n\n", b"", Exit::Code(1), "a\n\n\n[exit code: 1]"),
            (b"out\n", b"err\n", Exit::Code(0), "out\n[stderr]\nerr\n"),
            (b"out", b"err\n", Exit::Code(0), "out\n[stderr]\nerr\n"),
            (b"out", b"err", Exit::Code(0), "out\n[stderr]\nerr"),
            (b"", b"oops", Exit::Code(4), "[stderr]\noops\n[exit code: 4]"),
            (b"", b"\n", Exit::Code(1), "[stderr]\n\n[exit code: 1]"),
            ("a\u{2028}".as_bytes(), b"", Exit::Code(1), "a\u{2028}\n[exit code: 1]"),
            ("a\u{85}".as_bytes(), b"e", Exit::Code(0), "a\u{85}\n[stderr]\ne"),
            (b"partial\n", b"", Exit::Signal(9), "partial\n[killed by signal: SIGKILL]"),
            (b"x", b"", Exit::Signal(37), "x\n[killed by signal: SIGRTMIN+3]"),
            (b"x", b"", Exit::Unknown("executor restarted".to_owned()), "x\n[exit unknown: executor restarted]"),
        ];
        for (stdout, stderr, exit, text) in cases {
            assert_eq!(result(&run(stdout, stderr, exit)), text);
        }
    }

    #[test]
    fn markers_come_in_their_order() {
        let mut every = run(b"x", b"", Exit::Signal(15));
        every.sandbox_denied = Some(SandboxMode::WorkspaceWrite);
        every.timed_out_after_ms = Some(150.5);
        every.ended_by = Some(EndedBy::ExecutorStopping);
        every.survivors = vec![3, 41];
        let text = "x\n[sandbox: file access denied under workspace-write mode]\n[timed out after 150.5ms]\n[ended: executor \
                    stopping]\n[killed by signal: SIGTERM]\n[still running: 3, 41]";
        assert_eq!(result(&every), text);

        let mut gone = run(b"", b"", Exit::Code(0));
        gone.ended_by = Some(EndedBy::CallerGone);
        assert_eq!(result(&gone), "(no output)\n[ended: caller gone]");

        let mut timed_out = run(b"up\n", b"", Exit::Code(0));
        timed_out.timed_out_after_ms = Some(400.0);
        assert_eq!(result(&timed_out), "up\n[timed out after 400ms]");
    }

    #[test]
    fn a_dropped_head_is_marked_with_where_the_whole_is() {
        let mut cut = run(b"aaa\n", b"e", Exit::Code(5));
        cut.stdout.dropped = 9;
        cut.stdout.spill = Some(Spill { path: Bytes::from_static(b"/spill/\xff1"), cut_at: None });
        cut.stderr.dropped = 1;
        let text = "aaa\n\n[output truncated; full output: /spill/\u{fffd}1]\n[stderr]\ne\n[output truncated; full output: \
                    (unavailable)]\n[exit code: 5]";
        assert_eq!(result(&cut), text);

        cut.stdout.spill = Some(Spill { path: Bytes::from_static(b"/spill/1"), cut_at: Some(64) });
        cut.stderr = StreamResult::default();
        cut.exit = Exit::Code(0);
        assert_eq!(result(&cut), "aaa\n\n[output truncated; full output: /spill/1 (first 64 bytes)]");

        // A spill without a loss (the tail still holds everything) is not news.
        cut.stdout.dropped = 0;
        assert_eq!(result(&cut), "aaa\n");

        // Everything was dropped, e.g. because the tail would have held a part of a character only.
        let mut empty = run(b"", b"", Exit::Code(0));
        empty.stderr.dropped = 2;
        assert_eq!(result(&empty), "[stderr]\n\n[output truncated; full output: (unavailable)]");
    }

    #[test]
    fn an_aborted_run_names_what_lives_on_and_nothing_else() {
        let mut run = run(b"partial", b"", Exit::Signal(15));
        assert_eq!(aborted(&run), "command aborted");
        run.survivors = vec![8];
        assert_eq!(aborted(&run), "command aborted\n[still running: 8]");
    }

    proptest! {
        #[test]
        fn output_is_in_the_text_as_it_was(stdout in any::<Vec<u8>>(), stderr in any::<Vec<u8>>(), code: u8) {
            let text = result(&run(&stdout, &stderr, Exit::Code(code)));
            prop_assert!(text.starts_with(&*decode(&stdout)));
            let marker = format!("\n[exit code: {code}]");
            prop_assert_eq!(code != 0, text.ends_with(&marker) && code != 0);
            if code == 0 && !stderr.is_empty() {
                let section = format!("[stderr]\n{}", decode(&stderr));
                prop_assert!(text.ends_with(&section));
            }
            if code == 0 && stderr.is_empty() && !stdout.is_empty() {
                prop_assert_eq!(text, decode(&stdout));
            }
        }
    }
}
