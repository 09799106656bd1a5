//! System calls and /proc against the daemon's processes: by one of its own commands, and by a neighbour of another user.

use executor_proto::types::{CommandSpec, OwnerId};
use tool_client::executor::Executor;

use crate::{
    report::{Outcome, Report},
    rig::{Mode, OWNER, Rig},
};

/// Each attempt of `intruder.py`, and what it is.
const ATTEMPTS: &[(&str, &str)] = &[
    ("proc-environ", "read the environment"),
    ("proc-maps", "read where memory is"),
    ("proc-smaps", "read what memory is used for"),
    ("proc-smaps_rollup", "read how much memory is used"),
    ("proc-numa_maps", "read where memory is, by node"),
    ("proc-auxv", "read the auxiliary vector, with addresses and random bytes"),
    ("proc-syscall", "read the system call that is under way, with its arguments"),
    ("proc-io", "read how much is read and written"),
    ("proc-personality", "read the personality"),
    ("proc-pagemap", "read the page tables"),
    ("proc-timers", "read the timers"),
    ("proc-fd", "list descriptors, and so open them"),
    ("proc-fdinfo", "list what descriptors are"),
    ("proc-map_files", "list mapped files, and so open them"),
    ("proc-cwd", "go to the working directory"),
    ("proc-root", "go to the root directory"),
    ("proc-exe", "open the program by the process"),
    ("proc-ns-mnt", "open the mount namespace"),
    ("proc-ns-net", "open the network namespace"),
    ("proc-ns-user", "open the user namespace"),
    ("proc-mem", "open memory for reading"),
    ("proc-mem-write", "open memory for writing"),
    ("proc-tasks", "read the environment by each thread"),
    ("proc-write-oom_score_adj", "make it the first that dies when memory runs out"),
    ("proc-write-oom_adj", "the same by the older name"),
    ("proc-write-coredump_filter", "have all memory in a core dump"),
    ("proc-write-clear_refs", "clear what shows which pages are used"),
    ("open-by-proc-root", "open a file below the root directory"),
    ("open-by-proc-cwd", "list the working directory"),
    ("ptrace-attach", "trace it"),
    ("ptrace-seize", "trace it without stopping it"),
    ("gdb-like-attach-of-every-thread", "trace each thread"),
    ("process-vm-readv", "read memory"),
    ("process-vm-writev", "write memory"),
    ("pidfd-getfd", "take a descriptor"),
    ("signal-null", "ask whether a signal would arrive"),
    ("signal-term", "send SIGTERM"),
    ("signal-kill", "send SIGKILL"),
    ("signal-stop", "send SIGSTOP"),
    ("signal-hup", "send SIGHUP, which replaces the server"),
    ("signal-abrt", "send SIGABRT, for a core dump"),
    ("signal-segv", "send SIGSEGV"),
    ("signal-pidfd", "send SIGKILL through a pidfd"),
    ("signal-tgkill", "send SIGKILL to a thread of the process"),
    ("signal-tkill", "send SIGKILL to a thread"),
    ("signal-queue", "queue a SIGKILL that claims another sender"),
    ("signal-thread-queue", "queue it to a thread"),
    ("signal-owner-of-a-descriptor", "have the kernel send SIGKILL when a socket becomes readable"),
    ("prlimit-files", "leave it three descriptors"),
    ("prlimit-core", "change the size of its core dumps"),
    ("prlimit-read", "read its resource limits"),
    ("sched-setscheduler", "let it run only when nothing else does"),
    ("sched-setattr", "the same by the newer call"),
    ("sched-setaffinity", "put it on one processor"),
    ("setpriority", "give it the lowest priority"),
    ("setpriority-of-the-group", "the same by its process group"),
    ("ioprio-set", "give it the lowest priority on disks"),
    ("migrate-pages", "move its memory to another node"),
    ("move-pages", "ask where its pages are"),
    ("kcmp", "compare kernel objects"),
    ("perf-event-open", "watch it by performance events"),
    ("get-robust-list", "read where its locks are"),
    ("setpgid", "put it into another process group"),
    ("setns", "join its namespaces"),
];

