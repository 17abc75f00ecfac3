"""Advantage estimators: rewards in, one advantage a token out.

Each is a pure function ``f(inputs: AdvantageInputs) -> (advantages_N, returns_N)``, both 0 outside ``response_mask``.
``algorithm.adv_estimator`` names one of :data:`core.config.registry.ESTIMATORS`, or a user's own by its path, which
gets padded tensors (:mod:`core.algorithm.padded`).

Written ``R_i`` below: the reward of sequence i, what its tokens add included. One whose answer could not be scored
(``in_group_stats`` False) enters no mean, variance or count, and gets advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.algorithm.masked import masked_whiten
from core.algorithm.padded import is_padded, pads_estimator
from core.algorithm.sequences import discounted_sums, spread_over_tokens, sum_by_sequence
from core.config import registry
from core.config.code_by_path import chosen

if TYPE_CHECKING:
    from core.config.sections.algorithm import AlgorithmConfig
    from core.types import TrainBatch

Estimator = Callable[["AdvantageInputs"], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """The inputs of every estimator.

    Shapes (N tokens in B sequences, prompts included):
        reward              [B] float  the shaped score, which the last token of the response brings
        lengths             [B] int64  tokens of each sequence
        response_mask       [N] bool   written by the policy
        group               [B] int64  sequences of one prompt share a number, any number
        token_rewards       [N] float  what each token adds to the reward, as the KL penalty does; None: nothing
        in_group_stats      [B] bool   the sequence was scored; None: all were
        values              [N] float  the critic's, for gae
        baseline            [B] float  score of the greedy answer to the same prompt, for remax
        old_log_probs       [N] float  for optimal_token_baseline, as are the next two
        sum_pi_squared      [N] float  of the distribution that each token was drawn from
        rollout_is_weights  [N] float  importance weights of the loss; None: there are none
    """

    reward: Tensor
    lengths: Tensor
    response_mask: Tensor
    group: Tensor
    token_rewards: Tensor | None = None
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

    @cached_property
    def active_N(self) -> Tensor:
        """Return the tokens that can carry an advantage, [N] bool."""
        return self.response_mask.bool() & spread_over_tokens(self.counted_B, self.lengths)

    @cached_property
    def actions_B(self) -> Tensor:
        """Return how many active tokens each sequence has, [B] int64: the lengths of :meth:`actions`."""
        return sum_by_sequence(self.active_N.double(), self.lengths).long()

    @property
    def rewards_B(self) -> Tensor:
        """Return ``R_i``, [B] float64: in double a group of equal rewards has exactly equal deviations."""
        reward = self.reward.double()
        if self.token_rewards is not None:
            reward = reward + sum_by_sequence(self.token_rewards.double(), self.lengths)
        return reward.masked_fill(~self.counted_B, 0)

    def actions(self, values_N: Tensor) -> Tensor:
        """Return [M]: the active tokens alone, so that the next entry is the next token that the policy wrote."""
        return values_N[self.active_N]

    def action_rewards(self) -> Tensor:
        """Return [M]: the reward of each active token; the last one of a sequence brings the sequence's own.

        Not the last of the response: where that is a tool's output, GAE and returns would never see the reward.
        """
        rewards = self.reward.new_zeros(int(self.actions_B.sum()))
        if self.token_rewards is not None:
            rewards = rewards + self.actions(self.token_rewards)
        writes_B = self.actions_B > 0
        rewards[self.actions_B.cumsum(0)[writes_B] - 1] += self.reward[writes_B]
        return rewards

    def at_actions(self, values_M: Tensor) -> Tensor:
        """Return [N]: values of the active tokens at their places, 0 elsewhere."""
        return values_M.new_zeros(self.active_N.shape).masked_scatter(self.active_N, values_M)

    def need(self, name: str, estimator: str) -> Tensor:
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"the {estimator} estimator needs {name!r}, which this batch does not have")
        return value

    def spread(self, advantage_B: Tensor) -> Tensor:
        """Put a sequence's number on each of its active tokens, [B] -> [N] in the reward's dtype."""
        advantage_N = spread_over_tokens(advantage_B.to(self.reward.dtype), self.lengths)
        return torch.where(self.active_N, advantage_N, 0)


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


def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    r"""Estimate generalised advantages (arXiv:1506.02438, eq. 16), whitened over the batch's tokens.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, where "t+1" is the next
    token that the policy wrote: a stretch of tool output is stepped over without decay. Returns are
    ``A + V`` before whitening.

    Shapes:
        advantages, returns  [N]

    Raises:
        ValueError: no values, or fewer than two tokens to whiten.
    """
    values, ends = inputs.actions(inputs.need("values", "gae")), inputs.actions_B.cumsum(0)
    following = values.roll(-1)
    following[ends[inputs.actions_B > 0] - 1] = 0
    delta = inputs.action_rewards() + inputs.gamma * following - values
    advantages = discounted_sums(delta, inputs.actions_B, inputs.gamma * inputs.lam)
    whitened = masked_whiten(advantages, torch.ones_like(advantages, dtype=torch.bool))
    return inputs.at_actions(whitened), inputs.at_actions(advantages + values)


def grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Compare rewards within a group (arXiv:2402.03300, section 4.1.2: the outcome form of eq. 3).

    ``A_i = (R_i - mean_group) / (std_group + epsilon)``, std with Bessel's correction. Without the division
    (``norm_adv_by_std_in_grpo=False``) it is Dr. GRPO's (arXiv:2503.20783). A group of one keeps its reward.

    Shapes:
        advantages, returns  [N], equal
    """
    stats = group_stats(inputs)
    scale = stats.std_B + inputs.epsilon if inputs.norm_adv_by_std_in_grpo else 1.0
    advantages = inputs.spread(stats.centred_B / scale)
    return advantages, advantages


def estimator(name: str) -> Estimator:
    """Return the estimator of this name, or a user's own by its path. Raises InputError where there is none."""
    function = chosen(name, registry.ESTIMATORS, "algorithm.adv_estimator")
    return pads_estimator(function) if name not in registry.ESTIMATORS and is_padded(function) else function


def inputs_of(batch: TrainBatch, config: AlgorithmConfig, token_rewards_N: Tensor | None = None) -> AdvantageInputs:
    """Return what an estimator reads of a batch; ``token_rewards_N`` is what tokens add to their sequences' rewards."""
    optional = ("in_group_stats", "values", "baseline", "old_log_probs", "sum_pi_squared", "rollout_is_weights")
    return AdvantageInputs(
        reward=batch.reward,
        lengths=batch.lengths,
        response_mask=batch.response_mask,
        group=batch.group,
        token_rewards=token_rewards_N,
        gamma=config.gamma,
        lam=config.lam,
        norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
        **{name: getattr(batch, name) for name in optional},
    )
