"""The Python way in: ``core.train`` runs a recipe with the keys, checks and messages of the command
line."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Examples = str | Path | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class FinishedRun:
    """The folder of a finished run and its metrics, a dictionary a step."""

    folder: Path
    metrics: Sequence[Mapping[str, float]]

    def report(self) -> Path:
        """Write the report of the run, print its last lines, and return the page."""
        subprocess.run([sys.executable, "-m", "results.report", str(self.folder)], check=True)
        return self.folder / "report.html"


def train(
    recipe: str,
    *,
    model: str | Path,
    data: Examples,
    val_data: Examples = (),
    reward: str | Path | Callable[..., Any] | None = None,
    keys: Mapping[str, Any] | None = None,
) -> FinishedRun:
    """Train a model with a recipe and return the finished run.

    ``data`` and ``val_data`` are a file, or examples with verl's columns; of those a prompt
    suffices. ``reward`` is a file with a function ``compute_score``, or a function with its
    signature. ``keys`` are keys of the command line. Raises InputError where the command line
    refuses, SystemExit where it ends a run, and KeyboardInterrupt where a signal stopped the run:
    the same call continues it.
    """
    from core import command_line
    from core.config import recipes
    from core.config.composition import examine
    from core.errors import InputError

    settings = {
        "actor_rollout_ref.model.path": str(model),
        "data.train_files": _data_file(data),
        "data.val_files": _data_file(val_data) if val_data else [],
        "custom_reward_function.path": _function_file(reward)
        if callable(reward)
        else reward and str(reward),
        "custom_reward_function.name": getattr(reward, "__name__", "compute_score"),
        **(keys or {}),
    }
    composed = examine(recipe, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    if problems := command_line.all_problems(composed, None):
        raise InputError(problems)
    load = command_line.load_trainer(recipes.trainer_of(recipe))
    made: list[Any] = []

    def trainer(config: Any) -> Any:
        made.append(load(config))
        return made[-1]

    def stop() -> None:
        for each in made[-1:]:
            each.run.stop.request("SIGINT")

    try:
        run = _apart(lambda: command_line.train(trainer, composed.config).run, stop)
    except KeyboardInterrupt:  # whose traceback is that of loading, pages long
        raise KeyboardInterrupt("stopped before the first step; call it again") from None
    if run.stop.requested and not run.finished():
        raise KeyboardInterrupt(f"{run.outcome()}; the same call continues")
    lines = (run.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return FinishedRun(run.run_dir, [json.loads(line) for line in lines])


def _apart(work: Callable[[], Any], stop: Callable[[], None]) -> Any:
    """Return what ``work`` returns, which starts event loops.

    A cell of a notebook has one that runs, so there it works in a thread, which no signal reaches:
    the first interrupt calls ``stop`` and waits, the second does not wait.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # SystemExit and KeyboardInterrupt are the caller's too
            done.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        return done.result()
    except KeyboardInterrupt:
        if done.done():
            raise
        stop()
        return done.result()


def _data_file(examples: Examples) -> str:
    """Return the file of these examples, which is written if they are no file yet."""
    if isinstance(examples, str | Path):
        return str(examples)
    unstated = {"data_source": "own", "reward_model": {"ground_truth": ""}}
    return _written("\n".join(json.dumps(unstated | dict(row)) for row in examples), ".jsonl")


def _function_file(function: Callable[..., Any]) -> str:
    """Return a function's module or, if a notebook or script defines it, a file with its source."""
    if function.__module__ != "__main__":
        return function.__module__
    return _written(textwrap.dedent(inspect.getsource(function)), ".py")


def _written(text: str, suffix: str) -> str:
    """Write an object that was passed into a file named after its content, and return the path."""
    path = Path("outputs/inputs") / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)
