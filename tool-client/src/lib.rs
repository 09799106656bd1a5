//! The three tools that a model has for running commands, over an executor that is in this process or on another host.
//!
//! Read in this order: [`executor`] is the trait and its contract; [`session`] and [`permissions`] say for whom and
//! whether; [`tools`] turn the model's arguments into calls; [`text`] turns results into the words that the model reads;
//! [`presentation`] is for people; [`notices`] carry completions into sessions; [`mcp`] is all of it for agents that speak that protocol.
//!
//! # A session on a daemon
//!
//! The harness hands the model [`tools::definitions`], passes on what it calls, and keeps the agents that notices are for.
//!
//! ```no_run
//! use std::{path::Path, sync::Arc};
//!
//! use async_trait::async_trait;
//! use tool_client::{
//!     executor::{
//!         RemoteExecutor,
//!         connect::{Endpoint, Token},
//!         types::OwnerId,
//!     },
//!     notices::{AgentRegistry, Notice, Notices},
//!     session::Session,
//!     tools::{Abort, Tools},
//! };
//!
//! /// The agents that are there. A real one puts the text into the conversation of `notice.owner`.
//! #[derive(Debug)]
//! struct Agents;
//!
//! #[async_trait]
//! impl AgentRegistry for Agents {
//!     async fn deliver(&self, notice: Notice) -> bool {
//!         println!("{}: {}", notice.owner.0, notice.text);
//!         true
//!     }
//! }
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let endpoint = Endpoint::parse("unix:/run/executor-daemon/executor.sock")?;
//!     let token = Token::read(Path::new("/run/secrets/token"))?;
//!     let executor = Arc::new(RemoteExecutor::new(&endpoint, Some(token)));
//!
//!     let session = Session { id: OwnerId("session-1".to_owned()), cwd: None, sandbox: None };
//!     let notices = Notices::new(executor.clone(), Arc::new(Agents));
//!     notices.attach(session.id.clone());
//!
//!     let tools = Tools::new(executor);
//!     let arguments = r#"{"command": "make test", "description": "Run the tests", "run_in_background": true}"#;
//!     let result = tools.call(Some(&session), "bash", arguments, &Abort::default()).await;
//!     // `started background task bash-1`; the notice comes when it has ended.
//!     println!("{}", result.text);
//!     Ok(())
//! }
//! ```
//!
//! # Without a daemon
//!
//! An embedded executor's keeper is the same program, started again: the first line of `main` lets it be one.
//!
//! ```standalone_crate
//! use std::sync::Arc;
//!
//! use tool_client::{
//!     executor::{LocalExecutor, local::LocalOptions},
//!     tools::{Abort, Tools},
//! };
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     executor_daemon::keeper::enter_if_asked();
//!     tokio::runtime::Runtime::new()?.block_on(async {
//!         let executor = Arc::new(LocalExecutor::start(LocalOptions::default()).await?);
//!         let tools = Tools::new(executor.clone());
//!         let arguments = r#"{"command": "echo hello; exit 3", "description": "Say hello"}"#;
//!         let result = tools.call(None, "bash", arguments, &Abort::default()).await;
//!         assert_eq!(result.text, "hello\n[exit code: 3]");
//!         // Ends in order what is still running.
//!         executor.engine().drain().await;
//!         Ok(())
//!     })
//! }
//! ```

pub mod cli;
pub mod executor;
pub mod mcp;
pub mod notices;
pub mod permissions;
pub mod presentation;
pub mod session;
pub mod text;
pub mod tools;

/// What the fuzz targets call. Built under `--cfg fuzzing` only.
#[cfg(fuzzing)]
pub mod fuzzing {
    pub use crate::{
        executor::{answers, start},
        tools::fuzz_arguments as arguments,
    };
}
