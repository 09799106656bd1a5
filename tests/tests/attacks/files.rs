//! What the daemon keeps on disk: read by its commands and by neighbours, written by them, and replaced.

use crate::{
    report::Report,
    rig::Rig,
    script::{
        Control::{Inside, Outside, Root, Same},
        Script, by_a_neighbour, from_inside, script,
    },
};

/// Reading, which changes nothing.
const READ: &[Script] = &[
    script("token", "read its own tenant's token", r#"cat "$TLS/a.token" && echo TAKEN"#, Same),
    script("token-of-another", "read another tenant's token", r#"cat "$TLS/b.token" && echo TAKEN"#, Same),
    script("tls-key", "read the daemon's TLS key", r#"cat "$TLS/server.key" && echo TAKEN"#, Same),
    script(
        "ca-key",
        "read the key that signs certificates",
        r#"cat "$TLS/ca.key" && echo TAKEN"#,
        Root(r#"test -s "$TLS/ca.key" && echo works"#),
    ),
    script(
        "client-key",
        "read another tenant's client key",
        r#"cat "$TLS/b.key" && echo TAKEN"#,
        Root(r#"test -s "$TLS/b.key" && echo works"#),
    ),
    script("configuration", "read the configuration", r#"cat "$TLS/config.toml" && echo TAKEN"#, Same),
    script(
        "journal",
        "read the journal",
        r#"find "$STATE" -name 'journal.sqlite' 2>/dev/null | grep -q . && cat $(find "$STATE" -name journal.sqlite) >/dev/null && echo TAKEN"#,
        Same,
    ),
    script(
        "journal-by-name",
        "read the journal where it is known to lie",
        r#"cat "$STATE/journal.sqlite" "$STATE/server/journal.sqlite" 2>/dev/null | head -c 6 | grep -q SQLite && echo TAKEN"#,
        Same,
    ),
    script(
        "journal-log",
        "read what the journal is about to take in",
        r#"cat "$STATE/journal.sqlite-wal" "$STATE/server/journal.sqlite-wal" 2>/dev/null | head -c 1 | grep -q . && echo TAKEN"#,
        Same,
    ),
    script(
        "spill-of-another",
        "read what a command of another tenant has written",
        r#"head -n 1 "$SPILL_OF_B" | grep "$CANARY" && echo TAKEN"#,
        Same,
    ),
    script("state-list", "list the state directory", r#"ls "$STATE" && echo TAKEN"#, Same),
    script(
        "streams-list",
        "list the files of output",
        r#"{ ls "$STATE/streams" || ls "$STATE/server/streams"; } && echo TAKEN"#,
        Same,
    ),
    script("spills-list", "list everybody's spill files", r#"ls "$STATE/spill" && echo TAKEN"#, Same),
    script(
        "program-symlink",
        "read the token through a link of its own",
        r#"ln -sf "$TLS/a.token" "$WORK/link-$$" && cat "$WORK/link-$$" && echo TAKEN"#,
        Same,
    ),
    script(
        "hard-link",
        "make a hard link to the token and read that",
        r#"ln "$TLS/a.token" "$WORK/hard-$$" && cat "$WORK/hard-$$" && echo TAKEN"#,
        Outside(r#"touch "$WORK/mine" && ln "$WORK/mine" "$WORK/mine-too-$$" && echo works"#),
    ),
    script("by-dot-dot", "read the token by a way round", r#"cat "$WORK/../tls/../tls/./a.token" && echo TAKEN"#, Same),
    script(
        "by-proc-self-root",
        "read the token below /proc/self/root",
        r#"cat "/proc/self/root$TLS/a.token" && echo TAKEN"#,
        Same,
    ),
    script(
        "copy-of-the-directory",
        "pack the directory with tokens and keys",
        r#"tar -cf - "$TLS" 2>/dev/null | tar -tf - 2>/dev/null | grep -q 'token$' && echo TAKEN"#,
        Same,
    ),
    script(
        "watch-state",
        "watch the state directory with inotify",
        r#"/usr/bin/python3 -I -c '
import ctypes, os
l = ctypes.CDLL(None)
w = l.inotify_add_watch(l.inotify_init(), os.environ["STATE"].encode(), 0xfff)
print("TAKEN" if w >= 0 else "refused")'"#,
        Same,
    ),
    script(
        "watch-the-host",
        "watch everything with fanotify",
        r#"/usr/bin/python3 -I -c '
import ctypes
l = ctypes.CDLL(None)
print("TAKEN" if l.fanotify_init(0x4, 0) >= 0 else "refused")'"#,
        Inside(r#"/usr/bin/python3 -I -c 'import ctypes; ctypes.CDLL(None).fanotify_init; print("works")'"#),
    ),
    script(
        "handle",
        "open the token by a file handle",
        r#"/usr/bin/python3 -I -c '
import ctypes, os
l = ctypes.CDLL(None)
handle = (ctypes.c_uint32 * 34)(128)
mount = ctypes.c_int()
work = os.environ["WORK"].encode()
assert l.name_to_handle_at(-100, work, handle, ctypes.byref(mount), 0) == 0
at = os.open(work, os.O_RDONLY)
print("TAKEN" if l.open_by_handle_at(at, handle, 0) >= 0 else "refused")'"#,
        Inside(r#"test -d "$WORK" && echo works"#),
    ),
];

/// Only a command: its own tenant's spill it may read.
const SPILL: &[Script] = &[
    script(
        "own-spill-append",
        "write to its own spill file",
        r#"echo x >> "$SPILL_OF_A" && echo TAKEN"#,
        Inside(r#"head -n 1 "$SPILL_OF_A" | grep -q "$CANARY" && echo works"#),
    ),
    script(
        "own-spill-truncate",
        "empty its own spill file",
        r#"truncate -s 0 "$SPILL_OF_A" && echo TAKEN"#,
        Inside(r#"test -s "$SPILL_OF_A" && echo works"#),
    ),
    script(
        "own-spill-mode",
        "change the mode of its own spill file",
        r#"chmod 666 "$SPILL_OF_A" && echo TAKEN"#,
        Inside(r#"test -s "$SPILL_OF_A" && echo works"#),
    ),
    script(
        "own-spill-remove",
        "remove its own spill file",
        r#"rm -f "$SPILL_OF_A" && echo TAKEN"#,
        Inside(r#"test -s "$SPILL_OF_A" && echo works"#),
    ),
    script(
        "own-spill-rename",
        "rename its own spill file",
        r#"mv "$SPILL_OF_A" "$SPILL_OF_A.old" && echo TAKEN"#,
        Inside(r#"test -s "$SPILL_OF_A" && echo works"#),
    ),
    script(
        "own-spill-swap",
        "put a link in the place of its own spill file",
        r#"ln -sfn /etc/passwd "$SPILL_OF_A" && echo TAKEN"#,
        Inside(r#"test -s "$SPILL_OF_A" && echo works"#),
    ),
    script(
        "own-spill-link",
        "keep its own spill file by a hard link, and write there",
        r#"ln "$SPILL_OF_A" "$WORK/kept" && echo x >> "$WORK/kept" && echo TAKEN"#,
        Inside(r#"touch "$WORK/o" && ln "$WORK/o" "$WORK/o-$$" && echo works"#),
    ),
    script(
        "spill-planted",
        "plant a thousand links where spill files may come to lie",
        r#"cd "$(dirname "$SPILL_OF_A")" && for n in $(seq 1000); do ln -s /etc/passwd "bash-$n.stdout" 2>/dev/null && echo TAKEN && break; done"#,
        Inside(r#"cd "$WORK" && ln -s /etc/passwd "planted-$$" && echo works"#),
    ),
    script(
        "spill-directory-mode",
        "open the directory of spill files to all",
        r#"chmod 777 "$(dirname "$SPILL_OF_A")" && echo TAKEN"#,
        Inside(r#"test -d "$(dirname "$SPILL_OF_A")" && echo works"#),
    ),
    script(
        "own-output-elsewhere",
        "open the stream that takes its output, for reading what was written",
        r#"ls -l /proc/self/fd | grep -E '(spill|streams|memfd)' && echo TAKEN"#,
        Inside(r#"ls -l /proc/self/fd | grep -q pipe && echo works"#),
    ),
];

/// Writing, by commands and neighbours. Where one of them succeeds nothing after it counts.
const WRITE: &[Script] = &[
    script(
        "state-plant",
        "make a file in the state directory",
        r#": > "$STATE/planted" && echo TAKEN"#,
        Outside(r#"test -d "$STATE" && echo works"#),
    ),
    script(
        "state-link",
        "put a link in the place of the lock",
        r#"ln -sfn "$WORK/target" "$STATE/lock" && echo TAKEN"#,
        Outside(r#"test -d "$STATE" && echo works"#),
    ),
    script(
        "state-mode",
        "open the state directory to all",
        r#"chmod 777 "$STATE" && echo TAKEN"#,
        Outside(r#"test -d "$STATE" && echo works"#),
    ),
    script(
        "state-away",
        "move the state directory away",
        r#"mv "$STATE" "$WORK/away" && echo TAKEN"#,
        Outside(r#"test -d "$STATE" && echo works"#),
    ),
    script(
        "journal-write",
        "write into the journal",
        r#"for file in "$STATE/journal.sqlite" "$STATE/server/journal.sqlite"; do { echo x >> "$file"; } 2>/dev/null && echo TAKEN; done"#,
        Outside(r#"find "$STATE" -name journal.sqlite | grep -q . && echo works"#),
    ),
    script(
        "token-write",
        "add a token of its own",
        r#"{ echo 0123456789abcdef-mine >> "$TLS/a.token"; } && echo TAKEN"#,
        Outside(r#"test -w "$TLS/a.token" && echo works"#),
    ),
    script(
        "token-replace",
        "put a token of its own in the place of one",
        r#"echo 0123456789abcdef-mine > "$WORK/mine-$$" && mv -f "$WORK/mine-$$" "$TLS/a.token" && echo TAKEN"#,
        Outside(r#"test -w "$TLS/a.token" && echo works"#),
    ),
    script(
        "configuration-write",
        "write into the configuration",
        r#"{ echo >> "$TLS/config.toml"; } && echo TAKEN"#,
        Root(r#"test -w "$TLS/config.toml" && echo works"#),
    ),
    script(
        "authority-replace",
        "put an authority of its own in the place of the daemon's",
        r#"cp "$CA" "$TLS/ca.crt" && echo TAKEN"#,
        Root(r#"test -w "$TLS/ca.crt" && echo works"#),
    ),
    script(
        "program-write",
        "write into the daemon's program",
        r#"{ echo >> "$DAEMON"; } && echo TAKEN"#,
        Outside(r#"test -x "$DAEMON" && echo works"#),
    ),
    script(
        "program-replace",
        "put a program of its own in the place of the daemon's",
        r#"cp /bin/true "$WORK/t-$$" && mv -f "$WORK/t-$$" "$DAEMON" && echo TAKEN"#,
        Outside(r#"test -x "$DAEMON" && echo works"#),
    ),
    script(
        "program-by-process",
        "write into the daemon's program by its process",
        r#"for pid in $KEEPER $SERVER; do { : >> "/proc/$pid/exe"; } 2>/dev/null && echo TAKEN; done"#,
        Outside(r#"test -x "$DAEMON" && echo works"#),
    ),
    script(
        "log-write",
        "write into the daemon's log",
        r#"{ echo forged >> "$BASE/log"; } && echo TAKEN"#,
        Outside(r#"test -s "$BASE/log" && echo works"#),
    ),
    script(
        "log-by-process",
        "write into the daemon's log by its descriptors",
        r#"for pid in $KEEPER $SERVER $PPID; do for fd in 1 2; do { echo forged > "/proc/$pid/fd/$fd"; } 2>/dev/null && echo TAKEN; done; done"#,
        Outside(r#"test -s "$BASE/log" && echo works"#),
    ),
    script(
        "socket-remove",
        "remove the socket",
        r#"rm -f "$SOCKET" && echo TAKEN"#,
        Outside(r#"test -S "$SOCKET" && echo works"#),
    ),
    script(
        "socket-mode",
        "open the socket to all",
        r#"chmod 666 "$SOCKET" && echo TAKEN"#,
        Outside(r#"test -S "$SOCKET" && echo works"#),
    ),
    script(
        "socket-replace",
        "listen in the daemon's place",
        r#"/usr/bin/python3 -I -c '
import os, socket
path = os.environ["SOCKET"]
mine = path + ".mine"
s = socket.socket(socket.AF_UNIX)
try:
    s.bind(mine); os.rename(mine, path); print("TAKEN")
except OSError as error:
    print(error)'"#,
        Outside(r#"test -S "$SOCKET" && echo works"#),
    ),
];

pub(crate) async fn attack(rig: &Rig, report: &mut Report) {
    by_a_neighbour(rig, report, "neighbour-reads", READ).await;
    by_a_neighbour(rig, report, "neighbour-writes", WRITE).await;
    from_inside(rig, report, "command-reads", READ).await;
    from_inside(rig, report, "command-spills", SPILL).await;
    from_inside(rig, report, "command-writes", WRITE).await;
}
