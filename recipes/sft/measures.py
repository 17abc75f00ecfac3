"""What the table ``lora_real`` measures, from the rows of ``metrics.jsonl``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

LAST = 10  # steps


def log_likelihood(rows: Sequence[Mapping[str, float]]) -> float:
    """Return the log-likelihood of a trained token, in hundredths of a nat.

    It is the mean of the last steps. In its first epoch a run has not seen their demonstrations.
    """
    return -100 * statistics.fmean(row["actor/nll"] for row in rows[-LAST:])
