//! The tools over the Model Context Protocol: the real binary, spoken to through pipes as an agent does.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, ChildStdin, ChildStdout},
};

use serde_json::{Value, json};

use super::*;

/// An agent's end.
struct Agent {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
    _cli: Cli,
}

impl Agent {
    fn start(arguments: &[&str]) -> Self {
        let cli = Cli::new();
        let mut command = cli.command(&[&["mcp"], arguments].concat());
        let mut child = command.stdin(Stdio::piped()).spawn().expect("the binary starts");
        let from = BufReader::new(child.stdout.take().expect("it is piped"));
        Self { to: child.stdin.take(), child, from, _cli: cli }
    }

    fn line(&mut self, line: &str) {
        let to = self.to.as_mut().expect("it is open");
        to.write_all(line.as_bytes()).and_then(|()| to.write_all(b"\n")).expect("it reads");
    }

    fn send(&mut self, message: &Value) {
        self.line(&message.to_string());
    }

    fn ask(&mut self, id: i64, method: &str, params: &Value) {
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
    }

    fn tell(&mut self, method: &str, params: &Value) {
        self.send(&json!({"jsonrpc": "2.0", "method": method, "params": params}));
    }

    fn bash(&mut self, id: i64, command: &str, background: bool) {
        let arguments = json!({"command": command, "description": "test", "run_in_background": background});
        self.ask(id, "tools/call", &json!({"name": "bash", "arguments": arguments}));
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        self.from.read_line(&mut line).expect("it writes");
        let message: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
        assert_eq!(message["jsonrpc"], "2.0");
        message
    }

    fn answer(&mut self, id: i64) -> Value {
        let message = self.next();
        assert_eq!(message["id"], id, "{message}");
        message
    }

    /// The text of an answered call, which is an error result or not.
    fn text(&mut self, id: i64, is_error: bool) -> String {
        let message = self.answer(id);
        assert_eq!(message["result"]["isError"], is_error, "{message}");
        assert_eq!(message["result"]["content"][0]["type"], "text");
        message["result"]["content"][0]["text"].as_str().expect("a text").to_owned()
    }

    fn initialize(&mut self) -> Value {
        self.ask(0, "initialize", &json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {}}));
        let result = self.answer(0)["result"].clone();
        self.tell("notifications/initialized", &json!({}));
        result
    }

    /// Ends the input: how the process ends, and what it still says.
    fn end(mut self) -> (Option<i32>, String, String) {
        drop(self.to.take());
        let (mut out, mut err) = (String::new(), String::new());
        self.from.read_to_string(&mut out).expect("UTF-8");
        self.child.stderr.take().expect("it is piped").read_to_string(&mut err).expect("UTF-8");
        (self.child.wait().expect("it ends").code(), out, err)
    }
}

#[test]
fn an_agent_finds_the_three_tools_and_calls_them() {
    let mut agent = Agent::start(&[]);
    let hello = agent.initialize();
    assert_eq!(
        (&hello["protocolVersion"], &hello["serverInfo"]["name"]),
        (&json!("2025-06-18"), &json!("tool-client"))
    );
    assert!(hello["capabilities"]["tools"].is_object() && hello["capabilities"]["logging"].is_object(), "{hello}");
    agent.ask(1, "tools/list", &json!({}));
    let listed = agent.answer(1)["result"]["tools"].clone();
    let defined: Value = serde_json::from_str(&Cli::new().run_here(&["definitions"])).expect("JSON");
    let tools = defined.as_array().expect("an array").iter().map(
        |tool| json!({"name": tool["name"], "description": tool["description"], "inputSchema": tool["parameters"]}),
    );
    assert_eq!(listed, Value::Array(tools.collect()));

    agent.bash(2, "echo out; echo err >&2; exit 3", false);
    assert_eq!(agent.text(2, false), "out\n[stderr]\nerr\n[exit code: 3]");
    // As `call` says it, to a model that has left something out.
    agent.ask(3, "tools/call", &json!({"name": "bash", "arguments": {"description": "d"}}));
    let refused = agent.text(3, true);
    assert!(refused.starts_with("Error: ") && refused.contains("command"), "{refused}");
    agent.ask(4, "ping", &json!({}));
    assert_eq!(agent.answer(4)["result"], json!({}));
    let (code, out, err) = agent.end();
    assert_eq!((code, out.as_str(), err.as_str()), (Some(0), "", ""));
}

