//! One executor that is several hosts: each session is pinned to one of them.
//!
//! The hosts are the endpoints that were named, and the addresses that their names have: a name of a headless service or of
//! `tasks.NAME` in a Swarm stands for as many as it yields at the moment. Which daemons there are is the engine's business, which
//! runs and replaces them; here is only decided who goes where.
//!
//! ```text
//!   unknown ── asks every host for the session's tasks ──> pinned: where it has tasks, else where its owner hashes to
//!   pinned ── its host is no longer among the addresses ──┬─ it has tasks there: told once, in an error, then unknown
//!                                                         └─ it has none: unknown
//! ```
//! So a session with tasks never moves without a word, also when another process goes on with it, or when there are more hosts
//! than before. Where one of the hosts cannot be asked and would be the session's own, nobody can know, and that is the error.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use executor_proto::types::{
    CommandSpec, ExecutorInfo, KillOutcome, OwnerId, ReadStreamEvent, RunResult, StreamName, TaskId, TaskInfo,
    TaskOutput, TaskStatus, WatchEvent,
};
use futures_core::stream::BoxStream;
use futures_util::future::join_all;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    Executor, ExecutorError, OutputSink,
    connect::{Access, Endpoint},
    placement::rank,
    remote::RemoteExecutor,
};

/// How long the addresses of a name are taken for true. An engine needs longer than that to replace a container.
const ADDRESSES_HOLD: Duration = Duration::from_secs(2);
/// Sessions that are remembered. What is forgotten is asked for again, so it costs a call to each host.
const MAX_SESSIONS: usize = 65_536;

/// Several hosts that are one executor for whoever calls.
#[derive(Debug)]
pub struct PinnedExecutor {
    /// The endpoints, as they were given.
    name: String,
    targets: Vec<Endpoint>,
    access: Access,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Who there was, and when that was asked.
    members: Option<(Instant, Vec<Member>)>,
    /// Connections, by the name of their host.
    hosts: BTreeMap<String, Arc<RemoteExecutor>>,
    sessions: HashMap<Option<OwnerId>, Pin>,
}

/// A host, as it was named or as its name was resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Member {
    /// What is hashed, and what people read.
    name: String,
    target: Endpoint,
    /// One of several that the target's name has. `None`: the target is the host.
    address: Option<SocketAddr>,
}

/// Where a session is.
#[derive(Debug, Clone)]
struct Pin {
    host: String,
    /// It may have tasks there.
    has_tasks: bool,
}

impl PinnedExecutor {
    /// The executor at these endpoints. Must be called inside a tokio runtime; connects nothing yet.
    ///
    /// # Panics
    /// When there is no endpoint.
    #[must_use]
    pub fn new(endpoints: Vec<Endpoint>, access: impl Into<Access>) -> Self {
        assert!(!endpoints.is_empty(), "an executor is somewhere");
        let name = endpoints.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        Self { name, targets: endpoints, access: access.into(), state: Mutex::default() }
    }

    /// The host of a session.
    async fn host(&self, owner: Option<&OwnerId>) -> Result<Arc<RemoteExecutor>, ExecutorError> {
        let members = self.members().await;
        if let [only] = members.as_slice() {
            return Ok(self.open(only));
        }
        let pin = self.state().sessions.get(&owner.cloned()).cloned();
        if let Some(pin) = pin {
            if let Some(member) = members.iter().find(|member| member.name == pin.host) {
                return Ok(self.open(member));
            }
            // One that was the only host and is one of several now has another name: it is found by asking.
            let was_alone = self.targets.iter().any(|target| target.to_string() == pin.host);
            self.state().sessions.remove(&owner.cloned());
            if pin.has_tasks && !was_alone {
                return Err(ExecutorError::Unavailable {
                    endpoint: pin.host,
                    cause: "this host is gone, and the session's tasks with it; the next call goes to another one"
                        .to_owned(),
                });
            }
        }
        self.place(owner, &members).await
    }

