"""Tries system calls and files against processes, and says of each what came of it.

Called as `intruder.py NAME=PID ... [-- ATTEMPT ...]`. Each attempt is made in a process of its own, first on a child of ours,
where it has to work, then on each target. One line for each: the attempt's name, then `control=works` or why not, then
`NAME=taken` or `NAME=refused:REASON` for each target.
"""

import ctypes
import errno
import os
import signal
import socket
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
ATTEMPTS = {}

# The numbers of system calls that the C library has no function for.
NUMBERS = {
    "x86_64": dict(ptrace=101, ioprio_set=251, migrate_pages=256, move_pages=279, perf_event_open=298, rt_tgsigqueueinfo=297,
                   kcmp=312, sched_setattr=314, pidfd_send_signal=424, pidfd_open=434, pidfd_getfd=438,
                   tgkill=234, tkill=200, rt_sigqueueinfo=129, get_robust_list=274, setns=308),
    "aarch64": dict(ptrace=117, ioprio_set=30, migrate_pages=238, move_pages=239, perf_event_open=241, rt_tgsigqueueinfo=240,
                    kcmp=272, sched_setattr=274, pidfd_send_signal=424, pidfd_open=434, pidfd_getfd=438,
                    tgkill=131, tkill=130, rt_sigqueueinfo=138, get_robust_list=100, setns=268),
}[os.uname().machine]


def attempt(function):
    ATTEMPTS[function.__name__.replace("_", "-")] = function
    return function


def checked(result):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def call(name, *arguments):
    return checked(LIBC.syscall(NUMBERS[name], *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]))


def c(name, *arguments):
    return checked(getattr(LIBC, name)(*arguments))


def entry(name, read):
    def function(pid):
        return read(f"/proc/{pid}/{name}")
    ATTEMPTS["proc-" + name.replace("/", "-")] = function


def content(path):
    with open(path, "rb") as file:
        file.read(4096)
    return True


def listing(path):
    return os.listdir(path) is not None


for name in ["environ", "maps", "smaps", "smaps_rollup", "numa_maps", "auxv", "syscall", "io", "personality", "pagemap", "timers"]:
    entry(name, content)
for name in ["fdinfo", "map_files"]:
    entry(name, listing)
# Processes of one user may count each other's descriptors; what they are is another matter.
entry("fd", lambda path: [os.readlink(f"{path}/{number}") for number in os.listdir(path)] and True)
for name in ["cwd", "root", "exe", "ns/mnt", "ns/net", "ns/user"]:
    entry(name, lambda path: os.readlink(path) and os.stat(path))


@attempt
def proc_mem(pid):
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        if pid in TARGETS.values():
            return True
        with open(f"/proc/{pid}/maps") as maps:
            memory.seek(int(maps.read().split("-")[0], 16))
        return len(memory.read(16)) == 16


@attempt
def proc_mem_write(pid):
    return os.close(os.open(f"/proc/{pid}/mem", os.O_WRONLY)) is None


def written(name, text):
    def function(pid):
        file = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
        return os.write(file, text) > 0
    ATTEMPTS["proc-write-" + name] = function


written("oom_score_adj", b"1000")
written("coredump_filter", b"0x7f")
written("clear_refs", b"1")
written("oom_adj", b"15")


@attempt
def proc_tasks(pid):
    """Every thread's memory and environment, not only the first one's."""
    for task in os.listdir(f"/proc/{pid}/task"):
        content(f"/proc/{pid}/task/{task}/environ")
    return True


@attempt
def ptrace_attach(pid):
    return call("ptrace", 16, pid, 0, 0) == 0


@attempt
def ptrace_seize(pid):
    return call("ptrace", 0x4206, pid, 0, 0) == 0


def remote_vector(function, pid):
    with open(f"/proc/{pid if pid not in TARGETS.values() else os.getpid()}/maps") as maps:
        line = next(line for line in maps if " rw-p " in line)
    address = int(line.split("-")[0], 16)
    buffer = ctypes.create_string_buffer(8)

    class Vector(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
    own = Vector(ctypes.cast(buffer, ctypes.c_void_p), 8)
    other = Vector(address, 8)
    LIBC.process_vm_readv.restype = LIBC.process_vm_writev.restype = ctypes.c_ssize_t
    try:
        return c(function, pid, ctypes.byref(own), ctypes.c_ulong(1), ctypes.byref(other), ctypes.c_ulong(1),
                 ctypes.c_ulong(0)) == 8
    except OSError as error:
        # It was let in and there is nothing at this address.
        if error.errno == errno.EFAULT:
            return True
        raise


@attempt
def process_vm_readv(pid):
    return remote_vector("process_vm_readv", pid)


@attempt
def process_vm_writev(pid):
    return remote_vector("process_vm_writev", pid)


def signalled(name, send):
    ATTEMPTS["signal-" + name] = lambda pid: send(pid) or True


def queued(pid, number):
    info = ctypes.create_string_buffer(128)
    struct.pack_into("iii", info, 0, number, 0, -1)
    struct.pack_into("ii", info, 16, os.getpid(), os.getuid())
    return info


def by_owner_of_a_descriptor(pid):
    """A pipe whose readiness sends SIGKILL to whoever is its owner."""
    import fcntl
    ours, theirs = socket.socketpair()
    fcntl.fcntl(ours, fcntl.F_SETOWN, pid)
    fcntl.fcntl(ours, 10, signal.SIGKILL)
    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    theirs.send(b"x")
    # It says nothing of whether the signal went out: whoever is alive has not got it.
    import time
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        if not alive(pid):
            return
        time.sleep(0.01)
    raise PermissionError(errno.EPERM, "still alive")


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(") ")[1][0] not in "ZX"
    except FileNotFoundError:
        return False


for one in ["TERM", "KILL", "STOP", "HUP", "ABRT", "SEGV"]:
    number = getattr(signal, "SIG" + one)
    signalled(one.lower(), lambda pid, number=number: os.kill(pid, number))
signalled("null", lambda pid: os.kill(pid, 0))
signalled("pidfd", lambda pid: call("pidfd_send_signal", call("pidfd_open", pid, 0), 9, 0, 0))
signalled("tgkill", lambda pid: call("tgkill", pid, pid, 9))
signalled("tkill", lambda pid: call("tkill", pid, 9))
signalled("queue", lambda pid: call("rt_sigqueueinfo", pid, 9, queued(pid, 9)))
signalled("thread-queue", lambda pid: call("rt_tgsigqueueinfo", pid, pid, 9, queued(pid, 9)))
signalled("owner-of-a-descriptor", by_owner_of_a_descriptor)


@attempt
def pidfd_getfd(pid):
    return os.close(call("pidfd_getfd", call("pidfd_open", pid, 0), 0, 0)) is None


@attempt
def prlimit_files(pid):
    import resource
    return resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)) is not None


