"""What others published that a plan needs: lengths of answers, rows of validation sets, and seconds a step.

The tables are ``lengths.yaml`` and ``results/benchmarks/published_steps.yaml``. Nothing here plans; ``estimate`` reads
the first and prints the errors of the second, which tests/core/planning/test_published.py computes anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from core.config.schema import Config

TABLE = yaml.safe_load(Path(__file__).with_name("lengths.yaml").read_text(encoding="utf-8"))
STEPS = Path(__file__).parents[3] / "results/benchmarks/published_steps.yaml"


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of an answer (and of a prompt, where it is known) and where they were published."""

    answer: int
    prompt: int | None
    source: str


def lengths_of(config: Config) -> Lengths | None:
    """Return the published lengths for a run's data and model; None for episodes and where the table has none."""
    files, model = " ".join(config.data.train_files).lower(), config.actor_rollout_ref.model.path
    if config.turns > 1 or config.actor_rollout_ref.rollout.agent_loop:
        return None
    for entry in TABLE["lengths"]:
        if entry["data"] in files and any(name in model for name in entry.get("models", [""])):
            mean = (entry["first"] + entry["last"]) // 2
            source = f"{entry['source']}: {entry['first']:,} to {entry['last']:,}"
            return Lengths(min(mean, config.data.max_response_length), entry.get("prompt"), source)
    return None


def questions_of(config: Config) -> int:
    """Return the questions of a validation: counted in the files that are there, else as the table names them."""
    most = config.data.val_max_samples
    counts = [_rows(str(file)) for file in config.data.val_files]
    return sum(count if most < 0 else min(count, most) for count in counts)


def _rows(file: str) -> int:
    path = Path(file).expanduser()
    if path.is_file():
        import pyarrow.parquet as pq  # not needed for a plan of files that are elsewhere

        try:
            return pq.read_metadata(path).num_rows
        except (OSError, ValueError):  # not a parquet file; the data's own check reports that
            pass
    words = f"{path.parent.name}/{path.stem}".lower()
    return next((rows for name, rows in TABLE["questions"].items() if name in words), TABLE["other_questions"])


def rows() -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the rows of published step times, each with the keys that configure it here."""
    steps = yaml.safe_load(STEPS.read_text(encoding="utf-8"))
    for row in steps["rows"]:
        yield row, [*steps["common"], *row["keys"]]


def step_errors() -> str:
    """Return the range of the plan's errors against published step times, as the table holds them."""
    if not STEPS.exists():
        return "error is not known here"
    errors = [row["error"] for row, _ in rows()]
    span = f"{min(errors):+.0%} to {max(errors):+.0%}"
    return f"error against {len(errors)} published step times: {span}"
