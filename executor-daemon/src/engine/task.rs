//! The rules of one run or task: what state it is in and what a request to end it means then. Pure: no clock, no lock,
//! no await; the driver and the callers' methods apply them under one lock.
//!
//! ```text
//!             the shell was reaped                 both streams are settled
//!   Running ───────────────────────► Draining ───────────────────────────────► Ended
//!      │                                 ▲
//!      └─ its end can no longer be seen ─┘
//!
//!   beside it:   alive ──── nothing of the command lives ────► not alive
//!   and:         Idle ── request ──► Wanted ── begun ──► Active ── all gone, or survivors named ──► Idle
//! ```
//!
//! The status is final in `Ended` and never changes there. What lives on in `Ended` are leftovers; they can be ended too, and
//! are over when nothing is alive. This module does not know who may ask (the registry does), nor how something is ended (the
//! keeper does).

use std::time::Instant;

use executor_proto::types::{EndedBy, Exit, TaskStatus};

/// Why something is to be ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// The run's timer.
    Timeout,
    /// The run's caller took it back.
    Abort,
    /// Somebody killed the task, or a run or its leftovers by name.
    Kill,
    /// The run's caller vanished.
    CallerGone,
    /// The executor stops.
    Stopping,
    /// Its leftovers may not stay: over the cap, or not wanted at all.
    Leftovers,
}

/// Where the shell and its output stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// The shell runs.
    Running,
    /// The shell has ended, its last output is being taken.
    Draining,
    /// The result stands.
    Ended,
}

/// Where an end stands.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    /// Nobody wants one.
    Idle,
    /// Asked for, by these.
    Wanted(Vec<Cause>),
    /// The keeper is at it, for these.
    Active(Vec<Cause>),
}

/// What a request to end something comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    /// Nothing is alive, or it is too late for this cause: nothing will be signalled.
    Nothing,
    /// It is over when this many ends are done.
    Round {
        /// See [`State::ends_done`].
        number: u64,
        /// The same cause had asked for the same end before.
        repeated: bool,
    },
}

/// The state of one run or task.
#[derive(Debug, Clone)]
pub(super) struct State {
    phase: Phase,
    exit: Option<Exit>,
    alive: bool,
    /// What first asked for the end while the shell ran.
    ended_for: Option<Cause>,
    /// All that have asked for it while the shell ran, in this order, each once.
    asked_for: Vec<Cause>,
    /// How many of them are written down.
    written: usize,
    timed_out: bool,
    aborted: bool,
    end: End,
    ends_done: u64,
    survivors: Vec<u32>,
    exited_at_ms: Option<u64>,
    told: bool,
    taken: bool,
    /// Clients that wait for the run's result.
    attached: u32,
    /// Since when none does that once did.
    alone_since: Option<Instant>,
}

impl State {
    /// Just spawned.
    pub(super) fn started() -> Self {
        Self {
            phase: Phase::Running,
            exit: None,
            alive: true,
            ended_for: None,
            asked_for: Vec::new(),
            written: 0,
            timed_out: false,
            aborted: false,
            end: End::Idle,
            ends_done: 0,
            survivors: Vec::new(),
            exited_at_ms: None,
            told: false,
            taken: false,
            attached: 0,
            alone_since: None,
        }
    }

    /// A client waits for the run's result.
    pub(super) fn attach(&mut self) {
        self.attached += 1;
        self.alone_since = None;
    }

    /// A client that waited for the run's result is gone.
    pub(super) fn detach(&mut self, now: Instant) {
        self.attached = self.attached.saturating_sub(1);
        if self.attached == 0 && self.phase != Phase::Ended {
            self.alone_since = Some(now);
        }
    }

    /// A client has had the whole result.
    pub(super) fn taken(&mut self) {
        self.taken = true;
    }

    /// Whether a client has had the whole result.
    pub(super) fn is_taken(&self) -> bool {
        self.taken
    }

    /// Since when nobody waits for the result of a run that goes on. `None` also once it was asked to end for that.
    pub(super) fn alone_since(&self) -> Option<Instant> {
        self.alone_since
    }

    /// Ended under a process before this one, which nothing outlived.
    pub(super) fn recalled(exit: Exit, ended_for: Option<Cause>, exited_at_ms: u64) -> Self {
        Self {
            phase: Phase::Ended,
            exit: Some(exit),
            alive: false,
            ended_for,
            exited_at_ms: Some(exited_at_ms),
            ..Self::started()
        }
    }

