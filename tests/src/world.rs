//! One test's own executor, its directory, its sessions and its marks.

use std::{
    collections::HashMap,
    fmt::{self, Display},
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, bail};
use executor_proto::types::{
    CommandSpec, OwnerId, ReadStreamEvent, RunResult, StreamName, TaskId, TaskInfo, TaskStatus,
};
use futures_util::StreamExt;
use tempfile::TempDir;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tool_client::{
    executor::{
        Executor, ExecutorError,
        connect::{Access, Endpoint, Keepalive},
        local::LocalExecutor,
        remote::{Deadlines, RemoteExecutor},
    },
    notices::Notices,
    session::Session,
    tools::{Abort, ToolResult, Tools},
};

use crate::{
    backend::{Backend, Setup},
    binaries,
    daemon::{Daemon, Dies, give},
    faults::FaultProxy,
    mailbox::Mailbox,
    processes::{self, Found},
    random,
};

/// The session that [`World::bash`] and its like call for.
pub const SESSION: &str = "s1";

/// An executor of one's own, with everything around it. Made by [`World::start`], ended by [`World::finish`].
#[derive(Debug)]
pub struct World {
    tools: Tools,
    notices: Notices,
    executor: Arc<dyn Executor>,
    mailbox: Arc<Mailbox>,
    started: Mutex<HashMap<TaskId, Option<OwnerId>>>,
    proxy: Option<FaultProxy>,
    daemon: Option<Daemon>,
    killing: Option<AbortOnDropHandle<()>>,
    tmp: PathBuf,
    tag: String,
    root: Option<TempDir>,
}