    /// Finds the host of a session that is not pinned, and pins it there.
    async fn place(&self, owner: Option<&OwnerId>, members: &[Member]) -> Result<Arc<RemoteExecutor>, ExecutorError> {
        let names: Vec<&str> = members.iter().map(|member| member.name.as_str()).collect();
        let asked = rank(owner, &names).into_iter().map(|index| {
            let (host, name) = (self.open(&members[index]), names[index]);
            async move { (name, host.list_tasks(owner).await, host) }
        });
        let mut answers = join_all(asked).await;
        let with = |tasks: fn(&TaskInfo) -> bool| {
            move |(_, answer, _): &(&str, Result<Vec<TaskInfo>, ExecutorError>, Arc<RemoteExecutor>)| {
                answer.as_ref().is_ok_and(|found| found.iter().any(tasks))
            }
        };
        let has = answers
            .iter()
            .position(with(|task| matches!(task.status, TaskStatus::Running)))
            .or_else(|| answers.iter().position(with(|_any| true)));
        let (name, answer, host) = answers.swap_remove(has.unwrap_or(0));
        answer?;
        self.pin(owner, Pin { host: name.to_owned(), has_tasks: has.is_some() });
        Ok(host)
    }

    fn pin(&self, owner: Option<&OwnerId>, pin: Pin) {
        let mut state = self.state();
        if state.sessions.len() >= MAX_SESSIONS {
            state.sessions.clear();
        }
        state.sessions.insert(owner.cloned(), pin);
    }

    /// A session that has started a task stays where it is.
    fn has_tasks(&self, owner: Option<&OwnerId>) {
        if let Some(pin) = self.state().sessions.get_mut(&owner.cloned()) {
            pin.has_tasks = true;
        }
    }

    /// Who there is now. Never empty.
    async fn members(&self) -> Vec<Member> {
        if let Some((when, members)) = &self.state().members
            && when.elapsed() < ADDRESSES_HOLD
        {
            return members.clone();
        }
        let members: Vec<Member> = join_all(self.targets.iter().map(resolve)).await.concat();
        let mut state = self.state();
        state.hosts.retain(|name, _| members.iter().any(|member| member.name == *name));
        state.members = Some((Instant::now(), members.clone()));
        members
    }

