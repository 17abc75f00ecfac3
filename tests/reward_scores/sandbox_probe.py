"""Try every way out of a sandbox, each on what the prober made for it, and print the names of those
that are open.

It runs as a program in the sandbox (``test_sandbox.py``), which may be none, so nothing here does
harm: the process that it tries to reach is one that sleeps for this purpose, and what else is
changed is set to what it is. A sandbox claims no more than this: ``isolated`` means that all of
these were refused.
"""

import ctypes
import fcntl
import json
import mmap
import os
import platform
import resource
import signal
import socket
import struct
import sys

given = json.load(sys.stdin)
FILE, PORT, PATH, NAME, PID = (given[name] for name in ("file", "port", "path", "name", "pid"))
ARM = platform.machine() == "aarch64"
LIBC = ctypes.CDLL(None, use_errno=True)
SCRATCH = ctypes.create_string_buffer(256)


def call(x86_64, aarch64, *arguments):
    """Return whether a system call succeeds."""
    number = aarch64 if ARM else x86_64
    return (
        LIBC.syscall(
            ctypes.c_long(number),
            *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments),
        )
        >= 0
    )


def closed(what):
    """Close what was opened."""
    os.close(what)
    return True


def removed(number, remove, *arguments):
    """Remove what was made, by its number; a number below 0 means that nothing was."""
    return number >= 0 and remove(number, *arguments) >= 0


def datagram(address):
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return pair[0].sendto(b"x", address) == 1


def message(address, kind=socket.SOCK_DGRAM):
    pair = socket.socketpair(socket.AF_UNIX, kind)
    return pair[0].sendmsg([b"x"], [], 0, address) == 1


def connected(address):
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return pair[0].connect(address) is None


def new_socket(address):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        return one.sendto(b"x", address) == 1


def forked():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


def owned(command, what):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return fcntl.fcntl(ours, command, what) is not None


def owned_by_ioctl(request):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return fcntl.ioctl(ours, request, struct.pack("i", PID)) is not None


def asynchronous():
    ours, theirs = os.pipe()
    return fcntl.fcntl(ours, fcntl.F_SETFL, fcntl.fcntl(ours, fcntl.F_GETFL) | 0x2000) is not None


def niceness(pid):
    return os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid)) is None


def memory(x86_64, aarch64):
    """Return whether the memory of the process could be reached: at address 0, where nothing is."""
    return call(
        x86_64,
        aarch64,
        PID,
        struct.pack("QQ", ctypes.addressof(SCRATCH), 8),
        1,
        bytes(8) + b"\x08" + bytes(7),
        1,
        0,
    ) or (ctypes.get_errno() == 14)


def written(path, flags):
    return closed(os.open(path, flags))


