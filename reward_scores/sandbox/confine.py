"""Shut a process in by means of the kernel: namespaces, Landlock, seccomp, resource limits (Linux, by ctypes).

Run inside the sandbox's own processes. Every function raises OSError where the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import tempfile
from typing import NoReturn

MODES = ("namespaces", "user_namespaces", "landlock", "none")

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = (1 << bit for bit in (17, 26, 27, 28, 29, 30))
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = (1 << b for b in (0, 1, 2, 3, 5, 12, 14, 18))
_KEPT_FLAGS = {1: _RDONLY, 2: _NOSUID, 4: _NODEV, 8: _NOEXEC, 1024: 1 << 10, 2048: 1 << 11, 4096: 1 << 21}  # statvfs
_DETACH = 2
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_DUMPABLE = 1, 24, 38, 22, 4
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_MOUNT_POINTS = ("/mnt", "/media", "/srv", "/opt", "/tmp")
_FIRST_UID = 0x40000000  # of the users that programs run as where the sandbox starts as root; one a sandbox

_ARCHITECTURE = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
# name: (x86_64, aarch64); -1 where there is none
_DENIED = {
    **{"socket": (41, 198), "execve": (59, 221), "execveat": (322, 281), "fork": (57, -1), "vfork": (58, -1)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268)},
    **{"unshare": (272, 97), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430)},
    **{"fsconfig": (431, 431), "fsmount": (432, 432), "mount_setattr": (442, 442), "quotactl": (179, 60)},
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "personality": (135, 92)},
    **{"open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "syslog": (103, 116), "acct": (163, 89)},
    **{"init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104), "reboot": (169, 142)},
    **{"swapon": (167, 224), "settimeofday": (164, 170), "clock_settime": (227, 112)},
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190)},
    **{"msgget": (68, 186), "mq_open": (240, 180), "tkill": (200, 130), "pidfd_open": (434, 434)},
    **{"pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "rt_sigqueueinfo": (129, 138)},
    **{"rt_tgsigqueueinfo": (297, 240), "process_madvise": (440, 440), "sched_setscheduler": (144, 119)},
}
_CLONE, _CLONE3, _KILL, _TGKILL, _PRCTL, _PRLIMIT = (56, 220), (435, 435), (62, 129), (234, 131), (157, 167), (302, 261)
_PIVOT_ROOT, _CAPSET, _SECCOMP_FILTER, _CLONE_THREAD = (155, 41), (126, 91), 2, 0x10000
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8


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
    _checked(_LIBC.prctl(option, ctypes.c_ulong(value), pointer or zero, zero, zero), f"prctl({option})")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    result = _LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _checked(result, f"mount {kind or 'bind'} {target}")


def die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _require_architecture() -> int:
    if _ARCHITECTURE is None:
        raise OSError(38, f"no system call numbers for {platform.machine()}")
    return _ARCHITECTURE


# --- namespaces


def unshare(user: bool) -> None:
    """Enter new pid, network, mount, IPC and host name spaces, as an ordinary user inside a new user namespace.

    The pid namespace is that of processes forked from here on.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = _NEW_NS | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS | (_NEW_USER if user else 0)
    _checked(_LIBC.unshare(flags), "unshare")
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def readable(search_path: list[str]) -> list[str]:
    """Return what a program may read: the standard library and the system's shared libraries."""
    library = os.path.dirname(os.path.dirname(os.path.realpath(os.__file__)))
    wanted = [library, *(os.path.realpath(path) for path in search_path), *_LIBRARIES]
    found = [path for path in dict.fromkeys(wanted) if os.path.exists(path)]
    inside = [p for p in found if any(p != q and p.startswith(q + "/") and not os.path.islink(q) for q in found)]
    return [path for path in found if path not in inside]


