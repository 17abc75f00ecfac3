"""A run's loop in a process of its own, apart from the shell that asked for it: the process, and the shell's end.

On a cluster the loop is an actor that needs no GPU, so that a closed shell does not end the run
(``core.cluster.ray_driver.place_driver`` makes it; nothing here imports ray). The shell shows what the loop prints,
hands a
Ctrl-C on, starts the loop again where its process dies, and ends with its exit status. A later shell that asks for the
same run folder joins the run that goes on.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from core.cluster import signals
from core.cluster.restarts import work
from core.config import convert
from core.errors import WorkersLost

if TYPE_CHECKING:
    from core.config.schema import Config

FOLDER = "RLREPRO_FOLDER"  # where the shell stood, for processes that were started elsewhere
LOG = "driver.log"  # in the run folder: what the loop printed, for when no shell is there
KEPT = 10_000  # pieces of output for a shell that comes later
WAIT_S = 1.0  # of a shell for news; a Ctrl-C is handed on after it
LINGER_S = 30.0  # for a shell to come for the exit status


def stand_where_the_shell_stood() -> None:
    """Relative paths of the configuration mean the shell's folder, on every machine that has it."""
    folder = os.environ.get(FOLDER)
    if folder and os.path.isdir(folder):
        os.chdir(folder)


@dataclass(frozen=True)
class News:
    """What a shell hears of the loop: ``pieces`` are (1 or 2, text) for stdout and stderr, up to number ``seen``."""

    pieces: tuple[tuple[int, str], ...]
    seen: int
    restarts: int
    saved: bool  # whether there is a checkpoint of this run to go on from
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
        self.run: Any = None
        self.status: int | None = None
        self.told = threading.Event()

    def start(self, trainer: str, config: Config, restarts: int) -> None:
        """Begins the loop and returns."""
        self.config, self.restarts = config, restarts
        folder = Path(config.trainer.default_local_dir)
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
        """What was written after the first ``seen`` pieces; waits for something a while."""
        with self.news:
            self.news.wait_for(lambda: self.written > seen or self.status is not None, wait_s)
            fresh = self.written - max(seen, self.written - len(self.pieces))
            pieces = tuple(list(self.pieces)[len(self.pieces) - fresh :])
            if self.status is not None:
                self.told.set()
            saved = self.run is not None and self.run.session.saved_step is not None
            return News(pieces, self.written, self.restarts, saved, self.status)

    def lifeline(self) -> None:
        """Never returns."""
        threading.Event().wait()

    def write(self, stream: int, text: str) -> None:
        with self.news:
            self.pieces.append((stream, text))
            self.written += 1
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
        except BaseException:  # whatever it is, the shell must hear of it
            traceback.print_exc()
            status = 1
        with self.news:
            self.status = status
            self.news.notify_all()
        self.told.wait(LINGER_S)
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


# -- the shell's end ---------------------------------------------------------------------------------


class Driver(Protocol):
    """A loop's process as the shell sees it; each call raises WorkersLost where the process is gone."""

    def settings(self) -> dict[str, Any]: ...

    def read(self, seen: int) -> News: ...

    def interrupt(self) -> None: ...

    def kill(self) -> None: ...


def oversee(place: Callable[[Config, int], tuple[Driver, bool]], config: Config) -> int:
    """Shows the loop to its end; starts it again from its checkpoint where its process dies. The exit status.

    ``place(config, restarts)`` starts the loop, or finds the one that works on the run folder already (then True).
    """
    news, limit = News((), 0, 0, False, None), config.trainer.max_restarts
    with _signals() as asked:
        while True:
            driver, joined = place(config, news.restarts)
            if joined and not _same_run(driver, config):
                return 2
            news = dataclasses.replace(news, seen=0)
            try:
                while news.status is None:
                    news = driver.read(news.seen)
                    _show(news)
                    if len(asked) > 1:
                        driver.kill()
                        return signals.EXIT_STATUS
                    if asked:
                        driver.interrupt()
                return news.status
            except WorkersLost as error:
                if news.restarts >= limit or asked:
                    print(f"{error}\n(trainer.max_restarts={limit}: not started again)", file=sys.stderr)
                    return 1
                news = dataclasses.replace(news, restarts=news.restarts + 1)
                print(f"{error}\nrestart {news.restarts} of {limit}, of the loop's process", file=sys.stderr)
                if news.saved:
                    config = convert.replaced(config, {"trainer.resume_mode": "auto"})


def _same_run(driver: Driver, config: Config) -> bool:
    """Whether the loop that is there works with these settings; says so either way."""
    there, here = driver.settings(), convert.as_json(config)
    changed = [f"{key} is {there.get(key)} there, {here[key]} here" for key in here if there.get(key) != here[key]]
    folder = config.trainer.default_local_dir
    if changed:
        print(f"a run with other settings works in {folder}: {'; '.join(changed)}", file=sys.stderr)
    else:
        print(f"joined the run that works in {folder}", file=sys.stderr)
    return not changed


def _show(news: News) -> None:
    for number, text in news.pieces:
        stream = sys.stdout if number == 1 else sys.stderr
        stream.write(text)
        stream.flush()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM for as long as it is entered; the second one ends :func:`oversee` within a second."""
    seen: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        seen.append(number)
        again = "" if len(seen) == 1 else " again: stopping at once; the last complete checkpoint stands"
        os.write(2, f"\n{signal.Signals(number).name}{again or signals.NOTICE}\n".encode())

    before = {number: signal.signal(number, note) for number in signals.SIGNALS}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
