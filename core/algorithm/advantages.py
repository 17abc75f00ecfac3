"""Advantage estimators: rewards in, one advantage a token out.

Each is a pure function ``f(inputs: AdvantageInputs) -> (advantages_BT, returns_BT)``, both 0 outside
``response_mask``. ``algorithm.adv_estimator`` names one of :data:`core.config.registry.ESTIMATORS`, or a
user's own by its path.

Each works on padded tensors; :func:`estimate` decides how many groups are padded at once.

Written ``R_i`` below: the reward of sequence i, summed over all its positions. One whose answer could not be
scored (``in_group_stats`` False) enters no mean, variance or count, and gets advantage 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.algorithm.masked import masked_whiten
from core.config import registry
from core.config.registry import chosen

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


def _backwards_in_time(*tensors_BT: Tensor) -> Iterator[tuple[Tensor, ...]]:
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
    for here, reward, value in _backwards_in_time(mask, rewards, values):
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


def rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract a leave-one-out baseline (arXiv:2402.14740): ``A_i = R_i - mean of the group's other rewards``.

    Computed as ``n / (n - 1) * (R_i - mean_group)``. A group of one keeps its reward.

    Shapes:
        advantages, returns  [B, T], equal
    """
    stats = group_stats(inputs)
    advantages = inputs.spread(stats.centred_B * stats.counted_B / (stats.counted_B - 1).clamp(min=1))
    return advantages, advantages


def opo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract a length-weighted baseline (arXiv:2505.23585): ``A_i = R_i - sum_j L_j R_j / sum_j L_j``.

    ``L_j`` is the number of response tokens of sequence j. A group of one keeps its reward.

    Shapes:
        advantages, returns  [B, T], equal
    """
    advantages = inputs.spread(group_stats(inputs, weight_B=inputs.active_BT.sum(-1)).centred_B)
    return advantages, advantages


def gpg(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Scale deviations by ``alpha``, group policy gradient (arXiv:2504.02546): ``A_i = alpha (R_i - mean_group)``.

    ``alpha = B / number of sequences with R != 0`` makes up for the groups that carry no gradient; it is taken
    over the whole batch.

    Shapes:
        advantages, returns  [B, T], equal
    """
    alpha = inputs.counted_B.sum() / inputs.rewards_B.count_nonzero().clamp(min=1)  # in float32, as published
    advantages = inputs.spread(alpha * group_stats(inputs).centred_B)
    return advantages, advantages