def enter_root(paths: list[str], box_bytes: int, uid: int) -> None:
    """Change to a file tree of nothing but ``paths``, read-only, four devices and an empty, small working folder."""
    _mount("none", "/", None, _REC | _PRIVATE)
    root = next(p for p in _MOUNT_POINTS if os.path.isdir(p) and not any(q.startswith(p + "/") for q in paths))
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    os.chmod(root, 0o755)
    for path in (*paths, *_DEVICES):
        _show(path, root + path)
    os.mkdir(root + "/box")
    gid = os.getegid() if uid == os.geteuid() else uid
    data = f"size={max(box_bytes, 4096)},nr_inodes=256,mode=700,uid={uid},gid={gid}"
    _mount("tmpfs", root + "/box", "tmpfs", _NOSUID | _NODEV | _NOEXEC, data)
    _mount(None, root, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir(root)
    _syscall(_PIVOT_ROOT[_require_architecture()], "pivot_root", ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
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
    """Return the user that programs run as. In namespaces made by root it is this sandbox's alone."""
    return _FIRST_UID + os.getpid() if mode == "namespaces" and os.geteuid() == 0 else os.geteuid()


def drop_privileges(uid: int) -> None:
    """Give up root, every capability, and the way back."""
    if uid != os.geteuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    else:
        for capability in range(64):
            _LIBC.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)  # those that exist and are held
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _syscall(_CAPSET[_require_architecture()], "capset", ctypes.c_char_p(header), ctypes.c_char_p(nothing))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)


# --- Landlock


def landlock(paths: list[str]) -> None:
    """Allow from here on only reading of ``paths``: no file can be written or made, no TCP port used."""
    version = _syscall(_LANDLOCK_CREATE, "landlock", None, 0, 1)
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rule_set = struct.pack("QQQ", rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _syscall(_LANDLOCK_CREATE, "landlock", ctypes.c_char_p(rule_set), size, 0)
    for path in (*paths, "/dev/null", "/dev/urandom"):
        write = _WRITE_FILE if path == "/dev/null" else 0
        allowed = _READ_FILE | (_EXECUTE | _READ_DIR if os.path.isdir(path) else write)
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed & rights, beneath)
        _syscall(_LANDLOCK_ADD, f"landlock {path}", ruleset, 1, ctypes.c_char_p(rule), 0)
        os.close(beneath)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _syscall(_LANDLOCK_RESTRICT, "landlock", ruleset, 0)
    os.close(ruleset)


def enter_vanished_folder() -> None:
    """Enter an empty working folder in which nothing can be made, and that leaves nothing behind."""
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


# --- seccomp


def seccomp(pid: int) -> None:
    """Forbid new processes (not threads), programs, sockets, debugging, mounts, shared memory, signals to others."""
    arch = _require_architecture()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    program = b"".join(struct.pack("HBBI", *step) for step in _filter(arch, pid))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, ctypes.c_char_p(header))


def _filter(arch: int, pid: int) -> list[tuple[int, int, int, int]]:
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, absent, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    answer, first_argument = (lambda what: (end, 0, 0, what)), (load, 0, 0, 16)
    steps = [(load, 0, 0, 4), (equal, 1, 0, _AUDIT_ARCH[arch]), answer(kill), (load, 0, 0, 0)]
    if arch == 0:
        steps += [(at_least, 0, 1, 0x40000000), answer(refuse)]  # x32 numbers
    for number in (numbers[arch] for numbers in _DENIED.values() if numbers[arch] >= 0):
        steps += [(equal, 0, 1, number), answer(refuse)]
    steps += [(equal, 0, 1, _CLONE3[arch]), answer(absent)]  # its flags cannot be seen: the C library takes clone
    for number, test in (
        (_CLONE[arch], (any_bit, 1, 0, _CLONE_THREAD)),
        (_KILL[arch], (equal, 1, 0, pid)),
        (_TGKILL[arch], (equal, 1, 0, pid)),
        (_PRLIMIT[arch], (equal, 1, 0, 0)),
        (_PRCTL[arch], (equal, 0, 1, _PR_SET_PDEATHSIG)),
    ):
        steps += [(equal, 0, 4, number), first_argument, test, answer(refuse), answer(allow)]
    return [*steps, answer(allow)]


# --- limits


def limit(memory_bytes: int, cpu_seconds: int, file_bytes: int, threads: int | None) -> None:
    """Set resource limits of this process; ``threads`` is None where the user's other processes would count."""
    stack = min(112 << 20, memory_bytes)  # a larger one would grow into what lies below it
    wanted = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_STACK: stack,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        **({} if threads is None else {resource.RLIMIT_NPROC: threads}),
    }
    for name, value in wanted.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def leave(code: int) -> NoReturn:
    os._exit(code)
