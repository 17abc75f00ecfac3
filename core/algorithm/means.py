"""Means over the optimizer steps of one update, and over the ranks that share them."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class Means:
    """Token-weighted means over the optimizer steps of one update, per name over the tokens it was computed on."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, float] = {}
        self.troughs: dict[str, float] = {}

    def tokens(self, stats: dict[str, Tensor], mask_BT: Tensor) -> None:
        for name, value_BT in stats.items():
            self.sums[name] += float(torch.where(mask_BT, value_BT.detach(), 0.0).sum())
            self.counts[name] += float(mask_BT.sum())

    def value(self, name: str, value: float, *, counts: bool = True) -> None:
        """Add a number for an optimizer step; ``counts=False`` adds another partial sum to the same step."""
        self.sums[name] += value
        self.counts[name] += counts

    def peak(self, name: str, value: float) -> None:
        """Keep a maximum over everything, beside the means."""
        self.peaks[name] = max(self.peaks.get(name, value), value)

    def trough(self, name: str, value: float) -> None:
        """Keep a minimum over everything."""
        self.troughs[name] = min(self.troughs.get(name, value), value)

    def merge(self, other: Means) -> None:
        for name, total in other.sums.items():
            self.sums[name] += total
            self.counts[name] += other.counts[name]
        for name, value in other.peaks.items():
            self.peak(name, value)
        for name, value in other.troughs.items():
            self.trough(name, value)

    def result(self, prefix: str) -> dict[str, float]:
        means = {name: total / max(self.counts[name], 1.0) for name, total in self.sums.items()}
        return {f"{prefix}/{name}": value for name, value in {**means, **self.peaks, **self.troughs}.items()}
