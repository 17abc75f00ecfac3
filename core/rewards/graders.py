"""Grading in processes that can be killed: every job has a deadline, and nothing a scorer does reaches the trainer.

Here too is the choice of where an answer is graded, :func:`make_manager`.

A grader is a process in a session of its own (:mod:`core.rewards.grader_process`), which reads and writes lines. The
driver counts its time: a grader that misses a deadline is killed with everything it started, and replaced. No pickle is
read on either side. Libraries for this (``concurrent.futures``, pebble) were tried: they kill a worker, but not the
processes that it has started, and they unpickle what it sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core.config import code_by_path, registry
from core.config.code_by_path import load_module, load_object
from core.errors import InputError, WorkersLost
from core.rewards.custom_reward import users_code, without_scheme
from core.rewards.grading import Failure, InProcess, Job, RewardManager, Scorers, as_result
from reward_scores.http_client import BackgroundLoop
from reward_scores.score import Score, ScoreStatus

if TYPE_CHECKING:
    from core.config.sections.reward import RewardModelConfig

START_S = 120.0  # for a grader to import the user's function, which is not the answer's time
KILL_S = 10.0  # for a grader that was killed to be gone
TRIES = 3  # graders that may be lost under a job, or die before they have begun it
LONGEST_LINE = 64 * 2**20  # bytes of a grader's reply
SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

log = logging.getLogger(__name__)


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Grader:
    """One grading process, which is started when it is first needed; all methods run on one event loop.

    Lines to it: ``<number> <jobs, JSON>``. Lines from it: ``<number> begun``, ``<number> more|last <result, JSON>``
    (``last``: the process that graded ends, for its scorer has left something behind), ``0 died <how>``.
    """

    def __init__(self, settings: Mapping[str, Any]):
        self.settings = settings
        self.process: asyncio.subprocess.Process | None = None
        self._number = 0

    async def grade(self, jobs: str, seconds: float) -> tuple[str, bytes]:
        """Return a status and its details: ``graded`` and JSON, or ``timeout``, ``crash`` or ``killed`` and a text.

        ``killed``: by somebody else. Raises WorkersLost where the process itself ends.
        """
        if self.process is None or self.process.returncode is not None:
            await self._start()
        self._number += 1
        try:
            async with asyncio.timeout(START_S):
                if died := await self._begin(jobs):
                    await self.stop()
                    return "crash", b"the grader %s before it had begun" % died
        except TimeoutError:
            await self.stop()
            return "crash", b"a grader was not ready after %g s" % START_S
        try:
            async with asyncio.timeout(seconds):
                number, kind, text = await self._line()
        except TimeoutError:
            await self.kill()
            return "timeout", b"killed after %g s (reward_model.timeout_s)" % seconds
        except ValueError:
            await self.stop()
            return "crash", b"the scorer's result has more than %d bytes" % LONGEST_LINE
        if kind == b"died":
            how = b"the grader %s before it returned a score" % text
            return ("killed" if text == b"died of SIGKILL" else "crash"), how
        if number != b"%d" % self._number or kind not in (b"more", b"last"):
            await self.kill()
            return "crash", b"the grader wrote what is no message: " + repr(
                b" ".join((number, kind, text))[:200]
            ).encode()
        if kind == b"last":
            await self._until_dead()
        return "graded", text

    async def _start(self) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "core.rewards.grader_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
            start_new_session=True,  # a Ctrl-C is the driver's: the step it finishes still needs its scores
            # One thread: it forks, and a thread's memory counts against the limit
            env={**os.environ, "PYTHONPATH": path, **dict.fromkeys(SINGLE_THREADED, "1")},
        )
        # Not awaited: a start that is cancelled has its settings all the same
        self.process.stdin.write(to_json({**self.settings, "driver": os.getpid()}).encode() + b"\n")

    async def _write(self, line: str) -> None:
        with contextlib.suppress(ConnectionError):  # it is dead: the next line that is read tells
            self.process.stdin.write(line.encode() + b"\n")
            await self.process.stdin.drain()

    async def _begin(self, jobs: str) -> bytes:
        """Send jobs and wait until they are begun. Return how grader after grader died, or nothing."""
        for _ in range(TRIES):
            await self._write(f"{self._number} {jobs}")
            number, kind, text = await self._line()
            while kind != b"died":
                if kind == b"begun" and number == b"%d" % self._number:
                    return b""
                number, kind, text = await self._line()
            # It died idle: before it had read the jobs, or while. They are sent again; a number is graded once
        return text

    async def _line(self) -> tuple[bytes, bytes, bytes]:
        """Return the three parts of the next line. Raises WorkersLost at the end, ValueError for a line too long."""
        while (line := await self.process.stdout.readline()) == b"\n":
            pass
        if not line:
            status = await self.process.wait()
            raise WorkersLost(f"a grader ended with status {status}; see the messages above")
        number, _, rest = line.rstrip(b"\n").partition(b" ")
        kind, _, text = rest.partition(b" ")
        return number, kind, text

    async def _until_dead(self) -> None:
        try:
            async with asyncio.timeout(KILL_S):
                while (await self._line())[1] != b"died":
                    pass
        except (TimeoutError, ValueError, WorkersLost):
            await self.stop()

    async def kill(self) -> None:
        """Kill what grades now, and wait until it is gone. The next jobs get another."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGUSR1)
            await self._until_dead()

    async def stop(self) -> None:
        """End the process and all that it started."""
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(KILL_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


class GraderPool:
    """Grades jobs in ``num_workers`` graders (None: one a core, at most 4).

    A job that takes longer than ``timeout_s``, counted from when a grader begins it, gets status timeout; one whose
    grader dies, or whose scorer raises, gets crash. A grader may map ``memory_limit_mb`` MiB (None: no limit; a limit
    that is too low for what the user's module imports shows at start). An asynchronous function runs in the grader's
    own event loop, one job at a time. A job whose grader somebody else killed (``kill -9``, a lack of memory) is graded
    once more.

    A batched function is called with the jobs of :meth:`run_together`; ``timeout_s`` is then the time of that call.
    What a job holds must be JSON (:func:`to_json`). No process is started before the first job.
    """

    def __init__(
        self,
        scorers: Scorers,
        *,
        num_workers: int | None = None,
        timeout_s: float = 10.0,
        memory_limit_mb: int | None = 1024,
    ):
        self.timeout_s, self.num_workers = timeout_s, num_workers or min(4, cores())
        self.settings = {
            "memory_limit_mb": memory_limit_mb,
            "reward_kwargs": scorers.reward_kwargs,
            "custom": scorers.custom and scorers.custom.settings,
        }
        self.preloaded: tuple[str, ...] = ()
        self.graders: list[Grader] = []
        self._loop: BackgroundLoop | None = None  # of a thread, so that the callers' event loops may come and go
        self._idle: asyncio.LifoQueue[Grader] = asyncio.LifoQueue()

    def preload(self, libraries: Iterable[str]) -> None:
        """Name functions (``module:name``) that import slow libraries once a grader, for all of its forks."""
        self.preloaded = tuple(sorted({*self.preloaded, *libraries}))

    async def run(self, job: Job) -> Score | Failure:
        return (await self.run_together([job]))[0]

    async def run_together(self, jobs: Sequence[Job]) -> list[Score | Failure]:
        """Return the results of jobs that one grader gets at once, in the time of one: a batched function's one call.

        Raises WorkersLost where grader after grader is lost: that is never the fault of an answer.
        """
        try:
            body = to_json(list(map(vars, jobs)))
        except (TypeError, ValueError) as error:
            return [Failure(ScoreStatus.CRASH, f"a job for a grader must be JSON: {error}")] * len(jobs)
        if self._loop is None:
            self._loop, self._idle = BackgroundLoop("graders"), asyncio.LifoQueue()
            self.graders = [Grader({**self.settings, "preload": self.preloaded}) for _ in range(self.num_workers)]
            for grader in reversed(self.graders):  # the first one is taken first: as few start as are needed
                self._idle.put_nowait(grader)
        loop = self._loop
        try:
            return _results(*await asyncio.wrap_future(loop.submit(self._grade(body))), len(jobs))
        except asyncio.CancelledError:
            if self._loop is loop or asyncio.current_task().cancelling():
                raise
            return [Failure(ScoreStatus.CRASH, "the graders were closed")] * len(jobs)

    async def _grade(self, jobs: str) -> tuple[str, bytes]:
        grader = await self._idle.get()
        try:
            for tried in range(TRIES):
                try:
                    status, text = await grader.grade(jobs, self.timeout_s)
                except WorkersLost as error:
                    log.warning("%s; another one grades what it had not finished", error)
                    lost = error
                    continue
                if status == "killed" and not tried:
                    continue  # once, for the answer may have done it itself
                return status, text
            raise lost
        except asyncio.CancelledError:
            await grader.kill()
            raise
        finally:
            self._idle.put_nowait(grader)

    def close(self) -> None:
        """Kill the graders. The next job would start new ones."""

        async def stop() -> None:
            await asyncio.gather(*(grader.stop() for grader in self.graders))

        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close(stop)


def _results(status: str, text: bytes, count: int) -> list[Score | Failure]:
    """Read what a grader wrote: its scorer may have written it."""
    if status != "graded":
        failed = ScoreStatus.TIMEOUT if status == "timeout" else ScoreStatus.CRASH
        return [Failure(failed, text.decode(errors="replace"))] * count
    try:
        value = json.loads(text)
        if isinstance(value, str):
            return [Failure(ScoreStatus.CRASH, value)] * count
        if isinstance(value, dict):
            return [Failure(ScoreStatus.CRASH, f"{value['wrong']}\n", fatal=True)] * count
        scores = [
            Failure(ScoreStatus.CRASH, result)
            if isinstance(result, str)
            else Score(**{**result, "status": ScoreStatus(result["status"])})
            for result in value
        ]
        if len(scores) != count:
            raise ValueError(f"{len(scores)} scores for {count} jobs")
        return scores
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return [Failure(ScoreStatus.CRASH, f"unreadable result ({error}): {text[:200]!r}")] * count


def to_json(value: Any) -> str:
    """Write what goes to a grader. Raises TypeError or ValueError that names what is not JSON."""

    def as_dict(value: Any) -> dict[str, Any]:
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"{type(value).__name__} is not JSON: {value!r:.100}")

    return json.dumps(value, default=as_dict)


