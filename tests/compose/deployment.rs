//! `docker-compose.yml` brought up under a name of its own, and taken down when it is dropped.

use std::{process::Command, thread};

use crate::{
    client::Client,
    engine::{Finished, compose, docker, image, must, run, unique, wait_for},
};

/// The file, brought up.
#[derive(Debug)]
pub(crate) struct Deployment {
    pub(crate) project: String,
    /// Another file on top.
    also: Option<&'static str>,
    environment: Vec<(&'static str, String)>,
}

impl Deployment {
    /// Up, and the daemon healthy.
    pub(crate) fn up() -> Self {
        Self::with(None, Vec::new())
    }

    /// The same, with variables that the file reads, and another file on top.
    pub(crate) fn with(also: Option<&'static str>, environment: Vec<(&'static str, String)>) -> Self {
        let deployment = Self { project: unique(), also, environment };
        deployment.up_again();
        deployment
    }

    /// Up again, after something was changed.
    pub(crate) fn up_again(&self) {
        must(self.compose().args(["up", "--detach", "--no-build", "daemon"]), "");
        self.wait_until_healthy();
    }

    /// Waits for what the engine's health check says.
    pub(crate) fn wait_until_healthy(&self) {
        let daemon = self.daemon();
        wait_for("the daemon is healthy", || {
            let state = self.state(&daemon);
            assert!(state.starts_with("running"), "{state}: {}", self.logs());
            (state == "running healthy").then_some(())
        });
    }

    fn state(&self, daemon: &str) -> String {
        must(&mut docker(["inspect", "--format={{.State.Status}} {{.State.Health.Status}}", daemon]), "")
    }

    /// A command of Compose for this deployment.
    pub(crate) fn compose(&self) -> Command {
        let mut command = compose(&self.project, self.also);
        command.env("EXECUTOR_IMAGE", image()).envs(self.environment.iter().map(|(name, value)| (*name, value)));
        command
    }

    /// The id of the daemon's container.
    pub(crate) fn daemon(&self) -> String {
        must(self.compose().args(["ps", "--quiet", "daemon"]), "")
    }

    /// What the daemon has logged.
    pub(crate) fn logs(&self) -> Finished {
        run(&mut docker(["logs", &self.daemon()]), "")
    }

    /// Runs a script of `sh` in the daemon's container, as root.
    pub(crate) fn inside(&self, script: &str) -> String {
        must(&mut docker(["exec", &self.daemon(), "sh", "-c", script]), "")
    }

    /// A container of the service `client` that waits for scripts.
    pub(crate) fn client(&self) -> Client {
        self.client_of("client")
    }

    /// The same of another service.
    pub(crate) fn client_of(&self, service: &str) -> Client {
        Client::start(self, service)
    }

    /// The name of the network that daemon and clients are on.
    pub(crate) fn network(&self) -> String {
        format!("{}_private", self.project)
    }
}

impl Drop for Deployment {
    fn drop(&mut self) {
        let mut down = self.compose();
        down.args(["--profile", "client", "down", "--volumes", "--remove-orphans", "--timeout", "10"]);
        let down = run(&mut down, "");
        assert!(down.code == Some(0) || thread::panicking(), "taking down {}: {down}", self.project);
    }
}
