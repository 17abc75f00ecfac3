"""An advantage estimator that a claim compares GRPO with. ``adv_estimator`` takes its path.

algorithm.adv_estimator=recipes.lab.estimators:positive_only
"""

from __future__ import annotations

from torch import Tensor

from core.algorithm.advantages import AdvantageInputs
from core.algorithm.padded import works_on_flat_tokens


@works_on_flat_tokens
def positive_only(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Return ``A_i = 1`` for right answers, ``R_i >= 1``, and 0 for others: RAFT++ (arXiv:2504.11343).

    Right answers of the lab's tasks score 1 and all others less. Returns the advantages, [N], twice.
    """
    advantage_N = inputs.spread(inputs.rewards_B >= 1)
    return advantage_N, advantage_N