# -- reward managers: where an answer is graded (reward_model.reward_manager) --------------------------


class UsersOwn:
    """A user's manager: what it returns is read like a reward function's result, and what it raises is a crash."""

    def __init__(self, manager: Any):
        self.manager = manager

    async def run(self, job: Job) -> Score | Failure:
        return await as_result(self.manager.run, job)

    def close(self) -> None:
        self.manager.close()


def naive(reward: RewardModelConfig, scorers: Scorers) -> InProcess:
    return InProcess(scorers, pool(reward, scorers))


def pool(reward: RewardModelConfig, scorers: Scorers) -> GraderPool:
    limits = {name: getattr(reward, name) for name in ("num_workers", "timeout_s", "memory_limit_mb")}
    if reward.sandbox_fusion.url:  # a server that restarts must not cost an answer: its time is not the scorer's
        limits["timeout_s"] += reward.sandbox_fusion.give_up_s
    return GraderPool(scorers, **limits)


KEY, MODULE = "reward_model.reward_manager", "reward_model.module.path"


def register(name: str) -> Callable[[Any], Any]:
    """Return a decorator that names a manager: ``reward_model.reward_manager=name``, in the module of ``module.path``.

    Raises InputError for a name that is taken.
    """
    return code_by_path.registering(KEY, registry.REWARD_MANAGERS, name)


