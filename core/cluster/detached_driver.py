"""A run's loop in a process apart from the shell that started it: the process, and the shell's side.

On a cluster the loop is an actor beside rank 0 that needs no GPU: closing the terminal does not end the run.
:mod:`core.cluster.ray_driver` places it; nothing here imports ray. The shell shows the output, forwards Ctrl-C,
restarts a loop whose process died, and returns the exit status. Repeating the command reattaches to the run.
"""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from core.cluster import signals
from core.cluster.restarts import work
from core.config import convert
from core.config.paths import run_folder
from core.errors import WorkersLost

if TYPE_CHECKING:
    from core.config.schema import Config

FOLDER = "RLREPRO_FOLDER"  # the shell's working directory, for processes that Ray starts elsewhere
LOG = "driver.log"  # in the run folder: the output, for when no shell is attached
KEPT = 10_000  # pieces of output for a shell that attaches later
WAIT_S = 1.0  # for output; a shell forwards Ctrl-C after it
LINGER_S = 30.0  # for a shell to fetch the exit status


def stand_where_the_shell_stood() -> None:
    """Change to the shell's folder where this machine has it: relative paths of the configuration start there."""
    folder = os.environ.get(FOLDER)
    if folder and os.path.isdir(folder):
        os.chdir(folder)


@dataclass(frozen=True)
class News:
    """What a shell learns of the loop: ``pieces`` are (1 or 2, text) for stdout and stderr, up to number ``seen``."""

    pieces: tuple[tuple[int, str], ...]
    seen: int
    restarts: int
    saved: bool  # whether this run left a checkpoint to resume from
    status: int | None  # of the loop, once it has ended


class DriverProcess:
    """The process that holds the loop, in a thread: Ray's own threads answer the shell meanwhile."""

    def __init__(self) -> None:
        stand_where_the_shell_stood()
        self.news = threading.Condition()
        self.pieces: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self.written = 0
        self.restarts = 0
        self.interrupted = False
        self.config: Config | None = None
        self.log: io.TextIOBase | None = None
        self.run: Any = None
        self.status: int | None = None
        self.fetched = threading.Event()  # set once a shell has the status

    def start(self, trainer: str, config: Config, restarts: int) -> None:
        """Begin the loop and return."""
        self.config, self.restarts = config, restarts
        folder = run_folder(config)
        folder.mkdir(parents=True, exist_ok=True)
        self.log = open(folder / LOG, "a", encoding="utf-8")  # noqa: SIM115  (until the process ends)
        threading.Thread(target=self._work, args=(trainer,), name="loop", daemon=True).start()

    def settings(self) -> dict[str, Any]:
        return convert.as_json(self.config)

    def interrupt(self) -> None:
        self.interrupted = True
        if self.run is not None:
            self.run.session.stop.request()

    def read(self, seen: int, wait_s: float) -> News:
        """Return the output after the first ``seen`` pieces, waiting up to ``wait_s`` for some."""
        with self.news:
            self.news.wait_for(lambda: self.written > seen or self.status is not None, wait_s)
            fresh = self.written - max(seen, self.written - len(self.pieces))
            pieces = tuple(list(self.pieces)[len(self.pieces) - fresh :])
            if self.status is not None:
                self.fetched.set()
            saved = self.run is not None and self.run.session.saved_step is not None
            return News(pieces, self.written, self.restarts, saved, self.status)

    def write(self, stream: int, text: str) -> None:
        with self.news:
            self.pieces.append((stream, text))
            self.written += 1
            with suppress(OSError):  # a full disk; the shell has it all the same
                self.log.write(text)
                self.log.flush()
            self.news.notify_all()

    def _work(self, trainer: str) -> None:
        sys.stdout, sys.stderr = _Stream(self.write, 1), _Stream(self.write, 2)
        try:
            work(trainer, self.config, self.restarts, self._began)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # whatever it is, the shell must show it
            traceback.print_exc()
            status = 1
        with self.news:
            self.status = status
            self.news.notify_all()
        self.fetched.wait(LINGER_S)
        threading.Event().wait(WAIT_S)  # for the answer to leave
        os._exit(0)

    def _began(self, run: Any, restarts: int) -> None:
        self.run, self.restarts = run, restarts
        if self.interrupted:
            run.session.stop.request()


class _Stream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of the loop."""

    def __init__(self, write: Callable[[int, str], None], number: int):
        self._write, self._number = write, number

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._write(self._number, text)
        return len(text)


class Driver(Protocol):
    """A loop's process as the shell sees it; each call raises WorkersLost where the process is gone."""

    def settings(self) -> dict[str, Any]: ...

    def read(self, seen: int) -> News: ...

    def interrupt(self) -> None: ...

    def kill(self) -> None: ...


def oversee(place: Callable[[Config, int], tuple[Driver, bool]], config: Config) -> int:
    """Show the loop to its end, restarting it from its checkpoint where its process dies. Return the exit status.

    ``place(config, restarts)`` starts the loop, or finds the one that works on the run folder already (then True).
    A second signal ends the loop's process, or the wait for a place for it, within a second. A terminal that closes
    (SIGHUP) ends this shell alone: the loop goes on, and the same command joins it.
    """
    news, limit = News((), 0, 0, False, None), config.trainer.max_restarts
    seen: list[int] = []  # signals
    driver: Driver | None = None

    def note(number: int, _: FrameType | None) -> None:
        seen.append(number)
        signals.notify(number, again=len(seen) > 1)
        if len(seen) > 1 and driver is None:  # the cluster may be full for minutes
            raise KeyboardInterrupt

    with signals.handling(note, [number for number in signals.SIGNALS if number != signal.SIGHUP]):
        while True:
            try:
                driver, joined = place(config, news.restarts)
            except KeyboardInterrupt:
                return signals.ENDED_BY_SIGNAL + seen[-1]
            if joined and not _same_run(driver, config):
                return 2
            news = dataclasses.replace(news, seen=0)
            try:
                while news.status is None:
                    news = driver.read(news.seen)
                    for number, text in news.pieces:
                        print(text, end="", file=sys.stdout if number == 1 else sys.stderr, flush=True)
                    if len(seen) > 1:
                        driver.kill()
                        return signals.ENDED_BY_SIGNAL + seen[-1]
                    if seen:
                        driver.interrupt()
                return news.status
            except WorkersLost as error:
                driver = None
                if news.restarts >= limit or seen:
                    print(f"{error}\n(trainer.max_restarts={limit}: not started again)", file=sys.stderr)
                    return 1
                news = dataclasses.replace(news, restarts=news.restarts + 1)
                print(f"{error}\nrestart {news.restarts} of {limit}, of the loop's process", file=sys.stderr)
                if news.saved:
                    config = convert.replaced(config, {"trainer.resume_mode": "auto"})


def _same_run(driver: Driver, config: Config) -> bool:
    """Return whether the active run has these settings, and print the outcome."""
    there, here = driver.settings(), convert.as_json(config)
    changed = [f"{key} is {there.get(key)} there, {here[key]} here" for key in here if there.get(key) != here[key]]
    folder = config.trainer.default_local_dir
    if changed:
        print(f"a run with other settings is active in {folder}: {'; '.join(changed)}", file=sys.stderr)
    else:
        print(f"reattached to the run in {folder}", file=sys.stderr)
    return not changed