OTHER = os.getpid() != PID  # a first process of a namespace may have the prober's number
AFFINITY = (ctypes.c_ulong * 16)(*[2**64 - 1] * 16)
PERF = struct.pack("IIQ", 1, 112, 0).ljust(112, b"\0")  # perf_event_attr: the clock of a processor
WAYS = {
    "files outside": lambda: os.read(os.open(FILE, os.O_RDONLY), 6) == b"secret",
    "files outside for writing": lambda: written(FILE, os.O_WRONLY),
    "new files outside": lambda: written(f"{FILE}.new", os.O_WRONLY | os.O_CREAT),
    "new folders outside": lambda: os.mkdir(f"{FILE}.folder") is None,
    "new links outside": lambda: os.symlink("x", f"{FILE}.link") is None,
    "folders outside": lambda: bool(os.listdir(os.path.dirname(FILE))),
    "/proc": lambda: bool(os.listdir("/proc")),
    "environment": lambda: bool(os.environ),
    "network": lambda: socket.create_connection(("127.0.0.1", PORT), 1).close() is None,
    "network sockets": lambda: socket.socket().close() is None,
    "datagrams to a socket's path": lambda: datagram(PATH),
    "datagrams to a socket's name": lambda: datagram(f"\0{NAME}"),
    "messages to a socket's path": lambda: message(PATH),
    "messages on a stream to a socket's path": lambda: message(PATH, socket.SOCK_STREAM),
    "connections to a socket's path": lambda: connected(PATH),
    "connections to a socket's name": lambda: connected(f"\0{NAME}"),
    "a new socket to a socket's path": lambda: new_socket(PATH),
    "signals": lambda: OTHER and os.kill(PID, 0) is None,
    "signals to its parent": lambda: os.kill(os.getppid() or -1, 0) is None,
    "signals to threads": lambda: OTHER and call(234, 131, PID, PID, 0),
    "signals with values": lambda: OTHER and call(129, 138, PID, 0, SCRATCH),
    "signals to threads with values": lambda: OTHER and call(297, 240, PID, PID, 0, SCRATCH),
    "signals by descriptor": lambda: closed(os.pidfd_open(PID)),
    "owners of sockets": lambda: owned(8, PID),
    "owners of sockets by structure": lambda: owned(15, struct.pack("ii", 1, PID)),
    "owners of sockets by ioctl": lambda: owned_by_ioctl(0x8901),
    "signals of sockets": lambda: owned(10, signal.SIGUSR1),
    "signals at input": asynchronous,
    "signals at input by ioctl": lambda: owned_by_ioctl(0x5452),
    "signals of folders": lambda: closed(fcntl.fcntl(os.open("/", os.O_RDONLY), 1026, 0)),
    "priorities": lambda: os.setpriority(os.PRIO_PROCESS, PID, 1) is None,
    "its parent's priority": lambda: niceness(os.getppid()),
    "processors": lambda: call(203, 122, PID, 128, AFFINITY),
    "schedulers": lambda: call(144, 119, PID, 0, struct.pack("i", 0)),
    "limits": lambda: OTHER and call(302, 261, PID, 7, None, SCRATCH),
    "memory pages": lambda: (
        OTHER and (call(256, 238, PID, 0, None, None) or call(279, 239, PID, 0, None, None))
    ),
    "memory by debugging": lambda: LIBC.ptrace(0x4206, PID, None, None) == 0,
    "memory for reading": lambda: memory(310, 270),
    "memory for writing": lambda: memory(311, 271),
    "comparisons of processes": lambda: call(312, 272, PID, PID, 0, 0, 0),
    "counters of processes": lambda: call(298, 241, PERF, PID, -1, -1, 0),
    "programs in the kernel": lambda: call(321, 280, 0, SCRATCH, 72),
    "page faults": lambda: call(323, 282, 1),
    "queues in the kernel": lambda: call(425, 425, 1, SCRATCH),
    "keys": lambda: call(250, 219, 0, -3, 1) or call(248, 217, b"user", b"x", b"x", 1, -2),
    "new processes": forked,
    "new programs": lambda: os.posix_spawn("/proc/self/exe", ["x"], {}) > 0,
    "namespaces": lambda: LIBC.unshare(0x10000000) == 0,
    "namespaces of others": lambda: LIBC.setns(0, 0) == 0,
    "mounts": lambda: LIBC.mount(b"none", b"/", None, 0x44000, None) == 0,
    "other roots": lambda: os.chroot("/") is None,
    "personalities": lambda: LIBC.personality(0) >= 0,
    "memory with names": lambda: closed(os.memfd_create("x")),
    "shared memory": lambda: removed(LIBC.shmget(0, 4096, 0o1600), LIBC.shmctl, 0, None),
    "message queues": lambda: removed(LIBC.msgget(0, 0o1600), LIBC.msgctl, 0, None),
    "its parent's death": lambda: LIBC.prctl(1, 0, 0, 0, 0) == 0,
    "orphans": lambda: LIBC.prctl(36, 0, 0, 0, 0) == 0,
    "debuggers": lambda: LIBC.prctl(4, 1, 0, 0, 0) == 0,
    "terminals": lambda: LIBC.ioctl(0, 0x5412, b"x") == 0,
    "higher limits": lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)) is None,
    "other users": lambda: os.setuid(os.getuid()) is None,
    "locked memory": lambda: LIBC.mlockall(1) == 0,
}


def is_open(way):
    try:
        return bool(way())
    except (OSError, AttributeError, ValueError):
        # Of a C library without the function; of a limit that holds
        return False


if __name__ == "__main__":
    mmap.mmap(-1, 4096).close()  # what a program may do is not refused either
    print("\n".join([name for name, way in WAYS.items() if is_open(way)] + ["end"]))
