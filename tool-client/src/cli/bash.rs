//! `bash`: a command, with its output passed through.

use std::{io::Read, os::unix::ffi::OsStringExt, path::PathBuf};

use async_trait::async_trait;
use bytes::Bytes;
use executor_proto::{
    MAX_COMMAND_BYTES,
    error::ExecutorError,
    types::{CommandSpec, EndedBy, Exit, RunResult, StreamChunk, StreamName},
};
use tokio_util::sync::CancellationToken;

use super::{
    EXIT_OWN_FAILURE, EXIT_TIMEOUT, Failure, Outcome,
    arguments::Bash,
    backend::{Backend, Files},
    interrupt::Interrupt,
    json, needs_endpoint, output,
    settings::Settings,
};
use crate::{
    executor::OutputSink,
    text::{failure::Asked, number},
};

pub(super) async fn bash(arguments: Bash, settings: &Settings) -> Outcome {
    let Bash { command, background, workdir, timeout, json, stdin } = arguments;
    if command.is_empty() {
        return Err(Failure::Usage("the command is empty".to_owned()));
    }
    if workdir.as_ref().is_some_and(|workdir| workdir.is_empty()) {
        return Err(Failure::Usage("--workdir is empty".to_owned()));
    }
    if background && settings.endpoints.is_empty() {
        return Err(needs_endpoint("--background"));
    }
    let interrupt = Interrupt::listen()?;
    let told = if json { Files::AreTold } else { Files::AreNotTold };
    let prepared = interrupt.or(async {
        let stdin = if stdin { Some(read_stdin().await?) } else { None };
        let backend = Backend::new(settings, told).await?;
        let workdir = backend.workdir(workdir.map(PathBuf::from)).await?;
        Ok((backend, workdir, stdin))
    });
    let (backend, workdir, stdin) = prepared.await?;
    if backend.is_embedded() && output::is_terminal(StreamName::Stderr) {
        output::line("no endpoint is set: running on this host, as you").await?;
    }
    let spec = CommandSpec {
        command: Bytes::from(command.into_vec()),
        // Who calls has chosen where it starts.
        workspace: workdir.clone().filter(|workdir| workdir.starts_with(b"/")),
        workdir,
        stdin,
        sandbox_mode: settings.sandbox,
        timeout_ms: timeout.map(|timeout| timeout.as_secs_f64() * 1_000.0),
        ..CommandSpec::default()
    };
    let outcome = if background {
        interrupt.or(start(&backend, spec, json)).await
    } else if json {
        run_to_json(&backend, spec, &interrupt).await
    } else {
        run_through(&backend, spec, &interrupt).await
    };
    backend.close().await;
    outcome
}

/// Reads our stdin to its end.
async fn read_stdin() -> Result<Bytes, Failure> {
    let read = tokio::task::spawn_blocking(|| {
        let mut bytes = Vec::new();
        let limit = MAX_COMMAND_BYTES as u64 + 1;
        std::io::stdin().lock().take(limit).read_to_end(&mut bytes).map(|_| bytes)
    });
    let bytes = match read.await {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(error)) => return Err(Failure::Own(format!("cannot read stdin: {error}"))),
        Err(_panicked) => return Err(Failure::Own("cannot read stdin".to_owned())),
    };
    if bytes.len() > MAX_COMMAND_BYTES {
        return Err(Failure::Own(format!("stdin too large: at most {MAX_COMMAND_BYTES} bytes; put it into a file")));
    }
    Ok(Bytes::from(bytes))
}

async fn start(backend: &Backend, spec: CommandSpec, json: bool) -> Outcome {
    let workdir = spec.workdir.clone();
    let asked = Asked { workdir: workdir.as_deref(), ..Asked::default() };
    let id = backend.executor.start_task(backend.owner.as_ref(), spec).await;
    let id = id.map_err(|error| backend.failure_of(&error, &asked))?;
    let line = if json { serde_json::json!({"task_id": id.0}).to_string() } else { id.0 };
    output::stdout(line + "\n").await?;
    Ok(0)
}

async fn run_to_json(backend: &Backend, spec: CommandSpec, interrupt: &Interrupt) -> Outcome {
    let result = run(backend, spec, interrupt, interrupt.token(), None).await?;
    output::stdout(format!("{}\n", json::run(&result))).await?;
    Ok(exit_code(&result, interrupt))
}

async fn run_through(backend: &Backend, spec: CommandSpec, interrupt: &Interrupt) -> Outcome {
    // A reader that went away ends the command as Ctrl-C does.
    let abort = interrupt.token().child_token();
    let mut through = Through::new(abort.clone());
    let result = run(backend, spec, interrupt, &abort, Some(&mut through)).await?;
    let complete = through.finish(&result).await?;
    for remark in remarks(&result, backend.is_embedded()) {
        output::line(&remark).await?;
    }
    // Whoever asks only whether it went well does not take a part for the whole.
    Ok(match exit_code(&result, interrupt) {
        0 if !complete => EXIT_OWN_FAILURE,
        code => code,
    })
}

