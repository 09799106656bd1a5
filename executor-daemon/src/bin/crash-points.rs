//! The daemon with its crash points, for the tests that have the server die at each of them.

#[path = "../main.rs"]
mod daemon;

fn main() -> std::process::ExitCode {
    daemon::main()
}