def grpo_passk(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Reward only the best answer of a group, by its lead (arXiv:2503.19595): ``A = R_best - R_second``.

    Divided by ``std_group + epsilon`` as in grpo unless ``norm_adv_by_std_in_grpo=False``; a tie gives 0.

    Shapes:
        advantages, returns  [B, T], equal

    Raises:
        ValueError: a group of one answer, which has no second best.
    """
    stats, counted = group_stats(inputs), inputs.counted_B
    if (torch.bincount(stats.group_B) == 1).any():
        raise ValueError("grpo_passk compares a prompt's two best answers: actor_rollout_ref.rollout.n must be >= 2")
    key = torch.where(counted, inputs.rewards_B, -torch.inf)
    groups, rows = int(stats.group_B.max()) + 1, torch.arange(len(key), device=key.device)
    lowest = torch.full((groups,), -torch.inf, dtype=key.dtype, device=key.device)
    best = lowest.scatter_reduce(0, stats.group_B, key, "amax")[stats.group_B]
    candidate = torch.where(key == best, rows, len(rows))
    first = torch.full((groups,), len(rows), device=key.device).scatter_reduce(0, stats.group_B, candidate, "amin")
    winner = counted & (rows == first[stats.group_B])
    second = lowest.scatter_reduce(0, stats.group_B, torch.where(winner, -torch.inf, key), "amax")[stats.group_B]
    lead = torch.where(winner & second.isfinite(), key - second, 0)
    scale = stats.std_B + inputs.epsilon if inputs.norm_adv_by_std_in_grpo else 1.0
    advantages = inputs.spread(lead / scale)
    return advantages, advantages


def maxrl(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Divide deviations by the group's mean: maximum likelihood RL (arXiv:2602.02710).

    ``A_i = (R_i - mean_group) / mean_group``, and 0 where no answer of the group has a reward. With rewards 0 and 1 and
    n answers its expectation is the gradient of ``-sum_k (1 - p)^k / k`` over k below n, a truncated ``log p`` of the
    success probability p; see the test of this. Source: the paper's estimator as peers describe it (TRL, prime-rl);
    the equations' numbers were not read.

    Shapes:
        advantages, returns  [B, T], equal

    Raises:
        ValueError: a reward below 0, under which the mean is no success rate and its sign could turn the update round.
    """
    rewards, stats = inputs.rewards_B, group_stats(inputs)
    if bool((rewards < 0).any()):
        raise ValueError(
            f"the maxrl estimator divides by the group's mean reward, so rewards must be at least 0, and one is "
            f"{float(rewards.min()):g}: score with 0 and 1, and take no penalty off the reward"
        )
    mean_B = rewards - stats.centred_B
    advantages = inputs.spread(torch.where(mean_B > 0, stats.centred_B / mean_B.where(mean_B > 0, 1.0), 0))
    return advantages, advantages


def optimal_token_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract from each reward to go the baseline of least gradient variance: OTB (arXiv:2602.07078).

    ``B_k = sum_i W_ik G_ik / sum_i W_ik`` over the group's answers that have a k-th token of the policy, with
    ``W_ik = sum_{j <= k} w_ij^2 (1 - 2 pi_ij + sum_v pi_ijv^2)``: the squared norm of the gradient in the logits so far
    (the paper's Logit-Gradient Proxy), times the squared importance weights where the loss has some. Where only one
    answer is that long B is 0. Source: the formula as verl's documentation has it; the rule for the longest answer
    and k counting the policy's own tokens, over tools' text, are those of verl's code, not checked in the paper.

    Shapes:
        advantages  [B, T]  ``G - B``
        returns     [B, T]  ``G``, the undiscounted reward to go

    Raises:
        ValueError: no old log-probs or sums of squared probabilities.
    """
    mask, stats = inputs.active_BT, group_stats(inputs)
    old, squares = (inputs.need(name, "optimal_token_baseline") for name in ("old_log_probs", "sum_pi_squared"))
    energy = (1 - 2 * old.double().exp() + squares.double()).clamp(min=0)  # at least (1 - pi)^2, but for rounding
    if inputs.rollout_is_weights is not None:
        energy = energy * inputs.rollout_is_weights.double().square()
    weight = energy.masked_fill(~mask, 0).cumsum(-1)
    rewards = inputs.token_level_rewards.double().masked_fill(~mask, 0)
    returns = rewards.flip(-1).cumsum(-1).flip(-1)
    place = (stats.group_B[:, None] * mask.shape[1] + mask.cumsum(-1) - 1)[mask]  # of (group, k), one number
    advantages = torch.zeros_like(returns).masked_scatter(mask, _above_baseline(returns[mask], weight[mask], place))
    alone = (torch.bincount(stats.group_B)[stats.group_B] > 1) & (stats.counted_B == 1)  # the others were not scored
    advantages, returns = advantages.masked_fill(alone[:, None], 0), returns.masked_fill(~mask, 0)
    return advantages.to(inputs.token_level_rewards.dtype), returns.to(inputs.token_level_rewards.dtype)


def _above_baseline(values_M: Tensor, weight_M: Tensor, place_M: Tensor) -> Tensor:
    """Subtract from each value the weighted mean of those of its place; nothing where it is the only one, [M] float64.

    Measured from the largest of the place, as in :func:`group_stats`: of equal values the result is exactly 0.
    """
    places = torch.unique(place_M, return_inverse=True)[1]
    zeros = values_M.new_zeros(int(places.max()) + 1 if len(places) else 0)
    largest = (zeros - torch.inf).scatter_reduce(0, places, values_M, "amax")
    shifted, total = values_M - largest[places], zeros.index_add(0, places, weight_M)
    weight_M = weight_M.where(total[places] > 0, torch.ones_like(weight_M))  # no token has a gradient: the plain mean
    mean = zeros.index_add(0, places, weight_M * shifted) / zeros.index_add(0, places, weight_M)
    several = torch.bincount(places, minlength=len(zeros)) > 1
    return torch.where(several[places], shifted - mean[places], values_M)


def remax(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract the greedy answer's reward from the reward to go (arXiv:2310.10505).

    Shapes:
        advantages  [B, T]  returns less ``baseline``
        returns     [B, T]  ``sum of r_s over response tokens s >= t``

    Raises:
        ValueError: no baseline.
    """
    mask = inputs.active_BT
    rewards = inputs.token_level_rewards.masked_fill(~mask, 0)
    returns = rewards.flip(-1).cumsum(-1).flip(-1).masked_fill(~mask, 0)
    return returns - inputs.spread(inputs.need("baseline", "remax")), returns


def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Whiten the discounted reward to go over the batch's tokens (arXiv:2501.03262).

    ``G_t = r_t + gamma G_{t+1}``, where "t+1" is the next token that the policy wrote.

    Shapes:
        advantages  [B, T]  whitened
        returns     [B, T]  ``G``

    Raises:
        ValueError: fewer than two tokens to whiten.
    """
    mask = inputs.active_BT
    rewards = inputs.token_level_rewards.masked_fill(~mask, 0)
    running, columns = torch.zeros_like(rewards[:, 0]), []
    for here, reward in _backwards_in_time(mask, rewards):
        running = torch.where(here, reward + inputs.gamma * running, running)
        columns.append(running)
    returns = torch.stack(columns[::-1]).T.contiguous().masked_fill(~mask, 0)
    return masked_whiten(returns, mask).masked_fill(~mask, 0), returns


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract the group's mean, then whiten over the batch's tokens (arXiv:2501.03262).

    Shapes:
        advantages, returns  [B, T], equal

    Raises:
        ValueError: fewer than two tokens to whiten.
    """
    mask = inputs.active_BT
    centred = inputs.spread(group_stats(inputs).centred_B)
    advantages = masked_whiten(centred, mask).masked_fill(~mask, 0)
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
    return chosen(config.adv_estimator, registry.ESTIMATORS, "algorithm.adv_estimator")(inputs)


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
