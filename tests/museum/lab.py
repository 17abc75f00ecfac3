"""Three steps of a recipe's lab in this process, and what the run reports by itself.

Nobody tells the run which bug is in it. It reports what it always reports: warnings of its bounds and probes, and the
error that ends it. A clean run reports nothing.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from core.algorithm import invariants
from core.command_line import prepare
from core.config.plugins import load_object

STEPS = 3
SHARED = (
    *("trainer.backend=local", "trainer.cpu_threads=1", "trainer.device=cpu", "trainer.test_freq=-1"),
    *("trainer.save_freq=-1", "trainer.val_before_train=False", "trainer.logger=[jsonl]"),
)
SEARCH = (
    *("retriever.url=null", "retriever.local.backend=bm25"),
    "retriever.local.index=./outputs/lab/knowledge/seed-1/index",
    *(f"data.{split}_files=./outputs/lab/knowledge/seed-1/{split}.parquet" for split in ("train",)),
    "data.val_files=./outputs/lab/knowledge/seed-1/test.parquet",
)


PUBLISHED = (  # the settings of published scripts, which hide what float32 and a large step show
    "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
)


def overrides_of(keys: Sequence[str]) -> list[str]:
    """Return the keys with ``published`` written out."""
    return [one for key in keys for one in (PUBLISHED if key == "published" else (key,))]


@dataclass(frozen=True)
class Lab:
    """A laptop run: the recipe, its preset, its trainer and hooks, and what replaces the retrieval server."""

    recipe: str
    preset: str = "lab"
    trainer: str = "core.ray_trainer:RayPPOTrainer"
    hooks: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


EPISODES = {"trainer": "recipes.search_r1.search_r1_ray_trainer:SearchR1Trainer", "hooks": ("generate",)}
LABS = {
    "ppo": Lab("ppo"),
    "grpo": Lab("grpo"),
    "dapo": Lab("dapo"),
    "search_r1": Lab("search_r1", overrides=SEARCH, **EPISODES),
    "search_r1_ppo": Lab(
        "search_r1",
        "lab_ppo",
        overrides=(*SEARCH, "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32"),
        **EPISODES,
    ),
}


@dataclass
class Report:
    """What a run reported: its warnings and its error, and the time that it and the invariants took."""

    lines: list[str] = field(default_factory=list)
    steps: int = 0
    fit_s: float = 0.0  # CPU seconds of the loop: no more than its seconds, also on a machine that is busy
    invariants_s: float = 0.0  # CPU seconds inside the invariants

    @property
    def share(self) -> float:
        return self.invariants_s / self.fit_s if self.fit_s else 0.0


class _Listener(logging.Handler):
    def __init__(self, lines: list[str]):
        super().__init__(logging.WARNING)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname.lower()}: {record.getMessage()}")


@contextlib.contextmanager
def listening(lines: list[str]) -> Iterator[None]:
    """Collect the warnings of core and recipes for the time of the block."""
    listener, loggers = _Listener(lines), [logging.getLogger(name) for name in ("core", "recipes")]
    for logger in loggers:
        logger.addHandler(listener)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(listener)


def run(
    name: str, work: Path, overrides: Sequence[str] = (), *, seed: int = 1, resumed_after: int | None = None
) -> Report:
    """Run a lab for three steps in ``work``, which holds ``outputs/lab`` as ``tests.oracle`` prepares it.

    ``resumed_after`` ends the run after that step, and a second one resumes it.
    """
    lab, report = LABS[name], Report()
    folder = work / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    arguments = [
        *(f"preset={lab.preset}", *SHARED, *lab.overrides, f"trainer.seed={seed}"),
        *(f"trainer.default_local_dir={folder}", *overrides_of(overrides)),
    ]
    sessions = [STEPS] if resumed_after is None else [resumed_after, STEPS]
    for steps in sessions:
        saving = f"trainer.save_freq={steps if resumed_after else -1}"
        session(lab, work, [*arguments, saving, f"trainer.total_training_steps={steps}"], report)
    if (folder / "metrics.jsonl").exists():
        report.steps = len((folder / "metrics.jsonl").read_text().splitlines())
    return report


def session(lab: Lab, work: Path, arguments: Sequence[str], report: Report) -> None:
    """Start a run in ``work`` with these arguments and add what it reports, until it ends."""
    here, spent, said, start = os.getcwd(), invariants.SPENT["cpu_s"], io.StringIO(), None
    os.chdir(work)
    try:
        with listening(report.lines), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            trainer = load_object(lab.trainer, "trainer")(prepare(lab.recipe, arguments, lab.hooks)).init_workers()
            start = time.process_time()
            trainer.fit()
    except SystemExit:
        report.lines += [f"error: {line}" for line in said.getvalue().splitlines()]
    except Exception as error:
        report.lines.append(f"{type(error).__name__}: {error}")
    finally:
        os.chdir(here)
        if start is not None:
            report.fit_s += time.process_time() - start
        report.invariants_s += invariants.SPENT["cpu_s"] - spent
