//! `output`, `kill` and `ps`: background tasks.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use executor_proto::types::{Exit, Spill, StreamDelta, StreamName, TaskId, TaskInfo, TaskOutput, TaskStatus};

use super::{
    EXIT_OWN_FAILURE, Outcome,
    backend::Backend,
    bash::code_of,
    json,
    output::{self, Viewed, Visible},
};
use crate::text::{decode, failure::Asked, signal, task};

/// One wait for a task's end; the daemon may cut it shorter.
const WAIT: Duration = Duration::from_secs(24 * 60 * 60);
/// A command in the list is cut to as many characters.
const SHOWN_CHARACTERS: usize = 100;

pub(super) async fn output(backend: &Backend, id: &str, wait: bool) -> Outcome {
    let id = TaskId(id.to_owned());
    let asked = Asked { task: Some(&id), ..Asked::default() };
    let [mut out, mut err] = StreamName::BOTH.map(Viewed::new);
    let status = loop {
        let read = backend.executor.read_output(backend.owner.as_ref(), &id, wait.then_some(WAIT)).await;
        let TaskOutput { status, stdout, stderr } = read.map_err(|error| backend.failure_of(&error, &asked))?;
        for (view, stream, delta) in [(&mut out, StreamName::Stdout, stdout), (&mut err, StreamName::Stderr, stderr)] {
            let StreamDelta { start, data, dropped, spill, missing } = delta;
            let end = start + data.len() as u64;
            if dropped > 0 {
                output::line(&lost(stream, start - dropped.min(start), start, spill.as_ref())).await?;
            }
            view.write(data).await?;
            if missing > 0 {
                output::line(&lost(stream, end, end.saturating_add(missing), spill.as_ref())).await?;
            }
        }
        if !wait || status != TaskStatus::Running {
            break status;
        }
    };
    out.finish().await?;
    err.finish().await?;
    output::line(&format!("{id} {}", in_words(&status))).await?;
    Ok(match status {
        TaskStatus::Running => 0,
        TaskStatus::Ended(exit) => code_of(&exit),
        TaskStatus::Killed(signal) => signal.map_or(0, |number| code_of(&Exit::Signal(number))),
    })
}

fn lost(stream: StreamName, from: u64, to: u64, spill: Option<&Spill>) -> String {
    let whole = spill.map(|Spill { path, cut_at }| match cut_at {
        None => format!("; the whole is in {}", decode(path)),
        Some(bytes) => format!("; the first {bytes} bytes are in {}", decode(path)),
    });
    let name = stream.as_str();
    format!("bytes {from} to {to} of {name} are no longer kept{}", whole.unwrap_or_default())
}

pub(super) async fn kill(backend: &Backend, id: &str) -> Outcome {
    let id = TaskId(id.to_owned());
    let asked = Asked { task: Some(&id), ..Asked::default() };
    let killed = backend.executor.kill_task(backend.owner.as_ref(), &id).await;
    let outcome = killed.map_err(|error| backend.failure_of(&error, &asked))?;
    if is_run(&id) && outcome.survivors.is_empty() {
        let said = if outcome.already_finished { "nothing of it is running" } else { "killed what was running of it" };
        return output::stdout(format!("{id}: {said}\n")).await.map(|()| 0);
    }
    match task::killed(&id, &outcome) {
        Ok(line) => output::stdout(line + "\n").await.map(|()| 0),
        Err(line) => {
            output::line(&line).await?;
            Ok(EXIT_OWN_FAILURE)
        }
    }
}

/// Whether an id is a foreground run's, and not a task's.
pub(super) fn is_run(id: &TaskId) -> bool {
    id.0.strip_prefix("run-").is_some_and(|number| number.parse::<u64>().is_ok())
}

