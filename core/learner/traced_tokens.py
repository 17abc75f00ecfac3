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
from core.algorithm.sequences import max_by_sequence
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
        self.parts: list[tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]] = []
        self.cpu_s = 0.0  # in this process, for all that is done here

    def keep(self, batch: TrainBatch, log_prob_N: Tensor, **values_N: Tensor | None) -> None:
        """Keep the log-probs and other values of the rows that carry a number, flat; None is left out.

        Shapes:
            all tensors  [N]; ``old`` are the log-probs that the ratio is to
        """
        if batch.trace_row is None or not len(batch):
            return
        start, mask = time.thread_time(), batch.response_mask
        old = values_N.pop("old", None)
        if old is not None:
            values_N["ratio"] = (log_prob_N - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        values_N["log_prob"] = log_prob_N
        flat = {name: value.detach()[mask].float().cpu() for name, value in values_N.items() if value is not None}
        # The gap to the engine means something only where nothing was updated yet: old_log_probs are not set then.
        known = batch.old_log_probs is None and "rollout_log_probs" in batch.stored
        sampled = mask if batch.sampled_mask is None else batch.sampled_mask
        rollout = batch.rollout_log_probs if known else log_prob_N.detach()
        gap_N = (log_prob_N.detach() - rollout).abs().masked_fill(~sampled, 0)
        gap_B = max_by_sequence(gap_N, batch.lengths).clamp(min=0)
        self.parts.append((batch.trace_row.cpu(), batch.count(mask).cpu(), gap_B.cpu(), flat))
        self.cpu_s += time.thread_time() - start

    def largest_gap(self) -> tuple[float, int] | None:
        """Return the largest |log-prob of learner less engine| and its row, or None where nothing was kept."""
        rows = [(float(gap), int(row) - 1) for part in self.parts for row, gap in zip(part[0], part[2], strict=True)]
        return max(((gap, row) for gap, row in rows if row >= 0), default=None)

    def of(self, rows: Collection[int] | None) -> TracedRows:
        """Return the values of these rows, of the last epoch that had them; rows of other ranks are left out.

        None requests the row of the largest gap alone.
        """
        if rows is None:
            return TracedRows({}, self.largest_gap(), 0.0)
        start, found = time.thread_time(), {}
        for numbers, counts, _, flat in self.parts:
            ends = counts.cumsum(0)
            for number, end, count in zip(numbers.tolist(), ends.tolist(), counts.tolist(), strict=True):
                if number - 1 in rows and number:
                    found[number - 1] = {name: value[end - count : end].numpy() for name, value in flat.items()}
        self.cpu_s += time.thread_time() - start
        return TracedRows(found, self.largest_gap(), self.cpu_s)


def clipped_how(stats: dict[str, Tensor]) -> Tensor | None:
    """Return [N]: 0 where a token's gradient passes, 1 where the clip stops it, 2 where the dual clip does.

    None for a loss that reports no clipping.
    """
    if "pg_clipfrac" not in stats:
        return None
    dual = stats.get("pg_clipfrac_lower")
    return stats["pg_clipfrac"] if dual is None else torch.where(dual > 0, 2.0, stats["pg_clipfrac"])
