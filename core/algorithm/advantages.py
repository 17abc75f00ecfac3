"""Advantage estimators: rewards in, one advantage a token out.

Each is a pure function ``f(inputs: AdvantageInputs) -> (advantages_BT, returns_BT)``, both 0 outside
``response_mask``. ``algorithm.adv_estimator`` names one of :data:`core.config.registry.ESTIMATORS`, or a
user's own by its path.

Each works on padded tensors; :func:`estimate` decides how many groups are padded at once.

Written ``R_i`` below: the reward of sequence i, summed over all its positions. One whose answer could not be
scored (``in_group_stats`` False) enters no mean, variance or count, and gets advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.algorithm.masked import masked_whiten
from core.config import registry
from core.config.plugins import chosen

if TYPE_CHECKING:
    from core.config.sections.algorithm import AlgorithmConfig
    from core.types import TrainBatch


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """The inputs of every estimator.

    Shapes:
        token_level_rewards  [B, T] float  the score on the last response token, less a KL penalty if there is one
        response_mask        [B, T] bool   written by the policy
        group                [B]    int64  sequences of one prompt share a number, any number
        in_group_stats       [B]    bool   the sequence was scored; None: all were
        values               [B, T] float  the critic's, for gae
        baseline             [B]    float  score of the greedy answer to the same prompt, for remax
        old_log_probs        [B, T] float  for optimal_token_baseline, as are the next two
        sum_pi_squared       [B, T] float  of the distribution that each token was drawn from
        rollout_is_weights   [B, T] float  importance weights of the loss; None: there are none
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    group: Tensor
    in_group_stats: Tensor | None = None
    values: Tensor | None = None
    baseline: Tensor | None = None
    old_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    epsilon: float = 1e-6

    @property
    def counted_B(self) -> Tensor:
        """Return the sequences that enter statistics, [B] bool."""
        if self.in_group_stats is None:
            return torch.ones_like(self.group, dtype=torch.bool)
        return self.in_group_stats.bool()

    @property
    def active_BT(self) -> Tensor:
        """Return the tokens that can carry an advantage, [B, T] bool."""
        return self.response_mask.bool() & self.counted_B[:, None]

    @property
    def rewards_B(self) -> Tensor:
        """Return ``R_i``, [B] float64: in double a group of equal rewards has exactly equal deviations."""
        return self.token_level_rewards.sum(-1, dtype=torch.float64).masked_fill(~self.counted_B, 0)

    def need(self, name: str, estimator: str) -> Tensor:
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"the {estimator} estimator needs {name!r}, which this batch does not have")
        return value

    def spread(self, advantage_B: Tensor) -> Tensor:
        """Put a sequence's number on each of its active tokens, [B] -> [B, T] in the rewards' dtype."""
        advantage_B = advantage_B.to(self.token_level_rewards.dtype)
        return torch.where(self.active_BT, advantage_B[:, None], 0)


@dataclass(frozen=True, eq=False)
class GroupStats:
    """The rewards of a batch, measured from their group's mean.

    Shapes:
        group_B     [B] int64    dense group numbers
        centred_B   [B] float64  ``R_i - mean``; ``R_i`` itself where it is alone by design (n = 1)
        std_B       [B] float64  of the group, with Bessel's correction; 1 where fewer than two sequences count
        counted_B   [B] float64  how many sequences of the group count, at least 1
    """

    group_B: Tensor
    centred_B: Tensor
    std_B: Tensor
    counted_B: Tensor


def group_stats(inputs: AdvantageInputs, weight_B: Tensor | None = None) -> GroupStats:
    """Compute group means by scatter-add; ``weight_B`` (>= 0, [B]) makes the mean a weighted one.

    Rewards are first measured from the largest of their group: a group of equal rewards then deviates by
    exactly 0 whatever the rounding of the sum, and nearly equal rewards keep their digits.
    """
    labels, group = torch.unique(inputs.group, return_inverse=True)
    size, counted = len(labels), inputs.counted_B
    zeros = torch.zeros(size, dtype=torch.float64, device=group.device)
    kept = counted.double()
    weight = kept if weight_B is None else kept * weight_B.double()

    rewards = inputs.rewards_B
    largest = torch.full_like(zeros, -torch.inf).scatter_reduce(0, group[counted], rewards[counted], "amax")
    shifted = torch.where(counted, rewards - largest[group], 0)
    total = zeros.index_add(0, group, weight)
    mean = zeros.index_add(0, group, weight * shifted) / total.where(total > 0, torch.ones_like(total))
    centred = torch.where(counted, shifted - mean[group], 0)

    rows = torch.bincount(group, minlength=size)
    number = zeros.index_add(0, group, kept)
    plain_mean = zeros.index_add(0, group, shifted) / number.clamp(min=1)
    squares = zeros.index_add(0, group, torch.where(counted, shifted - plain_mean[group], 0).square())
    std = torch.where(number > 1, (squares / (number - 1).clamp(min=1)).sqrt(), 1.0)
    centred = torch.where(rows[group] == 1, rewards, centred)
    return GroupStats(group, centred, std[group], number.clamp(min=1)[group])