    fn open(&self, member: &Member) -> Arc<RemoteExecutor> {
        let open = || Arc::new(RemoteExecutor::at(&member.target, member.address, &member.name, self.access.clone()));
        Arc::clone(self.state().hosts.entry(member.name.clone()).or_insert_with(open))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is made in one step, so it is good whatever happened to who made one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The hosts that an endpoint stands for: itself, or as many as its name has addresses.
async fn resolve(target: &Endpoint) -> Vec<Member> {
    let itself = || vec![Member { name: target.to_string(), target: target.clone(), address: None }];
    let (Endpoint::Tls { host, port } | Endpoint::Tcp { host, port }) = target else { return itself() };
    if host.parse::<IpAddr>().is_ok() {
        return itself();
    }
    // Without an answer the connection will fail, and says so.
    let Ok(found) = tokio::net::lookup_host((host.as_str(), *port)).await else { return itself() };
    let mut addresses: Vec<SocketAddr> = found.collect();
    addresses.sort_unstable();
    addresses.dedup();
    // `localhost` and its like have one of each kind, for the same host.
    if addresses.len() < 2 || addresses.iter().all(|address| address.ip().is_loopback()) {
        return itself();
    }
    let member = |address: SocketAddr| Member {
        name: format!("{target} ({})", address.ip()),
        target: target.clone(),
        address: Some(address),
    };
    addresses.into_iter().map(member).collect()
}

#[async_trait]
impl Executor for PinnedExecutor {
    fn endpoint(&self) -> &str {
        &self.name
    }

    async fn info(&self) -> Result<ExecutorInfo, ExecutorError> {
        self.host(None).await?.info().await
    }

    async fn run(
        &self,
        owner: Option<&OwnerId>,
        spec: CommandSpec,
        abort: &CancellationToken,
        sink: Option<&mut dyn OutputSink>,
    ) -> Result<RunResult, ExecutorError> {
        self.host(owner).await?.run(owner, spec, abort, sink).await
    }

    async fn start_task(&self, owner: Option<&OwnerId>, spec: CommandSpec) -> Result<TaskId, ExecutorError> {
        let host = self.host(owner).await?;
        // Also one of which nobody knows whether it was started.
        self.has_tasks(owner);
        host.start_task(owner, spec).await
    }

    async fn read_output(
        &self,
        owner: Option<&OwnerId>,
        id: &TaskId,
        wait: Option<Duration>,
    ) -> Result<TaskOutput, ExecutorError> {
        self.host(owner).await?.read_output(owner, id, wait).await
    }

    async fn kill_task(&self, owner: Option<&OwnerId>, id: &TaskId) -> Result<KillOutcome, ExecutorError> {
        self.host(owner).await?.kill_task(owner, id).await
    }

    async fn get_task(&self, owner: Option<&OwnerId>, id: &TaskId) -> Result<TaskInfo, ExecutorError> {
        self.host(owner).await?.get_task(owner, id).await
    }

    async fn list_tasks(&self, owner: Option<&OwnerId>) -> Result<Vec<TaskInfo>, ExecutorError> {
        self.host(owner).await?.list_tasks(owner).await
    }

    async fn watch_tasks(
        &self,
        owner: &OwnerId,
    ) -> Result<BoxStream<'static, Result<WatchEvent, ExecutorError>>, ExecutorError> {
        self.host(Some(owner)).await?.watch_tasks(owner).await
    }

    async fn ack_completions(&self, owner: &OwnerId, up_to: u64) -> Result<(), ExecutorError> {
        self.host(Some(owner)).await?.ack_completions(owner, up_to).await
    }

    async fn read_stream(
        &self,
        owner: Option<&OwnerId>,
        id: &TaskId,
        stream: StreamName,
        offset: u64,
        follow: bool,
    ) -> Result<BoxStream<'static, Result<ReadStreamEvent, ExecutorError>>, ExecutorError> {
        self.host(owner).await?.read_stream(owner, id, stream, offset, follow).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner() -> OwnerId {
        OwnerId("s".to_owned())
    }

    /// Over two hosts that are never called, and a session that is pinned.
    fn pinned(host: &str, has_tasks: bool) -> PinnedExecutor {
        let endpoint = Endpoint::parse("http://daemons:7700").expect("an endpoint");
        let executor = PinnedExecutor::new(vec![endpoint.clone()], None);
        let member = |address: &str| Member {
            name: address.to_owned(),
            target: endpoint.clone(),
            address: Some(address.parse().expect("an address")),
        };
        executor.state().members = Some((Instant::now(), ["10.0.0.1:1", "10.0.0.2:1"].map(member).to_vec()));
        executor.pin(Some(&owner()), Pin { host: host.to_owned(), has_tasks });
        executor
    }

    #[tokio::test]
    async fn a_session_stays_on_its_host_as_long_as_that_is_there() {
        for host in ["10.0.0.1:1", "10.0.0.2:1"] {
            let executor = pinned(host, false);
            assert_eq!(executor.host(Some(&owner())).await.expect("it is there").endpoint(), host);
        }
    }

    #[tokio::test]
    async fn a_session_with_tasks_is_told_once_that_its_host_is_gone() {
        let executor = pinned("10.0.0.9:1", true);
        let error = executor.host(Some(&owner())).await.expect_err("it has tasks there").to_string();
        assert!(error.contains("10.0.0.9:1") && error.contains("this host is gone"), "{error}");
        assert!(executor.state().sessions.is_empty(), "the next call goes elsewhere");
    }

    #[tokio::test]
    async fn one_that_starts_a_task_has_tasks() {
        let executor = pinned("10.0.0.1:1", false);
        executor.has_tasks(Some(&owner()));
        assert!(executor.state().sessions[&Some(owner())].has_tasks);
    }

    #[tokio::test]
    async fn a_name_with_one_address_and_an_address_are_one_host() {
        for text in ["http://127.0.0.1:1", "http://localhost:1", "http://no-such-host.invalid:1"] {
            let endpoint = Endpoint::parse(text).expect("an endpoint");
            assert_eq!(resolve(&endpoint).await, [Member { name: text.to_owned(), target: endpoint, address: None }]);
        }
    }
}
