"""The code of the confined processes: a program, a program whose functions are called, or the tests of one.

The tests of assertions run in a process of their own, the *judge*. There the program's functions are stand-ins that
send the call over, and what comes back is plain data, so a program can alter nothing that an assertion is made of.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import types
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import Any, BinaryIO

import plain

ITEMS_MAX = 1_000_000  # of an iterator that is read to its end


class _Source(SourceFileLoader):
    """A loader of a module from text."""

    def __init__(self, name: str, source: str):
        super().__init__(name, f"<{name}>")
        self.source = source

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)


def load(name: str, source: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the source as a module named ``name`` and return its namespace."""
    module = types.ModuleType(name)
    module.__dict__.update(namespace or {})
    sys.modules[name] = module
    _Source(name, source).exec_module(module)
    return module.__dict__


def become_program(source: str) -> int:
    """Run a script on file descriptors 0, 1 and 2 and return its exit code."""
    sys.argv = ["program.py"]
    _open_standard_streams()
    try:
        code = _exit_code(lambda: load("__main__", source))
        _finish_threads_and_exit_functions()
        sys.stdout.flush()
    except (OSError, ValueError):  # its output is closed or too long
        return 1
    return code


def _open_standard_streams() -> None:
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)


def _exit_code(run: Callable[[], Any]) -> int:
    try:
        run()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 255
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:  # the program's own failure, whatever it is, shown as the interpreter would show it
        sys.__excepthook__(*sys.exc_info())
        return 1
    return 0


def _finish_threads_and_exit_functions() -> None:
    for name, last in (("threading", "_shutdown"), ("atexit", "_run_exitfuncs")):
        if name in sys.modules:
            getattr(sys.modules[name], last)()


# --- a program whose functions are called


class Server:
    """A server of calls of a program's functions over a pair of pipes, one JSON a line."""

    def __init__(self, source: str, requests: BinaryIO, answers: BinaryIO):
        self.source, self.requests, self.answers = source, requests, answers
        self.kept: list[Any] = []
        self.names: dict[str, Any] = {}

    def run(self) -> None:
        self._answer(self._load)
        for line in self.requests:
            request = plain.loads(line)
            self._answer(lambda request=request: self._serve(*request))

    def _answer(self, work: Callable[[], Any]) -> None:
        try:
            message = ["ok", work()]
        except Exception as error:  # whatever the program raises is the answer
            message = ["raised", type(error).__name__, str(error)[:500]]
        self.answers.write(plain.dumps(message) + b"\n")
        self.answers.flush()

    def _load(self) -> None:
        self.names = load("program", self.source)

    def _keep(self, value: Any) -> int:
        self.kept.append(value)
        return len(self.kept) - 1

    def _serve(self, action: str, target: Any, arguments: Any) -> Any:
        given = plain.decode(arguments, self.kept.__getitem__)
        if action == "find":
            return plain.encode(self._find(target), self._keep)
        owner = self.kept[target]
        if action == "call":
            value = owner(*given[0], **given[1])
        elif action == "get":
            value = getattr(owner, given)
        elif action == "set":
            value = setattr(owner, *given)
        else:
            value = [item for item, _ in zip(owner, range(ITEMS_MAX), strict=False)]
        return plain.encode(value, self._keep)

    def _find(self, name: str) -> Any:
        """Return a name of the program; ``Solution.name`` is a method of a new object, as contest graders take it."""
        owner, dot, method = name.partition(".")
        return getattr(self.names[owner](), method) if dot else self.names[name]


# --- the judge


class ProgramFailed(Exception):
    """The program under test raised an error that is no built-in one, ended, or sent what is no value."""


class Remote:
    """A stand-in, in the judge, for an object of the program. It equals nothing but itself."""

    __slots__ = ("_link", "_number")

    def __init__(self, link: Link, number: int):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask("call", self._number, (args, kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the judge's own machinery asks for these
            raise AttributeError(name)
        return self._link.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("set", self._number, (name, value))

    def __iter__(self) -> Any:
        return iter(self._link.ask("iterate", self._number, None))


class Link:
    """The judge's end of the pipes to a :class:`Server`."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO):
        self.requests, self.answers = requests, answers

    def ask(self, action: str, target: Any, arguments: Any) -> Any:
        encoded = plain.encode(arguments, _number_of)
        try:
            self.requests.write(plain.dumps([action, target, encoded]) + b"\n")
            self.requests.flush()
        except OSError as error:
            raise ProgramFailed("it has ended") from error
        return self.receive()

    def receive(self) -> Any:
        line = self.answers.readline(plain.MAX_BYTES)
        if not line.endswith(b"\n"):
            raise ProgramFailed("it ended, or sent too much")
        try:
            answer = plain.loads_foreign(line)
            if answer[0] == "ok":
                return plain.decode(answer[1], lambda number: Remote(self, number))
            name, text = str(answer[1]), str(answer[2])
        except (plain.NotPlain, LookupError, TypeError) as error:
            raise ProgramFailed(f"it sent no value: {error}") from error
        kind = getattr(builtins, name, None)
        plain_error = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
        raise kind(text) if plain_error else ProgramFailed(f"{name}: {text}")


def _number_of(value: Any) -> int:
    if isinstance(value, Remote):
        return value._number
    raise TypeError(f"a test passes a {type(value).__name__}, which cannot be sent to the program")


class Judge:
    """A runner of tests against a program in another process. ``report`` gets one message a test."""

    def __init__(self, link: Link, report: Callable[[Any], None]):
        self.link, self.report = link, report

    def run(self, prelude: str, tests: list[str], names: list[str]) -> None:
        """Run the tests. ``names`` are the program's that they use; what else the prelude defines is their own."""
        try:
            self.link.receive()  # the program is loaded
            namespace = load("prelude", prelude)
            namespace.update({name: found for name in names for found in self._find(name)})
        except BaseException as error:  # no test can pass; the program is told apart from the tests by the kind
            for _ in tests:
                self.report(_failure(error))
            return
        for number, test in enumerate(tests):
            try:
                namespace = load(f"test_{number}", test, namespace)
            except BaseException as error:  # a test fails in any way, an assertion among them
                self.report(_failure(error))
            else:
                self.report(["passed", ""])

    def _find(self, name: str) -> list[Any]:
        if name in sys.stdlib_module_names:
            return [importlib.import_module(name)]
        try:
            return [self.link.ask("find", name, None)]
        except KeyError:
            return []


def _failure(error: BaseException) -> list[str]:
    kind = "failed" if isinstance(error, AssertionError) else "raised"
    return [kind, f"{type(error).__name__}: {error}"[:500]]


def silence() -> None:
    """Send standard output and error nowhere, and read nothing."""
    nowhere = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