impl World {
    /// A fresh executor: an empty state directory, a new directory to work in, the environment that the scenarios were
    /// recorded with.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start(backend: Backend, setup: Setup) -> anyhow::Result<Self> {
        let root = tempfile::Builder::new().prefix("xw-").tempdir().context("making a directory")?;
        // Whoever the executor and its commands run as, they come through here.
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755))?;
        let tmp = root.path().canonicalize()?.join("tmp");
        let state = root.path().join("state");
        for directory in [&tmp, &state] {
            fs::create_dir(directory)?;
            give(directory, setup.uid)?;
        }
        give(root.path(), setup.uid)?;
        for line in &setup.prepare {
            prepare(line, &tmp)?;
        }
        if backend == Backend::InProcess {
            let none = setup.faults.is_none() && setup.kill_server_every.is_none();
            anyhow::ensure!(none, "an executor in this process has no connection and no server");
            let executor = LocalExecutor::start(setup.local_options(&tmp, &state)).await?;
            return Self::over(Arc::new(executor), None, None, tmp, Some(root));
        }
        let daemon = Daemon::start(backend, &setup, root.path(), &tmp).await?;
        let proxy = match setup.faults {
            Some(plan) => Some(FaultProxy::start(daemon.endpoint(), root.path(), plan).await?),
            None => None,
        };
        let endpoint = proxy.as_ref().map_or(daemon.endpoint(), FaultProxy::endpoint);
        let access = daemon.access()?;
        let executor =
            RemoteExecutor::with_times(&Endpoint::parse(endpoint)?, access, setup.deadlines, setup.keepalive);
        let killing = setup.kill_server_every.map(|time| daemon.kill_server_every(time));
        Ok(Self { killing, ..Self::over(Arc::new(executor), proxy, Some(daemon), tmp, Some(root))? })
    }

    /// Over a daemon that is already running elsewhere and shares the directory `tmp` with this process.
    ///
    /// # Errors
    /// When the endpoint is none.
    pub async fn connect(endpoint: &str, access: Access, tmp: &Path) -> anyhow::Result<Self> {
        let executor = RemoteExecutor::new(&Endpoint::parse(endpoint)?, access);
        Self::over(Arc::new(executor), None, None, tmp.to_owned(), None)
    }

    fn over(
        executor: Arc<dyn Executor>,
        proxy: Option<FaultProxy>,
        daemon: Option<Daemon>,
        tmp: PathBuf,
        root: Option<TempDir>,
    ) -> anyhow::Result<Self> {
        let mailbox = Arc::new(Mailbox::default());
        Ok(Self {
            tools: Tools::new(Arc::clone(&executor)),
            notices: Notices::new(Arc::clone(&executor), Arc::clone(&mailbox) as Arc<_>),
            executor,
            mailbox,
            started: Mutex::default(),
            killing: None,
            proxy,
            daemon,
            tmp,
            // Digits, so that it can stand behind the point of a number of seconds.
            tag: format!("{:020}", u64::from_le_bytes(random()?)),
            root,
        })
    }

    /// The directory that `${TMP}` stands for: HOME, and where the session works.
    #[must_use]
    pub fn tmp(&self) -> &Path {
        &self.tmp
    }

    /// Where the executor puts spill files.
    ///
    /// # Panics
    /// When the executor is elsewhere.
    #[must_use]
    pub fn spill_dir(&self) -> PathBuf {
        self.root.as_ref().expect("the executor is not elsewhere").path().join("state/spill")
    }

    /// Twenty random digits. Put them into a command, and [`World::survivors`] finds whatever of it is alive.
    #[must_use]
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// A `sleep` of so many seconds that carries the tag: `sleep 300.01234567890123456789`.
    #[must_use]
    pub fn sleep(&self, seconds: impl Display) -> String {
        format!("sleep {seconds}.{}", self.tag)
    }

    /// The executor under the tools.
    #[must_use]
    pub fn executor(&self) -> &Arc<dyn Executor> {
        &self.executor
    }

    /// The tools.
    #[must_use]
    pub fn tools(&self) -> &Tools {
        &self.tools
    }

    /// What the sessions were told.
    #[must_use]
    pub fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    /// The daemon; `None`: the executor is in this process, or elsewhere.
    #[must_use]
    pub fn daemon(&self) -> Option<&Daemon> {
        self.daemon.as_ref()
    }

    /// Kills the daemon, keeper and server at once, as they die with their container, and starts another one over the same
    /// state directory with the same setup. `between` is done while there is none.
    ///
    /// # Errors
    /// When there is none, or it does not die or come back.
    pub async fn restart(&mut self, setup: &Setup, between: impl FnOnce(&Path)) -> anyhow::Result<()> {
        self.restart_after(Dies::Daemon, setup, between).await
    }

    /// The same after less has died.
    ///
    /// # Errors
    /// As [`World::restart`].
    pub async fn restart_after(
        &mut self,
        dies: Dies,
        setup: &Setup,
        between: impl FnOnce(&Path),
    ) -> anyhow::Result<()> {
        let daemon = self.daemon.take().context("there is no daemon")?;
        daemon.kill(dies).await?;
        let root = self.root.as_ref().context("the executor is elsewhere")?;
        between(&root.path().join("state"));
        self.daemon = Some(Daemon::start(Backend::Unix, setup, root.path(), &self.tmp).await?);
        Ok(())
    }

    /// The proxy between client and daemon.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn faults(&self) -> &FaultProxy {
        self.proxy.as_ref().expect("the setup asks for a proxy")
    }

    /// Another client of the daemon, that comes to it directly.
    ///
    /// # Panics
    /// When there is no daemon.
    #[must_use]
    pub fn direct(&self) -> Arc<dyn Executor> {
        let daemon = self.daemon().expect("there is a daemon");
        self.client(daemon.endpoint(), Deadlines::default(), Keepalive::default())
    }

    /// Another client of the daemon, over an endpoint that leads to it.
    ///
    /// # Panics
    /// When there is no daemon.
    #[must_use]
    pub fn client(&self, endpoint: &str, deadlines: Deadlines, keepalive: Keepalive) -> Arc<dyn Executor> {
        let access = self.daemon().expect("there is a daemon").access().expect("its files can be read");
        let endpoint = Endpoint::parse(endpoint).expect("it is one");
        Arc::new(RemoteExecutor::with_times(&endpoint, access, deadlines, keepalive))
    }

    /// The session's agent joins the registry, and its notices are watched for.
    pub fn attach(&self, owner: &OwnerId) {
        if self.mailbox.join(owner) {
            self.notices.attach(owner.clone());
        }
    }

    /// A session that works in the directory.
    #[must_use]
    pub fn session(&self, id: &str) -> Session {
        Session { id: OwnerId(id.to_owned()), cwd: Some(self.tmp.clone()), sandbox: None }
    }

    /// Makes a tool call as a harness does: the session's agent joins the registry, and the model's text is passed on.
    pub async fn call(&self, session: Option<&Session>, tool: &str, arguments: &str, abort: &Abort) -> ToolResult {
        if let Some(session) = session {
            self.attach(&session.id);
        }
        let result = self.tools.call(session, tool, arguments, abort).await;
        if let Some(id) = result.text.strip_prefix("started background task ") {
            let owner = session.map(|session| session.id.clone());
            self.started.lock().unwrap_or_else(PoisonError::into_inner).insert(TaskId(id.to_owned()), owner);
        }
        result
    }

    /// The text of `bash` for the session.
    pub async fn bash(&self, command: &str) -> String {
        self.bash_with(command, serde_json::json!({})).await
    }

    /// The text of `bash` with more arguments, e.g. `{"timeoutMs": 2000}`.
    pub async fn bash_with(&self, command: &str, more: serde_json::Value) -> String {
        let mut arguments = serde_json::json!({"command": command, "description": "test command"});
        if let (Some(arguments), serde_json::Value::Object(more)) = (arguments.as_object_mut(), more) {
            arguments.extend(more);
        }
        self.text("bash", &arguments).await
    }

    /// Starts a background task for the session and returns its id.
    ///
    /// # Panics
    /// When it was not started.
    pub async fn background(&self, command: &str) -> TaskId {
        let text = self.bash_with(command, serde_json::json!({"run_in_background": true})).await;
        let id = text.strip_prefix("started background task ");
        TaskId(id.unwrap_or_else(|| panic!("not started: {text}")).to_owned())
    }

    /// The text of `bash_output` for the session.
    pub async fn output(&self, id: &TaskId) -> String {
        self.text("bash_output", &serde_json::json!({"task_id": id.0})).await
    }

    /// The text of `bash_kill` for the session.
    pub async fn kill(&self, id: &TaskId) -> String {
        self.text("bash_kill", &serde_json::json!({"task_id": id.0})).await
    }

    /// Runs a command through the executor itself, for the session and in its directory.
    ///
    /// # Errors
    /// As the executor's.
    pub async fn run(&self, spec: CommandSpec) -> Result<RunResult, ExecutorError> {
        let owner = OwnerId(SESSION.to_owned());
        self.executor.run(Some(&owner), spec, &CancellationToken::new(), None).await
    }

    /// Waits until a task has ended that was started through [`World::call`].
    ///
    /// # Errors
    /// When it has not within the limit, or is not known.
    pub async fn ended(&self, id: &TaskId, limit: Duration) -> anyhow::Result<TaskStatus> {
        let owner = self.started.lock().unwrap_or_else(PoisonError::into_inner).get(id).cloned().flatten();
        let deadline = tokio::time::Instant::now() + limit;
        loop {
            let status = self.executor.get_task(owner.as_ref(), id).await?.status;
            if status != TaskStatus::Running {
                return Ok(status);
            }
            if tokio::time::Instant::now() > deadline {
                bail!("{id} still runs after {limit:?}");
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// What the session sees of its tasks and runs.
    ///
    /// # Panics
    /// When the executor is lost.
    pub async fn list(&self) -> Vec<TaskInfo> {
        let owner = OwnerId(SESSION.to_owned());
        self.executor.list_tasks(Some(&owner)).await.expect("the executor answers")
    }

    /// All bytes of one stream that are there, and whether it has ended.
    ///
    /// # Errors
    /// As the executor's, and when the stream has no end or a gap.
    pub async fn stream(&self, id: &TaskId, stream: StreamName, follow: bool) -> anyhow::Result<(Vec<u8>, bool)> {
        let owner = OwnerId(SESSION.to_owned());
        let mut events = self.executor.read_stream(Some(&owner), id, stream, 0, follow).await?;
        let mut bytes = Vec::new();
        while let Some(event) = events.next().await {
            match event? {
                ReadStreamEvent::Chunk(chunk) => {
                    anyhow::ensure!(
                        chunk.offset == bytes.len() as u64,
                        "a gap before {} after {}",
                        chunk.offset,
                        bytes.len()
                    );
                    bytes.extend_from_slice(&chunk.data);
                }
                ReadStreamEvent::End { total, closed } => {
                    anyhow::ensure!(total == bytes.len() as u64, "{total} bytes are there, {} came", bytes.len());
                    return Ok((bytes, closed));
                }
            }
        }
        bail!("the stream ended without saying where it stands")
    }

    /// The processes of this world's commands that are alive: whatever carries the tag or the directory, in its arguments,
    /// its environment or as its place. The executor's own are not among them.
    #[must_use]
    pub fn survivors(&self) -> Vec<Found> {
        let marks = [self.tag.as_str(), &self.tmp.to_string_lossy()];
        let own = self.daemon().map_or(binaries::executor_daemon(), Daemon::program);
        let mut found = processes::marked(&marks, &self.tmp, own);
        // What the daemon was started through (a namespace of its own) is not a command's either.
        found.retain(|one| self.daemon().is_none_or(|daemon| !daemon.was_started_through(one.pid)));
        found
    }

    /// That nothing of this world's commands is alive, now.
    ///
    /// # Panics
    /// When something is.
    pub fn assert_no_survivors(&self, when: impl fmt::Display) {
        let survivors = self.survivors();
        assert!(survivors.is_empty(), "alive {when}: {survivors:#?}");
    }

    /// The processes of the executor, and whatever its commands have left: the daemon's, or those of the keeper that an
    /// embedded executor has below this process.
    #[must_use]
    pub fn processes(&self) -> Vec<Found> {
        if let Some(daemon) = &self.daemon {
            return processes::tree(daemon.pid());
        }
        let own = i32::try_from(std::process::id()).expect("process ids are small");
        let state = self.root.as_ref().map(|root| root.path().display().to_string());
        // An embedded keeper is told where spill files go.
        let keeper = |one: &Found| one.parent == own && state.as_ref().is_some_and(|it| one.command_line.contains(it));
        processes::all().into_values().filter(keeper).flat_map(|keeper| processes::tree(keeper.pid)).collect()
    }

    /// What the executor's processes compute in the coming time, in which nobody asks anything of them.
    ///
    /// # Panics
    /// When there is no such process.
    pub async fn idle_load(&self, time: Duration) -> Duration {
        let before = processes::cpu_times(&self.processes());
        assert!(!before.is_empty(), "an executor has processes");
        tokio::time::sleep(time).await;
        let after = processes::cpu_times(&self.processes());
        after.iter().map(|(one, now)| now.saturating_sub(before.get(one).copied().unwrap_or_default())).sum()
    }

    /// The session's agent leaves the registry.
    pub async fn dispose(&self, owner: &OwnerId) {
        self.mailbox.leave(owner);
        self.notices.detach(owner).await;
    }

    /// Builds the tools anew over the same executor.
    pub async fn reload(&mut self) {
        self.tools = Tools::new(Arc::clone(&self.executor));
    }

    /// Ends the executor, which must leave nothing behind.
    ///
    /// # Errors
    /// When it does not end, or not well, or leaves something behind.
    pub async fn finish(self) -> anyhow::Result<()> {
        let Self { tools, notices, executor, mailbox, started: _, proxy, daemon, killing, tmp: _, tag, root } = self;
        drop((tools, notices, executor, mailbox, proxy, killing));
        if let Some(daemon) = daemon {
            daemon.stop().await?;
        }
        if let Some(root) = root {
            // The executor's own processes have the directory in their arguments.
            let own = root.path().to_string_lossy();
            let marks: [&str; 2] = [&tag, &own];
            // An embedded keeper learns of its end by a closed socket, a little later.
            let deadline = tokio::time::Instant::now() + LAST_END;
            loop {
                let left = processes::marked(&marks, root.path(), Path::new(""));
                if left.is_empty() {
                    break;
                }
                anyhow::ensure!(tokio::time::Instant::now() < deadline, "these outlived the executor: {left:#?}");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        Ok(())
    }

    async fn text(&self, tool: &str, arguments: &serde_json::Value) -> String {
        let session = self.session(SESSION);
        self.call(Some(&session), tool, &arguments.to_string(), &Abort::default()).await.text
    }
}

/// Longest wait for the end of everything after the executor was dropped.
const LAST_END: Duration = Duration::from_secs(15);

#[expect(clippy::disallowed_methods, reason = "what is there before the executor starts is made outside of it")]
fn prepare(line: &str, directory: &Path) -> anyhow::Result<()> {
    let mut bash = std::process::Command::new("bash");
    let status = bash.arg("-c").arg(line).current_dir(directory).stdin(Stdio::null()).status()?;
    anyhow::ensure!(status.success(), "{line}: {status}");
    Ok(())
}