@attempt
def prlimit_core(pid):
    import resource
    return resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0)) is not None


@attempt
def prlimit_read(pid):
    import resource
    return resource.prlimit(pid, resource.RLIMIT_NOFILE) is not None


@attempt
def sched_setscheduler(pid):
    return os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)) is None


@attempt
def sched_setaffinity(pid):
    return os.sched_setaffinity(pid, {0}) is None


@attempt
def sched_setattr(pid):
    return call("sched_setattr", pid, struct.pack("IIQiIQQQ", 48, 3, 0, 0, 0, 0, 0, 0), 0) == 0


@attempt
def setpriority(pid):
    return os.setpriority(os.PRIO_PROCESS, pid, 19) is None


@attempt
def setpriority_of_the_group(pid):
    return os.setpriority(os.PRIO_PGRP, os.getpgid(pid), 19) is None


@attempt
def ioprio_set(pid):
    return call("ioprio_set", 1, pid, 3 << 13) == 0


@attempt
def migrate_pages(pid):
    one = ctypes.c_ulong(1)
    return call("migrate_pages", pid, 2, ctypes.byref(one), ctypes.byref(one)) >= 0


@attempt
def move_pages(pid):
    return call("move_pages", pid, 0, 0, 0, 0, 0) >= 0


@attempt
def kcmp(pid):
    return call("kcmp", os.getpid(), pid, 1, 0, 0) >= 0


@attempt
def perf_event_open(pid):
    # A software event of the process itself, without the kernel's part: what needs the least.
    attributes = struct.pack("IIQQQQQ", 1, 112, 1, 0, 0, 0, 1 << 5 | 1 << 6) + bytes(64)
    return os.close(call("perf_event_open", attributes, pid, -1, -1, 0)) is None


@attempt
def get_robust_list(pid):
    head, length = ctypes.c_void_p(), ctypes.c_size_t()
    return call("get_robust_list", pid, ctypes.byref(head), ctypes.byref(length)) == 0


@attempt
def setpgid(pid):
    return os.setpgid(pid, pid) is None


@attempt
def setns(pid):
    """Into the namespaces, by a pidfd: what `nsenter --target` does. Ours needs a right too, so that the user namespace is new."""
    CLONE_NEWUSER = 0x10000000
    return call("setns", call("pidfd_open", pid, 0), CLONE_NEWUSER) == 0


@attempt
def open_by_proc_root(pid):
    return content(f"/proc/{pid}/root/etc/passwd")


@attempt
def open_by_proc_cwd(pid):
    return listing(f"/proc/{pid}/cwd/")


@attempt
def gdb_like_attach_of_every_thread(pid):
    attached = [call("ptrace", 16, int(task), 0, 0) for task in os.listdir(f"/proc/{pid}/task")]
    return bool(attached)


def spare(name):
    """A child of ours that waits. For setns it is in a user namespace of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            if name == "setns":
                c("unshare", 0x10000000)
            if name == "setpriority-of-the-group":
                os.setpgid(0, 0)
        finally:
            os.close(writer)
        while True:
            signal.pause()
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    return child


def outcome(name, pid):
    """`taken`, or `refused:` and why. In a process of its own: an attempt may end whoever makes it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            answer = "taken" if ATTEMPTS[name](pid) else "refused:no effect"
        except OSError as error:
            answer = "refused:" + errno.errorcode.get(error.errno, str(error.errno))
        except Exception as error:  # pylint: disable=broad-except
            answer = "failed:" + type(error).__name__ + ":" + str(error)
        os.write(writer, answer.replace(" ", "_").encode())
        os._exit(0)
    os.close(writer)
    answer = os.read(reader, 4096).decode()
    os.close(reader)
    os.waitpid(child, 0)
    return answer or "failed:died"


def own(name):
    child = spare(name)
    try:
        # Signals and the like may be sent only by the process itself or its parent; the attempt's process is neither.
        if name == "setpgid":
            return "taken" if ATTEMPTS[name](child) else "refused"
        return outcome(name, child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


TARGETS = {}


def main(arguments):
    names = arguments[arguments.index("--") + 1:] if "--" in arguments else list(ATTEMPTS)
    for argument in arguments[:arguments.index("--")] if "--" in arguments else arguments:
        name, pid = argument.split("=")
        TARGETS[name] = int(pid)
    for name in names:
        control = own(name)
        line = [name, "control=" + ("works" if control == "taken" else control)]
        line += [f"{target}={outcome(name, pid)}" for target, pid in TARGETS.items()]
        print(*line, flush=True)
    print("done")


main(sys.argv[1:])
