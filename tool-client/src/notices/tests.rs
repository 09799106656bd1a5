//! Notices over an executor that cuts, loses and forgets as a test says.

use std::{collections::HashSet, time::Duration};

use executor_proto::types::{Completion, Exit, TaskStatus};
use tokio::sync::{Notify, mpsc};

use super::*;
use crate::{executor::ExecutorError, tools::fake::Fake};

/// Notices that wait for a test to look at them.
const NOTICES: usize = 1_024;

/// How long a test waits for what must happen soon.
const PATIENCE: Duration = Duration::from_secs(30);

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("it happens soon")
}

/// Hands every notice to the test.
#[derive(Debug)]
struct Registry {
    delivered: mpsc::Sender<Notice>,
    /// Whether there is an agent.
    takes: watch::Sender<bool>,
    /// Permits for deliveries, where a test holds them back.
    gate: Option<Notify>,
}

#[async_trait]
impl AgentRegistry for Registry {
    async fn deliver(&self, notice: Notice) -> bool {
        let takes = *self.takes.borrow();
        self.delivered.send(notice).await.expect("the test listens");
        if let Some(gate) = &self.gate {
            gate.notified().await;
        }
        takes
    }
}

struct House {
    fake: Arc<Fake>,
    registry: Arc<Registry>,
    notices: Notices,
    delivered: mpsc::Receiver<Notice>,
}

fn house(gate: Option<Notify>) -> House {
    let (sender, delivered) = mpsc::channel(NOTICES);
    let fake: Arc<Fake> = Arc::default();
    let registry = Arc::new(Registry { delivered: sender, takes: watch::channel(true).0, gate });
    let pace = Backoff { first: Duration::from_millis(1), longest: Duration::from_millis(4) };
    let notices = Notices::with_pace(Arc::clone(&fake) as _, Arc::clone(&registry) as _, pace);
    House { fake, registry, notices, delivered }
}

fn owner() -> OwnerId {
    OwnerId("s1".to_owned())
}

fn completion(sequence: u64) -> Completion {
    Completion {
        sequence,
        task_id: TaskId(format!("bash-{sequence}")),
        status: TaskStatus::Ended(Exit::Code(0)),
        ended_at_ms: 1_000 + sequence,
    }
}

impl House {
    async fn next(&mut self) -> u64 {
        soon(self.delivered.recv()).await.expect("the registry lives").sequence
    }

    /// Waits until so many acknowledgements have come.
    async fn acked(&self, count: u64) {
        soon(self.fake.acks.subscribe().wait_for(|acks| *acks >= count)).await.expect("the fake lives");
    }

    async fn watched(&self, count: u64) {
        soon(self.fake.watches.subscribe().wait_for(|watches| *watches >= count)).await.expect("the fake lives");
    }

    /// Stops everything and shows what was delivered and not looked at.
    async fn rest(mut self) -> Vec<u64> {
        soon(self.notices.detach(&owner())).await;
        let mut rest = Vec::new();
        while let Ok(notice) = self.delivered.try_recv() {
            rest.push(notice.sequence);
        }
        rest
    }
}

#[tokio::test]
async fn what_waits_and_what_comes_is_delivered_and_acknowledged() {
    let mut house = house(None);
    house.fake.complete(completion(1));
    house.fake.complete(completion(2));
    house.notices.attach(owner());
    house.notices.attach(owner());
    let notice = soon(house.delivered.recv()).await.expect("the registry lives");
    let text =
        "background bash task bash-1 finished [status: completed, exit code: 0]. Read its output with bash_output.";
    assert_eq!(
        notice,
        Notice { owner: owner(), task_id: TaskId("bash-1".to_owned()), sequence: 1, text: text.to_owned() }
    );
    assert_eq!(house.next().await, 2);
    house.acked(1).await;
    house.fake.complete(completion(3));
    assert_eq!(house.next().await, 3);
    house.acked(2).await;
    assert_eq!(house.fake.completions().acked, [2, 3]);
    assert_eq!(*house.fake.watches.borrow(), 1);
    assert_eq!(house.rest().await, [0_u64; 0]);
}