def backwards_in_time(*tensors_BT: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return the tensors' columns, last first, each contiguous: strided ones cost ten times as much."""
    return zip(*(tensor.T.contiguous().flip(0).unbind(0) for tensor in tensors_BT), strict=True)


def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    r"""Estimate generalised advantages (arXiv:1506.02438, eq. 16), whitened over the batch's tokens.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, where "t+1" is the next
    token that the policy wrote: a stretch of tool output is stepped over without decay. Returns are
    ``A + V`` before whitening.

    Shapes:
        advantages, returns  [B, T]

    Raises:
        ValueError: no values, or fewer than two tokens to whiten.
    """
    mask = inputs.active_BT
    values = inputs.need("values", "gae").masked_fill(~mask, 0)
    rewards = inputs.token_level_rewards.masked_fill(~mask, 0)
    next_value, advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    columns = []
    for here, reward, value in backwards_in_time(mask, rewards, values):
        delta = reward + inputs.gamma * next_value - value
        advantage = torch.where(here, delta + inputs.gamma * inputs.lam * advantage, advantage)
        next_value = torch.where(here, value, next_value)
        columns.append(advantage)
    advantages = torch.stack(columns[::-1]).T.contiguous().masked_fill(~mask, 0)
    return masked_whiten(advantages, mask).masked_fill(~mask, 0), advantages + values


def grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Compare rewards within a group (arXiv:2402.03300, section 4.1.2: the outcome form of eq. 3).

    ``A_i = (R_i - mean_group) / (std_group + epsilon)``, std with Bessel's correction. Without the division
    (``norm_adv_by_std_in_grpo=False``) it is Dr. GRPO's (arXiv:2503.20783). A group of one keeps its reward.

    Shapes:
        advantages, returns  [B, T], equal
    """
    stats = group_stats(inputs)
    scale = stats.std_B + inputs.epsilon if inputs.norm_adv_by_std_in_grpo else 1.0
    advantages = inputs.spread(stats.centred_B / scale)
    return advantages, advantages


def compute(token_level_rewards_BT: Tensor, batch: TrainBatch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns of a batch by the configured estimator.

    Shapes:
        token_level_rewards_BT, advantages, returns  [B, T]

    Raises:
        InputError: ``algorithm.adv_estimator`` leads to no function.
    """
    inputs = AdvantageInputs(
        token_level_rewards=token_level_rewards_BT,
        response_mask=batch.response_mask,
        group=batch.group,
        in_group_stats=batch.in_group_stats,
        values=batch.values,
        baseline=batch.baseline,
        old_log_probs=batch.old_log_probs,
        sum_pi_squared=batch.sum_pi_squared,
        rollout_is_weights=batch.rollout_is_weights,
        gamma=config.gamma,
        lam=config.lam,
        norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
    )
    return estimator(config.adv_estimator)(inputs)


def estimator(name: str) -> Callable[[AdvantageInputs], tuple[Tensor, Tensor]]:
    """Return the estimator of this name, or a user's own by its path. Raises InputError where there is none."""
    return chosen(name, registry.ESTIMATORS, "algorithm.adv_estimator")


def estimate(batch: TrainBatch, config: AlgorithmConfig) -> TrainBatch:
    """Set ``advantages`` and ``returns`` from ``token_level_rewards``, which are taken away.

    Estimators work on padded tensors. One that reads a group at a time (``by_group`` in the table) gets a few groups
    at a time, so that no padded tensor of a large batch exists. The others, and a user's own, get the whole batch:
    they may average over all of it.
    """
    by_group = registry.estimator(config.adv_estimator).by_group
    pieces, found = batch.pieces(whole_groups=True) if by_group else (batch,), []
    for piece in pieces:
        advantages_BT, returns_BT = compute(piece.need("token_level_rewards"), piece, config)
        advantages = piece.flattened(advantages_BT)
        found.append((advantages, advantages if returns_BT is advantages_BT else piece.flattened(returns_BT)))
    advantages = torch.cat([one for one, _ in found])
    same = all(one is other for one, other in found)
    returns = advantages if same else torch.cat([other for _, other in found])
    return batch.adding(advantages=advantages, returns=returns, token_level_rewards=None)
