//! `call` and `definitions`: the tools as a model has them.

use serde_json::Value;

use super::{
    Failure, Outcome,
    backend::{Backend, Files},
    interrupt::Interrupt,
    needs_endpoint, output,
    settings::Settings,
};
use crate::{
    session::Session,
    tools::{self, Abort, Tools},
};

pub(super) async fn definitions() -> Outcome {
    let json = serde_json::to_string_pretty(&tools::definitions())
        .map_err(|error| Failure::Own(format!("cannot print the definitions: {error}")))?;
    output::stdout(json + "\n").await?;
    Ok(0)
}

/// Prints exactly what the model would read.
pub(super) async fn call(settings: &Settings, tool: &str, arguments: &str) -> Outcome {
    if settings.endpoints.is_empty()
        && let Some(what) = task_in(tool, arguments)
    {
        return Err(needs_endpoint(what));
    }
    let interrupt = Interrupt::listen()?;
    let prepared = interrupt.or(async {
        let backend = Backend::new(settings, Files::AreTold).await?;
        let session = match &backend.owner {
            Some(id) => Some(Session { id: id.clone(), cwd: backend.callers_directory().await?, sandbox: None }),
            None => None,
        };
        Ok((backend, session))
    });
    let (backend, session) = prepared.await?;
    let abort = Abort { token: interrupt.token().clone(), reason: None };
    let tools = Tools::new(backend.executor.clone());
    let result = tools.call_in(settings.sandbox, session.as_ref(), tool, arguments, &abort).await;
    let remark = backend.remark_on(&result.text);
    output::stdout(result.text).await?;
    if result.is_error
        && let Err(error) = serde_json::from_str::<Value>(arguments)
    {
        output::line(&format!("the arguments of {tool} are not JSON: {error}")).await?;
    }
    if let Some(remark) = remark {
        output::line(&remark).await?;
    }
    backend.close().await;
    Ok(interrupt.code().unwrap_or(u8::from(result.is_error)))
}

/// What of a call starts or names a task, which would not outlive an embedded executor. Arguments that no tool would take
/// are left for the tool to refuse.
fn task_in(tool: &str, arguments: &str) -> Option<&'static str> {
    let arguments: Value = serde_json::from_str(arguments).ok()?;
    match tool {
        "bash" => (arguments.get("run_in_background") == Some(&Value::Bool(true))).then_some("run_in_background"),
        "bash_output" | "bash_kill" => arguments.get("task_id").is_some_and(Value::is_string).then_some("task_id"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_starts_or_names_a_task_needs_a_daemon() {
        for (tool, arguments, expected) in [
            ("bash", r#"{"command": "x"}"#, None),
            ("bash", r#"{"command": "x", "run_in_background": false}"#, None),
            ("bash", r#"{"command": "x", "task_id": "bash-1"}"#, None),
            ("bash", r#"{"command": "x", "run_in_background": true}"#, Some("run_in_background")),
            ("bash", "not JSON", None),
            ("bash_output", r#"{"task_id": "bash-1"}"#, Some("task_id")),
            ("bash_kill", r#"{"task_id": "bash-1"}"#, Some("task_id")),
            ("bash_kill", "{}", None),
            ("bash_kill", r#"{"task_id": 1}"#, None),
            ("other", r#"{"task_id": "bash-1"}"#, None),
        ] {
            assert_eq!(task_in(tool, arguments), expected, "{tool} {arguments}");
        }
    }
}
