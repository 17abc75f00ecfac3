"""What a person at a terminal reads of a step: one line, and answers where they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from core.safe_text.printable import printable

ACC = "reward/acc/mean"
# label on the console, names of the metric (the first that the step has), format
_CONSOLE = (
    ("reward", ("critic/rewards/mean", "critic/score/mean"), ".3f"),
    ("acc", (ACC,), ".3f"),
    ("length", ("response_length/mean",), ".1f"),
    ("nll", ("actor/nll",), ".3f"),
    ("entropy", ("actor/entropy",), ".3f"),
    ("kl", ("actor/ppo_kl", "actor/kl_loss"), ".2e"),
    ("time", ("timing_s/step",), ".1f"),
)

_FAILED = {  # metric -> its label, shown where it is not 0
    "reward/failed_rate": "scorer failed on",
    "reward/val_failed_rate": "scorer failed in validation on",
}


class ConsoleLogger:
    """One line a step, above the progress bar where there is one."""

    def __init__(self) -> None:
        self.total: int | None = None

    def write(self, line: str) -> None:
        tqdm.write(printable(line))
        sys.stdout.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        shown = [f"{label} {value:{form}}" for label, value, form in headline(values)]
        shown += [f"{words} {values[name]:.1%}" for name, words in _FAILED.items() if values.get(name)]
        shown += [
            f"{name.removeprefix('val-core/') if validated_share(values, name) else _as_score(name)} {value:.3f}"
            for name, value in values.items()
            if is_validated(name)
        ]
        self.write(f"step {step}{f'/{self.total}' if self.total else ''} | " + " | ".join(shown))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self.write(f"step {step} sample, score {row['score']}, expected {row['gts']!r}")
            self.write(f"    {str(row['input'])[-200:]!r} -> {str(row['output'])[:400]!r}")

    def close(self, failed: bool) -> None:
        pass


def is_share(values: Mapping[str, float]) -> bool:
    """Return whether a step's ``acc`` can be an accuracy: not where it is a score that leaves 0 to 1."""
    if ACC not in values or values[ACC] != values.get("critic/score/mean"):
        return True
    return values.get("critic/score/min", 0) >= 0 and values.get("critic/score/max", 1) <= 1


def is_validated(name: str) -> bool:
    """Return whether a metric is a validation's mean of ``acc`` on a data source."""
    return name.startswith("val-core/") and "/acc/mean@" in name


def validated_share(values: Mapping[str, float], name: str) -> bool:
    """Return whether such a metric is an accuracy: no answer's value was outside of 0 to 1."""
    source = name.removeprefix("val-core/").partition("/acc/mean@")[0]
    return f"val-aux/{source}/acc/min" not in values


def _as_score(name: str) -> str:
    return name.removeprefix("val-core/").replace("/acc/", "/score/")


def headline(values: Mapping[str, float]) -> Iterator[tuple[str, float, str]]:
    """Yield label, value and format of the few numbers that a person follows, where the step has them."""
    for label, names, form in _CONSOLE:
        value = next((values[name] for name in names if name in values), None)
        if label == "acc" and not is_share(values):
            continue  # the same number as the reward, of a function that gives scores
        if value is not None:
            yield label, value, form