#[tokio::test]
async fn cuts_and_lost_acknowledgements_neither_lose_nor_repeat_a_notice() {
    const TASKS: u64 = 200;
    let mut house = house(None);
    house.notices.attach(owner());
    let lost = ExecutorError::Unavailable { endpoint: "fake".to_owned(), cause: "cut".to_owned() };
    let mut seen = HashSet::new();
    for sequence in 1..=TASKS {
        house.fake.completions().lost_acks += sequence % 3;
        house.fake.completions().refused_watches += u64::from(sequence % 10 == 0);
        house.fake.complete(completion(sequence));
        if sequence % 4 == 0 {
            let watches = *house.fake.watches.borrow();
            house.fake.cut((sequence % 8 == 0).then_some(&lost));
            house.watched(watches + 1).await;
        }
    }
    while seen.len() < usize::try_from(TASKS).expect("it is small") {
        assert!(seen.insert(house.next().await), "delivered twice");
    }
    // With every stream that opens, what was delivered is acknowledged again until nothing is left.
    house.fake.completions().lost_acks = 0;
    while !house.fake.completions().unacknowledged.is_empty() {
        let acks = *house.fake.acks.borrow();
        house.fake.cut(None);
        house.acked(acks + 1).await;
    }
    assert_eq!(house.rest().await, [0_u64; 0]);
}

#[tokio::test]
async fn what_the_registry_does_not_take_waits_for_the_next_attachment() {
    let mut house = house(None);
    house.notices.attach(owner());
    house.fake.complete(completion(1));
    assert_eq!(house.next().await, 1);
    house.acked(1).await;
    house.registry.takes.send_replace(false);
    house.fake.complete(completion(2));
    house.fake.complete(completion(3));
    assert_eq!(house.next().await, 2);
    house.registry.takes.send_replace(true);
    house.notices.attach(owner());
    assert_eq!(house.next().await, 2);
    assert_eq!(house.next().await, 3);
    house.acked(2).await;
    assert_eq!(house.fake.completions().acked, [1, 3]);
    assert_eq!(house.rest().await, [0_u64; 0]);
}

#[tokio::test]
async fn an_attachment_while_the_registry_refuses_is_not_lost() {
    let mut house = house(Some(Notify::new()));
    let registry = Arc::clone(&house.registry);
    let gate = registry.gate.as_ref().expect("there is one");
    registry.takes.send_replace(false);
    house.notices.attach(owner());
    house.fake.complete(completion(1));
    // The registry has looked and has found no agent; before it says so, the agent comes.
    assert_eq!(house.next().await, 1);
    registry.takes.send_replace(true);
    house.notices.attach(owner());
    gate.notify_one();
    assert_eq!(house.next().await, 1);
    gate.notify_one();
    house.acked(1).await;
    assert_eq!(house.rest().await, [0_u64; 0]);
}

#[tokio::test]
async fn detaching_waits_for_a_delivery_and_remembers_it() {
    let mut house = house(Some(Notify::new()));
    let registry = Arc::clone(&house.registry);
    let gate = registry.gate.as_ref().expect("there is one");
    house.fake.completions().lost_acks = 1;
    house.notices.attach(owner());
    house.fake.complete(completion(1));
    house.fake.complete(completion(2));
    assert_eq!(house.next().await, 1);
    let notices = house.notices.clone();
    let owner_again = owner();
    let detached = notices.detach(&owner_again);
    tokio::pin!(detached);
    assert!(futures_util::poll!(&mut detached).is_pending());
    gate.notify_one();
    soon(detached).await;
    assert_eq!(house.delivered.try_recv().ok(), None, "nothing is delivered after it was detached");

    // The acknowledgement was lost, so the first comes again over the wire, but not to the registry.
    house.notices.attach(owner());
    assert_eq!(house.next().await, 2);
    gate.notify_one();
    house.acked(2).await;
    assert_eq!(house.fake.completions().unacknowledged, []);
    assert_eq!(house.rest().await, [0_u64; 0]);
}

