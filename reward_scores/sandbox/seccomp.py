"""Filter the system calls of a program: those of an ordinary Python program, on itself alone, and
no others (Linux).

An allow-list, so that what a later kernel adds is denied as well. A call that is not listed does
not exist for the program (ENOSYS, for which the C library has a way round where it tries a newer
call first); one of the ``LIMITED`` is not permitted (EPERM) but with the arguments given there. Of
an argument the filter sees the number alone, never what it points to: a call whose target is behind
a pointer is left out.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ARCHITECTURE = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
Numbers = tuple[int, int]  # x86_64, aarch64; -1 where there is none

# Each call and its numbers
_CALLS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
pwritev 296 70, preadv2 327 286, pwritev2 328 287, lseek 8 62, sendfile 40 71,
copy_file_range 326 285, splice 275 76, tee 276 77, close 3 57, close_range 436 436, dup 32 23,
dup2 33 -1, dup3 292 24, fsync 74 82, fdatasync 75 83, fadvise64 221 223, open 2 -1,
openat 257 56, openat2 437 437, creat 85 -1, access 21 -1, faccessat 269 48, faccessat2 439 439,
stat 4 -1, lstat 6 -1, fstat 5 80, newfstatat 262 79, statx 332 291, statfs 137 43,
fstatfs 138 44, readlink 89 -1, readlinkat 267 78, getcwd 79 17, chdir 80 49, fchdir 81 50,
getdents 78 -1, getdents64 217 61, umask 95 166, pipe 22 -1, pipe2 293 59, poll 7 -1,
ppoll 271 73, select 23 -1, pselect6 270 72, epoll_create 213 -1, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -1, epoll_pwait 281 22, eventfd2 290 19, timerfd_create 283 85,
timerfd_settime 286 86, timerfd_gettime 287 87, signalfd4 289 74, pause 34 -1, nanosleep 35 101,
clock_nanosleep 230 115, restart_syscall 219 128, wait4 61 260, waitid 247 95, mmap 9 222,
munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, msync 26 227, brk 12 214,
membarrier 324 283, futex 202 98, futex_waitv 449 449, set_robust_list 273 99, rseq 334 293,
set_tid_address 218 96, arch_prctl 158 -1, sched_yield 24 124, sched_getaffinity 204 123,
getcpu 309 168, exit 60 93, exit_group 231 94, rt_sigaction 13 134, rt_sigprocmask 14 135,
rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133, rt_sigtimedwait 128 137,
sigaltstack 131 132, alarm 37 -1, setitimer 38 103, getitimer 36 102, getpid 39 172,
gettid 186 178, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
getresuid 118 148, getresgid 120 150, getgroups 115 158, getpgrp 111 -1, getrusage 98 165,
getrlimit 97 163, setrlimit 160 164, times 100 153, time 201 -1, uname 63 160,
gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114, sysinfo 99 179,
getrandom 318 278, recvfrom 45 207, recvmsg 47 212, shutdown 48 210, getsockname 51 204,
getpeername 52 205, getsockopt 55 209
"""
ALLOWED: dict[str, Numbers] = {}
for _call in _CALLS.split(","):
    _name, _x86_64, _aarch64 = _call.split()
    ALLOWED[_name] = (int(_x86_64), int(_aarch64))


class Word(NamedTuple):
    """A condition on 32 bits of the arguments: word 2n is argument n, as the kernel reads an int of
    it."""

    word: int
    values: tuple[int, ...]
    mask: int = 0  # 0: all bits


_THREAD, _NEW_NAMESPACES = 0x00010000, 0x7E020080  # flags of clone
_STREAM, _KIND = 1, 0xF  # of socketpair's type
_F_SETFL, _O_ASYNC = 4, 0x2000
# Dup, get and set the descriptor's flags, get the file's, dup and close, pipe's size
_FCNTL = (0, 1, 2, 3, 1030, 1032)
# TCGETS, window's size, FIONREAD, FIONBIO, FIO(N)CLEX
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_PRCTL = (15, 16, 0x53564D41)  # a thread's name, a mapping's name


