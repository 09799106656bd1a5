//! `info`: what the executor is.

use executor_proto::types::{Budgets, ExecutorInfo, SandboxMode};

use super::{
    Outcome,
    backend::Backend,
    output::{self, Visible},
};
use crate::text::number;

pub(super) async fn info(backend: &Backend) -> Outcome {
    let info = backend.executor.info().await.map_err(|error| backend.failure(&error))?;
    output::stdout(listed(backend.executor.endpoint(), &info)).await?;
    Ok(0)
}

fn listed(endpoint: &str, info: &ExecutorInfo) -> String {
    let ExecutorInfo {
        version,
        protocol_revision,
        instance_id,
        hostname,
        boot_id,
        default_workdir,
        default_timeout_ms,
        max_timeout_ms,
        max_output_bytes,
        max_spill_bytes,
        grace_ms,
        max_command_bytes,
        max_stdin_bytes,
        max_tasks_per_owner,
        max_tasks,
        max_leftovers_per_owner,
        resume_window_ms,
        heartbeat_ms,
        run_as_user,
        run_as_uid,
        sandbox_modes,
        sandbox_mode,
        network_off,
        features,
        stated_limits,
        budgets,
    } = info;
    let modes: Vec<&str> = sandbox_modes.iter().map(|mode| mode.as_str()).collect();
    let mut rows = vec![
        ("executor", endpoint.to_owned()),
        ("version", version.clone()),
        ("protocol", format!("executor.v1, revision {protocol_revision}")),
        ("instance", instance_id.clone()),
        ("host", format!("{hostname} (boot {boot_id})")),
        ("commands run as", format!("{run_as_user} (uid {run_as_uid})")),
        ("workdir", Visible::text(default_workdir)),
        ("timeout", format!("{}ms, at most {}ms", number::plain(*default_timeout_ms), number::plain(*max_timeout_ms))),
        ("grace", format!("{grace_ms}ms")),
        ("output kept", format!("{max_output_bytes} bytes per stream, {max_spill_bytes} in a file")),
        ("command", format!("at most {max_command_bytes} bytes, stdin {max_stdin_bytes}")),
        ("tasks", format!("at most {max_tasks_per_owner} per owner, {max_tasks} in all")),
        ("leftovers", format!("at most {max_leftovers_per_owner} per owner")),
        ("resume window", format!("{resume_window_ms}ms")),
        ("heartbeat", format!("{heartbeat_ms}ms")),
        ("sandbox modes", modes.join(", ")),
        ("sandbox", sandbox_mode.map_or("not said", SandboxMode::as_str).to_owned()),
        ("network", if *network_off { "off" } else { "not limited" }.to_owned()),
        ("features", if features.is_empty() { "none".to_owned() } else { features.join(", ") }),
    ];
    rows.extend(budgets.iter().flat_map(of_tenant));
    rows.extend(stated_limits.iter().map(|limit| ("not protected", limit.clone())));
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    rows.iter().map(|(name, value)| format!("{name:width$}  {}\n", Visible::text(value.as_bytes()))).collect()
}

/// What else may be used.
fn of_tenant(budgets: &Budgets) -> [(&'static str, String); 5] {
    let Budgets {
        max_spill_bytes_in_all,
        max_spill_bytes_per_owner,
        max_output_bytes_per_second,
        max_watchers,
        max_requests,
        max_processes,
        max_memory_bytes,
    } = *budgets;
    let or = |number: u64, text: String| if number == 0 { "not limited".to_owned() } else { text };
    [
        (
            "spill files",
            format!("at most {max_spill_bytes_per_owner} bytes per owner, {max_spill_bytes_in_all} in all"),
        ),
        ("output rate", or(max_output_bytes_per_second, format!("{max_output_bytes_per_second} bytes per second"))),
        ("calls", format!("at most {max_requests} and {max_watchers} watchers at a time, half of them per owner")),
        ("processes", or(max_processes, format!("at most {max_processes}"))),
        ("memory", or(max_memory_bytes, format!("at most {max_memory_bytes} bytes"))),
    ]
}
