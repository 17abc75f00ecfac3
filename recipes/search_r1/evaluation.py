"""The table of an evaluation: every test set, and their macro average, each with its interval and its count.

    python -m recipes.search_r1.evaluation RUN_FOLDER [RUN_FOLDER ...]

Reads what ``eval.sh`` (or any run with ``trainer.val_only=True``) recorded: a line a decoding, exact match in percent.
The macro average weighs the sets equally, as the papers do; its interval adds up the sets' variances, so a small set
(Bamboogle: 125 questions) has its full share of it. Training seeds are not in it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.tracking.validation import Estimate, accuracy_by_question, question_interval
from results.reporting.run_reader import NotARun, RecordedRun, decoding, load_run
from results.reporting.tables import percent

Z95 = 1.959964


@dataclass(frozen=True)
class Evaluation:
    """One run's accuracy on each test set."""

    model: str
    decoding: str
    sets: dict[str, Estimate]

    @property
    def macro(self) -> Estimate:
        """The mean over the sets; its interval from the sets' standard errors."""
        values = list(self.sets.values())
        mean = sum(estimate.value for estimate in values) / len(values)
        errors = [(e.high - e.low) / (2 * Z95) for e in values if e.low is not None]
        half = Z95 * math.sqrt(sum(error**2 for error in errors)) / len(values)
        return Estimate(mean, mean - half, mean + half, sum(estimate.n for estimate in values))


def evaluation(run: RecordedRun) -> Evaluation:
    """Of the run's last validation. Raises NotARun where it has none with records."""
    if not run.validation:
        raise NotARun(f"{run.folder}: it has no validation records")
    records = run.validation[max(run.validation)]
    draws = len(records[0].values["acc"])
    sets = {
        source: question_interval(list(by_uid.values()), draws)
        for source, by_uid in accuracy_by_question(records).items()
    }
    model = str(run.config.get("actor_rollout_ref.model.path"))
    return Evaluation(model, decoding(run.config), sets)


def table(evaluations: Sequence[Evaluation]) -> str:
    """Markdown: a column a set, then the macro average, each with its 95 % interval and its number of questions."""
    sets = list(dict.fromkeys(source for one in evaluations for source in one.sets))
    lines = [f"| model | decoding | {' | '.join(sets)} | macro average |", "|---" * (len(sets) + 3) + "|"]
    for one in evaluations:
        cells = [_cell(one.sets.get(source)) for source in sets]
        lines.append(f"| {one.model} | {one.decoding} | {' | '.join(cells)} | {_cell(one.macro)} |")
    return "\n".join(lines)


def _cell(estimate: Estimate | None) -> str:
    return "not run" if estimate is None else f"{percent(estimate)} (n={estimate.n})"


def main(folders: Sequence[str]) -> int:
    """Run the command. Returns 0, or 2 with a line on stderr."""
    if not folders:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(table([evaluation(load_run(_with_validation(Path(folder)))) for folder in folders]))
    except NotARun as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _with_validation(folder: Path) -> Path:
    """Return the run folder, or the newest ``val_only_step_N`` in it."""
    inside = sorted(folder.glob("val_only_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    return inside[-1] if inside else folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
