//! The id that `bash_output` and `bash_kill` are given.

use executor_proto::types::TaskId;

use super::arguments::Arguments;
use crate::text::{check, task};

/// Digits of the largest number that an id can have.
const MAX_DIGITS: usize = 20;

/// The id in the arguments. One that is not of the form `bash-N` was never issued; runs (`run-N`) are for people only.
///
/// # Errors
/// The message of the first check that fails.
pub(super) fn check(arguments: &Arguments) -> Result<TaskId, String> {
    let id = arguments.string("task_id").unwrap_or_default();
    if id.is_empty() {
        return Err(check::EMPTY_TASK_ID.to_owned());
    }
    let id = TaskId(id.to_owned());
    if is_issuable(&id) { Ok(id) } else { Err(task::unknown(&id)) }
}

fn is_issuable(TaskId(id): &TaskId) -> bool {
    id.strip_prefix("bash-").is_some_and(|number| {
        (1..=MAX_DIGITS).contains(&number.len())
            && number.bytes().all(|byte| byte.is_ascii_digit())
            && !number.starts_with('0')
    })
}

#[cfg(test)]
mod tests {
    use super::{super::definitions::Tool, *};

    #[test]
    fn only_ids_that_can_have_been_issued_are_asked_for() {
        for id in ["bash-1", "bash-10", "bash-18446744073709551615"] {
            assert!(is_issuable(&TaskId(id.to_owned())), "{id}");
        }
        let never = [
            " ",
            "BASH-1",
            "bash-",
            "bash-0",
            "bash-01",
            "bash-1 ",
            " bash-1",
            "bash-+1",
            "bash--1",
            "bash-1x",
            "run-1",
            "1",
            "bash-\u{661}",
            "bash-184467440737095516150",
            "we\"ird\n",
        ];
        for id in never {
            assert!(!is_issuable(&TaskId(id.to_owned())), "{id}");
        }
    }

    #[test]
    fn the_message_holds_the_id_as_it_was_given() {
        let message = |text: &str| check(&Arguments::parse(Tool::BashKill, text).expect("the schema is kept"));
        assert_eq!(message(r#"{"task_id":""}"#), Err("invalid task_id: expected a string, got \"\"".to_owned()));
        assert_eq!(message(r#"{"task_id":"we\"ird\n"}"#), Err("unknown bash task \"we\"ird\n\"".to_owned()));
        assert_eq!(message(r#"{"task_id":"bash-3"}"#), Ok(TaskId("bash-3".to_owned())));
    }
}
