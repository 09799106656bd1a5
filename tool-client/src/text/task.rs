//! What is said of background tasks.

use executor_proto::types::{Exit, KillOutcome, StreamDelta, TaskId, TaskOutput, TaskStatus};

use super::{UNAVAILABLE, decode, join_streams, pids, signal, spill};

/// A task was started.
#[must_use]
pub fn started(id: &TaskId) -> String {
    format!("started background task {id}")
}

/// What a task wrote since the previous read, and its status.
#[must_use]
pub fn output(output: &TaskOutput) -> String {
    let TaskOutput { status, stdout, stderr } = output;
    let mut text = join_streams(decode(&stdout.data).into_owned(), &decode(&stderr.data));
    if text.is_empty() {
        text.push_str("(no new output)");
    }
    if lost(stdout) || lost(stderr) {
        let whole = full_output(stdout, stderr);
        text.push_str(&format!("\n[some output was dropped from memory; full output: {whole}]"));
    }
    text.push('\n');
    text.push_str(&self::status(status));
    text
}

/// The status line.
#[must_use]
pub fn status(status: &TaskStatus) -> String {
    match status {
        TaskStatus::Running => "[status: running]".to_owned(),
        TaskStatus::Ended(Exit::Code(code)) => format!("[status: completed, exit code: {code}]"),
        TaskStatus::Ended(Exit::Signal(number)) | TaskStatus::Killed(Some(number)) => {
            format!("[status: killed by {}]", signal::name(*number))
        }
        TaskStatus::Ended(Exit::Unknown(_)) => "[status: ended, exit unknown]".to_owned(),
        TaskStatus::Killed(None) => "[status: killed]".to_owned(),
    }
}

/// The notice in the session of a task's owner.
#[must_use]
pub fn notice(id: &TaskId, status: &TaskStatus) -> String {
    format!("background bash task {id} finished {}. Read its output with bash_output.", self::status(status))
}

/// What a kill did. `Err`, an error's message: something could not be ended.
///
/// # Errors
/// When there are survivors.
pub fn killed(id: &TaskId, outcome: &KillOutcome) -> Result<String, String> {
    let KillOutcome { already_finished, survivors } = outcome;
    if !survivors.is_empty() {
        Err(format!("could not end task {id}: still running: {}", pids(survivors)))
    } else if *already_finished {
        Ok(format!("task {id} had already finished"))
    } else {
        Ok(format!("killed background task {id}"))
    }
}

/// An id that was never issued, or that another tenant's task has.
#[must_use]
pub fn unknown(id: &TaskId) -> String {
    format!("unknown bash task \"{id}\"")
}

/// A task of another session.
#[must_use]
pub fn foreign(id: &TaskId) -> String {
    format!("task {id} belongs to another session")
}

/// Whether something that was not read is gone.
fn lost(stream: &StreamDelta) -> bool {
    stream.dropped > 0 || stream.missing > 0
}

