//! The names of signals.

/// The names of the signals 1 to 31 on Linux (all architectures that bash agents meet number them like this), as Node
/// prints them: of two names for one number the one that libuv's table has (`SIGABRT`, `SIGCHLD`, `SIGIO`).
const NAMES: [&str; 31] = [
    "SIGHUP",
    "SIGINT",
    "SIGQUIT",
    "SIGILL",
    "SIGTRAP",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGKILL",
    "SIGUSR1",
    "SIGSEGV",
    "SIGUSR2",
    "SIGPIPE",
    "SIGALRM",
    "SIGTERM",
    "SIGSTKFLT",
    "SIGCHLD",
    "SIGCONT",
    "SIGSTOP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGXCPU",
    "SIGXFSZ",
    "SIGVTALRM",
    "SIGPROF",
    "SIGWINCH",
    "SIGIO",
    "SIGPWR",
    "SIGSYS",
];

/// The first real-time signal that programs can use: glibc keeps 32 and 33 for itself.
const FIRST_REAL_TIME: u8 = 34;

/// The last real-time signal.
const LAST_REAL_TIME: u8 = 64;

/// The name of a signal by its Linux number: `SIGTERM`, `SIGRTMIN+3`, `SIG32`.
#[must_use]
pub fn name(number: u8) -> String {
    match number {
        FIRST_REAL_TIME..=LAST_REAL_TIME => format!("SIGRTMIN+{}", number - FIRST_REAL_TIME),
        _ => match number.checked_sub(1).and_then(|index| NAMES.get(usize::from(index))) {
            Some(name) => (*name).to_owned(),
            None => format!("SIG{number}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_agree_with_the_kernel_headers() {
        for signal in nix::sys::signal::Signal::iterator() {
            let number = u8::try_from(signal as i32).expect("signals are below 65");
            assert_eq!(name(number), signal.as_str());
        }
    }

    #[test]
    fn real_time_signals_count_from_34() {
        let names = [(0, "SIG0"), (32, "SIG32"), (33, "SIG33"), (34, "SIGRTMIN+0"), (37, "SIGRTMIN+3")];
        for (number, expected) in names.into_iter().chain([(64, "SIGRTMIN+30"), (65, "SIG65"), (255, "SIG255")]) {
            assert_eq!(name(number), expected);
        }
    }
}
