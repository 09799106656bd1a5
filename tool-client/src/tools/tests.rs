//! Whole calls over an executor that answers what is written here.

use std::sync::Mutex;

use bytes::Bytes;
use executor_proto::{
    error::{ExecutorError, SpawnStage},
    types::{CommandSpec, Exit, KillOutcome, StreamDelta, TaskId, TaskOutput, TaskStatus},
};

use super::{
    fake::{Answer, Fake, Question, run_result},
    *,
};

fn session(id: &str) -> Session {
    Session { id: OwnerId(id.to_owned()), cwd: Some("/srv".into()), sandbox: None }
}

fn id(text: &str) -> TaskId {
    TaskId(text.to_owned())
}

fn success(text: &str) -> ToolResult {
    ToolResult::success(text.to_owned())
}

async fn call(fake: &Arc<Fake>, tool: &str, arguments: &str) -> ToolResult {
    let executor: Arc<dyn Executor> = Arc::clone(fake) as _;
    Tools::new(executor).call(Some(&session("s1")), tool, arguments, &Abort::default()).await
}

const ECHO: &str = r#"{"command":"echo hi","description":"d","workdir":"sub","timeoutMs":5,"env":{"A":"b"}}"#;
const BACKGROUND: &str = r#"{"command":"echo hi","description":"d","run_in_background":true}"#;

fn echo_spec() -> CommandSpec {
    CommandSpec {
        command: Bytes::from_static(b"echo hi"),
        workdir: Some(Bytes::from_static(b"/srv/sub")),
        timeout_ms: Some(5.0),
        workspace: Some(Bytes::from_static(b"/srv")),
        ..CommandSpec::default()
    }
}

#[tokio::test]
async fn a_run_gives_its_text_and_only_known_arguments_are_sent() {
    let fake = Arc::new(Fake::answering([Answer::Run(Ok(run_result("hi\n", Exit::Code(3))))]));
    assert_eq!(call(&fake, "bash", ECHO).await, success("hi\n[exit code: 3]"));
    assert_eq!(fake.questions(), [Question::Run(Some(OwnerId("s1".to_owned())), echo_spec())]);
}

#[tokio::test]
async fn a_task_is_started_read_and_killed() {
    let output = TaskOutput {
        status: TaskStatus::Running,
        stdout: StreamDelta { data: Bytes::from_static(b"one\n"), ..StreamDelta::default() },
        stderr: StreamDelta::default(),
    };
    let fake = Arc::new(Fake::answering([
        Answer::Start(Ok(id("bash-1"))),
        Answer::Read(Ok(output)),
        Answer::Kill(Ok(KillOutcome::default())),
        Answer::Kill(Ok(KillOutcome { already_finished: false, survivors: vec![9, 12] })),
    ]));
    assert_eq!(call(&fake, "bash", BACKGROUND).await, success("started background task bash-1"));
    let task = r#"{"task_id":"bash-1"}"#;
    assert_eq!(call(&fake, "bash_output", task).await, success("one\n\n[status: running]"));
    assert_eq!(call(&fake, "bash_kill", task).await, success("killed background task bash-1"));
    let survivors = ToolResult::error("could not end task bash-1: still running: 9, 12");
    assert_eq!(call(&fake, "bash_kill", task).await, survivors);
    let owner = Some(OwnerId("s1".to_owned()));
    let spec = CommandSpec { workdir: Some(Bytes::from_static(b"/srv")), timeout_ms: None, ..echo_spec() };
    assert_eq!(
        fake.questions(),
        [
            Question::Start(owner.clone(), spec),
            Question::Read(owner.clone(), id("bash-1")),
            Question::Kill(owner.clone(), id("bash-1")),
            Question::Kill(owner, id("bash-1")),
        ]
    );
}

#[tokio::test]
async fn a_call_without_a_session_has_no_owner_and_no_workdir() {
    let fake = Arc::new(Fake::answering([Answer::Start(Ok(id("bash-1")))]));
    let executor: Arc<dyn Executor> = Arc::clone(&fake) as _;
    Tools::new(executor).call(None, "bash", BACKGROUND, &Abort::default()).await;
    let spec = CommandSpec { workdir: None, timeout_ms: None, workspace: None, ..echo_spec() };
    assert_eq!(fake.questions(), [Question::Start(None, spec)]);
}

