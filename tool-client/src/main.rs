//! The command line of `tool-client`.

use std::process::ExitCode;

fn main() -> ExitCode {
    // An embedded executor starts this program again to be its keeper.
    executor_daemon::keeper::enter_if_asked();
    tool_client::cli::main()
}