def limited(pid: int) -> list[tuple[str, Numbers, tuple[Word, ...]]]:
    """Return the calls that are allowed with some arguments, of the process ``pid``; a name may
    stand there twice."""
    fcntl = (72, 25)
    return [
        ("clone", (56, 220), (Word(0, (_THREAD,), _THREAD | _NEW_NAMESPACES),)),
        ("kill", (62, 129), (Word(0, (pid,)),)),
        ("tgkill", (234, 131), (Word(0, (pid,)),)),
        ("prlimit64", (302, 261), (Word(0, (0, pid)),)),
        ("prctl", (157, 167), (Word(0, _PRCTL),)),
        ("ioctl", (16, 29), (Word(2, _IOCTL),)),
        # F_SETOWN and F_SETSIG with O_ASYNC would have the kernel send a signal of choice to a
        # process of choice
        ("fcntl", fcntl, (Word(2, _FCNTL),)),
        ("fcntl", fcntl, (Word(2, (_F_SETFL,)), Word(4, (0,), _O_ASYNC))),
        # Unix stream pairs alone (asyncio wakes itself with one): a datagram could go to any socket
        # by its name
        ("socketpair", (53, 199), (Word(0, (1,)), Word(2, (_STREAM,), _KIND))),
        ("sendto", (44, 206), (Word(8, (0,)), Word(9, (0,)))),
    ]


def install(pid: int) -> None:
    """Filter the system calls of this thread from here on. Raises OSError where the kernel or the
    machine cannot."""
    if ARCHITECTURE is None:
        raise OSError(38, f"no system call numbers for {platform.machine()}")
    libc, zero = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(0)
    program = b"".join(struct.pack("HBBI", *step) for step in _filter(ARCHITECTURE, pid))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.c_char_p(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)))
    no_new_privs, set_seccomp, by_filter = 38, 22, ctypes.c_ulong(2)
    if libc.prctl(no_new_privs, ctypes.c_ulong(1), zero, zero, zero) or libc.prctl(
        set_seccomp, by_filter, header, zero, zero
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


# An instruction of the kernel's filters: code, steps if true, steps if false, value
Step = tuple[int, int, int, int]
_LOAD, _EQUAL, _AND, _JUMP, _END = 0x20, 0x15, 0x54, 0x05, 0x06
_ALLOW, _REFUSE, _ABSENT, _KILL = (
    (_END, 0, 0, what) for what in (0x7FFF0000, 0x00050001, 0x00050026, 0x80000000)
)


def _filter(arch: int, pid: int) -> list[Step]:
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT_ARCH[arch]), _KILL, (_LOAD, 0, 0, 0)]
    for numbers in ALLOWED.values():
        if numbers[arch] >= 0:
            steps += [(_EQUAL, 0, 1, numbers[arch]), _ALLOW]
    rules = limited(pid)
    for _, numbers, words in rules:
        steps += _rule(numbers[arch], words)
    steps.append((_LOAD, 0, 0, 0))
    for number in dict.fromkeys(numbers[arch] for _, numbers, _ in rules):
        steps += [(_EQUAL, 0, 1, number), _REFUSE]
    return [*steps, _ABSENT]


def _rule(number: int, words: Sequence[Word]) -> list[Step]:
    """Return the steps that allow a call where all words are as they must be, and else go on behind
    them."""
    rest: list[Step] = [_ALLOW]
    for word in reversed(words):
        rest = [*_test(word), (_JUMP, 0, 0, len(rest)), *rest]
    return [(_LOAD, 0, 0, 0), (_EQUAL, 0, len(rest), number), *rest]


def _test(word: Word) -> Iterator[Step]:
    """Yield the steps that pass over the one behind them where the word has one of its values."""
    yield (_LOAD, 0, 0, 16 + 4 * word.word)
    if word.mask:
        yield (_AND, 0, 0, word.mask)
    for place, value in enumerate(word.values):
        yield (_EQUAL, len(word.values) - place, 0, value)