/// What the kernel lets processes of one user do to each other, with no means to fence it but a uid: a stated limit of a daemon
/// that is not root.
const BY_UID_ALONE: [&str; 9] = [
    "prlimit-files",
    "prlimit-core",
    "prlimit-read",
    "sched-setscheduler",
    "sched-setattr",
    "sched-setaffinity",
    "setpriority",
    "setpriority-of-the-group",
    "ioprio-set",
];

pub(crate) async fn attack(rig: &Rig, report: &mut Report) {
    let by_uid = |name: &str| matches!(rig.mode, Mode::User(_)) && BY_UID_ALONE.contains(&name);
    let names: Vec<&str> = ATTEMPTS.iter().map(|(name, _)| *name).filter(|name| !by_uid(name)).collect();
    let names = names.join(" ");
    // As an ordinary user the helper is on the commands' side of the fence: whoever ends it ends commands of the same tenant.
    let helper = if rig.mode == Mode::Root { "helper=$PPID" } else { "" };
    let said = rig.inside(&format!("$INTRUDER keeper=$KEEPER server=$SERVER {helper} -- {names}")).await;
    add(report, "command", "one of its commands", &said, &by_uid);

    let Some(neighbour) = rig.mode.neighbour() else {
        return report.add("neighbours", "what another user of the host can do", not_root());
    };
    let owner = OwnerId(OWNER.to_owned());
    let spec = CommandSpec { command: "sleep 300".into(), ..CommandSpec::default() };
    let a = rig.tenant("a");
    let task = a.start_task(Some(&owner), spec).await.expect("started");
    let shell = a.get_task(Some(&owner), &task).await.expect("its own").shell_pid.expect("it runs");
    let all: Vec<&str> = ATTEMPTS.iter().map(|(name, _)| *name).collect();
    let all = all.join(" ");
    let script = format!("$INTRUDER keeper=$KEEPER server=$SERVER command={shell} -- {all}");
    add(report, "neighbour", "another user of the host", &rig.outside(Some(neighbour), &script), &|_| false);
    let script = format!("$INTRUDER command={shell} -- {names}");
    for (who, by, tenant, owner) in [
        ("other-tenant-command", "a command of another tenant, on a task", "b", OWNER),
        ("other-owner-command", "a command of another session of the tenant, on a task", "a", "another"),
    ] {
        if rig.mode != Mode::Root && tenant == "a" {
            let reason = "a stated limit: sessions of one tenant share a user and may signal each other";
            report.add(who, by, Outcome::NotTried(reason.to_owned()));
            continue;
        }
        let said = rig.run_for(tenant, owner, &script).await;
        // The kernel gives these entries to a process's user, where it is dumpable, as commands are and the daemon is not.
        let by_uid_too = |name: &str| by_uid(name) || (rig.mode != Mode::Root && name.starts_with("proc-write-"));
        add(report, who, by, &String::from_utf8_lossy(&said.stdout.tail), &by_uid_too);
    }
    let killed = a.kill_task(Some(&owner), &task).await.expect("its own");
    assert!(!killed.already_finished, "the neighbour has ended a task");
}

fn not_root() -> Outcome {
    Outcome::NotTried("only root can be another user".to_owned())
}

/// A row for each line of what the intruder has said.
fn add(report: &mut Report, who: &str, by: &str, said: &str, by_uid: &dyn Fn(&str) -> bool) {
    for (name, tried) in ATTEMPTS {
        let what = format!("{by}, on each of the daemon's processes: {tried}");
        let line = said.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        let outcome = match line {
            _ if by_uid(name) => Outcome::NotTried("a stated limit where daemon and commands share a uid".to_owned()),
            None => Outcome::Unproven(said.to_owned()),
            Some(line) => judge(line),
        };
        report.add(format_args!("{who}/{name}"), what, outcome);
    }
    assert!(said.ends_with("done\n"), "the intruder has not come to its end: {said}");
}

/// `control=works`, then what came of it for each target.
fn judge(line: &str) -> Outcome {
    let mut fields = line.split(' ').filter_map(|field| field.split_once('='));
    let control = fields.next() == Some(("control", "works"));
    let targets: Vec<_> = fields.collect();
    let refused = !targets.is_empty() && targets.iter().all(|(_, outcome)| outcome.starts_with("refused:"));
    Outcome::of(control, refused, line)
}
