//! What people see of a call and its result; the model never does.
//!
//! Cards are JSON as harnesses show it; a key that does not apply is absent. Everything here is pure, so a stored
//! conversation can be shown again without an executor, and says nothing of what is malformed.

use serde_json::{Value, json};

use crate::{
    text::number,
    tools::{arguments::Arguments, definitions::Tool},
};

/// The card of a call, from the model's own JSON text. `None`: there is nothing to show.
#[must_use]
pub fn present_call(tool: &str, arguments: &str) -> Option<Value> {
    let tool = Tool::named(tool)?;
    let arguments = Arguments::parse(tool, arguments).ok()?;
    match tool {
        Tool::Bash => {
            let (command, description) = (arguments.string("command")?, arguments.string("description")?);
            if in_background(&arguments) {
                let content = [json!({"type": "text", "text": description})];
                return Some(
                    json!({"card": "generic", "title": command, "kind": "execute", "rawInput": command, "content": content}),
                );
            }
            let mut card = json!({"card": "terminal", "title": command, "description": description});
            if let Some(workdir) = arguments.string("workdir") {
                card["cwd"] = json!(workdir);
            }
            Some(card)
        }
        Tool::BashOutput => task_card("Read output from background task", &arguments),
        Tool::BashKill => task_card("Kill background task", &arguments),
    }
}

/// The card of a result, `{"content": […], "isError": …}` as it was stored, of a call with these arguments. `None`: the
/// result is shown as any tool's is.
#[must_use]
pub fn present_result(tool: &str, arguments: &str, result: &Value) -> Option<Value> {
    if Tool::named(tool)? != Tool::Bash {
        return None;
    }
    let arguments = Arguments::parse(Tool::Bash, arguments).ok()?;
    let [block] = result.get("content")?.as_array()?.as_slice() else { return None };
    if block.get("type")? != "text" {
        return None;
    }
    let text = block.get("text")?.as_str()?;
    let is_error = result.get("isError").and_then(Value::as_bool).unwrap_or(false);
    if is_error || in_background(&arguments) {
        let fenced = format!("```console\n{}\n```", text.trim_end_matches('\n'));
        return Some(json!({"card": "generic", "content": [{"type": "text", "text": fenced}]}));
    }
    let mut card = json!({"card": "terminal", "output": text});
    match exit_of(text) {
        ShownExit::Signal(name) => card["signal"] = json!(name),
        ShownExit::Code(code) => card["exitCode"] = code,
        ShownExit::Unknown => {}
    }
    Some(card)
}

fn in_background(arguments: &Arguments) -> bool {
    arguments.bool("run_in_background").unwrap_or(false)
}

fn task_card(what: &str, arguments: &Arguments) -> Option<Value> {
    let id = arguments.string("task_id")?;
    Some(json!({"card": "generic", "title": format!("{what} {id}"), "kind": "execute", "rawInput": id}))
}

enum ShownExit<'a> {
    Signal(&'a str),
    Code(Value),
    /// The end was not seen: neither a signal nor a code, and above all not success.
    Unknown,
}

/// Reads the exit marker at the end of a result's text; without one the command exited with 0.
fn exit_of(text: &str) -> ShownExit<'_> {
    // The names of survivors stand behind the exit marker.
    let text = last_marker(text, "still running: ").map_or(text, |(_, before)| before);
    if let Some((name, _)) = last_marker(text, "killed by signal: ") {
        return ShownExit::Signal(name);
    }
    if let Some((code, _)) = last_marker(text, "exit code: ")
        && code.bytes().all(|byte| byte.is_ascii_digit())
    {
        return ShownExit::Code(number::value(code.parse().unwrap_or(f64::INFINITY)));
    }
    if last_marker(text, "exit unknown: ").is_some() {
        return ShownExit::Unknown;
    }
    ShownExit::Code(json!(0))
}

