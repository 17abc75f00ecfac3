"""What an update computed of each token, kept while a step is recorded (``trainer.trace``).

The update's own pass is the only one that has the ratio, the entropy and what clipping did, so its numbers are kept
there instead of being computed again. Rows are numbered by the driver: ``TrainBatch.trace_row`` is one more than the
row's index, since a blank row has 0. Without that field nothing is kept.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core.algorithm.losses import LOG_RATIO_BOUND
from core.types import TrainBatch

RowValues = dict[str, np.ndarray]  # name -> [policy tokens of the row] float32


@dataclass(frozen=True)
class TracedRows:
    """Rows with their values, the row of the largest gap between engine and learner, and CPU seconds of keeping."""

    rows: dict[int, RowValues]
    largest_gap: tuple[float, int] | None  # the gap, and the row
    cpu_s: float

    @classmethod
    def merged(cls, parts: Iterable[TracedRows]) -> TracedRows:
        """Return those of several ranks as one; CPU seconds are those of the busiest, since ranks work in parallel."""
        parts = list(parts)
        rows = {row: values for part in parts for row, values in part.rows.items()}
        gaps = [part.largest_gap for part in parts if part.largest_gap is not None]
        return cls(rows, max(gaps, default=None), max((part.cpu_s for part in parts), default=0.0))


def numbered(batch: TrainBatch) -> TrainBatch:
    """Return the batch with its rows numbered: the update then keeps what it computes of them."""
    return batch.adding(trace_row=torch.arange(1, len(batch) + 1))


class TracedTokens:
    """The numbers of one update, by row; those of a later epoch replace those of an earlier one."""

    def __init__(self) -> None:
        self.rows: dict[int, RowValues] = {}
        self.largest_gap: tuple[float, int] | None = None  # |log-prob of learner less engine|, and its row
        self.cpu_s = 0.0  # in this process, for all that is done here

    def keep(self, batch: TrainBatch, log_prob_N: Tensor, **values_N: Tensor | None) -> None:
        """Keep the log-probs and other values of the rows that carry a number; None is left out.

        Shapes:
            all tensors  [N]; ``old`` are the log-probs that the ratio is to
        """
        if batch.trace_row is None or not len(batch):
            return
        start, log_prob_N, mask = time.thread_time(), log_prob_N.detach(), batch.response_mask
        if (old := values_N.pop("old", None)) is not None:
            values_N["ratio"] = (log_prob_N - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        values_N["log_prob"] = log_prob_N
        # The gap to the engine means something only where nothing was updated yet: old_log_probs are not set then.
        if batch.old_log_probs is None and "rollout_log_probs" in batch.stored:
            sampled = mask if batch.sampled_mask is None else batch.sampled_mask
            gap_N = (log_prob_N - batch.rollout_log_probs).abs().masked_fill(~sampled, 0)
        else:
            gap_N = torch.zeros_like(log_prob_N)
        counts = batch.count(mask).tolist()
        kept = {name: value.detach()[mask].float().cpu() for name, value in values_N.items() if value is not None}
        parts = {name: value.split(counts) for name, value in kept.items()}
        gaps = gap_N.cpu().split(batch.lengths.tolist())
        for place, number in enumerate(batch.trace_row.tolist()):
            if number:
                self.rows[number - 1] = {name: part[place].numpy() for name, part in parts.items()}
                gap = float(gaps[place].max()), number - 1
                self.largest_gap = max(gap, self.largest_gap or gap)
        self.cpu_s += time.thread_time() - start

    def of(self, rows: Collection[int] | None) -> TracedRows:
        """Return the values of these rows; None requests the row of the largest gap alone.

        Rows of other ranks are left out.
        """
        found = {row: self.rows[row] for row in rows or () if row in self.rows}
        return TracedRows(found, self.largest_gap, 0.0 if rows is None else self.cpu_s)


def clipped_how(stats: dict[str, Tensor]) -> Tensor | None:
    """Return [N]: 0 where a token's gradient passes, 1 where the clip stops it, 2 where the dual clip does.

    None for a loss that reports no clipping.
    """
    if "pg_clipfrac" not in stats:
        return None
    dual = stats.get("pg_clipfrac_lower")
    return stats["pg_clipfrac"] if dual is None else torch.where(dual > 0, 2.0, stats["pg_clipfrac"])
