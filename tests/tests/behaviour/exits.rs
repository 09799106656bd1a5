//! The exit is told as it was (kind J).

use executor_proto::types::{CommandSpec, Exit};
use executor_tests::{World, every_backend};
use serde_json::json;
use tool_client::presentation;

async fn exit(world: &World, command: &str) -> Exit {
    let spec = CommandSpec { command: command.to_owned().into(), ..CommandSpec::default() };
    world.run(spec).await.expect("it runs").exit
}

every_backend!(j01_death_by_a_signal_is_no_success);
async fn j01_death_by_a_signal_is_no_success(world: &World) {
    let command = "printf before; kill -9 $$";
    let text = world.bash(command).await;
    assert_eq!(text, "before\n[killed by signal: SIGKILL]");
    let arguments = json!({"command": command, "description": "test command"}).to_string();
    let stored = json!({"content": [{"type": "text", "text": text}], "isError": false});
    let card = presentation::present_result("bash", &arguments, &stored).expect("there is something to show");
    assert_eq!(card.get("signal"), Some(&json!("SIGKILL")));
    assert_eq!(card.get("exitCode"), None);
}

every_backend!(j02_a_signal_is_not_swallowed_as_a_code);
async fn j02_a_signal_is_not_swallowed_as_a_code(world: &World) {
    assert_eq!(world.bash("kill -TERM $$").await, "(no output)\n[killed by signal: SIGTERM]");
    assert_eq!(world.bash("kill -SEGV $$").await, "(no output)\n[killed by signal: SIGSEGV]");
    // In a child it is the shell's own answer.
    assert_eq!(world.bash("sh -c 'kill -9 $$'; exit $?").await.lines().last(), Some("[exit code: 137]"));
}

// J10 asks for the number as well: 128 and this one make the code that shells show.
every_backend!(j03_every_signal_has_its_own_number);
async fn j03_every_signal_has_its_own_number(world: &World) {
    for (name, number) in [("KILL", 9), ("TERM", 15), ("SEGV", 11), ("HUP", 1), ("PIPE", 13), ("ABRT", 6)] {
        assert_eq!(exit(world, &format!("ulimit -c 0; kill -{name} $$")).await, Exit::Signal(number), "{name}");
    }
}

every_backend!(j08_the_shells_options_are_its_own);
async fn j08_the_shells_options_are_its_own(world: &World) {
    assert_eq!(world.bash("yes | head -1").await, "y\n");
    assert_eq!(world.bash("(exit 3) | cat").await, "(no output)");
    assert_eq!(world.bash("set -o pipefail; yes | head -1").await, "y\n[exit code: 141]");
    assert_eq!(world.bash("set -o pipefail; (exit 3) | cat").await, "(no output)\n[exit code: 3]");
}

every_backend!(j12_a_missing_directory_is_not_a_missing_shell);
async fn j12_a_missing_directory_is_not_a_missing_shell(world: &World) {
    let text = world.bash_with("pwd", json!({"workdir": "/gone"})).await;
    assert_eq!(text, "Error: spawn bash ENOENT: workdir \"/gone\" does not exist");
}

every_backend!(every_exit_code_is_told);
async fn every_exit_code_is_told(world: &World) {
    for code in 0..=255 {
        assert_eq!(exit(world, &format!("exit {code}")).await, Exit::Code(code));
    }
    assert_eq!(exit(world, "exit 300").await, Exit::Code(44));
}
