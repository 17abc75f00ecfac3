"""What the tables ``entropy`` and ``dr_grpo`` measure, from the rows of ``metrics.jsonl``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

ACCURACY = "val-core/lab/hops/acc/mean@1"
FIRST = 0.15  # share of the steps from which the end is predicted
Rows = Sequence[Mapping[str, float]]


def curve(rows: Rows) -> tuple[list[float], list[float]]:
    """Return exp(H) and the accuracy of each policy.

    A step reports the entropy of the policy that it starts from, and validates the one that it ends
    with, whose entropy the next step reports.
    """
    pairs = list(zip(rows, rows[1:], strict=False))
    entropies = [math.exp(after["actor/entropy"]) for _, after in pairs]
    return entropies, [before[ACCURACY] for before, _ in pairs]


def r_squared(x: Sequence[float], y: Sequence[float]) -> float:
    return statistics.correlation(x, y) ** 2


def entropy_law_gain(rows: Rows) -> float:
    """Return how much more variance R = -a exp(H) + b explains than a line in log(step), in %."""
    entropies, accuracies = curve(rows)
    log_steps = [math.log(step) for step in range(1, len(accuracies) + 1)]
    return 100 * (r_squared(entropies, accuracies) - r_squared(log_steps, accuracies))


def entropy_slope(rows: Rows) -> float:
    """Return the points of accuracy for one unit of exp(H): -a of R = -a exp(H) + b."""
    return 100 * statistics.linear_regression(*curve(rows)).slope


def prediction_error(rows: Rows) -> float:
    """Return how far the end lies from what the first steps predict through the law, in points."""
    entropies, accuracies = curve(rows)
    first = round(FIRST * len(accuracies))
    slope, intercept = statistics.linear_regression(entropies[:first], accuracies[:first])
    return 100 * abs(accuracies[-1] - (slope * entropies[-1] + intercept))


def steps_of_wrong_answers(rows: Rows) -> float:
    """Return the mean number of steps of a wrong answer, at the last validation."""
    accuracy, _, wrong = last_maze(rows)
    return wrong / (1 - accuracy)


def steps_of_right_answers(rows: Rows) -> float:
    """Return the mean number of steps of a right answer, at the last validation."""
    accuracy, steps, wrong = last_maze(rows)
    return (steps - wrong) / accuracy


def last_maze(rows: Rows) -> tuple[float, float, float]:
    """Return the last validation's accuracy, its steps, and its steps in wrong answers."""
    last = [row for row in rows if "val-core/lab/maze/acc/mean@16" in row][-1]
    parts = ("steps", "wrong_steps")
    accuracy = last["val-core/lab/maze/acc/mean@16"]
    return accuracy, *(last[f"val-aux/lab/maze/{part}/mean@16"] for part in parts)
