"""Advantage estimators beyond those of the four papers; ``core/algorithm/advantages.py`` has their inputs and terms."""

from __future__ import annotations

import torch
from torch import Tensor

from core.algorithm.advantages import AdvantageInputs, group_stats
from core.algorithm.masked import masked_whiten
from core.algorithm.sequences import discounted_sums, spread_over_tokens


def rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract a leave-one-out baseline (arXiv:2402.14740): ``A_i = R_i - mean of the group's other rewards``.

    Computed as ``n / (n - 1) * (R_i - mean_group)``. A group of one keeps its reward.

    Shapes:
        advantages, returns  [N], equal
    """
    stats = group_stats(inputs)
    advantages = inputs.spread(stats.centred_B * stats.counted_B / (stats.counted_B - 1).clamp(min=1))
    return advantages, advantages


def opo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract a length-weighted baseline (arXiv:2505.23585): ``A_i = R_i - sum_j L_j R_j / sum_j L_j``.

    ``L_j`` is the number of response tokens of sequence j. A group of one keeps its reward.

    Shapes:
        advantages, returns  [N], equal
    """
    advantages = inputs.spread(group_stats(inputs, weight_B=inputs.actions_B).centred_B)
    return advantages, advantages


def gpg(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Scale deviations by ``alpha``, group policy gradient (arXiv:2504.02546): ``A_i = alpha (R_i - mean_group)``.

    ``alpha = B / number of sequences with R != 0`` makes up for the groups that carry no gradient; it is taken
    over the whole batch.

    Shapes:
        advantages, returns  [N], equal
    """
    alpha = inputs.counted_B.sum() / inputs.rewards_B.count_nonzero().clamp(min=1)  # in float32, as published
    advantages = inputs.spread(alpha * group_stats(inputs).centred_B)
    return advantages, advantages


def grpo_passk(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Reward only the best answer of a group, by its lead (arXiv:2503.19595): ``A = R_best - R_second``.

    Divided by ``std_group + epsilon`` as in grpo unless ``norm_adv_by_std_in_grpo=False``; a tie gives 0.

    Shapes:
        advantages, returns  [N], equal

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
        advantages, returns  [N], equal

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
        advantages  [N]  ``G - B``
        returns     [N]  ``G``, the undiscounted reward to go

    Raises:
        ValueError: no old log-probs or sums of squared probabilities.
    """
    stats, lengths = group_stats(inputs), inputs.actions_B
    needed = (inputs.need(name, "optimal_token_baseline") for name in ("old_log_probs", "sum_pi_squared"))
    old, squares = (inputs.actions(value).double() for value in needed)
    energy = (1 - 2 * old.exp() + squares).clamp(min=0)  # at least (1 - pi)^2, but for rounding
    if inputs.rollout_is_weights is not None:
        energy = energy * inputs.actions(inputs.rollout_is_weights).double().square()
    weight = discounted_sums(energy.flip(0), lengths.flip(0), 1.0).flip(0)  # from the first token to each
    returns = discounted_sums(inputs.action_rewards().double(), lengths, 1.0)
    first = spread_over_tokens(lengths.cumsum(0) - lengths, lengths)
    number = torch.arange(len(first), device=first.device) - first  # k
    place = spread_over_tokens(stats.group_B, lengths) * (int(lengths.max()) + 1) + number  # (group, k) as one number
    alone = (torch.bincount(stats.group_B)[stats.group_B] > 1) & (stats.counted_B == 1)  # the others were not scored
    advantages = _above_baseline(returns, weight, place).masked_fill(spread_over_tokens(alone, lengths), 0)
    dtype = inputs.reward.dtype
    return inputs.at_actions(advantages.to(dtype)), inputs.at_actions(returns.to(dtype))


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
        advantages  [N]  returns less ``baseline``
        returns     [N]  ``sum of r_s over response tokens s >= t``

    Raises:
        ValueError: no baseline.
    """
    returns = inputs.at_actions(discounted_sums(inputs.action_rewards(), inputs.actions_B, 1.0))
    return returns - inputs.spread(inputs.need("baseline", "remax")), returns


def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Whiten the discounted reward to go over the batch's tokens (arXiv:2501.03262).

    ``G_t = r_t + gamma G_{t+1}``, where "t+1" is the next token that the policy wrote.

    Shapes:
        advantages  [N]  whitened
        returns     [N]  ``G``

    Raises:
        ValueError: fewer than two tokens to whiten.
    """
    returns = discounted_sums(inputs.action_rewards(), inputs.actions_B, inputs.gamma)
    whitened = masked_whiten(returns, torch.ones_like(returns, dtype=torch.bool))
    return inputs.at_actions(whitened), inputs.at_actions(returns)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract the group's mean, then whiten over the batch's tokens (arXiv:2501.03262).

    Shapes:
        advantages, returns  [N], equal

    Raises:
        ValueError: fewer than two tokens to whiten.
    """
    mask = inputs.active_N
    centred = inputs.spread(group_stats(inputs).centred_B)
    advantages = masked_whiten(centred, mask).masked_fill(~mask, 0)
    return advantages, advantages
