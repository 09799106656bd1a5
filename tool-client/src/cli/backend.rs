//! The executor that a call uses: the daemon at the endpoint, or one of our own for this call.

use std::{os::unix::ffi::OsStrExt, path::PathBuf, sync::Arc};

use bytes::Bytes;
use executor_proto::{
    error::{ExecutorError, SpawnStage},
    types::OwnerId,
};

use nix::errno::Errno;

use super::{Failure, settings::Settings, tasks::is_run};
use crate::{
    executor::{
        Executor,
        connect::Endpoint,
        local::{LocalExecutor, LocalOptions},
        pinned::PinnedExecutor,
        remote::RemoteExecutor,
    },
    text::failure::Asked,
};

/// Where a token is named.
const TOKEN_FILE: &str = "name the file that holds it: --token-file FILE or EXECUTOR_TOKEN_FILE";

/// An executor and for whom it is called.
#[derive(Debug)]
pub(super) struct Backend {
    pub(super) executor: Arc<dyn Executor>,
    pub(super) owner: Option<OwnerId>,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// In this process.
    Embedded(Arc<LocalExecutor>),
    /// Over a Unix socket: on this host, or in a container that shares a directory with it.
    Unix,
    Tcp {
        /// Whether it is told who we are.
        has_token: bool,
    },
}

/// Whether the paths of files with whole outputs are told to the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Files {
    AreTold,
    AreNotTold,
}

impl Backend {
    /// The daemon at the endpoint, or one of those at several; `None` if there is no endpoint.
    pub(super) fn remote(settings: &Settings) -> Option<Self> {
        let access = settings.access.clone();
        let has_token = access.token.is_some();
        let (executor, place): (Arc<dyn Executor>, _) = match settings.endpoints.as_slice() {
            [] => return None,
            [unix @ Endpoint::Unix(_)] => (Arc::new(RemoteExecutor::new(unix, access)), Place::Unix),
            hosts => (Arc::new(PinnedExecutor::new(hosts.to_vec(), access)), Place::Tcp { has_token }),
        };
        Some(Self { executor, owner: settings.owner.clone(), place })
    }

    /// The daemon at the endpoint, else an embedded executor. Embedded, the files that hold whole outputs are gone when the
    /// call ends, unless their paths are told.
    pub(super) async fn new(settings: &Settings, files: Files) -> Result<Self, Failure> {
        match Self::remote(settings) {
            Some(remote) => Ok(remote),
            None => Self::embedded(settings.owner.clone(), files).await,
        }
    }

    async fn embedded(owner: Option<OwnerId>, files: Files) -> Result<Self, Failure> {
        let options = LocalOptions {
            // A directory that was removed under us is no reason to run nothing.
            default_workdir: Some(std::env::current_dir().unwrap_or_else(|_gone| PathBuf::from("/"))),
            keep_spills: files == Files::AreTold,
            ..LocalOptions::default()
        };
        let executor = LocalExecutor::start(options)
            .await
            .map_err(|error| Failure::Own(format!("cannot start an executor on this host: {error}")))?;
        let executor = Arc::new(executor);
        Ok(Self { executor: executor.clone(), owner, place: Place::Embedded(executor) })
    }

    /// Lets an embedded executor end what its command has left running.
    pub(super) async fn close(self) {
        if let Place::Embedded(executor) = self.place {
            executor.engine().drain().await;
        }
    }

    pub(super) fn is_embedded(&self) -> bool {
        matches!(self.place, Place::Embedded(_))
    }

    /// The directory that we were called in, if it means the same to the executor: it is in this process, or it answers over
    /// a Unix socket that it runs on this host and not in a container of its own.
    pub(super) async fn callers_directory(&self) -> Result<Option<PathBuf>, Failure> {
        let same_host = match self.place {
            Place::Embedded(_) => true,
            Place::Tcp { .. } => false,
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

    /// What the executor said, about this call.
    pub(super) fn failure(&self, error: &ExecutorError) -> Failure {
        self.failure_of(error, &Asked::default())
    }

    /// The same, where something was asked for by name.
    pub(super) fn failure_of(&self, error: &ExecutorError, asked: &Asked<'_>) -> Failure {
        let failure = Failure::of(error, &Asked { endpoint: self.executor.endpoint(), ..*asked });
        match (failure, error, &self.place) {
            // The executor says how a token is sent; who sits here can only say where it is.
            (Failure::Own(line), ExecutorError::Refused { .. }, Place::Tcp { has_token: false }) => {
                Failure::Own(format!("{line}; {TOKEN_FILE}"))
            }
            // The model's tools know tasks only; people are told why a run is not there.
            (Failure::Own(_), ExecutorError::UnknownTask(_), _) if asked.task.is_some_and(is_run) => {
                let id = asked.task.map(ToString::to_string).unwrap_or_default();
                Failure::Own(format!(
                    "unknown run \"{id}\": a run is known while it runs, while something that it left is running, and while \
                     its long output is kept"
                ))
            }
            (Failure::Own(line), ExecutorError::Spawn { stage: SpawnStage::Chdir, errno, .. }, _)
                if *errno == Errno::EACCES as i32 =>
            {
                Failure::Own(format!("{line}; --workdir DIR starts the command elsewhere"))
            }
            (failure, _, _) => failure,
        }
    }

    /// What there is to say to who sits here of a refusal that a model was told; `None`: it was none, or nothing.
    pub(super) fn remark_on(&self, text: &str) -> Option<String> {
        let refused = text.starts_with("Error: executor refused the caller: ");
        let without = matches!(self.place, Place::Tcp { has_token: false });
        (refused && without).then(|| format!("no token was sent; {TOKEN_FILE}"))
    }
}

#[cfg(test)]
mod tests {
    use executor_proto::types::TaskId;

    use super::*;
    use crate::executor::connect::Access;

    #[tokio::test]
    async fn failures_say_what_a_person_can_do() {
        let endpoint = Endpoint::parse("http://x:1").expect("an endpoint");
        let settings = Settings { endpoints: vec![endpoint], access: Access::default(), owner: None, sandbox: None };
        let backend = Backend::remote(&settings).expect("there is an endpoint");
        let said = |error: &ExecutorError, task: &str| {
            let task = TaskId(task.to_owned());
            match backend.failure_of(error, &Asked { task: Some(&task), workdir: Some(b"/x"), ..Asked::default() }) {
                Failure::Own(line) => line,
                other => panic!("{other:?}"),
            }
        };
        let unknown = |id: &str| ExecutorError::UnknownTask(TaskId(id.to_owned()));
        assert!(said(&unknown("run-7"), "run-7").starts_with("unknown run \"run-7\": a run is known while it runs"));
        assert_eq!(said(&unknown("bash-7"), "bash-7"), "unknown bash task \"bash-7\"");
        assert_eq!(said(&unknown("run-x"), "run-x"), "unknown bash task \"run-x\"");
        let chdir = |errno: Errno| ExecutorError::Spawn { stage: SpawnStage::Chdir, errno: errno as i32, path: None };
        let line = said(&chdir(Errno::EACCES), "");
        assert!(line.ends_with(": permission denied; --workdir DIR starts the command elsewhere"), "{line}");
        assert!(!said(&chdir(Errno::ENOENT), "").contains("--workdir"));
        let text = "Error: executor refused the caller: no token";
        assert!(backend.remark_on(text).is_some_and(|line| line.contains("--token-file FILE")));
        assert_eq!(backend.remark_on("no token"), None);
    }
}
