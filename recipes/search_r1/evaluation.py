"""The table of an evaluation: every test set, and their macro average, each with its interval and its count.

    python -m recipes.search_r1.evaluation RUN_FOLDER [RUN_FOLDER ...]

Reads what ``eval.sh`` (or any run with ``trainer.val_only=True``) recorded: a line a decoding, exact match in percent.
The macro average weighs the sets equally, as the papers do; its interval adds up the sets' variances, so a small set
(Bamboogle: 125 questions) has its full share of it. Training seeds are not in it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.tracking.validation import Estimate, question_interval
from results.reporting.comparison import accuracy_by_question
from results.reporting.numbers import percent
from results.reporting.pages import Table, markdown_table
from results.reporting.run_reader import NotARun, RecordedRun, decoding, load_run


@dataclass(frozen=True)
class Evaluation:
    """One run's accuracy on each test set."""

    model: str
    decoding: str
    sets: dict[str, Estimate]

    @property
    def macro(self) -> Estimate:
        """The mean over the sets, with an interval of which the variances of the sets' means add up."""
        values = list(self.sets.values())
        mean = sum(estimate.value for estimate in values) / len(values)
        half = math.hypot(*((e.high - e.low) / 2 for e in values if e.low is not None)) / len(values)
        return Estimate(mean, mean - half, mean + half, sum(estimate.n for estimate in values))


def evaluation(run: RecordedRun) -> Evaluation:
    """Return the accuracies of the run's last validation.

    Raises:
        NotARun: no validation with records was kept.
    """
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
    """Return Markdown with a column for each set and one for the macro average: accuracy, 95 % interval, questions."""
    sets = list(dict.fromkeys(source for one in evaluations for source in one.sets))
    rows = [
        [one.model, one.decoding, *(_cell(one.sets.get(source)) for source in sets), _cell(one.macro)]
        for one in evaluations
    ]
    return markdown_table(Table(["model", "decoding", *sets, "macro average"], rows))


def _cell(estimate: Estimate | None) -> str:
    return "not run" if estimate is None else f"{percent(estimate)} (n={estimate.n})"


def main(folders: Sequence[str]) -> int:
    """Run the command. Returns 0, or 2 with a line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m recipes.search_r1.evaluation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folders", nargs="*", metavar="RUN_FOLDER", help="The folders of the runs, a line each.")
    args = parser.parse_args(folders)
    if not args.folders:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(table([evaluation(load_run(_with_validation(Path(folder)))) for folder in args.folders]))
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