#[tokio::test]
async fn an_owner_that_is_attached_again_while_it_is_detached_is_watched() {
    let mut house = house(Some(Notify::new()));
    let registry = Arc::clone(&house.registry);
    let gate = registry.gate.as_ref().expect("there is one");
    house.notices.attach(owner());
    house.fake.complete(completion(1));
    assert_eq!(house.next().await, 1);
    let notices = house.notices.clone();
    let owner_again = owner();
    let detached = notices.detach(&owner_again);
    tokio::pin!(detached);
    assert!(futures_util::poll!(&mut detached).is_pending());
    house.notices.attach(owner());
    gate.notify_one();
    soon(detached).await;
    house.fake.complete(completion(2));
    assert_eq!(house.next().await, 2);
    gate.notify_one();
    house.acked(2).await;
    assert_eq!(house.rest().await, [0_u64; 0]);
}

#[tokio::test]
async fn an_executor_whose_numbers_begin_anew_loses_no_notice() {
    let mut house = house(None);
    house.notices.attach(owner());
    for sequence in 1..=3 {
        house.fake.complete(completion(sequence));
        assert_eq!(house.next().await, sequence);
    }
    house.acked(1).await;
    // Another executor, as empty as the first one was.
    house.fake.cut(None);
    *house.fake.completions() = crate::tools::fake::Completions::default();
    house.fake.complete(Completion { ended_at_ms: 9_000, ..completion(1) });
    assert_eq!(house.next().await, 1);
    house.fake.complete(Completion { ended_at_ms: 9_001, ..completion(2) });
    assert_eq!(house.next().await, 2);
    assert_eq!(house.rest().await, [0_u64; 0]);
}

#[tokio::test]
async fn dropping_the_last_clone_stops_all_watching() {
    let house = house(None);
    house.notices.attach(owner());
    house.watched(1).await;
    let House { fake, registry, notices, mut delivered } = house;
    drop(registry);
    drop(notices.clone());
    fake.complete(completion(1));
    assert_eq!(soon(delivered.recv()).await.map(|notice| notice.sequence), Some(1));
    drop(notices);
    // The watcher holds the last handle to the registry; when it has ended, the channel closes.
    assert_eq!(soon(delivered.recv()).await, None);
    assert_eq!(fake.completions().acked, [1]);
}

#[tokio::test]
async fn an_acknowledgement_that_is_never_answered_does_not_hold_up_detaching() {
    let mut house = house(None);
    house.fake.completions().acks_hang = true;
    house.notices.attach(owner());
    house.fake.complete(completion(1));
    assert_eq!(house.next().await, 1);
    house.acked(1).await;
    assert_eq!(house.rest().await, [0_u64; 0]);
}

#[tokio::test]
async fn a_registry_that_panics_is_offered_the_notice_again() {
    #[derive(Debug)]
    struct Panics(mpsc::Sender<u64>, std::sync::atomic::AtomicBool);

    #[async_trait]
    impl AgentRegistry for Panics {
        async fn deliver(&self, notice: Notice) -> bool {
            self.0.send(notice.sequence).await.expect("the test listens");
            assert!(self.1.swap(true, std::sync::atomic::Ordering::Relaxed), "the first time it panics");
            true
        }
    }

    let (sender, mut offered) = mpsc::channel(NOTICES);
    let fake: Arc<Fake> = Arc::default();
    let notices = Notices::new(Arc::clone(&fake) as _, Arc::new(Panics(sender, false.into())));
    fake.complete(completion(1));
    notices.attach(owner());
    assert_eq!(soon(offered.recv()).await, Some(1));
    soon(notices.detach(&owner())).await;
    notices.attach(owner());
    assert_eq!(soon(offered.recv()).await, Some(1));
    soon(notices.detach(&owner())).await;
    assert_eq!(fake.completions().acked, [1]);
}
