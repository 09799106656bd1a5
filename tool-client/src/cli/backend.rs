//! The executor that a call uses: the daemon at the endpoint, or one of our own for this call.

use std::{os::unix::ffi::OsStrExt, path::PathBuf, sync::Arc};

use bytes::Bytes;
use executor_daemon::{config::Settings as EngineSettings, keeper::embedded::EmbeddedOptions};
use executor_proto::{error::ExecutorError, types::OwnerId};

use super::{Failure, settings::Settings};
use crate::{
    executor::{Executor, connect::Endpoint, local::LocalExecutor, remote::RemoteExecutor},
    text::failure::Asked,
};

/// An executor and for whom it is called.
#[derive(Debug)]
pub(super) struct Backend {
    pub(super) executor: Arc<dyn Executor>,
    pub(super) owner: Option<OwnerId>,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// In this process, with the directory that holds its state for as long as this call lasts.
    Embedded(tempfile::TempDir),
    /// Over a Unix socket: on this host, or in a container that shares a directory with it.
    Unix,
    Tcp,
}

impl Backend {
    /// The daemon at the endpoint; `None` if there is no endpoint.
    pub(super) fn remote(settings: &Settings) -> Option<Self> {
        let endpoint = settings.endpoint.as_ref()?;
        Some(Self {
            executor: Arc::new(RemoteExecutor::new(endpoint, settings.token.clone())),
            owner: settings.owner.clone(),
            place: match endpoint {
                Endpoint::Unix(_) => Place::Unix,
                Endpoint::Tcp { .. } => Place::Tcp,
            },
        })
    }

    /// The daemon at the endpoint, else an embedded executor.
    pub(super) async fn new(settings: &Settings) -> Result<Self, Failure> {
        match Self::remote(settings) {
            Some(remote) => Ok(remote),
            None => Self::embedded(settings.owner.clone()).await,
        }
    }

    async fn embedded(owner: Option<OwnerId>) -> Result<Self, Failure> {
        let state = tempfile::Builder::new()
            .prefix("tool-client-")
            .tempdir()
            .map_err(|error| Failure::Own(format!("cannot make a directory for the embedded executor: {error}")))?;
        // A directory that was removed under us is no reason to run nothing.
        let workdir = std::env::current_dir().unwrap_or_else(|_gone| PathBuf::from("/"));
        let environment = EngineSettings::command_environment(std::env::vars_os());
        let engine = EngineSettings::new(state.path().to_owned(), workdir, environment);
        let keeper = EmbeddedOptions { program: None, spill_dir: state.path().join("spill") };
        let executor = LocalExecutor::start(engine, keeper)
            .await
            .map_err(|error| Failure::Own(format!("cannot start the embedded executor: {error}")))?;
        Ok(Self { executor: Arc::new(executor), owner, place: Place::Embedded(state) })
    }

    pub(super) fn is_embedded(&self) -> bool {
        matches!(self.place, Place::Embedded(_))
    }

    /// The directory that we were called in, if it means the same to the executor: it is in this process, or it answers over
    /// a Unix socket that it runs on this host and not in a container of its own.
    pub(super) async fn callers_directory(&self) -> Result<Option<PathBuf>, Failure> {
        let same_host = match self.place {
            Place::Embedded(_) => true,
            Place::Tcp => false,
            Place::Unix => {
                let info = self.executor.info().await.map_err(|error| self.failure(&error))?;
                let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
                let hostname = nix::unistd::gethostname().unwrap_or_default();
                !info.boot_id.is_empty() && info.boot_id == boot_id.trim() && hostname == *info.hostname
            }
        };
        Ok(same_host.then(std::env::current_dir).and_then(Result::ok))
    }

    /// The directory to start in, from what was asked for: relative ones start at ours where that means something.
    pub(super) async fn workdir(&self, asked: Option<PathBuf>) -> Result<Option<Bytes>, Failure> {
        let workdir = match asked {
            Some(asked) if asked.is_absolute() => Some(asked),
            Some(asked) => Some(self.callers_directory().await?.map_or_else(|| asked.clone(), |own| own.join(&asked))),
            None => self.callers_directory().await?,
        };
        Ok(workdir.map(|workdir| Bytes::copy_from_slice(workdir.as_os_str().as_bytes())))
    }

    /// Keeps the files that a text has named: the state directory of an embedded executor outlives this call if whole
    /// outputs were saved in it.
    pub(super) fn keep_named_files(self) {
        if let Place::Embedded(state) = self.place {
            let saved = std::fs::read_dir(state.path().join("spill")).is_ok_and(|mut files| files.next().is_some());
            if saved {
                let _ = state.keep();
            }
        }
    }

    /// What the executor said, about this call.
    pub(super) fn failure(&self, error: &ExecutorError) -> Failure {
        self.failure_of(error, &Asked::default())
    }

    /// The same, where something was asked for by name.
    pub(super) fn failure_of(&self, error: &ExecutorError, asked: &Asked<'_>) -> Failure {
        Failure::of(error, &Asked { endpoint: self.executor.endpoint(), ..*asked })
    }
}