#[test]
fn a_task_is_the_sessions_and_its_notice_comes_by_itself() {
    let mut agent = Agent::start(&["--owner", "me"]);
    agent.initialize();
    agent.bash(1, "until [ -e go ]; do sleep 0.02; done; echo built", true);
    assert_eq!(agent.text(1, false), "started background task bash-1");
    agent.bash(2, "touch go", false);
    let mut messages = [agent.next(), agent.next()];
    messages.sort_by_key(|message| message["id"].is_null());
    assert_eq!(messages[0]["result"]["content"][0]["text"], "(no output)");
    let notice =
        "background bash task bash-1 finished [status: completed, exit code: 0]. Read its output with bash_output.";
    assert_eq!(
        (&messages[1]["method"], &messages[1]["params"]["data"]),
        (&json!("notifications/message"), &json!(notice))
    );
    agent.ask(3, "tools/call", &json!({"name": "bash_output", "arguments": {"task_id": "bash-1"}}));
    assert_eq!(agent.text(3, false), "built\n\n[status: completed, exit code: 0]");
    agent.ask(4, "tools/call", &json!({"name": "bash_kill", "arguments": {"task_id": "bash-1"}}));
    assert_eq!(agent.text(4, false), "task bash-1 had already finished");
    assert_eq!(agent.end().0, Some(0));
}

#[test]
fn a_call_that_is_cancelled_is_ended_and_not_answered() {
    let mut agent = Agent::start(&[]);
    agent.initialize();
    agent.bash(7, "touch begun; trap 'touch ended; exit' TERM; while :; do sleep 0.02; done", false);
    // Calls go on beside each other.
    agent.bash(8, "until [ -e begun ]; do sleep 0.02; done; echo beside", false);
    assert_eq!(agent.text(8, false), "beside\n");
    agent.bash(7, "echo another", false);
    assert_eq!(agent.answer(7)["error"]["code"], -32_600, "its id is taken");
    agent.tell("notifications/cancelled", &json!({"requestId": 7, "reason": "enough"}));
    agent.tell("notifications/cancelled", &json!({"requestId": "of nobody"}));
    agent.bash(9, "until [ -e ended ]; do sleep 0.02; done; echo it has ended", false);
    assert_eq!(agent.text(9, false), "it has ended\n");
    let (code, out, _) = agent.end();
    assert_eq!((code, out.as_str()), (Some(0), ""), "no answer to what was cancelled");
}

#[test]
fn the_end_of_the_input_ends_what_is_under_way() {
    let mut agent = Agent::start(&[]);
    agent.initialize();
    agent.bash(1, "echo $$ > pid; exec sleep 300", true);
    agent.text(1, false);
    agent.bash(2, "until [ -s pid ]; do sleep 0.02; done; cat pid", false);
    let pid = agent.text(2, false);
    agent.bash(3, "echo $$ > other; exec sleep 300", false);
    agent.bash(4, "until [ -s other ]; do sleep 0.02; done; cat other", false);
    let other = agent.text(4, false);
    let (code, out, err) = agent.end();
    assert_eq!((code, out.as_str(), err.as_str()), (Some(0), "", ""));
    for pid in [pid, other] {
        assert!(!Path::new("/proc").join(pid.trim()).exists(), "{pid} is alive");
    }
}

#[test]
fn what_is_no_request_is_answered_with_its_reason() {
    let mut agent = Agent::start(&[]);
    for (line, id, code) in [
        ("{", Value::Null, -32_700),
        ("[]", Value::Null, -32_600),
        (r#"[{"jsonrpc": "2.0", "id": 1, "method": "ping"}]"#, Value::Null, -32_600),
        (r#"{"jsonrpc": "2.0"}"#, Value::Null, -32_600),
        (r#"{"jsonrpc": "2.0", "id": "a", "method": "resources/list"}"#, json!("a"), -32_601),
        (r#"{"jsonrpc": "2.0", "id": 1, "method": "tools/call"}"#, json!(1), -32_602),
        (r#"{"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "sh"}}"#, json!(2), -32_602),
        (r#"{"jsonrpc": "2.0", "id": 3, "method": "initialize", "params": {}}"#, json!(3), -32_602),
    ] {
        agent.line(line);
        let answer = agent.next();
        assert_eq!((&answer["id"], &answer["error"]["code"]), (&id, &json!(code)), "{line}: {answer}");
        assert!(answer["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{answer}");
    }
    // What is not known and wants no answer has none; empty lines and answers neither.
    for line in
        [r#"{"jsonrpc": "2.0", "method": "notifications/else"}"#, "", r#"{"jsonrpc": "2.0", "id": 1, "result": {}}"#]
    {
        agent.line(line);
    }
    agent.ask(9, "ping", &json!({}));
    assert_eq!(agent.answer(9)["result"], json!({}));
    assert_eq!(agent.end().0, Some(0));
}
