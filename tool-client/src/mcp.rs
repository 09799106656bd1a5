//! The tools over the Model Context Protocol, for agents that speak it: JSON-RPC 2.0, one message a line.
//!
//! ```text
//!   initialize ─► tools/list, tools/call, ping …  each call is answered when it is over, in any order
//!                 notifications/cancelled ─► the call's abort; it is not answered any more
//!                 a task has ended ────────► notifications/message
//!   end of input, or the stop ─► every call that is under way is aborted and awaited
//! ```
//! What the model is told and reads is what the tools say ([`crate::tools`]): definitions, texts and notices are the same as in a harness
//! that links them. There is one session for each [`serve`]. Not here: where messages come from and go to, and what becomes of
//! the session's tasks afterwards.

use std::{collections::HashMap, fmt, io, sync::Arc};

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};
use tokio::{
    io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    sync::Mutex,
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use crate::{
    executor::Executor,
    notices::{AgentRegistry, Notice, Notices},
    session::Session,
    tools::{self, Abort, ErrorCode, Tools},
};

/// Versions of the protocol in which the messages used here are the same, the newest first.
const VERSIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];

/// Longest message that is read: the longest command with every byte of it escaped, and its frame.
const MAX_MESSAGE_BYTES: u64 = 6 * executor_proto::MAX_COMMAND_BYTES as u64 + 64 * 1024;

/// Calls that may be under way at the same time; those above are refused.
const MAX_CALLS: usize = 64;

/// Error codes of JSON-RPC.
const PARSE_ERROR: i32 = -32_700;
const INVALID_REQUEST: i32 = -32_600;
const METHOD_NOT_FOUND: i32 = -32_601;
const INVALID_PARAMS: i32 = -32_602;
/// One that servers may define: too many calls at the same time.
const BUSY: i32 = -32_000;

/// A message from the client, as far as it matters here.
#[derive(Debug, Deserialize)]
struct Message {
    #[serde(default)]
    id: Option<Value>,
    #[serde(default)]
    method: Option<String>,
    #[serde(default)]
    params: Option<Box<RawValue>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct InitializeParams {
    protocol_version: String,
}

#[derive(Debug, Deserialize)]
struct CallParams {
    name: String,
    /// As the model wrote them: the tools read them in their own way.
    #[serde(default)]
    arguments: Option<Box<RawValue>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CancelledParams {
    request_id: Value,
    #[serde(default)]
    reason: Option<String>,
}

/// What a request is answered with.
type Answer = Result<Value, (i32, String)>;

/// Where messages go, one at a time.
type Output<W> = Arc<Mutex<W>>;

/// Serves one client until its input ends or `stop` is raised, and until no call is under way any more.
///
/// # Errors
/// When messages can be read or written no longer. Every call that was under way has ended then.
pub async fn serve<R, W>(
    executor: Arc<dyn Executor>,
    session: Session,
    mut input: R,
    output: W,
    stop: &CancellationToken,
) -> io::Result<()>
where
    R: AsyncBufRead + Unpin,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let output = Arc::new(Mutex::new(output));
    let notices = Notices::new(Arc::clone(&executor), Arc::new(Client { output: Arc::clone(&output) }));
    let owner = session.id.clone();
    let mut calls = Calls {
        tools: Tools::new(executor),
        session: Arc::new(session),
        output: Arc::clone(&output),
        running: JoinSet::new(),
        aborts: HashMap::new(),
    };
    let mut line = Vec::new();
    let served = loop {
        let read = tokio::select! {
            biased;
            () = stop.cancelled() => break Ok(()),
            Some(over) = calls.running.join_next() => {
                if let Ok((id, Err(error))) = calls.forget(over) {
                    break Err(io::Error::new(error.kind(), format!("the answer to request {id}: {error}")));
                }
                continue;
            }
            // Cancel-safe as it is used: what has been read of a line stays in the buffer.
            read = read_line(&mut input, &mut line) => read,
        };
        match read {
            Ok(true) => {}
            Ok(false) => break Ok(()),
            Err(error) => break Err(error),
        }
        let message = std::mem::take(&mut line);
        if message.trim_ascii().is_empty() {
            continue;
        }
        if message.trim_ascii_start().first() == Some(&b'[') {
            let refused = Err((INVALID_REQUEST, "batches are not taken: send one message a line".to_owned()));
            if let Err(error) = send(&output, &answer(&Value::Null, refused)).await {
                break Err(error);
            }
            continue;
        }
        let handled = match serde_json::from_slice::<Message>(&message) {
            Ok(Message { method: Some(method), id: None, params }) => {
                if method == "notifications/initialized" {
                    notices.attach(owner.clone());
                }
                calls.hear(&method, params.as_deref());
                Ok(())
            }
            Ok(Message { method: Some(method), id: Some(id), params }) => {
                calls.ask(id, &method, params.as_deref()).await
            }
            // An answer: nothing is asked of clients.
            Ok(Message { method: None, id: Some(_), .. }) => Ok(()),
            Ok(Message { method: None, id: None, .. }) => {
                send(&output, &answer(&Value::Null, Err((INVALID_REQUEST, "no method".to_owned())))).await
            }
            Err(error) => {
                let code = if error.is_data() { INVALID_REQUEST } else { PARSE_ERROR };
                send(&output, &answer(&Value::Null, Err((code, error.to_string())))).await
            }
        };
        if let Err(error) = handled {
            break Err(error);
        }
    };
    calls.end().await;
    notices.detach(&owner).await;
    served
}

/// Reads to the end of a line; false: there is none any more.
async fn read_line(input: &mut (impl AsyncBufRead + Unpin), line: &mut Vec<u8>) -> io::Result<bool> {
    let left = (MAX_MESSAGE_BYTES + 1).saturating_sub(line.len() as u64);
    let mut limited = input.take(left);
    limited.read_until(b'\n', line).await?;
    if line.len() as u64 > MAX_MESSAGE_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a message is longer than {MAX_MESSAGE_BYTES} bytes"),
        ));
    }
    Ok(!line.is_empty())
}