    /// Somebody asks for the end. The first cause while the shell runs is the one that people read; a timer that fires while
    /// an end is already wanted is not news.
    pub(super) fn request(&mut self, cause: Cause) -> Request {
        let of_the_run = match cause {
            Cause::Timeout | Cause::Abort | Cause::CallerGone => true,
            Cause::Kill | Cause::Stopping | Cause::Leftovers => false,
        };
        let too_late = match (cause, self.phase) {
            (Cause::Timeout, Phase::Running) => self.ended_for.is_some(),
            (Cause::Timeout, _) => true,
            (_, Phase::Ended) => of_the_run,
            (_, Phase::Running | Phase::Draining) => false,
        };
        if cause == Cause::CallerGone {
            self.alone_since = None;
        }
        if too_late || !self.alive {
            return Request::Nothing;
        }
        self.timed_out |= cause == Cause::Timeout;
        self.aborted |= cause == Cause::Abort;
        if self.phase == Phase::Running {
            self.ended_for.get_or_insert(cause);
            if !self.asked_for.contains(&cause) {
                self.asked_for.push(cause);
            }
        }
        let number = self.ends_done + 1;
        match &mut self.end {
            End::Idle => {
                self.end = End::Wanted(vec![cause]);
                Request::Round { number, repeated: false }
            }
            End::Wanted(causes) | End::Active(causes) => {
                let repeated = causes.contains(&cause);
                if !repeated {
                    causes.push(cause);
                }
                Request::Round { number, repeated }
            }
        }
    }

    /// Whether the keeper is to be asked now; from then on the end is under way.
    pub(super) fn begin_end(&mut self) -> bool {
        let wanted = matches!(self.end, End::Wanted(_));
        if let End::Wanted(causes) = &mut self.end {
            self.end = End::Active(std::mem::take(causes));
        }
        wanted
    }

    /// Whether somebody has asked for the end of which nothing is written down yet.
    pub(super) fn has_unwritten(&self) -> bool {
        self.written < self.asked_for.len()
    }

    /// Takes the causes that are not written down yet, in the order in which they came: from here on they are. Not only the
    /// first counts: a run that timed out may have been aborted as well, and is told both.
    pub(super) fn take_unwritten(&mut self) -> Vec<Cause> {
        let causes = self.asked_for[self.written..].to_vec();
        self.written = self.asked_for.len();
        causes
    }

    /// The keeper has ended everything, or names what it could not end yet.
    pub(super) fn end_done(&mut self, survivors: Vec<u32>) {
        self.end = End::Idle;
        self.ends_done += 1;
        self.alive &= !survivors.is_empty();
        self.survivors = survivors;
    }

    /// The shell was reaped, or its end can no longer be seen. `empty`: nothing else lives either. Later news of the same
    /// kind change nothing but what is alive.
    pub(super) fn shell_ended(&mut self, exit: Exit, empty: bool, now_ms: u64) {
        if self.phase == Phase::Running {
            self.phase = Phase::Draining;
            self.exit = Some(exit);
            self.exited_at_ms = Some(now_ms);
        }
        self.alive &= !empty;
    }

    /// Nothing of the command is alive.
    pub(super) fn emptied(&mut self) {
        self.alive = false;
        self.survivors.clear();
    }

    /// The last output was taken: the result stands. True the first time, false when there was nothing to settle.
    pub(super) fn settled(&mut self) -> bool {
        let now = self.phase == Phase::Draining;
        if now {
            self.alone_since = None;
            self.phase = Phase::Ended;
        }
        now
    }

    /// What people and models are told. Running until the result stands, so that whoever sees the end has all the output.
    pub(super) fn status(&self) -> TaskStatus {
        match (&self.exit, self.phase) {
            (None, _) | (_, Phase::Running | Phase::Draining) => TaskStatus::Running,
            (Some(exit), Phase::Ended) => match (self.ended_for, exit) {
                (None, exit) | (Some(_), exit @ Exit::Unknown(_)) => TaskStatus::Ended(exit.clone()),
                (Some(_), Exit::Signal(signal)) => TaskStatus::Killed(Some(*signal)),
                (Some(_), Exit::Code(_)) => TaskStatus::Killed(None),
            },
        }
    }

    /// Where the shell and its output stand.
    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    /// How the shell ended.
    pub(super) fn exit(&self) -> Option<&Exit> {
        self.exit.as_ref()
    }

    /// Something of the command lives.
    pub(super) fn alive(&self) -> bool {
        self.alive
    }

    /// An end is wanted or under way.
    pub(super) fn ending(&self) -> bool {
        self.end != End::Idle
    }

