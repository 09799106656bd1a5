//! What every request passes before it reaches a service, and every answer on its way out.
//!
//! In: health checks go through; anything else needs a caller that the [`Gate`] admits, a daemon that is not stopping, and room
//! among the requests of its tenant ([`Limits`]).
//! Out: answers that the gRPC library gave by itself are put into the protocol's words. This is a layer around all services,
//! so that nothing can be added beside it.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Instant,
};

use executor_proto::error::ExecutorError;
use http::{Request, Response};
use tonic::body::Body;
use tower::{Layer, Service};

use super::{
    auth::{Gate, Peer},
    status,
};
use crate::{
    ids::TenantId,
    limits::{Limits, RequestKind, RequestPermit},
};

/// The service that containers and load balancers ask, without a token.
const HEALTH: &str = "/grpc.health.v1.Health/";

/// A connection, as each of its requests knows it.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    /// Who is at its other end.
    pub(crate) peer: Peer,
    /// What came over it.
    pub(crate) calls: Calls,
}

/// What has come over a connection, for whoever decides how long it may stay.
#[derive(Debug, Clone, Default)]
pub(crate) struct Calls(Arc<Mutex<Latest>>);

/// The most that is known for the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Latest {
    /// Nothing but calls that were refused, if any.
    #[default]
    Nothing,
    /// A check of health, which anybody may make.
    Health(Instant),
    /// A call that was admitted.
    Admitted,
}

impl Calls {
    /// The most so far.
    pub(crate) fn latest(&self) -> Latest {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another one has come.
    pub(crate) fn note(&self, call: Latest) {
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *latest != Latest::Admitted {
            *latest = call;
        }
    }
}

/// Makes [`Edge`]s.
#[derive(Debug, Clone)]
pub(crate) struct EdgeLayer {
    gate: Arc<Gate>,
    limits: Limits,
    stopping: Arc<AtomicBool>,
}

impl EdgeLayer {
    pub(crate) fn new(gate: Gate, limits: Limits) -> Self {
        Self { gate: Arc::new(gate), limits, stopping: Arc::new(AtomicBool::new(false)) }
    }

    /// From now on new calls are refused.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    /// Whether a request may go on; its tenant and its room are put into it.
    fn enter(&self, request: &mut Request<Body>) -> Result<(), ExecutorError> {
        let path = request.uri().path();
        let line = request.extensions().get::<Line>();
        if path.starts_with(HEALTH) {
            if let Some(line) = line {
                line.calls.note(Latest::Health(Instant::now()));
            }
            return Ok(());
        }
        let admitted = match line {
            Some(Line { peer, .. }) => {
                let admitted = self.gate.admit(peer, request.headers());
                admitted.inspect_err(|reason| {
                    tracing::warn!(peer = peer.to_string(), path = shown(path), reason = reason.to_string(), "refused");
                })
            }
            None => Err(ExecutorError::Internal { problem: "a connection without a peer".to_owned() }),
        };
        let tenant = admitted?;
        if let Some(line) = line {
            line.calls.note(Latest::Admitted);
        }
        if self.stopping.load(Ordering::Acquire) {
            return Err(ExecutorError::Stopping);
        }
        let room = self.limits.request(&tenant, kind_of(path)).inspect_err(|reason| {
            let peer = line.map(|line| line.peer.to_string());
            let reason = reason.to_string();
            tracing::warn!(peer, tenant = tenant.0, path = shown(path), reason, "refused");
        })?;
        request.extensions_mut().insert(Admitted { tenant, room: Arc::new(room) });
        Ok(())
    }
}

/// What a request brings that has come in.
#[derive(Debug, Clone)]
pub(crate) struct Admitted {
    /// Whose it is.
    pub(crate) tenant: TenantId,
    /// Its place, for as long as it is under way.
    pub(crate) room: Arc<RequestPermit>,
}

/// What a request does with what there is, by its path.
fn kind_of(path: &str) -> RequestKind {
    match path.strip_prefix("/executor.v1.Executor/") {
        Some("KillTask" | "CancelRun" | "AckCompletions") => RequestKind::Ending,
        Some("WatchTasks" | "ReadStream") => RequestKind::Watcher,
        Some(_) | None => RequestKind::Work,
    }
}

/// A path is the caller's own text, and is cut in the log.
fn shown(path: &str) -> String {
    const MAX_CHARS: usize = 128;

    path.chars().take(MAX_CHARS).collect()
}

impl<S> Layer<S> for EdgeLayer {
    type Service = Edge<S>;

    fn layer(&self, inner: S) -> Edge<S> {
        Edge { layer: self.clone(), inner }
    }
}

/// A service behind the edge.
#[derive(Debug, Clone)]
pub(crate) struct Edge<S> {
    layer: EdgeLayer,
    inner: S,
}

impl<S> Service<Request<Body>> for Edge<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Err(error) = self.layer.enter(&mut request) {
            return Box::pin(std::future::ready(Ok(error.to_status().into_http())));
        }
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            Ok(match status::in_our_words(answer.headers()) {
                Some(error) => error.to_status().into_http(),
                None => answer,
            })
        })
    }
}
