//! The server process: registry, engine and gRPC, behind the sockets that the keeper holds.
//!
//! ```text
//!   starting ──ready──▶ serving ──drain requested──▶ draining ──all ended──▶ closing ──▶ exit 0
//!                          └───────keeper lost───────────▲
//! ```
//! While it drains, health says NOT_SERVING, new calls are answered with STOPPING, and the calls that are under way go on to
//! their results. Closing waits a bounded time for clients to take those results.

mod incoming;

use std::{io, os::unix::process::parent_id, process::ExitCode, time::Duration};

use executor_proto::{FILE_DESCRIPTOR_SET, transport};
use tokio::{sync::oneshot, time::timeout};
use tokio_util::task::TaskTracker;
use tonic::transport::Server;
use tonic_health::{ServingStatus, server::HealthReporter};

use crate::{
    config::ServerSettings,
    crash::Point,
    engine::{Engine, StartError},
    keeper::link::{Greeted, Over, server::end_with_keeper},
    limits::HostLimits,
    service::{self, auth::Gate, edge::EdgeLayer},
    telemetry,
    tls::{ServerTls, TlsProblem},
};

/// Calls under way on one connection: a session has few, but one connection may carry a whole harness.
const MAX_CALLS_PER_CONNECTION: u32 = 4_096;

/// What a client may send ahead on one call, and on one connection, so that a large command needs few round trips.
const CALL_WINDOW_BYTES: u32 = 1024 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 4 * 1024 * 1024;

/// Time that clients have to take the results of calls that have ended, when the daemon stops.
const RESULTS_TAKEN: Duration = Duration::from_secs(5);

/// The same when the keeper is lost. Until then the next daemon may find the sockets in use.
const UNKNOWN_TOLD: Duration = Duration::from_secs(1);

/// Time that connections have to close after that.
const CONNECTIONS_CLOSED: Duration = Duration::from_secs(1);

/// Longest time from the end of the last command to this process's exit.
pub(crate) const LONGEST_CLOSING: Duration = RESULTS_TAKEN.saturating_add(CONNECTIONS_CLOSED);

/// Exit code for the daemon's own failures, as for the client's.
const OWN_FAILURE: u8 = 125;

/// Why the server could not be started.
#[derive(Debug, thiserror::Error)]
enum ServerError {
    /// They were made by another version of this program.
    #[error("the keeper's settings: {0}")]
    Settings(#[from] postcard::Error),
    /// TLS cannot be spoken with what the files held.
    #[error("TLS: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Tls(Vec<TlsProblem>),
    /// The engine could not be started.
    #[error(transparent)]
    Engine(#[from] StartError),
    /// A passed socket cannot be served.
    #[error("the keeper or its sockets: {0}")]
    Listen(#[from] io::Error),
    /// The descriptors of the protocol are not what reflection takes.
    #[error("reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// There is nobody any more who could start or end anything.
    #[error("the keeper is lost, and what it had started has ended with it")]
    KeeperLost,
    /// The gRPC library gave up.
    #[error("gRPC: {0}")]
    Transport(#[from] tonic::transport::Error),
}

/// Serves until the keeper asks for a drain or is lost, from the moment on that nobody else does. The keeper's settings are
/// what [`ServerSettings::encode`] made.
///
/// Returns 0 after a drain, 125 when serving could not begin or broke.
pub(crate) async fn main(greeted: Greeted) -> ExitCode {
    let decoded = ServerSettings::decode(&greeted.server_settings);
    let Ok(lines) = telemetry::init(decoded.as_ref().map(|settings| settings.log).unwrap_or_default()) else {
        return ExitCode::from(OWN_FAILURE);
    };
    let served = match decoded {
        Ok(settings) => serve(greeted, settings).await,
        Err(error) => Err(error.into()),
    };
    if let Err(error) = &served {
        tracing::error!(%error, "the server ends");
    }
    lines.flush();
    if served.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(OWN_FAILURE) }
}

async fn serve(mut greeted: Greeted, settings: ServerSettings) -> Result<(), ServerError> {
    Point::Greeted.pass();
    let ServerSettings { engine: engine_settings, tenants, tls, log: _ } = settings;
    let tls = tls.as_ref().map(ServerTls::acceptor).transpose().map_err(ServerError::Tls)?;
    let heartbeat = Duration::from_millis(engine_settings.heartbeat_ms);
    // The keeper is the parent of this process; every command descends from it.
    let per_kind = usize::try_from(HostLimits::learn().connections_per_kind()).unwrap_or(usize::MAX);
    let listeners = std::mem::take(&mut greeted.listeners);
    let connections = incoming::incoming(listeners, tls, parent_id(), per_kind)?;
    let (reflection_v1, reflection_v1alpha) = (reflection().build_v1()?, reflection().build_v1alpha()?);
    Engine::probe(&engine_settings)?;
    // From here on nothing is left to go wrong that another server would do better.
    let (link, carried) = greeted.take_over().await?;
    end_with_keeper(&link);
    let engine = Engine::take_over(engine_settings, link.clone(), carried).await?;

    let calls = TaskTracker::new();
    let edge = EdgeLayer::new(Gate::new(tenants), engine.limits().clone());
    let health = HealthReporter::new();
    let executor = service::service(engine.clone(), heartbeat, calls.clone());
    set_health(&health, ServingStatus::Serving).await;

    let (close, closed) = oneshot::channel::<()>();
    let serving = Server::builder()
        .http2_keepalive_interval(Some(transport::DAEMON_PING_INTERVAL))
        .http2_keepalive_timeout(Some(transport::DAEMON_PING_TIMEOUT))
        .max_concurrent_streams(MAX_CALLS_PER_CONNECTION)
        .initial_stream_window_size(CALL_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .layer(edge.clone())
        .add_service(tonic_health::pb::health_server::HealthServer::new(
            tonic_health::server::HealthService::from_health_reporter(health.clone()),
        ))
        .add_service(reflection_v1)
        .add_service(reflection_v1alpha)
        .add_service(executor)
        .serve_with_incoming_shutdown(connections, async {
            // An error is the sender's end, which closes too.
            let _ = closed.await;
        });
    // Said before the first answer, so that a server that has answered was ready, for the keeper too.
    link.ready().await;
    Point::Ready.pass();
    let serving = tokio::spawn(serving);
    tracing::info!(version = env!("CARGO_PKG_VERSION"), "serving");

    let over = link.over().await;
    edge.stop();
    set_health(&health, ServingStatus::NotServing).await;
    if over == Over::KeeperLost {
        // Who waits for a command is told that its exit is unknown, and so is whoever asks the next daemon.
        calls.close();
        let _ = timeout(UNKNOWN_TOLD, calls.wait()).await;
        return Err(ServerError::KeeperLost);
    }
    tracing::info!("draining");
    engine.drain().await;
    calls.close();
    if timeout(RESULTS_TAKEN, calls.wait()).await.is_err() {
        tracing::warn!(calls = calls.len(), "clients have not taken their results");
    }
    drop(close);
    match timeout(CONNECTIONS_CLOSED, serving).await {
        Ok(Ok(served)) => served?,
        Ok(Err(lost)) => tracing::error!(%lost, "the gRPC task was lost"),
        // Clients that only watch keep their connections; they see them end with this process.
        Err(_still_open) => {}
    }
    link.drained();
    tracing::info!("drained");
    Ok(())
}

/// Sets what health checks are told, of the daemon as a whole and of the service by name.
async fn set_health(health: &HealthReporter, status: ServingStatus) {
    health.set_service_status("", status).await;
    health.set_service_status(executor_proto::v1::executor_server::SERVICE_NAME, status).await;
}

fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}
