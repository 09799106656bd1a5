//! A client's container: it stays, so that a call costs one `docker exec` and not a container.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Stdio},
    thread::{self, JoinHandle},
};

use crate::{
    deployment::Deployment,
    engine::{Finished, LABEL, docker, must, run, unique},
};

/// A container with `tool-client`, its certificate and the daemon's address. Gone when dropped.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) container: String,
}

impl Client {
    pub(crate) fn start(deployment: &Deployment, service: &str) -> Self {
        let container = unique();
        let label = format!("--label={LABEL}={container}");
        let mut start = deployment.compose();
        start.args(["run", "--detach", "--rm", "--no-deps", &label, "--name", &container, "--entrypoint", "sleep"]);
        must(start.args([service, "infinity"]), "");
        Self { container }
    }

    /// Runs a script of bash there.
    pub(crate) fn run(&self, script: &str) -> Finished {
        run(&mut docker(["exec", &self.container, "bash", "-c", script]), "")
    }

    /// The same, which must end with 0; what it printed, trimmed.
    pub(crate) fn must(&self, script: &str) -> String {
        must(&mut docker(["exec", &self.container, "bash", "-c", script]), "")
    }

    /// Starts a script and returns once it has printed its first line.
    pub(crate) fn begin(&self, script: &str) -> Script {
        let mut command = docker(["exec", &self.container, "bash", "-c", script]);
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the engine's client can be started");
        let mut stdout = BufReader::new(child.stdout.take().expect("it is a pipe"));
        let mut text = String::new();
        stdout.read_line(&mut text).expect("its output is text");
        let reader = thread::spawn(move || {
            for line in stdout.lines() {
                text.push_str(&line.expect("its output is text"));
                text.push('\n');
            }
            text
        });
        Script { child, reader }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        run(&mut docker(["rm", "--force", "--volumes", &self.container]), "");
    }
}

/// A script that runs in a client's container.
#[derive(Debug)]
pub(crate) struct Script {
    child: Child,
    reader: JoinHandle<String>,
}

impl Script {
    /// Waits for its end.
    pub(crate) fn finish(self) -> Finished {
        let stdout = self.reader.join().expect("its output is text");
        let output = self.child.wait_with_output().expect("a child can be waited for");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        Finished { code: output.status.code(), stdout, stderr }
    }
}
