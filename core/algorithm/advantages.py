"""Advantage estimators: rewards in, one advantage a token out.

Each is a pure function ``f(inputs: AdvantageInputs) -> (advantages_N, returns_N)``, both 0 outside
``response_mask``. ``algorithm.adv_estimator`` names one of :data:`core.config.registry.ESTIMATORS`,
or a user's own by its path.

Written ``R_i`` below: the reward of sequence i, what its tokens add included. One whose answer
could not be scored (``in_group_stats`` False) enters no mean, variance or count, and gets advantage
0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.algorithm.sequences import (
    count_by_sequence,
    discounted_sums,
    masked_whiten,
    spread_over_tokens,
    sum_by_sequence,
)
from core.config import registry
from core.config.code_by_path import load_object

if TYPE_CHECKING:
    from core.config.training_keys import AlgorithmConfig
    from core.types import TrainBatch

Estimator = Callable[["AdvantageInputs"], tuple[Tensor, Tensor]]
OPTIONAL = ("in_group_stats", "values", "baseline")


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """The inputs of every estimator, of N tokens in B sequences, prompts included."""

    reward: Tensor  # [B] float: the shaped score, which the last token of the response brings
    lengths: Tensor  # [B] int64: tokens of each sequence
    response_mask: Tensor  # [N] bool: written by the policy
    group: Tensor  # [B] int64: sequences of one prompt share a number, any number
    # [N] float: what each token adds, as the KL penalty does; None: nothing
    token_rewards: Tensor | None = None
    in_group_stats: Tensor | None = None  # [B] bool: the sequence was scored; None: all were
    values: Tensor | None = None  # [N] float: the critic's, for gae
    # [B] float: score of the greedy answer to the same prompt, for remax
    baseline: Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    epsilon: float = 1e-6

    @property
    def counted_B(self) -> Tensor:
        """Return the sequences that enter statistics, [B] bool."""
        everything = torch.ones_like(self.group, dtype=torch.bool)
        return everything if self.in_group_stats is None else self.in_group_stats.bool()

    @cached_property
    def active_N(self) -> Tensor:
        """Return the tokens that can carry an advantage, [N] bool."""
        return self.response_mask.bool() & spread_over_tokens(self.counted_B, self.lengths)

    @cached_property
    def actions_B(self) -> Tensor:
        """Return how many active tokens each sequence has, [B] int64: the lengths of
        :meth:`actions`."""
        return count_by_sequence(self.active_N, self.lengths)

    @property
    def rewards_B(self) -> Tensor:
        """Return ``R_i``, [B] float64: in double a group of equal rewards has exactly equal
        deviations."""
        reward = self.reward.double()
        if self.token_rewards is not None:
            reward = reward + sum_by_sequence(self.token_rewards.double(), self.lengths)
        return reward.masked_fill(~self.counted_B, 0)

    def actions(self, values_N: Tensor) -> Tensor:
        """Return [M]: the active tokens alone, so that the next entry is the next token that the
        policy wrote."""
        return values_N[self.active_N]

    def action_rewards(self) -> Tensor:
        """Return [M]: the reward of each active token; the last one of a sequence brings the
        sequence's own.

        Not the last of the response: where that is a tool's output, GAE and returns would never see
        the reward.
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

    def spread(self, advantage_B: Tensor) -> Tensor:
        """Put a sequence's number on each of its active tokens, [B] -> [N] in the reward's
        dtype."""
        advantage_N = spread_over_tokens(advantage_B.to(self.reward.dtype), self.lengths)
        return torch.where(self.active_N, advantage_N, 0)

    def need(self, name: str, estimator: str) -> Tensor:
        """Return an optional field. Raises ValueError where the batch does not have it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"the {estimator} estimator needs {name!r}, which this batch does not have"
            )
        return value


@dataclass(frozen=True, eq=False)
class GroupStats:
    """The rewards of a batch, measured from their group's mean."""

    group_B: Tensor  # int64: dense group numbers
    centred_B: Tensor  # float64: ``R_i - mean``; ``R_i`` itself where it is alone by design (n = 1)
    # Float64: of the group, with Bessel's correction; 1 where fewer than two sequences count
    std_B: Tensor
    counted_B: Tensor  # float64: how many sequences of the group count, at least 1


