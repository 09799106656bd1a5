//! `bash`: a command, with its output passed through.

use std::{io::Read, os::unix::ffi::OsStringExt, path::PathBuf};

use async_trait::async_trait;
use bytes::Bytes;
use executor_proto::{
    MAX_COMMAND_BYTES,
    types::{CommandSpec, EndedBy, Exit, RunResult, StreamChunk, StreamName},
};
use tokio_util::sync::CancellationToken;

use super::{
    EXIT_OWN_FAILURE, EXIT_TIMEOUT, Failure, Outcome, arguments::Bash, backend::Backend, interrupt::Interrupt, json,
    needs_endpoint, output, settings::Settings,
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
    if background && settings.endpoint.is_none() {
        return Err(needs_endpoint("--background"));
    }
    let interrupt = Interrupt::listen()?;
    let stdin = if stdin {
        tokio::select! {
            () = interrupt.token().cancelled() => return Ok(interrupt.code().unwrap_or(EXIT_OWN_FAILURE)),
            stdin = read_stdin() => Some(stdin?),
        }
    } else {
        None
    };
    let backend = Backend::new(settings).await?;
    if backend.is_embedded() && output::is_terminal(StreamName::Stderr) {
        output::line("no endpoint is set: running on this host, as you").await?;
    }
    let spec = CommandSpec {
        command: Bytes::from(command.into_vec()),
        workdir: backend.workdir(workdir.map(PathBuf::from)).await?,
        stdin,
        timeout_ms: timeout.map(|timeout| timeout.as_secs_f64() * 1_000.0),
        ..CommandSpec::default()
    };
    if background {
        interrupt.or(start(&backend, spec, json)).await
    } else if json {
        run_to_json(backend, spec, &interrupt).await
    } else {
        run_through(&backend, spec, &interrupt).await
    }
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

async fn run_to_json(backend: Backend, spec: CommandSpec, interrupt: &Interrupt) -> Outcome {
    let result = run(&backend, spec, interrupt.token(), None).await?;
    let code = exit_code(&result, interrupt);
    output::stdout(format!("{}\n", json::run(&result))).await?;
    backend.keep_named_files();
    Ok(code)
}

async fn run_through(backend: &Backend, spec: CommandSpec, interrupt: &Interrupt) -> Outcome {
    // A reader that went away ends the command as Ctrl-C does.
    let abort = interrupt.token().child_token();
    let mut through = Through { abort: abort.clone(), received: [0; 2], failure: None };
    let result = run(backend, spec, &abort, Some(&mut through)).await?;
    if let Some(failure) = through.failure {
        return Err(failure);
    }
    for (stream, received, total) in [
        (StreamName::Stdout, through.received[0], result.stdout.total),
        (StreamName::Stderr, through.received[1], result.stderr.total),
    ] {
        if received < total {
            output::line(&gap(stream, received, total)).await?;
        }
    }
    for remark in remarks(&result) {
        output::line(&remark).await?;
    }
    Ok(exit_code(&result, interrupt))
}

async fn run(
    backend: &Backend,
    spec: CommandSpec,
    abort: &CancellationToken,
    sink: Option<&mut dyn OutputSink>,
) -> Result<RunResult, Failure> {
    let workdir = spec.workdir.clone();
    let asked = Asked { workdir: workdir.as_deref(), ..Asked::default() };
    let result = backend.executor.run(backend.owner.as_ref(), spec, abort, sink).await;
    result.map_err(|error| backend.failure_of(&error, &asked))
}

/// Passes output on as it comes.
#[derive(Debug)]
struct Through {
    abort: CancellationToken,
    /// Offset after the last byte of stdout and stderr.
    received: [u64; 2],
    failure: Option<Failure>,
}

#[async_trait]
impl OutputSink for Through {
    async fn output(&mut self, StreamChunk { stream, offset, data }: StreamChunk) {
        if self.failure.is_some() {
            return;
        }
        let received = &mut self.received[usize::from(stream == StreamName::Stderr)];
        let before = std::mem::replace(received, offset + data.len() as u64);
        let written = async {
            if offset > before {
                output::line(&gap(stream, before, offset)).await?;
            }
            output::raw(stream, data).await
        };
        if let Err(failure) = written.await {
            self.failure = Some(failure);
            self.abort.cancel();
        }
    }
}

fn gap(stream: StreamName, from: u64, to: u64) -> String {
    format!("{} bytes of {} are lost, from byte {from} to byte {to}", to - from, stream.as_str())
}

/// What the exit code does not say.
fn remarks(result: &RunResult) -> Vec<String> {
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
        remarks.push(format!("left running: {}", pids(&result.leftovers)));
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
