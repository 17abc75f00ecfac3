"""What a person at a terminal reads of a step: one line, and answers where they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from core.config.convert import printable

# label on the console, names of the metric (the first that the step has), format
_CONSOLE = (
    ("reward", ("critic/rewards/mean", "critic/score/mean"), ".3f"),
    ("acc", ("reward/acc/mean",), ".3f"),
    ("length", ("response_length/mean",), ".1f"),
    ("nll", ("actor/nll",), ".3f"),
    ("entropy", ("actor/entropy",), ".3f"),
    ("kl", ("actor/ppo_kl", "actor/kl_loss"), ".2e"),
    ("time", ("timing_s/step",), ".1f"),
)


class ConsoleLogger:
    """One line a step, above the progress bar where there is one."""

    def __init__(self) -> None:
        self.total: int | None = None

    def write(self, line: str) -> None:
        tqdm.write(printable(line))
        sys.stdout.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        shown = [f"{label} {value:{form}}" for label, value, form in headline(values)]
        shown += [
            f"{name.removeprefix('val-core/')} {value:.3f}"
            for name, value in values.items()
            if name.startswith("val-core/") and "/acc/mean@" in name
        ]
        self.write(f"step {step}{f'/{self.total}' if self.total else ''} | " + " | ".join(shown))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self.write(f"step {step} sample, score {row['score']}, expected {row['gts']!r}")
            self.write(f"    {str(row['input'])[-200:]!r} -> {str(row['output'])[:400]!r}")

    def close(self, failed: bool) -> None:
        pass


def headline(values: Mapping[str, float]) -> Iterator[tuple[str, float, str]]:
    """Yield label, value and format of the few numbers that a person follows, where the step has them."""
    for label, names, form in _CONSOLE:
        found = next((values[name] for name in names if name in values), None)
        if found is not None:
            yield label, found, form