async fn run(
    backend: &Backend,
    spec: CommandSpec,
    interrupt: &Interrupt,
    abort: &CancellationToken,
    sink: Option<&mut dyn OutputSink>,
) -> Result<RunResult, Failure> {
    let workdir = spec.workdir.clone();
    let asked = Asked { workdir: workdir.as_deref(), ..Asked::default() };
    let result = backend.executor.run(backend.owner.as_ref(), spec, abort, sink).await;
    result.map_err(|error| match (interrupt.code(), error) {
        // Nothing ran, and nobody waits for it any more.
        (Some(code), ExecutorError::Unavailable { .. }) => Failure::Interrupted(code),
        (_, error) => backend.failure_of(&error, &asked),
    })
}

/// Passes output on as it comes.
#[derive(Debug)]
struct Through {
    abort: CancellationToken,
    /// Stdout and stderr.
    passed: [Passed; 2],
    failure: Option<Failure>,
}

/// How far a stream has been passed on, and what was lost on the way.
#[derive(Debug, Default, Clone, Copy)]
struct Passed {
    /// Offset after the last byte.
    end: u64,
    gaps: u64,
    lost: u64,
}

impl Through {
    fn new(abort: CancellationToken) -> Self {
        Self { abort, passed: [Passed::default(); 2], failure: None }
    }

    /// The next bytes begin here. The first gap is told where it is, so that a reader of both streams sees it there; a
    /// command that is much faster than its reader has too many to tell them all.
    async fn begin(&mut self, stream: StreamName, offset: u64) -> Result<(), Failure> {
        let Passed { end, gaps, lost } = &mut self.passed[index(stream)];
        if offset <= *end {
            return Ok(());
        }
        *gaps += 1;
        *lost += offset - *end;
        let first = *gaps == 1;
        let from = std::mem::replace(end, offset);
        if first {
            let bytes = offset - from;
            output::line(&format!("{bytes} bytes of {} are lost, from byte {from}", stream.as_str())).await?;
        }
        Ok(())
    }

    async fn write(&mut self, StreamChunk { stream, offset, data }: StreamChunk) -> Result<(), Failure> {
        self.begin(stream, offset).await?;
        self.passed[index(stream)].end = offset + data.len() as u64;
        output::raw(stream, data).await
    }

    /// The streams end here: whether all of them was passed on.
    async fn finish(mut self, result: &RunResult) -> Result<bool, Failure> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        for (stream, total) in [(StreamName::Stdout, result.stdout.total), (StreamName::Stderr, result.stderr.total)] {
            self.begin(stream, total).await?;
            let Passed { end: _, gaps, lost } = self.passed[index(stream)];
            if gaps > 1 {
                output::line(&format!("{lost} bytes of {} are lost in all, in {gaps} places", stream.as_str())).await?;
            }
        }
        Ok(self.passed.iter().all(|passed| passed.gaps == 0))
    }
}

fn index(stream: StreamName) -> usize {
    usize::from(stream == StreamName::Stderr)
}

#[async_trait]
impl OutputSink for Through {
    async fn output(&mut self, chunk: StreamChunk) {
        if self.failure.is_none()
            && let Err(failure) = self.write(chunk).await
        {
            self.failure = Some(failure);
            self.abort.cancel();
        }
    }
}

/// What the exit code does not say.
fn remarks(result: &RunResult, embedded: bool) -> Vec<String> {
    let pids = |pids: &[u32]| pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    let mut remarks = Vec::new();
    if let Some(after) = result.timed_out_after_ms {
        remarks.push(format!("timed out after {}ms", number::plain(after)));
    }
    remarks.extend(result.ended_by.map(|ended_by| match ended_by {
        EndedBy::CallerGone => "ended: caller gone".to_owned(),
        EndedBy::ExecutorStopping => "ended: executor stopping".to_owned(),
    }));
    if let Exit::Unknown(reason) = &result.exit
        && !result.aborted
    {
        remarks.push(format!("exit unknown: {reason}"));
    }
    if let Some(mode) = result.sandbox_denied {
        remarks.push(format!("file access denied under {} mode", mode.as_str()));
    }
    if !result.survivors.is_empty() {
        remarks.push(format!("could not be ended: {}", pids(&result.survivors)));
    }
    if !result.leftovers.is_empty() {
        // An embedded executor ends with this call, and what it started ends with it.
        let fate = if embedded { "left running, ended with this call" } else { "left running" };
        remarks.push(format!("{fate}: {}", pids(&result.leftovers)));
    }
    remarks
}

fn exit_code(result: &RunResult, interrupt: &Interrupt) -> u8 {
    match (interrupt.code(), &result.exit) {
        (Some(code), _) if result.aborted => code,
        _ if result.timed_out_after_ms.is_some() => EXIT_TIMEOUT,
        (_, exit) => code_of(exit),
    }
}

/// The exit code that a shell gives for an end.
pub(super) fn code_of(exit: &Exit) -> u8 {
    match exit {
        Exit::Code(code) => *code,
        Exit::Signal(number) => 128_u8.saturating_add(*number),
        Exit::Unknown(_) => EXIT_OWN_FAILURE,
    }
}
