//! The daemon's command line: reads the configuration, then becomes the keeper.

fn main() {
    executor_daemon::keeper::enter_if_asked();
}
