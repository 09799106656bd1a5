//! The names of reads. A read's answer moves the task's cursor, so one that was lost must be asked for again by the same name,
//! or the output in it is gone. A read that was given up, or whose future was dropped, may have been answered: the next read
//! of that task goes on under its name.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use executor_proto::types::{OwnerId, TaskId};

use super::random_name;

/// Most names that are remembered. Above it any one goes: the daemon forgets them too.
const MAX_UNANSWERED: usize = 1024;

type Task = (Option<OwnerId>, TaskId);

/// Reads without an answer, the latest of each task as its owner.
#[derive(Debug, Default)]
pub(super) struct Unanswered {
    names: Mutex<HashMap<Task, String>>,
}

/// A read under way. Dropped without [`Read::answered`], its name is remembered.
#[derive(Debug)]
pub(super) struct Read<'a> {
    of: &'a Unanswered,
    task: Task,
    /// There until it is answered.
    name: Option<String>,
}

impl Unanswered {
    /// Begins a read: under the name of one without an answer, which nobody else uses meanwhile, or under a new one.
    pub(super) fn begin(&self, owner: Option<&OwnerId>, id: &TaskId) -> Read<'_> {
        let task = (owner.cloned(), id.clone());
        let name = self.names().remove(&task).unwrap_or_else(random_name);
        Read { of: self, task, name: Some(name) }
    }

    fn names(&self) -> MutexGuard<'_, HashMap<Task, String>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Read<'_> {
    /// Its name for the executor.
    pub(super) fn name(&self) -> String {
        self.name.clone().unwrap_or_default()
    }

    /// The executor has answered, whatever it was.
    pub(super) fn answered(mut self) {
        self.name = None;
    }
}

impl Drop for Read<'_> {
    fn drop(&mut self) {
        let Some(name) = self.name.take() else { return };
        let mut names = self.of.names();
        if names.len() >= MAX_UNANSWERED
            && let Some(any) = names.keys().next().cloned()
        {
            names.remove(&any);
        }
        names.insert(self.task.clone(), name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_without_an_answer_lends_its_name_to_the_next_of_that_task_and_owner() {
        let (unanswered, task, other) = (Unanswered::default(), TaskId("bash-1".into()), TaskId("bash-2".into()));
        let owner = OwnerId("a".into());
        let lost = unanswered.begin(Some(&owner), &task);
        // One beside it is another read.
        let beside = unanswered.begin(Some(&owner), &task);
        assert_ne!(lost.name(), beside.name());
        beside.answered();
        let name = lost.name();
        drop(lost);
        assert_ne!(unanswered.begin(None, &task).name(), name);
        assert_ne!(unanswered.begin(Some(&owner), &other).name(), name);
        let again = unanswered.begin(Some(&owner), &task);
        assert_eq!(again.name(), name);
        again.answered();
        assert_ne!(unanswered.begin(Some(&owner), &task).name(), name);
    }

    #[test]
    fn only_so_many_are_remembered() {
        let unanswered = Unanswered::default();
        for number in 0..2 * MAX_UNANSWERED {
            drop(unanswered.begin(None, &TaskId(format!("bash-{number}"))));
        }
        assert_eq!(unanswered.names().len(), MAX_UNANSWERED);
    }
}