/// Where the whole streams are: every spill there is, as long as one of them belongs to a stream that lost something.
fn full_output(stdout: &StreamDelta, stderr: &StreamDelta) -> String {
    let streams = [stdout, stderr];
    if !streams.iter().any(|stream| lost(stream) && stream.spill.is_some()) {
        return UNAVAILABLE.to_owned();
    }
    streams.iter().filter_map(|stream| stream.spill.as_ref()).map(spill).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use executor_proto::types::Spill;
    use proptest::prelude::*;

    use super::*;

    fn delta(data: &[u8], dropped: u64, path: Option<&'static str>) -> StreamDelta {
        let spill = path.map(|path| Spill { path: Bytes::from(path), cut_at: None });
        StreamDelta { start: dropped, data: Bytes::copy_from_slice(data), dropped, spill, missing: 0 }
    }

    #[test]
    fn a_delta_is_followed_by_the_status() {
        let cases: [(&[u8], &[u8], &str); 6] = [
            (b"", b"", "(no new output)\n[status: running]"),
            (b"one\n", b"", "one\n\n[status: running]"),
            (b"three", b"", "three\n[status: running]"),
            (b"out\n", b"err\n", "out\n[stderr]\nerr\n\n[status: running]"),
            (b"o2", b"e2", "o2\n[stderr]\ne2\n[status: running]"),
            (b"", b"e3\n", "[stderr]\ne3\n\n[status: running]"),
        ];
        for (stdout, stderr, text) in cases {
            let read = TaskOutput {
                status: TaskStatus::Running,
                stdout: delta(stdout, 0, Some("/unused")),
                stderr: delta(stderr, 0, None),
            };
            assert_eq!(output(&read), text);
        }
    }

    #[test]
    fn a_lossy_read_says_where_the_whole_is() {
        let text = |stdout, stderr| output(&TaskOutput { status: TaskStatus::Killed(None), stdout, stderr });
        let notice =
            |what: &str| format!("a\n\n[some output was dropped from memory; full output: {what}]\n[status: killed]");
        assert_eq!(text(delta(b"a\n", 1, Some("/o")), delta(b"", 0, None)), notice("/o"));
        assert_eq!(text(delta(b"a\n", 1, Some("/o")), delta(b"", 0, Some("/e"))), notice("/o, /e"));
        assert_eq!(text(delta(b"a\n", 1, None), delta(b"", 0, Some("/e"))), notice("(unavailable)"));
        assert_eq!(text(delta(b"a\n", 1, None), delta(b"", 1, Some("/e"))), notice("/e"));
        assert_eq!(text(delta(b"a\n", 1, None), delta(b"", 0, None)), notice("(unavailable)"));
        let cut = StreamDelta {
            spill: Some(Spill { path: Bytes::from_static(b"/o"), cut_at: Some(7) }),
            ..delta(b"a\n", 1, None)
        };
        assert_eq!(text(cut, delta(b"", 0, None)), notice("/o (first 7 bytes)"));
        let missing = StreamDelta { missing: 1, ..delta(b"a\n", 0, None) };
        assert_eq!(text(missing.clone(), delta(b"", 0, Some("/e"))), notice("(unavailable)"));
        assert_eq!(
            text(delta(b"a\n", 0, Some("/o")), StreamDelta { missing: 1, ..delta(b"", 0, None) }),
            notice("(unavailable)")
        );
        assert_eq!(
            text(delta(b"", 3, None), delta(b"", 0, None)),
            "(no new output)\n[some output was dropped from memory; full output: (unavailable)]\n[status: killed]"
        );
    }

    #[test]
    fn every_end_has_its_status() {
        let cases = [
            (TaskStatus::Running, "[status: running]"),
            (TaskStatus::Ended(Exit::Code(0)), "[status: completed, exit code: 0]"),
            (TaskStatus::Ended(Exit::Code(255)), "[status: completed, exit code: 255]"),
            (TaskStatus::Ended(Exit::Signal(11)), "[status: killed by SIGSEGV]"),
            (TaskStatus::Ended(Exit::Unknown("host died".to_owned())), "[status: ended, exit unknown]"),
            (TaskStatus::Killed(Some(9)), "[status: killed by SIGKILL]"),
            (TaskStatus::Killed(None), "[status: killed]"),
        ];
        let id = TaskId("bash-4".to_owned());
        for (status, text) in cases {
            assert_eq!(self::status(&status), text);
            let sentence = format!("background bash task bash-4 finished {text}. Read its output with bash_output.");
            assert_eq!(notice(&id, &status), sentence);
        }
    }

    #[test]
    fn a_kill_says_what_it_did() {
        let id = TaskId("bash-4".to_owned());
        let outcome = |already_finished, survivors| KillOutcome { already_finished, survivors };
        assert_eq!(killed(&id, &outcome(false, vec![])), Ok("killed background task bash-4".to_owned()));
        assert_eq!(killed(&id, &outcome(true, vec![])), Ok("task bash-4 had already finished".to_owned()));
        let message = "could not end task bash-4: still running: 5, 6".to_owned();
        assert_eq!(killed(&id, &outcome(false, vec![5, 6])), Err(message.clone()));
        assert_eq!(killed(&id, &outcome(true, vec![5, 6])), Err(message));
    }

    proptest! {
        #[test]
        fn a_delta_is_in_the_text_as_it_was(stdout in any::<Vec<u8>>(), stderr in any::<Vec<u8>>(), dropped in 0..3_u64) {
            let read = TaskOutput {
                status: TaskStatus::Running,
                stdout: delta(&stdout, dropped, None),
                stderr: delta(&stderr, 0, None),
            };
            let text = output(&read);
            prop_assert!(text.starts_with(&*decode(&stdout)));
            prop_assert!(text.ends_with("\n[status: running]"));
            let section = format!("[stderr]\n{}", decode(&stderr));
            prop_assert!(stderr.is_empty() || text.contains(&section));
            let lossy = "\n[some output was dropped from memory; full output: (unavailable)]\n[status: running]";
            prop_assert_eq!(text.ends_with(lossy), dropped > 0);
        }
    }
}
