"""The advantages of GDPO, and a scorer of two parts for the lab."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.algorithm.advantages import AdvantageInputs
from reward_scores import hops


def gdpo(x: AdvantageInputs, parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Normalise each part [B] within its group and their weighted sum over the batch.

    ``A_k = (r_k - mean_group) / (std_group + epsilon)`` and ``S = sum_k w_k A_k``; the result is
    ``(S - mean_batch S) / (std_batch S + epsilon)`` on each token, [N].
    """
    total_B = torch.zeros_like(x.rewards_B)
    for name, weight in weights.items():
        part = dataclasses.replace(x, reward=parts[name])
        deviation_B = part.relative_rewards_B - part.group_mean()
        total_B += weight * deviation_B / (part.group_std() + x.epsilon)
    counted = total_B[x.counted_B]
    if len(counted) > 1:
        total_B = (total_B - counted.mean()) / (counted.std() + x.epsilon)
    return x.spread(total_B)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any
) -> dict[str, float]:
    """Return parts of an answer to the lab's task: the right letter, a chain before it, and both.

    ``both`` is their sum: as the only part of GDPO it trains on what GRPO normalises.
    """
    parts = hops.score(solution_str, ground_truth).parts
    both = parts["acc"] + parts["chain"]
    return {"score": both, "acc": parts["acc"], "chain": parts["chain"], "both": both}
