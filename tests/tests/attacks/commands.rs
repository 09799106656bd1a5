//! What a command finds around itself, what it can become, and what its environment can do to others.

use executor_proto::types::{CommandSpec, EnvironmentVariable, OwnerId};
use tokio_util::sync::CancellationToken;
use tool_client::executor::Executor;

use crate::{
    report::{Outcome, Report},
    rig::{CANARY, OWNER, Rig},
    script::{
        Control::{Inside, Root, Where},
        Script, from_inside, script,
    },
};

const HERE: &str = "echo works";
/// A user namespace, in which one is root.
const NAMESPACES: &str = "unshare -Ur true && echo works";

const ROWS: &[Script] = &[
    script(
        "environment",
        "find the daemon's secret in the environment",
        r#"env -u CANARY | grep -q "$CANARY" && echo TAKEN"#,
        Root(r#"tr '\0' '\n' < "/proc/$KEEPER/environ" | grep -q "$CANARY" && echo works"#),
    ),
    script(
        "environment-of-parents",
        "find it in the environment of each parent",
        r#"pid=$$; while [ "$pid" -gt 1 ]; do pid=$(awk '{print $4}' "/proc/$pid/stat"); tr '\0' '\n' < "/proc/$pid/environ" 2>/dev/null | grep -q "^API_TOKEN=" && echo TAKEN; done"#,
        Root(r#"tr '\0' '\n' < "/proc/$KEEPER/environ" | grep -q "^API_TOKEN=" && echo works"#),
    ),
    script(
        "environment-of-all",
        "find it in the environment of any process",
        r#"for file in /proc/[0-9]*/environ; do tr '\0' '\n' < "$file" 2>/dev/null | grep -q "^API_TOKEN=$CANARY" && echo TAKEN; done"#,
        Root(r#"tr '\0' '\n' < "/proc/$KEEPER/environ" | grep -q "^API_TOKEN=" && echo works"#),
    ),
    script(
        "command-lines",
        "find a token in the command line of any process",
        r#"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n' | grep -xFf <(grep -v '^$' "$TLS/a.token" 2>/dev/null || echo none-can-be-read-here) && echo TAKEN"#,
        Inside(HERE),
    ),
    script(
        "descriptors",
        "find descriptors of the daemon's",
        r#"exec 9>&-; ls /proc/self/fd | grep -vxE '[0-3]' && echo TAKEN"#,
        Inside(r#"exec 7</dev/null; ls /proc/self/fd | grep -qx 7 && echo works"#),
    ),
    script(
        "terminal",
        "type into the daemon's terminal",
        r#"/usr/bin/python3 -I -c '
import fcntl, os, termios
try:
    fcntl.ioctl(os.open("/dev/tty", os.O_RDWR), termios.TIOCSTI, b"x"); print("TAKEN")
except OSError as error:
    print(error)'"#,
        Inside(HERE),
    ),
    script(
        "terminal-taken",
        "take a terminal",
        r#"/usr/bin/python3 -I -c '
import fcntl, os, termios
for name in ("/dev/console", "/dev/tty0", "/dev/tty1"):
    try:
        fcntl.ioctl(os.open(name, os.O_RDWR), termios.TIOCSCTTY, 1); print("TAKEN")
    except OSError as error:
        print(error)'"#,
        Inside(HERE),
    ),
    script(
        "session",
        "be in the session of the daemon",
        r#"[ "$(awk '{print $6}' /proc/$$/stat)" = "$(awk '{print $6}' "/proc/$KEEPER/stat")" ] && echo TAKEN"#,
        Inside(r#"awk '{print $6}' "/proc/$KEEPER/stat" | grep -q . && echo works"#),
    ),
    script(
        "capabilities",
        "have capabilities",
        r#"grep -E '^Cap(Inh|Prm|Eff|Amb):.*[1-9a-f]' /proc/self/status && echo TAKEN"#,
        Inside("grep -q ^CapEff /proc/self/status && echo works"),
    ),
    script(
        "groups",
        "be in the groups of root",
        r#"[ "$(stat -c %U "/proc/$KEEPER")" = root ] && id -G | tr ' ' '\n' | grep -x 0 && echo TAKEN"#,
        Inside("id -G && echo works"),
    ),
    script(
        "mount",
        "mount something",
        r#"mount -t tmpfs none "$WORK" && echo TAKEN"#,
        Inside("test -d \"$WORK\" && echo works"),
    ),
    script(
        "chroot",
        "change the root directory",
        r#"/usr/bin/python3 -I -c '
import os
try:
    os.chroot("/tmp"); print("TAKEN")
except OSError as error:
    print(error)'"#,
        Inside(HERE),
    ),
    script(
        "namespace-mount",
        "mount over the state directory in namespaces of one's own, seen from outside",
        r#"unshare -Urm sh -c 'mount -t tmpfs none "$STATE"' 2>/dev/null; [ "$(stat -c %t "$STATE" 2>/dev/null)" ] ; grep -q "$STATE" /proc/mounts && echo TAKEN"#,
        Where(NAMESPACES),
    ),
    script(
        "namespace-read",
        "read the token as root of a user namespace",
        r#"unshare -Ur cat "$TLS/a.token" && echo TAKEN"#,
        Where(NAMESPACES),
    ),
    script(
        "namespace-kill",
        "end the daemon as root of a user namespace",
        r#"unshare -Ur sh -c 'kill -9 $KEEPER && echo TAKEN; kill -9 $SERVER && echo TAKEN'"#,
        Where(NAMESPACES),
    ),
    script(
        "namespace-environ",
        "read the daemon's environment as root of a user namespace",
        r#"unshare -Ur sh -c 'cat /proc/$KEEPER/environ && echo TAKEN; cat /proc/$SERVER/environ && echo TAKEN'"#,
        Where(NAMESPACES),
    ),
    script(
        "namespace-bind",
        "read the token through a bind mount of one's own",
        r#"unshare -Urm sh -c 'mkdir -p "$WORK/m"; mount --bind "$TLS" "$WORK/m" && cat "$WORK/m/a.token" && echo TAKEN'"#,
        Where(NAMESPACES),
    ),
    script(
        "namespace-enter",
        "enter the daemon's namespaces",
        r#"for pid in $KEEPER $SERVER; do nsenter --target "$pid" --mount --pid true && echo TAKEN; done"#,
        Inside(HERE),
    ),
    script(
        "namespace-overlay",
        "read the token through an overlay of one's own",
        r#"unshare -Urm sh -c 'mkdir -p "$WORK/u" "$WORK/w" "$WORK/o"; mount -t overlay -o "lowerdir=$TLS,upperdir=$WORK/u,workdir=$WORK/w" none "$WORK/o" && cat "$WORK/o/a.token" && echo TAKEN'"#,
        Where(NAMESPACES),
    ),
    script(
        "priority",
        "take a higher priority than the daemon",
        r#"nice -n -5 true 2>&1 | grep -q . || { [ "$(nice -n -5 nice)" -lt 0 ] && echo TAKEN; }"#,
        Inside("nice && echo works"),
    ),
    script(
        "realtime",
        "run before everything else",
        r#"chrt -f 50 true && echo TAKEN"#,
        Inside("chrt --max && echo works"),
    ),
    script("limits", "raise its own limits", r#"ulimit -Hn 2000000 && echo TAKEN"#, Inside("ulimit -Hn && echo works")),
    script(
        "core-pattern",
        "have core dumps run a program",
        r#"{ echo "|$WORK/x" > /proc/sys/kernel/core_pattern; } && echo TAKEN"#,
        Inside("cat /proc/sys/kernel/core_pattern && echo works"),
    ),
    script(
        "kernel-log",
        "read the kernel's memory",
        r#"{ head -c 1 /dev/mem || head -c 1 /proc/kcore; } | grep -q . && echo TAKEN"#,
        Inside(HERE),
    ),
    script(
        "device",
        "make a device of one's own",
        r#"mknod "$WORK/null" c 1 3 && echo TAKEN"#,
        Inside("mkfifo \"$WORK/fifo-$$\" && echo works"),
    ),
    script(
        "setuid-of-its-own",
        "make a program that becomes root",
        r#"cp /usr/bin/id "$WORK/id-$$" && chown root "$WORK/id-$$" && chmod 4755 "$WORK/id-$$" && [ "$("$WORK/id-$$" -u)" = 0 ] && echo TAKEN"#,
        Inside("id -u && echo works"),
    ),
    script(
        "setuid-of-root",
        "become root by a program that makes others root",
        r#"[ "$("$BASE/bin/suid-id" -u)" = 0 ] && echo TAKEN"#,
        Where(r#"[ "$("$BASE/bin/suid-id" -u)" = 0 ] && echo works"#),
    ),
    script(
        "privileges",
        "be able to gain privileges",
        r#"grep -q '^NoNewPrivs:.*0' /proc/self/status && echo TAKEN"#,
        Inside("grep -q ^NoNewPrivs /proc/self/status && echo works"),
    ),
    script(
        "keyring",
        "read a key of the login that the daemon was started in",
        r#"/usr/bin/python3 -I -c '
import ctypes, platform
call = ctypes.CDLL(None).syscall
call.restype = ctypes.c_long
keyctl = {"x86_64": 250, "aarch64": 219}[platform.machine()]
key = call(keyctl, 10, ctypes.c_long(-3), b"user", b"key-of-the-login", 0)
print("TAKEN" if key >= 0 else "not found")'"#,
        Where(r#"grep -q 'the login has a key' "$BASE/log" && echo works"#),
    ),
    script(
        "uid",
        "become another user",
        r#"/usr/bin/python3 -I -c '
import os
for become in (lambda: os.setuid(0), lambda: os.setresuid(65521, 65521, 65521), lambda: os.setgroups([0]), lambda: os.setgid(0)):
    try:
        become(); print("TAKEN")
    except OSError as error:
        print(error)'"#,
        Inside("id -u && echo works"),
    ),
];

/// What ends processes by what they are called or where they stand. It may end the command itself, and what is its tenant's.
const ENDS: [(&str, &str, &str); 7] = [
    ("group", "end the daemon's process group", "kill -9 -- -$(awk '{print $5}' /proc/$KEEPER/stat)"),
    ("name", "end the daemon by its name", "n=executor-; pkill -9 -f \"${n}daemon\""),
    ("path", "end the daemon by its program", "pkill -9 -f \"$DAEMON\"; pkill -9 daemon; killall -9 daemon"),
    ("port", "end whoever listens on the daemon's port", "fuser -k -9 \"$PORT/tcp\""),
    ("parent", "end its parent", "kill -9 $PPID"),
    (
        "ancestors",
        "end its parent from elsewhere, and its parent's parent",
        "setsid sh -c 'kill -9 $(awk \"{print \\$4}\" /proc/$0/stat) $0' $PPID",
    ),
    ("everything", "end everything that one may signal", "kill -9 -1"),
];

pub(crate) async fn attack(rig: &Rig, report: &mut Report) {
    from_inside(rig, report, "command", ROWS).await;
    report.add("command/own-environment", "have variables of one call in the next", leaks(rig).await);
    report.add("command/loader", "have the loader write files as the daemon", loader(rig).await);
    report.add("command/shell-startup", "have the daemon's shells run a file at their start", startup(rig).await);
    for (name, tried, lines) in ENDS {
        report.add(format_args!("command/{name}"), tried, ends(rig, lines).await);
    }
}

async fn with_environment(rig: &Rig, variables: &[(&str, String)], command: &str) -> String {
    let variable = |(name, value): &(&str, String)| EnvironmentVariable {
        name: (*name).to_owned().into(),
        value: value.clone().into(),
    };
    let spec = CommandSpec {
        command: command.to_owned().into(),
        environment: variables.iter().map(variable).collect(),
        ..CommandSpec::default()
    };
    let owner = OwnerId(OWNER.to_owned());
    let result = rig.tenant("a").run(Some(&owner), spec, &CancellationToken::new(), None).await.expect("it runs");
    String::from_utf8_lossy(&result.stdout.tail).into_owned()
}

/// What one call sets is set for nobody else.
async fn leaks(rig: &Rig) -> Outcome {
    let set =
        [("PATH", "/nowhere:/usr/bin:/bin".to_owned()), ("MARK", CANARY.to_owned()), ("LD_BIND_NOW", "1".to_owned())];
    let first = with_environment(rig, &set, "echo $MARK").await;
    let second = with_environment(rig, &[], "env").await;
    let clean = !second.contains(CANARY) && !second.contains("/nowhere") && !second.contains("LD_BIND_NOW");
    Outcome::of(first.contains(CANARY), clean, second)
}

/// The loader of every program that runs with these variables writes a file, so whose files they are shows who ran with them.
async fn loader(rig: &Rig) -> Outcome {
    let out = rig.at("work/loader");
    let set = [("LD_DEBUG", "files".to_owned()), ("LD_DEBUG_OUTPUT", out.display().to_string())];
    let id = with_environment(rig, &set, "exec /usr/bin/id -u").await;
    let found = rig.outside(None, r#"stat -c '%u' "$WORK"/loader.*"#);
    let all_own = found.lines().all(|uid| uid == id.trim());
    Outcome::of(!found.is_empty(), all_own && rig.mode.is_not_the_daemon(id.trim()), format_args!("{found} by {id}"))
}

/// bash runs the file in `BASH_ENV` at its start: only the command's own may, as the command's own user.
async fn startup(rig: &Rig) -> Outcome {
    let file = rig.at("work/startup");
    std::fs::write(&file, "echo $(id -u) $PPID >> $WORK_OF_IT/started\n").expect("written");
    let path = file.display().to_string();
    let work = rig.at("work").display().to_string();
    let set = [("BASH_ENV", path.clone()), ("ENV", path), ("WORK_OF_IT", work)];
    let id = with_environment(rig, &set, "id -u").await;
    let started = std::fs::read_to_string(rig.at("work/started")).unwrap_or_default();
    let own = started.lines().count() == 1 && started.starts_with(&format!("{} ", id.trim()));
    Outcome::of(!started.is_empty(), own, started)
}

/// Ends what it can. The daemon, and a task of another tenant, go on, and so does what the tenant asks for next.
async fn ends(rig: &Rig, lines: &str) -> Outcome {
    let (b, owner) = (rig.tenant("b"), OwnerId(OWNER.to_owned()));
    let spec = CommandSpec { command: "sleep 300".into(), ..CommandSpec::default() };
    let task = b.start_task(Some(&owner), spec).await.expect("started");
    let said = rig.run_as("a", &format!("exec 2>&1\n{lines}\nsleep 0.1")).await;
    let next = rig.inside("echo next").await;
    let same = rig.is_the_same();
    let killed = b.kill_task(Some(&owner), &task).await.expect("its own");
    let refused = same && next == "next\n" && !killed.already_finished;
    Outcome::of(
        true,
        refused,
        format_args!("{said:?}, then {next:?}; same daemon: {same}; the other's task: {killed:?}"),
    )
}