def make_manager(reward: RewardModelConfig, scorers: Scorers) -> RewardManager:
    """Make the manager that ``reward_model`` names: one of the table, or the user's own.

    A user's is a class (or function) in ``module.path``, which names it by :func:`register`; with ``source=importlib``
    it is ``module.name`` there. It is called with ``reward_model`` and the :class:`Scorers` of the run (so that it can
    use an :class:`InProcess` or a :class:`GraderPool`), and what it returns has ``async run(job)`` and ``close()``.
    Raises InputError.
    """
    name, own = reward.reward_manager, registry.own_manager(reward.reward_manager, reward.source)
    if not own:
        return load_object(registry.reward_manager(name, reward.source).function)(reward, scorers)
    where, key = without_scheme(reward.module.path or ""), f"{KEY}={name}"
    with users_code(f"{MODULE}={where}", "loading it"):
        if reward.source == "importlib":
            key = f"reward_model.module.name={reward.module.name}"
            maker = load_object(f"{where}:{reward.module.name or ''}", MODULE)
        else:
            load_module(where, f"{MODULE}={where}")
            names = code_by_path.registered(KEY)
            if name not in names:
                has = f"it has {', '.join(names)}" if names else "it has no name"
                raise InputError(
                    f'{key}: {where} registers no such name, {has}; write @register("{name}") over the class'
                )
            maker = names[name]
        manager = maker(reward, scorers)
    if lacks := [name for name in ("run", "close") if not callable(getattr(manager, name, None))]:
        raise InputError(f"{key}: has no {' and no '.join(lacks)}()")
    return UsersOwn(manager)