    /// Ends that were carried out, whatever they achieved.
    pub(super) fn ends_done(&self) -> u64 {
        self.ends_done
    }

    /// What the latest end could not end, by pid.
    pub(super) fn survivors(&self) -> &[u32] {
        &self.survivors
    }

    /// What first asked for the end while the shell ran.
    pub(super) fn ended_for(&self) -> Option<Cause> {
        self.ended_for
    }

    /// The run's timer fired.
    pub(super) fn timed_out(&self) -> bool {
        self.timed_out
    }

    /// The run's caller took it back while something of it was alive.
    pub(super) fn aborted(&self) -> bool {
        self.aborted
    }

    /// Whether a caller or timer is behind the end, or something that its caller has to be told.
    pub(super) fn ended_by(&self) -> Option<EndedBy> {
        match self.ended_for? {
            Cause::CallerGone => Some(EndedBy::CallerGone),
            Cause::Stopping => Some(EndedBy::ExecutorStopping),
            Cause::Timeout | Cause::Abort | Cause::Kill | Cause::Leftovers => None,
        }
    }

    /// Whether its owner is to be told of the end: not of one that the executor's own stopping brought about.
    pub(super) fn to_be_told(&self) -> bool {
        self.ended_for != Some(Cause::Stopping) && !self.told
    }

    /// Its owner's completion was written by a process before this one.
    pub(super) fn told(&mut self) {
        self.told = true;
    }

    /// Milliseconds since the Unix epoch when the shell exited.
    pub(super) fn exited_at_ms(&self) -> Option<u64> {
        self.exited_at_ms
    }
}

