//! The daemon's sockets, tried by its own commands and by neighbours: as a client of the same kind as everybody's.

use executor_tests::wait_until;

use crate::{
    report::{Outcome, Report},
    rig::{Rig, SOON},
    script::{
        Control::{Inside, Outside, Root, Same, Where},
        Script, by_a_neighbour, from_inside, script,
    },
};

/// A new client, once it has found out whether it is served, says so.
const DIRECT: &str = r#""$CLIENT" info --endpoint "unix:$SOCKET" && echo TAKEN"#;
/// Over TCP with a token the daemon knows.
const BY_TOKEN: &str =
    r#""$CLIENT" info --endpoint "https://localhost:$PORT" --ca "$CA" --token-file "$TLS/a.token" && echo works"#;
/// A port can be bound that is nobody's.
const BINDS: &str = r#"/usr/bin/python3 -I -c 'import socket; socket.socket().bind(("127.0.0.1", 0)); print("works")'"#;

const ROWS: &[Script] = &[
    script("unix", "call through the Unix socket", DIRECT, Same),
    script(
        "unix-session",
        "the same from a session of its own",
        r#"setsid -w "$CLIENT" info --endpoint "unix:$SOCKET" && echo TAKEN"#,
        Same,
    ),
    script(
        "unix-double-fork",
        "the same from a process whose parents have ended",
        r#"out="$WORK/double-$$"; mkfifo "$out.go"
(setsid sh -c 'read -r _ < "$0.go"; "$CLIENT" info --endpoint "unix:$SOCKET" > "$0" 2>&1 && echo TAKEN >> "$0"; echo over >> "$0"' "$out" &)
echo > "$out.go"; until grep -q over "$out" 2>/dev/null; do sleep 0.05; done; cat "$out""#,
        Outside(r#""$CLIENT" info --endpoint "unix:$SOCKET" && echo works"#),
    ),
    script(
        "unix-cleared",
        "the same without environment, session and name of a command",
        r#"setsid -w env -i bash -c 'exec -a systemd "$0" info --endpoint "unix:$1"' "$CLIENT" "$SOCKET" && echo TAKEN"#,
        Same,
    ),
    script(
        "unix-user-namespace",
        "the same as root of a user namespace of its own",
        r#"unshare -Ur "$CLIENT" info --endpoint "unix:$SOCKET" && echo TAKEN"#,
        Where("unshare -Ur true && echo works"),
    ),
    script(
        "unix-pid-namespace",
        "the same from a pid namespace of its own",
        r#"unshare -Urpf "$CLIENT" info --endpoint "unix:$SOCKET" && echo TAKEN"#,
        Where("unshare -Urpf true && echo works"),
    ),
    script(
        "unix-relative",
        "the same by another way to the socket",
        r#"cd "$(dirname "$SOCKET")/../state" && "$CLIENT" info --endpoint "unix:/proc/self/cwd/sock" && echo TAKEN"#,
        Same,
    ),
    script(
        "unix-inherited",
        "the same over a connection whose maker has ended",
        r#"/usr/bin/python3 -I "$BASE/public/relay.py" "$SOCKET" "$WORK/relay-$$" && "$CLIENT" info --endpoint "unix:$WORK/relay-$$" && echo TAKEN"#,
        Outside(r#""$CLIENT" info --endpoint "unix:$SOCKET" && echo works"#),
    ),
    script(
        "tcp",
        "call over TCP without a token",
        r#""$CLIENT" info --endpoint "https://localhost:$PORT" --ca "$CA" && echo TAKEN"#,
        Outside(BY_TOKEN),
    ),
    script(
        "tcp-guessed",
        "call over TCP with guessed tokens",
        r#"for guess in 0123456789abcdef aaaaaaaaaaaaaaaa "$CANARY" default-token-0000 "$(printf %064d 0)"; do echo "$guess" > "$WORK/guess-$$"; chmod 600 "$WORK/guess-$$"
"$CLIENT" info --endpoint "https://localhost:$PORT" --ca "$CA" --token-file "$WORK/guess-$$" && echo TAKEN; done"#,
        Outside(BY_TOKEN),
    ),
    script(
        "tcp-plain",
        "call over TCP without TLS",
        r#""$CLIENT" info --endpoint "http://127.0.0.1:$PORT" && echo TAKEN"#,
        Outside(BY_TOKEN),
    ),
    script(
        "tcp-with-the-daemons-token",
        "call over TCP with the token file that it knows the name of",
        r#""$CLIENT" info --endpoint "https://localhost:$PORT" --ca "$CA" --token-file "$TLS/a.token" && echo TAKEN"#,
        Outside(BY_TOKEN),
    ),
    script(
        "tcp-with-a-certificate",
        "call over TCP with another's certificate and key",
        r#""$CLIENT" info --endpoint "https://localhost:$PORT" --ca "$CA" --cert "$TLS/b.crt" --key "$TLS/b.key" && echo TAKEN"#,
        Root(
            r#""$CLIENT" info --endpoint "https://localhost:$PORT" --ca "$CA" --cert "$TLS/b.crt" --key "$TLS/b.key" && echo works"#,
        ),
    ),
    script(
        "port-shared",
        "listen on the daemon's port beside it",
        r#"/usr/bin/python3 -I -c '
import os, socket
s = socket.socket()
for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT): s.setsockopt(socket.SOL_SOCKET, option, 1)
try:
    s.bind(("127.0.0.1", int(os.environ["PORT"]))); s.listen(); print("TAKEN")
except OSError as error:
    print(error)'"#,
        Inside(BINDS),
    ),
    script(
        "port-everywhere",
        "listen on the daemon's port of all addresses",
        r#"/usr/bin/python3 -I -c '
import os, socket
for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
    try:
        s = socket.socket(family); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind((address, int(os.environ["PORT"]))); s.listen(); print("TAKEN")
    except OSError as error:
        print(error)'"#,
        Inside(BINDS),
    ),
    script(
        "abstract",
        "find sockets of the daemon without a place in the file system",
        r#"grep -a '@.*executor' /proc/net/unix && echo TAKEN"#,
        Inside(r#"grep -qa "$SOCKET" /proc/net/unix && echo works"#),
    ),
];

pub(crate) async fn attack(rig: &Rig, report: &mut Report) {
    by_a_neighbour(rig, report, "neighbour-calls", ROWS).await;
    from_inside(rig, report, "command-calls", ROWS).await;
    report.add("command-calls/leftover", "call when the shell has ended", leftover(rig).await);
    report.add("command-calls/descriptors", "leave descriptors to the server over the socket", descriptors(rig));
}

/// A process that waits until its shell is gone, then calls.
async fn leftover(rig: &Rig) -> Outcome {
    let start = r#"rm -f "$WORK/left"; shell=$$; (nohup sh -c 'while kill -0 "$0" 2>/dev/null; do sleep 0.05; done
"$CLIENT" info --endpoint "unix:$SOCKET" > "$WORK/left.part" 2>&1 && echo TAKEN >> "$WORK/left.part"; mv "$WORK/left.part" "$WORK/left"' $shell > /dev/null 2>&1 &); exit 0"#;
    rig.inside(start).await;
    let left = rig.at("work/left");
    let said = wait_until("a leftover has tried", SOON, async || std::fs::read_to_string(&left).ok()).await;
    let works = rig.outside(rig.mode.daemon(), DIRECT).contains("TAKEN");
    Outcome::of(works, !said.contains("TAKEN"), said)
}

/// Whoever may connect sends descriptors along; the server must not keep any.
fn descriptors(rig: &Rig) -> Outcome {
    let open = || std::fs::read_dir(format!("/proc/{}/fd", rig.server())).map(Iterator::count).unwrap_or_default();
    let before = open();
    if before == 0 {
        return Outcome::NotTried("only root can look at the server's descriptors".to_owned());
    }
    let lines = r#"/usr/bin/python3 -I -c '
import array, os, socket
s = socket.socket(socket.AF_UNIX); s.connect(os.environ["SOCKET"])
null = [os.open("/dev/null", os.O_RDONLY) for _ in range(200)]
try:
    for _ in range(4):
        s.sendmsg([b"P"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", null))])
        print("sent")
    s.settimeout(1); s.recv(100)
except OSError: pass'"#;
    let sent = rig.outside(rig.mode.daemon(), lines).contains("sent");
    let after = open();
    Outcome::of(sent, after < before + 100, format_args!("{before} descriptors before, {after} after"))
}