/// Writes one message.
async fn send<W: AsyncWrite + Unpin>(output: &Mutex<W>, message: &Value) -> io::Result<()> {
    let mut line = message.to_string();
    line.push('\n');
    let mut output = output.lock().await;
    output.write_all(line.as_bytes()).await?;
    output.flush().await
}

fn answer(id: &Value, answer: Answer) -> Value {
    match answer {
        Ok(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
        Err((code, message)) => json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}}),
    }
}

/// The parameters of a request.
fn parse<'a, T: Deserialize<'a>>(params: Option<&'a RawValue>) -> Result<T, (i32, String)> {
    let text = params.map_or("{}", RawValue::get);
    serde_json::from_str(text).map_err(|error| (INVALID_PARAMS, error.to_string()))
}

/// Calls that are under way: each is a task that answers by itself.
struct Calls<W> {
    tools: Tools,
    session: Arc<Session>,
    output: Output<W>,
    running: JoinSet<(String, io::Result<()>)>,
    /// By the request's id, as JSON.
    aborts: HashMap<String, CancellationToken>,
}

impl<W: AsyncWrite + Unpin + Send + 'static> Calls<W> {
    /// A request, which is answered.
    async fn ask(&mut self, id: Value, method: &str, params: Option<&RawValue>) -> io::Result<()> {
        let answered = match method {
            "initialize" => parse(params).map(|params| initialized(&params)),
            // Notices come whatever the level: there are few, and each is wanted.
            "ping" | "logging/setLevel" => Ok(json!({})),
            "tools/list" => Ok(json!({"tools": listed()})),
            "tools/call" => match parse(params) {
                Ok(_) if self.aborts.contains_key(&id.to_string()) => {
                    Err((INVALID_REQUEST, format!("request {id} is still under way")))
                }
                Ok(params) if self.aborts.len() < MAX_CALLS => {
                    self.call(&id, params);
                    return Ok(());
                }
                Ok(_) => Err((BUSY, format!("{MAX_CALLS} calls are under way: wait until one is over"))),
                Err(error) => Err(error),
            },
            _ => Err((METHOD_NOT_FOUND, format!("{method} is not known"))),
        };
        send(&self.output, &answer(&id, answered)).await
    }

    fn call(&mut self, id: &Value, params: CallParams) {
        let CallParams { name, arguments } = params;
        let token = CancellationToken::new();
        let known_as = id.to_string();
        self.aborts.insert(known_as.clone(), token.clone());
        let (tools, session, output, id) =
            (self.tools.clone(), Arc::clone(&self.session), self.output.clone(), id.clone());
        self.running.spawn(async move {
            let arguments = arguments.as_deref().map_or("{}", RawValue::get);
            let abort = Abort { token: token.clone(), reason: None };
            let result = tools.call(Some(&session), &name, arguments, &abort).await;
            if token.is_cancelled() {
                // Nobody waits for it.
                return (known_as, Ok(()));
            }
            let answered = match result.code {
                Some(ErrorCode::UnknownTool) => Err((INVALID_PARAMS, result.text)),
                Some(ErrorCode::InvalidArgs) | None => Ok(result.to_json()),
            };
            (known_as, send(&output, &answer(&id, answered)).await)
        });
    }

    /// A notification.
    fn hear(&mut self, method: &str, params: Option<&RawValue>) {
        if method == "notifications/cancelled"
            && let Ok(CancelledParams { request_id, reason }) = parse(params)
            && let Some(abort) = self.aborts.get(&request_id.to_string())
        {
            tracing::debug!(%request_id, reason, "a call is cancelled");
            abort.cancel();
        }
    }

    fn forget(
        &mut self,
        over: Result<(String, io::Result<()>), tokio::task::JoinError>,
    ) -> Result<(String, io::Result<()>), tokio::task::JoinError> {
        if let Ok((id, _)) = &over {
            self.aborts.remove(id);
        }
        over
    }

    /// Aborts all of them, and waits for their ends.
    async fn end(mut self) {
        self.aborts.values().for_each(CancellationToken::cancel);
        while self.running.join_next().await.is_some() {}
    }
}

fn initialized(params: &InitializeParams) -> Value {
    let asked = VERSIONS.into_iter().find(|version| *version == params.protocol_version);
    json!({
        "protocolVersion": asked.unwrap_or(VERSIONS[0]),
        "capabilities": {"tools": {}, "logging": {}},
        "serverInfo": {"name": "tool-client", "version": env!("CARGO_PKG_VERSION")},
        "instructions": tools::prompt_section().text,
    })
}

/// The definitions of the tools in the words of the protocol.
fn listed() -> Vec<Value> {
    let tool = |tool: &tools::ToolDefinition| {
        let tools::ToolDefinition { name, description, parameters } = tool;
        json!({"name": name, "description": description, "inputSchema": parameters})
    };
    tools::definitions().iter().map(tool).collect()
}

/// The client, as the agent that notices are for.
struct Client<W> {
    output: Output<W>,
}

impl<W> fmt::Debug for Client<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

#[async_trait]
impl<W: AsyncWrite + Unpin + Send> AgentRegistry for Client<W> {
    async fn deliver(&self, notice: Notice) -> bool {
        let params = json!({"level": "info", "logger": "bash", "data": notice.text});
        let message = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": params});
        send(&self.output, &message).await.is_ok()
    }
}