/// What a marker of this kind says, where it is the text's last line and not its first, and the text before it.
fn last_marker<'a>(text: &'a str, kind: &str) -> Option<(&'a str, &'a str)> {
    let (before, line) = text.rsplit_once('\n')?;
    let said = line.strip_prefix('[')?.strip_prefix(kind)?.strip_suffix(']')?;
    (!said.is_empty() && !said.contains(']')).then_some((said, before))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LS: &str = r#"{"command":"ls -la","description":"List"}"#;

    fn result(text: &str, is_error: bool) -> Value {
        json!({"content": [{"type": "text", "text": text}], "isError": is_error})
    }

    #[test]
    fn calls_have_their_cards() {
        let background = r#"{"command":"ls","description":"List","workdir":"/abs","run_in_background":true}"#;
        let cases = [
            ("bash", LS, Some(json!({"card": "terminal", "title": "ls -la", "description": "List"}))),
            (
                "bash",
                r#"{"command":"","description":"","workdir":"","extra":1}"#,
                Some(json!({"card": "terminal", "title": "", "description": "", "cwd": ""})),
            ),
            (
                "bash",
                background,
                Some(json!({"card": "generic", "title": "ls", "kind": "execute", "rawInput": "ls",
                    "content": [{"type": "text", "text": "List"}]})),
            ),
            ("bash", r#"{"command":"ls"}"#, None),
            ("bash", r#"{"command":"ls","description":"d","timeoutMs":"x"}"#, None),
            ("bash", "null", None),
            ("bash", "raw string", None),
            ("bash_list", "{}", None),
            (
                "bash_output",
                r#"{"task_id":""}"#,
                Some(json!({"card": "generic", "title": "Read output from background task ", "kind": "execute",
                    "rawInput": ""})),
            ),
            (
                "bash_kill",
                r#"{"task_id":"bash-3"}"#,
                Some(json!({"card": "generic", "title": "Kill background task bash-3", "kind": "execute",
                    "rawInput": "bash-3"})),
            ),
            ("bash_kill", r#"{"task_id":3}"#, None),
        ];
        for (tool, arguments, card) in cases {
            assert_eq!(present_call(tool, arguments), card, "{tool} {arguments}");
        }
    }

    #[test]
    fn the_exit_is_read_from_the_end_of_the_text() {
        let code = |code: &str| json!({"exitCode": code.parse::<serde_json::Number>().expect("a number")});
        let signal = |name: &str| json!({"signal": name});
        let cases = [
            ("hi\n", code("0")),
            ("", code("0")),
            ("x\n[exit code: 3]", code("3")),
            ("x\n[exit code: 007]", code("7")),
            ("x\n[exit code: 99999999999999999999]", code("100000000000000000000")),
            ("x\n[exit code: -1]", code("0")),
            ("x\n[exit code: ]", code("0")),
            ("x\n[exit code: 3]\n", code("0")),
            ("[exit code: 3]", code("0")),
            ("\n[exit code: 4]", code("4")),
            ("x\r[exit code: 4]", code("0")),
            ("x\n[exit code: \u{ff14}]", code("0")),
            ("x\n[killed by signal: weird name]", signal("weird name")),
            ("x\n[killed by signal: A]B]", code("0")),
            ("x\n[killed by signal: ]", code("0")),
            ("x\n[killed by signal: SIGTERM]\n[exit code: 3]", code("3")),
            ("x\n[timed out after 5ms]\n[killed by signal: SIGKILL]\n[still running: 3, 4]", signal("SIGKILL")),
            ("x\n[timed out after 5ms]\n[still running: 3]", code("0")),
            ("x\n[exit unknown: executor restarted]", json!({})),
        ];
        for (text, exit) in cases {
            let mut card = present_result("bash", LS, &result(text, false)).expect("a card");
            let card = card.as_object_mut().expect("an object");
            assert_eq!(card.remove("card"), Some(json!("terminal")));
            assert_eq!(card.remove("output"), Some(json!(text)));
            assert_eq!(Value::Object(card.clone()), exit, "{text:?}");
        }
        let endless = format!("x\n[exit code: {}]", "9".repeat(400));
        let card = present_result("bash", LS, &result(&endless, false)).expect("a card");
        assert_eq!(card["exitCode"], Value::Null);
    }

    #[test]
    fn errors_and_acknowledgements_are_fenced() {
        let fenced = |text: &str| Some(json!({"card": "generic", "content": [{"type": "text", "text": text}]}));
        let card = |text| present_result("bash", LS, &result(text, true));
        assert_eq!(card("Error: x\n\n\n"), fenced("```console\nError: x\n```"));
        assert_eq!(card("x \r\n"), fenced("```console\nx \r\n```"));
        assert_eq!(card("\n\n"), fenced("```console\n\n```"));
        let background = r#"{"command":"ls","description":"List","run_in_background":true}"#;
        assert_eq!(present_result("bash", background, &result("a\n", false)), fenced("```console\na\n```"));
    }

    #[test]
    fn nothing_is_said_of_what_is_malformed() {
        let text = json!({"type": "text", "text": "a"});
        let results = [
            json!(null),
            json!({}),
            json!({"content": []}),
            json!({"content": [text, text]}),
            json!({"content": [{"type": "reasoning", "text": "a"}]}),
            json!({"content": [{"type": "text", "text": 1}]}),
            json!({"content": "a"}),
        ];
        for malformed in results {
            assert_eq!(present_result("bash", LS, &malformed), None, "{malformed}");
        }
        assert_eq!(present_result("bash", "null", &result("x", false)), None);
        assert_eq!(present_result("bash_output", r#"{"task_id":"bash-1"}"#, &result("x", false)), None);
    }

    /// Every recorded presentation, where the recorded cases are beside this crate.
    #[test]
    fn recorded_presentations_are_the_same() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/model-text/scenarios.json");
        let Ok(text) = std::fs::read_to_string(path) else { return };
        let scenarios: Value = serde_json::from_str(&text).expect("the recorded cases are JSON");
        let mut compared = 0;
        for scenario in scenarios.as_array().expect("a list") {
            let mut tasks = Vec::new();
            for step in scenario["steps"].as_array().expect("a list") {
                compared += compare(scenario["name"].as_str().unwrap_or_default(), step, &tasks);
                let id = step["expect"]["text"].as_str().and_then(|text| text.rsplit(' ').next());
                tasks.extend(step["saveTaskAs"].as_str().map(|name| (format!("${{{name}}}"), id.unwrap_or_default())));
            }
        }
        assert!(compared > 100, "{compared} compared");
    }

    /// Compares one recorded step; returns how many cards were compared.
    fn compare(scenario: &str, step: &Value, tasks: &[(String, &str)]) -> usize {
        let tool = step["tool"].as_str().unwrap_or_default();
        let mut arguments = step["rawArgs"].as_str().map_or_else(|| step["args"].to_string(), str::to_owned);
        // What is filled in before a call is shown as what it stands for.
        for (placeholder, id) in tasks {
            arguments = arguments.replace(placeholder, id);
        }
        for path in ["TMP", "SPILL:stdout"] {
            arguments = arguments.replace(&format!("${{{path}}}"), &format!("<{path}>"));
        }
        let expected = &step["expect"];
        let stored = match (step.get("result"), expected["text"].as_str()) {
            (Some(stored), _) => Some(stored.clone()),
            (None, Some(text)) => Some(result(text, expected["isError"] == true)),
            (None, None) => None,
        };
        let made = [
            ("presentCall", present_call(tool, &arguments)),
            ("presentResult", stored.and_then(|stored| present_result(tool, &arguments, &stored))),
        ];
        let mut compared = 0;
        for (key, card) in made {
            // Long outputs are recorded by their sum only. In a presentation of its own an absent card is one that is not made.
            let recorded = expected.get(key).filter(|_| key == "presentCall" || expected.get("textBytes").is_none());
            if recorded.is_some() || step["op"] == "present" {
                assert_eq!(card.as_ref(), recorded, "{scenario}: {step}");
                compared += 1;
            }
        }
        compared
    }

    proptest! {
        #[test]
        fn no_text_is_a_panic(text in any::<String>(), marker in "(\n\\[(exit code|killed by signal|still running): \\PC{0,5}\\]?){0,3}") {
            let _ = present_call("bash", &text);
            let card = present_result("bash", LS, &result(&format!("{text}{marker}"), false)).expect("a card");
            prop_assert_eq!(card.as_object().map(serde_json::Map::len), Some(3));
        }
    }
}