#[tokio::test]
async fn what_fails_a_check_never_reaches_the_executor() {
    let fake = Arc::new(Fake::default());
    let coded = [
        ("bash_list", "{}", ErrorCode::UnknownTool, "unknown tool \"bash_list\""),
        ("", "not json", ErrorCode::UnknownTool, "unknown tool \"\""),
        ("bash", "[1", ErrorCode::InvalidArgs, "invalid arguments: \"arguments\" must be an object"),
        ("bash_output", "", ErrorCode::InvalidArgs, "invalid arguments: missing required property \"task_id\""),
    ];
    for (tool, arguments, code, message) in coded {
        assert_eq!(call(&fake, tool, arguments).await, ToolResult::error_of(code, message));
    }
    let plain = [
        ("bash", r#"{"command":"","description":"d"}"#, "invalid command: expected a non-empty string"),
        ("bash_output", r#"{"task_id":"run-1"}"#, "unknown bash task \"run-1\""),
        ("bash_kill", r#"{"task_id":""}"#, "invalid task_id: expected a string, got \"\""),
    ];
    for (tool, arguments, message) in plain {
        assert_eq!(call(&fake, tool, arguments).await, ToolResult::error(message));
    }
    assert_eq!(fake.questions(), []);
}

#[tokio::test]
async fn errors_of_the_executor_are_told_in_its_words_for_what_was_asked() {
    let missing = ExecutorError::Spawn { stage: SpawnStage::Chdir, errno: 2, path: None };
    let fake = Arc::new(Fake::answering([
        Answer::Run(Err(missing)),
        Answer::Start(Err(ExecutorError::Stopping)),
        Answer::Read(Err(ExecutorError::ForeignTask(id("cut")))),
        Answer::Kill(Err(ExecutorError::UnknownTask(id("cut")))),
    ]));
    let task = r#"{"task_id":"bash-1"}"#;
    let cases = [
        ("bash", ECHO, "Error: spawn bash ENOENT: workdir \"/srv/sub\" does not exist"),
        ("bash", BACKGROUND, "Error: executor unavailable: fake: the executor is stopping"),
        ("bash_output", task, "Error: task bash-1 belongs to another session"),
        ("bash_kill", task, "Error: unknown bash task \"bash-1\""),
    ];
    for (tool, arguments, text) in cases {
        let result = call(&fake, tool, arguments).await;
        assert_eq!((result.text.as_str(), result.is_error, result.code), (text, true, None));
    }
}

#[tokio::test]
async fn an_abort_before_the_call_is_told_with_its_reason() {
    let fake: Arc<Fake> = Arc::default();
    let executor: Arc<dyn Executor> = Arc::clone(&fake) as _;
    let tools = Tools::new(executor);
    for (reason, text) in [(None, "cancelled"), (Some("by the user".to_owned()), "by the user")] {
        let abort = Abort { reason, ..Abort::default() };
        abort.token.cancel();
        for arguments in [ECHO, BACKGROUND] {
            let result = tools.call(None, "bash", arguments, &abort).await;
            assert_eq!(result, ToolResult::error(&format!("aborted before spawn: {text}")));
        }
        // A check that fails is told first: the call was wrong whatever became of it.
        let wrong = tools.call(None, "bash", r#"{"command":"x","description":""}"#, &abort).await;
        assert_eq!(wrong, ToolResult::error("invalid description: expected a non-empty string"));
    }
    assert_eq!(fake.questions(), []);
}

#[tokio::test]
async fn an_abort_ends_a_run_and_discards_its_output() {
    let fake = Arc::new(Fake::answering([Answer::RunUntilAborted]));
    let executor: Arc<dyn Executor> = Arc::clone(&fake) as _;
    let tools = Tools::new(executor);
    let abort = Abort { reason: Some("unused".to_owned()), ..Abort::default() };
    let (result, ()) = tokio::join!(tools.call(None, "bash", ECHO, &abort), async {
        while fake.questions().is_empty() {
            tokio::task::yield_now().await;
        }
        abort.token.cancel();
    });
    assert_eq!(result, ToolResult::error("command aborted"));
}

#[tokio::test]
async fn an_abort_does_not_touch_a_task_that_is_being_started() {
    let gate = CancellationToken::new();
    let fake = Arc::new(Fake::answering([Answer::StartAfter(gate.clone(), id("bash-1"))]));
    let executor: Arc<dyn Executor> = Arc::clone(&fake) as _;
    let tools = Tools::new(executor);
    let abort = Abort::default();
    let (result, ()) = tokio::join!(tools.call(None, "bash", BACKGROUND, &abort), async {
        while fake.questions().is_empty() {
            tokio::task::yield_now().await;
        }
        abort.token.cancel();
        gate.cancel();
    });
    assert_eq!(result, success("started background task bash-1"));
}

/// A hook that says what a test has written down, and keeps what it was asked.
#[derive(Debug)]
struct Hook {
    verdict: Permission,
    answer: Option<Result<(), String>>,
    asked: Mutex<Vec<String>>,
}

#[async_trait::async_trait]
impl PreExecute for Hook {
    async fn check(&self, call: &PendingCall<'_>) -> Permission {
        let arguments = serde_json::to_string(call.arguments).expect("printable");
        let owner = call.session.map_or("nobody", |session| session.id.0.as_str());
        self.asked.lock().expect("no test panics in it").push(format!("{} {owner} {arguments}", call.tool));
        self.verdict.clone()
    }

    async fn ask(&self, _: &PendingCall<'_>, question: &str) -> Result<(), String> {
        self.asked.lock().expect("no test panics in it").push(question.to_owned());
        match &self.answer {
            Some(answer) => answer.clone(),
            None => std::future::pending().await,
        }
    }
}

#[tokio::test]
async fn a_hook_allows_denies_or_asks() {
    let cases = [
        (Permission::Allow, None, "hi"),
        (Permission::Deny("not here".to_owned()), None, "Error: not here"),
        (Permission::Ask("May it?".to_owned()), Some(Ok(())), "hi"),
        (Permission::Ask("May it?".to_owned()), Some(Err("she said no".to_owned())), "Error: she said no"),
    ];
    for (verdict, answer, text) in cases {
        let asks = matches!(verdict, Permission::Ask(_));
        let fake = Arc::new(Fake::answering([Answer::Run(Ok(run_result("hi", Exit::Code(0))))]));
        let executor: Arc<dyn Executor> = Arc::clone(&fake) as _;
        let hook = Arc::new(Hook { verdict, answer, asked: Mutex::default() });
        let tools = Tools::new(executor).with_hook(Arc::clone(&hook) as _);
        let result = tools.call(Some(&session("s1")), "bash", ECHO, &Abort::default()).await;
        assert_eq!(result.text, text);
        assert_eq!(result.is_error, text.starts_with("Error: "));
        assert_eq!(fake.questions().is_empty(), result.is_error);
        let mut asked = vec![r#"bash s1 {"command":"echo hi","description":"d","timeoutMs":5,"workdir":"sub"}"#];
        asked.extend(asks.then_some("May it?"));
        assert_eq!(*hook.asked.lock().expect("no test panics in it"), asked);
    }
}

#[tokio::test]
async fn a_hook_sees_calls_of_every_tool_but_none_that_fails_a_check() {
    let fake: Arc<Fake> = Arc::default();
    let executor: Arc<dyn Executor> = Arc::clone(&fake) as _;
    let hook = Arc::new(Hook { verdict: Permission::Deny("no".to_owned()), answer: None, asked: Mutex::default() });
    let tools = Tools::new(executor).with_hook(Arc::clone(&hook) as _);
    for (tool, arguments) in
        [("bash_output", r#"{"task_id":"bash-1","x":1}"#), ("bash_kill", r#"{"task_id":"bash-2"}"#)]
    {
        let result = tools.call(None, tool, arguments, &Abort::default()).await;
        assert_eq!(result, ToolResult::error("no"));
    }
    tools.call(None, "bash_kill", r#"{"task_id":""}"#, &Abort::default()).await;
    let asked = [r#"bash_output nobody {"task_id":"bash-1"}"#, r#"bash_kill nobody {"task_id":"bash-2"}"#];
    assert_eq!(*hook.asked.lock().expect("no test panics in it"), asked);
    assert_eq!(fake.questions(), []);
}

/// A hook that has nothing of its own to say.
#[derive(Debug)]
struct Silent;

impl PreExecute for Silent {}

#[tokio::test]
async fn a_wider_sandbox_than_the_sessions_needs_a_permission() {
    const FULL: Option<SandboxMode> = Some(SandboxMode::DangerFullAccess);
    let question = "run in sandbox mode danger-full-access instead of the session's read-only?";
    let limited = Session { sandbox: Some(SandboxMode::ReadOnly), ..session("s1") };
    let hook = |verdict| Hook { verdict, answer: Some(Ok(())), asked: Mutex::default() };
    type Case = (Option<SandboxMode>, Option<Arc<dyn PreExecute>>, Result<SandboxMode, String>);
    let cases: [Case; 7] = [
        (None, None, Ok(SandboxMode::ReadOnly)),
        (Some(SandboxMode::ReadOnly), None, Ok(SandboxMode::ReadOnly)),
        (None, Some(Arc::new(Silent)), Ok(SandboxMode::ReadOnly)),
        (FULL, Some(Arc::new(Silent)), Err("nobody is there to be asked".to_owned())),
        (FULL, Some(Arc::new(hook(Permission::Ask(question.to_owned())))), Ok(SandboxMode::DangerFullAccess)),
        (FULL, Some(Arc::new(hook(Permission::Deny("no".to_owned())))), Err("no".to_owned())),
        (
            FULL,
            None,
            Err("sandbox mode danger-full-access is wider than the session's read-only, and nothing here may allow it"
                .to_owned()),
        ),
    ];
    for (asked, hook, expected) in cases {
        let fake = Arc::new(Fake::answering([Answer::Run(Ok(run_result("hi", Exit::Code(0))))]));
        let executor: Arc<dyn Executor> = Arc::clone(&fake) as _;
        let mut tools = Tools::new(executor);
        if let Some(hook) = hook {
            tools = tools.with_hook(hook);
        }
        let result = tools.call_in(asked, Some(&limited), "bash", ECHO, &Abort::default()).await;
        match expected {
            Ok(mode) => {
                let spec = CommandSpec { sandbox_mode: Some(mode), ..echo_spec() };
                assert_eq!(fake.questions(), [Question::Run(Some(OwnerId("s1".to_owned())), spec)]);
            }
            Err(message) => {
                assert_eq!(result, ToolResult::error(&message));
                assert_eq!(fake.questions(), []);
            }
        }
    }
    // Whoever has a mode of nobody's cannot ask for more than it: that is the executor's to say.
    let wider = WiderSandbox { session: SandboxMode::ReadOnly, asked: SandboxMode::DangerFullAccess };
    assert_eq!(wider.question(), question);
}

#[tokio::test]
async fn an_abort_ends_a_question_that_nobody_answers() {
    let fake: Arc<Fake> = Arc::default();
    let executor: Arc<dyn Executor> = Arc::clone(&fake) as _;
    let verdict = Permission::Ask("May it?".to_owned());
    let hook = Arc::new(Hook { verdict, answer: None, asked: Mutex::default() });
    let tools = Tools::new(executor).with_hook(Arc::clone(&hook) as _);
    let abort = Abort::default();
    let (result, ()) = tokio::join!(tools.call(None, "bash", ECHO, &abort), async {
        while hook.asked.lock().expect("no test panics in it").len() < 2 {
            tokio::task::yield_now().await;
        }
        abort.token.cancel();
    });
    assert_eq!(result, ToolResult::error("aborted before spawn: cancelled"));
    assert_eq!(fake.questions(), []);
}

#[test]
fn a_result_is_stored_as_one_text_block() {
    let stored = r#"{"content":[{"type":"text","text":"Error: x"}],"isError":true}"#;
    assert_eq!(ToolResult::error("x").to_json().to_string(), stored);
    assert_eq!((ErrorCode::InvalidArgs.as_str(), ErrorCode::UnknownTool.as_str()), ("INVALID_ARGS", "UNKNOWN_TOOL"));
}
