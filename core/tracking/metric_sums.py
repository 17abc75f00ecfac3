"""Sums of a step's metrics, which add up over micro-batches, optimizer steps and ranks."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class MetricSums:
    """Sums and counts of metrics, whose quotients are the means, and extremes beside them."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)
        self.extremes: dict[str, float] = {}

    def add_tokens(self, stats: dict[str, Tensor], mask_N: Tensor) -> None:
        """Add the values of the tokens of the mask; each token counts once."""
        for name, value_N in stats.items():
            self.sums[name] += float(torch.where(mask_N, value_N.detach(), 0.0).sum())
            self.counts[name] += float(mask_N.sum())

    def add_value(self, name: str, value: float) -> None:
        """Add a number of an optimizer step, of which the result is the mean."""
        self.add_part(name, value)
        self.count_step(name)

    def add_part(self, name: str, value: float) -> None:
        """Add a part of an optimizer step's number; :meth:`count_step` counts the step."""
        self.sums[name] += value

    def count_step(self, name: str) -> None:
        """Count an optimizer step, once, whose number is added in parts."""
        self.sums[name] += 0.0  # also if no part follows
        self.counts[name] += 1

    def keep_extreme(self, name: str, value: float) -> None:
        """Keep the smallest value of a name that ends in ``_min``, the largest of any other."""
        choose = min if name.endswith("_min") else max
        self.extremes[name] = choose(self.extremes.get(name, value), value)

    def merge(self, other: MetricSums) -> None:
        """Add the sums, counts and extremes of another."""
        for name, total in other.sums.items():
            self.sums[name] += total
            self.counts[name] += other.counts[name]
        for name, value in other.extremes.items():
            self.keep_extreme(name, value)

    def result(self, prefix: str) -> dict[str, float]:
        """Return the means and extremes under ``prefix/``."""
        means = {name: total / max(self.counts[name], 1.0) for name, total in self.sums.items()}
        return {f"{prefix}/{name}": value for name, value in {**means, **self.extremes}.items()}
