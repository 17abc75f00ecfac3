"""A control: a fair coin in place of a reward. What a policy gains from it, it does not owe to the
reward.

The coin is a hash of the answer and of ``extra_info["seed"]``, so that an answer keeps its reward
and a run repeats. The control's files (``recipes/real/controls.py``) have another seed for every
prompt: with one seed for all of them, a policy could raise its reward by giving one lucky answer to
every prompt. The ground truth is not read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from reward_scores.score import Score, graded

EXAMPLES = (("Rome", "", 1.0), ("London", "", 0.0))


def score(
    response: str, ground_truth: Any = None, extra_info: Mapping[str, Any] | None = None
) -> Score:
    """Return 1 or 0 with equal probability, always the same for the same answer and seed."""
    seed = (extra_info or {}).get("seed", "")
    digest = hashlib.sha256(f"{seed}\n{response}".encode("utf-8", "surrogatepass")).digest()
    return graded(digest[0] % 2 == 1, pred=None)
