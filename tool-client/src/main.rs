//! The command line of `tool-client`.

fn main() {
    executor_daemon::keeper::enter_if_asked();
}