/// What a raw wait status says.
pub(super) fn exit_of(status: Option<i32>) -> Exit {
    let lost = || Exit::Unknown("its wait status was lost".to_owned());
    let Some(status) = status else { return lost() };
    let byte = |value: i32| u8::try_from(value).ok();
    if libc::WIFEXITED(status) {
        byte(libc::WEXITSTATUS(status)).map_or_else(lost, Exit::Code)
    } else if libc::WIFSIGNALED(status) {
        byte(libc::WTERMSIG(status)).map_or_else(lost, Exit::Signal)
    } else {
        lost()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Request(Cause),
        BeginEnd,
        EndDone(Vec<u32>),
        ShellEnded(Exit, bool),
        Emptied,
        Settled,
    }

    fn step() -> impl Strategy<Value = Step> {
        let cause = prop_oneof![
            Just(Cause::Timeout),
            Just(Cause::Abort),
            Just(Cause::Kill),
            Just(Cause::CallerGone),
            Just(Cause::Stopping),
            Just(Cause::Leftovers),
        ];
        let exit = prop_oneof![
            any::<u8>().prop_map(Exit::Code),
            (1_u8..65).prop_map(Exit::Signal),
            Just(Exit::Unknown("x".into()))
        ];
        prop_oneof![
            4 => cause.prop_map(Step::Request),
            2 => Just(Step::BeginEnd),
            2 => proptest::collection::vec(1_u32..9, 0..3).prop_map(Step::EndDone),
            2 => (exit, any::<bool>()).prop_map(|(exit, empty)| Step::ShellEnded(exit, empty)),
            1 => Just(Step::Emptied),
            2 => Just(Step::Settled),
        ]
    }

    /// Applies a step as the driver may: an end is done only while one is under way, and leftovers are nobody's business
    /// while the shell runs.
    fn apply(state: &mut State, step: &Step) -> Option<Request> {
        match step {
            Step::Request(Cause::Leftovers) if state.phase() == Phase::Running => {}
            Step::Request(cause) => return Some(state.request(*cause)),
            Step::BeginEnd => {
                state.begin_end();
            }
            Step::EndDone(survivors) if matches!(state.end, End::Active(_)) => state.end_done(survivors.clone()),
            Step::EndDone(_) => {}
            Step::ShellEnded(exit, empty) => state.shell_ended(exit.clone(), *empty, 7),
            Step::Emptied => state.emptied(),
            Step::Settled => {
                state.settled();
            }
        }
        None
    }

    proptest! {
        #[test]
        fn the_rules_hold_in_any_order(steps in proptest::collection::vec(step(), 0..40)) {
            let mut state = State::started();
            let mut settled = 0;
            for step in &steps {
                let before = state.clone();
                if let (Step::Settled, Phase::Draining) = (step, before.phase()) {
                    settled += 1;
                }
                let request = apply(&mut state, step);

                // What is over stays over, and says the same for ever.
                if before.phase() == Phase::Ended {
                    prop_assert_eq!(state.phase(), Phase::Ended);
                    prop_assert_eq!(state.status(), before.status());
                    prop_assert_eq!(state.ended_by(), before.ended_by());
                    prop_assert_eq!((state.timed_out(), state.aborted()), (before.timed_out(), before.aborted()));
                }
                prop_assert!(before.alive() || !state.alive());
                prop_assert!(state.ends_done() >= before.ends_done());
                // The exit is told exactly when the result stands, and is the first one seen.
                prop_assert_eq!(state.status() == TaskStatus::Running, state.phase() != Phase::Ended);
                if let Some(exit) = before.exit() {
                    prop_assert_eq!(state.exit(), Some(exit));
                }
                // Nothing is signalled once nothing is alive; else a request always leads to an end that is still to come.
                match request {
                    Some(Request::Nothing) => prop_assert_eq!(state.ending(), before.ending()),
                    Some(Request::Round { number, repeated }) => {
                        prop_assert!(before.alive());
                        prop_assert!(state.ending());
                        prop_assert_eq!(number, state.ends_done() + 1);
                        prop_assert!(!repeated || before.ending());
                    }
                    None => {}
                }
                // Killed is who was asked to end while the shell ran; a code is never shown then.
                if let TaskStatus::Killed(_) = state.status() {
                    prop_assert!(state.ended_for.is_some());
                }
                if let (TaskStatus::Ended(Exit::Code(_) | Exit::Signal(_)), Some(_)) = (state.status(), state.ended_for) {
                    prop_assert!(false, "ended on request, but told as if by itself");
                }
            }
            prop_assert!(settled <= 1);
        }
    }

    #[test]
    fn a_second_kill_waits_for_the_same_end_and_is_told_so() {
        let mut state = State::started();
        assert_eq!(state.request(Cause::Kill), Request::Round { number: 1, repeated: false });
        assert!(state.begin_end());
        assert!(!state.begin_end());
        assert_eq!(state.request(Cause::Kill), Request::Round { number: 1, repeated: true });
        assert_eq!(state.request(Cause::Stopping), Request::Round { number: 1, repeated: false });
        state.shell_ended(Exit::Signal(15), true, 1);
        state.end_done(vec![]);
        assert!(state.settled());
        assert_eq!(state.status(), TaskStatus::Killed(Some(15)));
        assert_eq!(state.request(Cause::Kill), Request::Nothing);
    }

    #[test]
    fn leftovers_can_be_killed_and_the_status_stays() {
        let mut state = State::started();
        state.shell_ended(Exit::Code(3), false, 1);
        state.settled();
        assert_eq!(state.request(Cause::Abort), Request::Nothing);
        assert_eq!(state.request(Cause::Kill), Request::Round { number: 1, repeated: false });
        state.begin_end();
        state.end_done(vec![]);
        assert!(!state.alive());
        assert_eq!(state.status(), TaskStatus::Ended(Exit::Code(3)));
    }

    #[test]
    fn an_abort_counts_during_the_grace_of_a_timeout_but_a_timer_not_during_an_abort() {
        let mut state = State::started();
        state.request(Cause::Timeout);
        assert!(state.begin_end());
        assert_eq!(state.take_unwritten(), [Cause::Timeout]);
        state.request(Cause::Abort);
        state.request(Cause::Abort);
        assert!(state.timed_out() && state.aborted() && state.has_unwritten());
        assert_eq!(state.take_unwritten(), [Cause::Abort]);
        assert!(!state.has_unwritten());

        let mut state = State::started();
        state.request(Cause::Abort);
        assert_eq!(state.request(Cause::Timeout), Request::Nothing);
        assert!(!state.timed_out() && state.aborted());
    }

    #[test]
    fn what_survives_can_be_asked_for_again() {
        let mut state = State::started();
        state.request(Cause::Kill);
        state.begin_end();
        state.end_done(vec![7]);
        assert_eq!((state.alive(), state.survivors()), (true, &[7][..]));
        assert_eq!(state.request(Cause::Kill), Request::Round { number: 2, repeated: false });
    }

    #[test]
    fn wait_statuses() {
        assert_eq!(exit_of(Some(44 << 8)), Exit::Code(44));
        assert_eq!(exit_of(Some(9)), Exit::Signal(9));
        assert_eq!(exit_of(Some(11 | 0x80)), Exit::Signal(11));
        assert_eq!(exit_of(Some(35)), Exit::Signal(35));
        assert!(matches!(exit_of(None), Exit::Unknown(_)));
        assert!(matches!(exit_of(Some(0x137f)), Exit::Unknown(_)));
    }
}