pub(super) async fn ps(backend: &Backend, json: bool) -> Outcome {
    let listed = backend.executor.list_tasks(backend.owner.as_ref()).await;
    let tasks = listed.map_err(|error| backend.failure(&error))?;
    let text = if json {
        let all: Vec<_> = tasks.iter().map(json::task_info).collect();
        format!("{}\n", serde_json::Value::from(all))
    } else {
        table(&tasks, now_ms())
    };
    output::stdout(text).await?;
    Ok(0)
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The list, with what is left over of a task below it. Commands are other people's text: a terminal must not obey it.
fn table(tasks: &[TaskInfo], now_ms: u64) -> String {
    let heading = ["ID", "STATUS", "AGE", "PID", "COMMAND"].map(str::to_owned);
    let mut rows = vec![heading];
    for info in tasks {
        let pid = info.shell_pid.map(|pid| pid.to_string()).unwrap_or_default();
        rows.push([
            info.id.0.clone(),
            in_words(&info.status),
            age(now_ms.saturating_sub(info.started_at_ms)),
            pid,
            one_line(&info.command),
        ]);
        rows.extend(info.leftovers.iter().map(|left| {
            [
                String::new(),
                "left running".to_owned(),
                String::new(),
                left.pid.to_string(),
                one_line(&left.command_line),
            ]
        }));
    }
    let mut widths = [0; 4];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let [id, status, old, pid] = widths;
    rows.iter().map(|[a, b, c, d, e]| format!("{a:id$}  {b:status$}  {c:>old$}  {d:>pid$}  {e}\n")).collect()
}

fn one_line(text: &[u8]) -> String {
    let visible = Visible::text(text).replace('\n', "\\n").replace('\t', "\\t");
    match visible.char_indices().nth(SHOWN_CHARACTERS) {
        Some((cut, _)) => format!("{}…", &visible[..cut]),
        None => visible,
    }
}

fn age(milliseconds: u64) -> String {
    match milliseconds / 1_000 {
        seconds @ 0..=119 => format!("{seconds}s"),
        seconds @ 120..=7_199 => format!("{}m", seconds / 60),
        seconds @ 7_200..=172_799 => format!("{}h", seconds / 3_600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

fn in_words(status: &TaskStatus) -> String {
    match status {
        TaskStatus::Running => "running".to_owned(),
        TaskStatus::Ended(Exit::Code(code)) => format!("exit code {code}"),
        TaskStatus::Ended(Exit::Signal(number)) | TaskStatus::Killed(Some(number)) => {
            format!("killed by {}", signal::name(*number))
        }
        TaskStatus::Ended(Exit::Unknown(_)) => "exit unknown".to_owned(),
        TaskStatus::Killed(None) => "killed".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use executor_proto::types::Process;

    use super::*;

    #[test]
    fn the_list_shows_leftovers_and_obeys_no_command() {
        let info = |id: &str, command: &'static [u8], status| TaskInfo {
            id: TaskId(id.to_owned()),
            owner: None,
            command: Bytes::from_static(command),
            workdir: Bytes::from_static(b"/"),
            status,
            started_at_ms: 1_000,
            ended_at_ms: None,
            stdout_total: 0,
            stderr_total: 0,
            shell_pid: None,
            leftovers: Vec::new(),
        };
        let mut run = info("run-12", b"(sleep 9 &)\necho \x1b]0;owned\x07", TaskStatus::Ended(Exit::Code(0)));
        run.leftovers = vec![Process { pid: 4711, command_line: Bytes::from_static(b"sleep 9") }];
        let mut running = info("bash-1", b"make", TaskStatus::Running);
        running.shell_pid = Some(99);
        let expected = "\
ID      STATUS        AGE   PID  COMMAND
run-12  exit code 0    5m        (sleep 9 &)\\necho ^[]0;owned^G
        left running       4711  sleep 9
bash-1  running        5m    99  make
";
        assert_eq!(table(&[run, running], 301_000), expected);
    }

    #[test]
    fn long_commands_are_cut_between_characters() {
        let shown = one_line("é".repeat(500).as_bytes());
        assert_eq!(shown.chars().count(), SHOWN_CHARACTERS + 1);
        assert!(shown.ends_with('…'));
    }

    #[test]
    fn ages_have_one_unit() {
        let shown = [0, 119_999, 120_000, 7_200_000, 172_800_000].map(age);
        assert_eq!(shown, ["0s", "119s", "2m", "2h", "2d"]);
    }
}
