//! Steps at which a test has the server or the keeper die: of a start, an end, a read, a kill, and a taking over.
//!
//! Compiled in under the feature `crash-points` only, which no released program has; without it passing a point is nothing. The
//! variable `EXECUTOR_CRASH` then holds the name of a point, a number, and a file: at that pass of that point the process kills
//! itself with SIGKILL. Passes are counted in the file, one byte each, so that they go on over several servers and a test
//! sees that there were any.

macro_rules! points {
    (
        server { $($(#[doc = $doc:literal])* $point:ident = $name:literal,)* }
        keeper { $($(#[doc = $keeper_doc:literal])* $keeper_point:ident = $keeper_name:literal,)* }
    ) => {
        /// A step at which the server or the keeper may die.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Point {
            $($(#[doc = $doc])* $point,)*
            $($(#[doc = $keeper_doc])* $keeper_point,)*
        }

        impl Point {
            /// All at which the server may die.
            pub const OF_SERVER: &'static [Self] = &[$(Self::$point,)*];

            /// All at which the keeper may die.
            pub const OF_KEEPER: &'static [Self] = &[$(Self::$keeper_point,)*];

            /// As the variable names it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$point => $name,)*
                    $(Self::$keeper_point => $keeper_name,)*
                }
            }
        }
    };
}

points! {
    server {
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
    keeper {
        /// A helper has a command, and nobody was told that it was started.
        HelperAssigned = "helper-assigned",
        /// The helper has said that the shell runs, and nobody was told.
        StartHeard = "start-heard",
        /// A shell's exit is noted, and not passed on.
        ExitHeard = "exit-heard",
        /// It is noted that nothing of a command is alive, and not passed on.
        EmptyHeard = "empty-heard",
        /// The engine asks for an end, and no helper knows it yet.
        EndTaken = "end-taken",
        /// A helper has ended everything, and nobody was told.
        EndHeard = "end-heard",
        /// A stream's file is held.
        FileHeld = "file-held",
        /// A spill file was made, and nobody was told.
        SpillMade = "spill-made",
        /// A command may be forgotten, and is not yet.
        ReleaseTaken = "release-taken",
        /// A server was said hello to.
        HelloSaid = "hello-said",
        /// A server could take over, and the one before is not ended yet.
        StandbyHeard = "standby-heard",
        /// A server was made the engine, and nothing was handed over yet.
        GoSaid = "go-said",
        /// A command was handed over.
        CommandCarried = "command-carried",
        /// The server has said that it takes calls, and nobody else knows.
        ReadyHeard = "ready-heard",
    }
}

impl Point {
    /// Whether it is passed once for every server, on its way to take over.
    #[must_use]
    pub const fn of_taking_over(self) -> bool {
        matches!(
            self,
            Self::Greeted
                | Self::StandingBy
                | Self::HandedOver
                | Self::Adopted
                | Self::Recalled
                | Self::Ready
                | Self::HelloSaid
                | Self::StandbyHeard
                | Self::GoSaid
                | Self::ReadyHeard
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
                // The keeper has nobody who takes this line.
                tracing::warn!(point = point.name(), pass, "the server dies here, as it was asked to");
                // Nothing after this runs: the signal cannot be held back.
                let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
            }
            Ok(_) => {}
            Err(error) => tracing::error!(%error, "a crash point's passes cannot be counted"),
        }
    }
}