def group_stats(inputs: AdvantageInputs, weight_B: Tensor | None = None) -> GroupStats:
    """Compare the rewards of each group; ``weight_B`` (>= 0, [B]) makes the mean of ``centred_B`` a
    weighted one."""
    group_B = torch.unique(inputs.group, return_inverse=True)[1]
    rewards_B, counts_B = inputs.rewards_B, inputs.counted_B.double()
    counted_B = group_B.bincount(weights=counts_B)[group_B]
    deviation_B = less_mean(rewards_B, group_B, counts_B) * counts_B
    squares_B = group_B.bincount(weights=deviation_B.square())[group_B]
    std_B = torch.where(counted_B > 1, (squares_B / (counted_B - 1).clamp(min=1)).sqrt(), 1.0)
    centred_B = deviation_B
    if weight_B is not None:
        centred_B = less_mean(rewards_B, group_B, counts_B * weight_B.double()) * counts_B
    centred_B = torch.where(group_B.bincount()[group_B] == 1, rewards_B, centred_B)
    return GroupStats(group_B, centred_B, std_B, counted_B.clamp(min=1))


def less_mean(values_M: Tensor, group_M: Tensor, weight_M: Tensor) -> Tensor:
    """Subtract from each value the weighted mean of its group; of weights that are all 0, the plain
    mean.

    Values are first measured from the largest of their group: equal ones then deviate by exactly 0
    whatever the rounding of the sum, and nearly equal ones keep their digits.

    Shapes:
        all tensors  [M], float64; group_M is int64
    """
    zeros = values_M.new_zeros(int(group_M.max()) + 1 if len(group_M) else 0)
    weight_M = weight_M.where(zeros.index_add(0, group_M, weight_M)[group_M] > 0, 1.0)
    counts = weight_M > 0
    largest = (zeros - torch.inf).scatter_reduce(0, group_M[counts], values_M[counts], "amax")
    shifted = values_M - largest[group_M]
    mean = zeros.index_add(0, group_M, weight_M * shifted) / zeros.index_add(0, group_M, weight_M)
    return shifted - mean[group_M]


def estimator(name: str) -> Estimator:
    """Return the estimator of this name, or a user's own by its path. Raises InputError where there
    is none."""
    return load_object(registry.estimator(name).function, "algorithm.adv_estimator")


def inputs_of(
    batch: TrainBatch, config: AlgorithmConfig, token_rewards_N: Tensor | None = None
) -> AdvantageInputs:
    """Return what an estimator reads of a batch; ``token_rewards_N`` is what tokens add to their
    sequences' rewards."""
    return AdvantageInputs(
        reward=batch.reward,
        lengths=batch.lengths,
        response_mask=batch.response_mask,
        group=batch.group,
        token_rewards=token_rewards_N,
        gamma=config.gamma,
        lam=config.lam,
        norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
        **{name: batch.optional(name) for name in OPTIONAL},
    )


# -- estimators ------------------------------------------------------------------------------------


def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    r"""Estimate generalised advantages (arXiv:1506.02438, eq. 16), whitened over the batch's
    tokens.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, where "t+1"
    is the next token that the policy wrote: a stretch of tool output is stepped over without decay.
    Returns are ``A + V`` before whitening. Raises ValueError: no values, or fewer than two tokens
    to whiten.
    """
    values, ends = inputs.actions(inputs.need("values", "gae")), inputs.actions_B.cumsum(0)
    following = values.roll(-1)
    following[ends[inputs.actions_B > 0] - 1] = 0
    delta = inputs.action_rewards() + inputs.gamma * following - values
    advantages = discounted_sums(delta, inputs.actions_B, inputs.gamma * inputs.lam)
    return inputs.at_actions(_whitened(advantages)), inputs.at_actions(advantages + values)


def grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Compare rewards within a group (arXiv:2402.03300, section 4.1.2: the outcome form of eq. 3).

    ``A_i = (R_i - mean_group) / (std_group + epsilon)``, std with Bessel's correction. Without the
    division (``norm_adv_by_std_in_grpo=False``) it is Dr. GRPO's (arXiv:2503.20783). A group of one
    keeps its reward.
    """
    stats = group_stats(inputs)
    scale = stats.std_B + inputs.epsilon if inputs.norm_adv_by_std_in_grpo else 1.0
    advantages = inputs.spread(stats.centred_B / scale)
    return advantages, advantages


def rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract a leave-one-out baseline (arXiv:2402.14740): ``A_i = R_i - mean of the group's other
    rewards``.

    Computed as ``n / (n - 1) * (R_i - mean_group)``. A group of one keeps its reward.
    """
    stats = group_stats(inputs)
    advantages = inputs.spread(
        stats.centred_B * stats.counted_B / (stats.counted_B - 1).clamp(min=1)
    )
    return advantages, advantages


def opo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract a length-weighted baseline (arXiv:2505.23585): ``A_i = R_i - sum_j L_j R_j / sum_j
    L_j``.

    ``L_j`` is the number of response tokens of sequence j. A group of one keeps its reward.
    """
    advantages = inputs.spread(group_stats(inputs, weight_B=inputs.actions_B).centred_B)
    return advantages, advantages


def gpg(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Scale deviations by ``alpha``, group policy gradient (arXiv:2504.02546): ``A_i = alpha (R_i -
    mean_group)``.

    ``alpha = B / number of sequences with R != 0`` makes up for the groups that carry no gradient;
    it is taken over the whole batch.
    """
    # In float32, as published
    alpha = inputs.counted_B.sum() / inputs.rewards_B.count_nonzero().clamp(min=1)
    advantages = inputs.spread(alpha * group_stats(inputs).centred_B)
    return advantages, advantages


def grpo_passk(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Reward only the best answer of a group, by its lead (arXiv:2503.19595): ``A = R_best -
    R_second``.

    Divided by ``std_group + epsilon`` as in grpo unless ``norm_adv_by_std_in_grpo=False``; a tie
    gives 0. Raises ValueError: a group of one answer, which has no second best.
    """
    stats = group_stats(inputs)
    size_P = stats.group_B.bincount()
    if (size_P == 1).any():
        raise ValueError(
            "grpo_passk compares a prompt's two best answers: "
            "actor_rollout_ref.rollout.n must be >= 2"
        )
    reward_B = torch.where(inputs.counted_B, inputs.rewards_B, -torch.inf)
    ranked = reward_B.argsort(descending=True, stable=True)
    # Group by group, the best answer first
    ranked = ranked[stats.group_B[ranked].argsort(stable=True)]
    best_P = size_P.cumsum(0) - size_P
    lead_P = reward_B[ranked[best_P]] - reward_B[ranked[best_P + 1]]
    lead_B = torch.zeros_like(reward_B)
    lead_B[ranked[best_P]] = torch.where(lead_P.isfinite(), lead_P, 0)
    scale = stats.std_B + inputs.epsilon if inputs.norm_adv_by_std_in_grpo else 1.0
    advantages = inputs.spread(lead_B / scale)
    return advantages, advantages


def remax(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract the greedy answer's reward from the undiscounted reward to go (arXiv:2310.10505).

    Raises ValueError: no baseline.
    """
    returns = inputs.at_actions(discounted_sums(inputs.action_rewards(), inputs.actions_B, 1.0))
    return returns - inputs.spread(inputs.need("baseline", "remax")), returns


def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Whiten the discounted reward to go over the batch's tokens (arXiv:2501.03262).

    ``G_t = r_t + gamma G_{t+1}``, where "t+1" is the next token that the policy wrote.
    Raises ValueError: fewer than two tokens to whiten.
    """
    returns = discounted_sums(inputs.action_rewards(), inputs.actions_B, inputs.gamma)
    return inputs.at_actions(_whitened(returns)), inputs.at_actions(returns)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract the group's mean, then whiten over the batch's tokens (arXiv:2501.03262).

    Raises ValueError: fewer than two tokens to whiten.
    """
    advantages = inputs.at_actions(
        _whitened(inputs.actions(inputs.spread(group_stats(inputs).centred_B)))
    )
    return advantages, advantages


def _whitened(values_M: Tensor) -> Tensor:
    return masked_whiten(values_M, torch.ones_like(values_M, dtype=torch.bool))
