//! Steps at which a test has the server die: of a start, an end, a read, a kill, and a taking over.
//!
//! Compiled in under the feature `crash-points` only, which no released program has; without it passing a point is nothing. The
//! variable `EXECUTOR_CRASH` then holds the name of a point, a number, and a file: at that pass of that point the process kills
//! itself with SIGKILL. Passes are counted in the file, one byte each, so that they go on over several servers and a test
//! sees that there were any.

macro_rules! points {
    ($($(#[doc = $doc:literal])* $point:ident = $name:literal,)*) => {
        /// A step at which the server may die.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Point {
            $($(#[doc = $doc])* $point,)*
        }

        impl Point {
            /// All that there are.
            pub const ALL: &'static [Self] = &[$(Self::$point,)*];

            /// As the variable names it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$point => $name,)*
                }
            }
        }
    };
}

points! {
    /// The journal has a start of which the keeper does not know yet.
    StartBegun = "start-begun",
    /// The keeper was asked for a start.
    StartAsked = "start-asked",
    /// The keeper has answered with the command's pipes.
    StartAnswered = "start-answered",
    /// The journal has the id.
    StartRecorded = "start-recorded",
    /// The reply to a start is about to be sent.
    StartReplied = "start-replied",
    /// The shell's exit was heard of.
    ExitSeen = "exit-seen",
    /// A run's result stands.
    ResultMade = "result-made",
    /// A run's client has had its result.
    ResultTaken = "result-taken",
    /// The journal has a task's end.
    EndRecorded = "end-recorded",
    /// The journal has a task's completion, and nobody was told.
    CompletionRecorded = "completion-recorded",
    /// A client has had a completion and acknowledges it.
    CompletionDelivered = "completion-delivered",
    /// The journal has the acknowledgement.
    CompletionAcknowledged = "completion-acknowledged",
    /// The output of what is over was written down.
    OutputKept = "output-kept",
    /// The keeper was told to forget a command.
    Released = "released",
    /// The journal has a read, and nobody was answered.
    ReadRecorded = "read-recorded",
    /// A client has had the answer to a read.
    ReadTaken = "read-taken",
    /// The journal has that an end is wanted.
    KillRecorded = "kill-recorded",
    /// The keeper was asked for an end.
    KillAsked = "kill-asked",
    /// The keeper has ended everything, and nobody was answered.
    KillDone = "kill-done",
    /// The keeper has said hello.
    Greeted = "greeted",
    /// The keeper was told that this server could take over.
    StandingBy = "standing-by",
    /// The keeper has handed over what it holds.
    HandedOver = "handed-over",
    /// What runs was taken on.
    Adopted = "adopted",
    /// What has ended was brought back.
    Recalled = "recalled",
    /// The keeper was told that calls are taken.
    Ready = "ready",
}

impl Point {
    /// Whether every server passes it once, on its way to take over.
    #[must_use]
    pub const fn of_taking_over(self) -> bool {
        matches!(
            self,
            Self::Greeted | Self::StandingBy | Self::HandedOver | Self::Adopted | Self::Recalled | Self::Ready
        )
    }

    /// Dies here, if this is where and when it is to be.
    #[cfg(feature = "crash-points")]
    pub(crate) fn pass(self) {
        armed::pass(self);
    }

    /// Nothing.
    #[cfg(not(feature = "crash-points"))]
    #[inline(always)]
    pub(crate) const fn pass(self) {}
}

#[cfg(feature = "crash-points")]
mod armed {
    use std::{
        fs::OpenOptions,
        io::{self, Seek, Write},
        path::PathBuf,
        sync::OnceLock,
    };

    use super::Point;

    struct Plan {
        point: String,
        pass: u64,
        passes: PathBuf,
    }

    impl Plan {
        fn of_environment() -> Option<Self> {
            let text = std::env::var("EXECUTOR_CRASH").ok()?;
            let mut words = text.splitn(3, ' ');
            let (point, pass, passes) = (words.next()?.to_owned(), words.next()?.parse().ok()?, words.next()?.into());
            Some(Self { point, pass, passes })
        }

        /// Counts a pass; which one it is.
        fn count(&self) -> io::Result<u64> {
            let mut passes = OpenOptions::new().append(true).create(true).open(&self.passes)?;
            passes.write_all(b".")?;
            passes.stream_position()
        }
    }

    pub(super) fn pass(point: Point) {
        static PLAN: OnceLock<Option<Plan>> = OnceLock::new();
        let Some(plan) = PLAN.get_or_init(Plan::of_environment).as_ref().filter(|plan| plan.point == point.name())
        else {
            return;
        };
        match plan.count() {
            Ok(pass) if pass == plan.pass => {
                tracing::warn!(point = point.name(), pass, "the server dies here, as it was asked to");
                // Nothing after this runs: the signal cannot be held back.
                let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
            }
            Ok(_) => {}
            Err(error) => tracing::error!(%error, "a crash point's passes cannot be counted"),
        }
    }
}
