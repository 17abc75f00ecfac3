"""Shut a process in by means of the kernel: namespaces and resource limits (Linux, by ctypes).

The filter of system calls is ``seccomp.py``. Run inside the sandbox's own processes. Every function
raises OSError where the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct

import seccomp

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = (
    1 << bit for bit in (17, 26, 27, 28, 29, 30)
)
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = (
    1 << b for b in (0, 1, 2, 3, 5, 12, 14, 18)
)
# Statvfs
_KEPT_FLAGS = {
    1: _RDONLY,
    2: _NOSUID,
    4: _NODEV,
    8: _NOEXEC,
    1024: 1 << 10,
    2048: 1 << 11,
    4096: 1 << 21,
}
_DETACH = 2
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 1, 24, 38, 4
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_MOUNT_POINTS = ("/mnt", "/media", "/srv", "/opt", "/tmp")
# Of the users that programs run as where the sandbox starts as root; one a sandbox
_FIRST_UID = 0x40000000

_PIVOT_ROOT, _CAPSET = (155, 41), (126, 91)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(number: int, what: str, *arguments: object) -> int:
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(_LIBC.syscall(ctypes.c_long(number), *wide), what)


def _prctl(option: int, value: int = 0, pointer: object = None) -> None:
    zero = ctypes.c_ulong(0)
    _checked(
        _LIBC.prctl(option, ctypes.c_ulong(value), pointer or zero, zero, zero), f"prctl({option})"
    )


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    result = _LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _checked(result, f"mount {kind or 'bind'} {target}")


def die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _require_architecture() -> int:
    if seccomp.ARCHITECTURE is None:
        raise OSError(38, f"no system call numbers for {platform.machine()}")
    return seccomp.ARCHITECTURE


# --- namespaces


def unshare(user: bool) -> None:
    """Enter new pid, network, mount, IPC and host name spaces, as an ordinary user inside a new
    user namespace.

    The pid namespace is that of processes forked from here on.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = _NEW_NS | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS | (_NEW_USER if user else 0)
    _checked(_LIBC.unshare(flags), "unshare")
    if user:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def readable(search_path: list[str]) -> list[str]:
    """Return what a program may read: the standard library and the system's shared libraries."""
    library = os.path.dirname(os.path.dirname(os.path.realpath(os.__file__)))
    wanted = [library, *(os.path.realpath(path) for path in search_path), *_LIBRARIES]
    found = [path for path in dict.fromkeys(wanted) if os.path.exists(path)]
    inside = [
        p
        for p in found
        if any(p != q and p.startswith(q + "/") and not os.path.islink(q) for q in found)
    ]
    return [path for path in found if path not in inside]


def enter_root(paths: list[str]) -> None:
    """Change to a read-only file tree of nothing but ``paths``, four devices and an empty working
    folder."""
    _mount("none", "/", None, _REC | _PRIVATE)
    root = next(
        p
        for p in _MOUNT_POINTS
        if os.path.isdir(p) and not any(q.startswith(p + "/") for q in paths)
    )
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    os.chmod(root, 0o755)
    for path in (*paths, *_DEVICES):
        _show(path, root + path)
    os.mkdir(root + "/box")
    _mount(None, root, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir(root)
    _syscall(
        _PIVOT_ROOT[_require_architecture()],
        "pivot_root",
        ctypes.c_char_p(b"."),
        ctypes.c_char_p(b"."),
    )
    _checked(_LIBC.umount2(b".", _DETACH), "umount")
    os.chdir("/box")


def _show(path: str, target: str) -> None:
    """Mount the same file or folder at ``target``, read-only; a link stays a link."""
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        open(target, "x").close()
    _mount(path, target, None, _BIND | _REC)
    present = os.statvfs(path).f_flag  # flags that this namespace may not take away
    kept = sum(flag for bit, flag in _KEPT_FLAGS.items() if present & bit)
    nodev = 0 if path in _DEVICES else _NODEV
    _mount(None, target, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | nodev | kept)


def program_uid(mode: str) -> int:
    """Return the user that programs run as. Where the sandbox starts as root it is this sandbox's
    alone."""
    return _FIRST_UID + os.getpid() if mode == "namespaces" and os.geteuid() == 0 else os.geteuid()


def drop_privileges(uid: int) -> None:
    """Give up root, every capability, and the way back."""
    if uid != os.geteuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    else:
        for capability in range(64):
            # Those that exist and are held
            _LIBC.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _syscall(
        _CAPSET[_require_architecture()],
        "capset",
        ctypes.c_char_p(header),
        ctypes.c_char_p(nothing),
    )
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)


# --- limits


def limit(memory_bytes: int, cpu_seconds: int, threads: int, own_user: bool) -> None:
    """Set resource limits of this process; ``threads`` are those of all processes of its user, if
    that is its own."""
    wanted = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        # A larger one would grow into what lies below it
        resource.RLIMIT_STACK: min(112 << 20, memory_bytes),
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        **({resource.RLIMIT_NPROC: threads} if own_user else {}),
    }
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    for name, value in wanted.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
