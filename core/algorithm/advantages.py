"""Advantage estimators: rewards in, one advantage per token out.

Each is a pure function ``f(inputs: AdvantageInputs) -> (advantages_N, returns_N)``, both 0 outside
``response_mask``. ``algorithm.adv_estimator`` names one of
:data:`core.config.registry.ESTIMATORS`, or a user's own by its path.

``R_i`` below is the reward of sequence i, including what its tokens add. A sequence whose answer
could not be scored (``in_group_stats`` is False) enters no mean, variance or count, and its
advantage is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from core.algorithm.sequences import (
    count_by_sequence,
    discounted_sums,
    spread_over_tokens,
    sum_by_sequence,
    whiten,
)
from core.config import registry
from core.config.code_by_path import load_object
from core.config.training_keys import AlgorithmConfig
from core.types import TrainBatch

Estimator = Callable[["AdvantageInputs"], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """The inputs of every estimator: N tokens in B sequences, prompts included."""

    reward: Tensor  # [B] float: the shaped score, which the last token of the response brings
    lengths: Tensor  # [B] int64: tokens of each sequence
    response_mask: Tensor  # [N] bool: True where the policy wrote the token
    group: Tensor  # [B] int64: any number that the sequences of one prompt share
    token_rewards: Tensor | None = None  # [N] float: what each token adds, such as a KL penalty
    in_group_stats: Tensor | None = None  # [B] bool: the sequence was scored; None if all were
    is_branch: Tensor | None = None  # [B] bool: its episode's first sequence counts for it
    values: Tensor | None = None  # [N] float: the critic's values, for gae
    baseline: Tensor | None = None  # [B] float: score of the prompt's greedy answer, for remax
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    epsilon: float = 1e-6

    @property
    def scored_B(self) -> Tensor:
        """Return the sequences that were scored, [B] bool."""
        everything = torch.ones_like(self.group, dtype=torch.bool)
        return everything if self.in_group_stats is None else self.in_group_stats.bool()

    @property
    def counted_B(self) -> Tensor:
        """Return the sequences that enter statistics, [B] bool: an episode counts once."""
        return self.scored_B if self.is_branch is None else self.scored_B & ~self.is_branch

    @property
    def rewards_B(self) -> Tensor:
        """Return ``R_i``, [B] float64; 0 for sequences that could not be scored."""
        reward = self.reward.double()
        if self.token_rewards is not None:
            reward = reward + sum_by_sequence(self.token_rewards.double(), self.lengths)
        return reward.masked_fill(~self.scored_B, 0)

    def need(self, name: str, estimator: str) -> Tensor:
        """Return an optional field. Raises ValueError if the batch does not have it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"the {estimator} estimator needs {name!r}, which this batch does not have"
            )
        return value

    # -- groups: the answers to one prompt --------------------------------------------------------

    @cached_property
    def group_B(self) -> Tensor:
        """Return the groups numbered from 0, [B] int64."""
        return torch.unique(self.group, return_inverse=True)[1]

    @cached_property
    def single_B(self) -> Tensor:
        """Return the sequences without another of their group, [B] bool: ``rollout.n`` is 1."""
        if self.is_branch is None:
            return self.group_B.bincount()[self.group_B] == 1
        return self.group_sum((~self.is_branch).double()) == 1

    @cached_property
    def relative_rewards_B(self) -> Tensor:
        """Return ``R_i`` less the largest reward of its group, [B] float64, for :meth:`group_mean`.

        A group's mean is subtracted from them next, so the shift cancels. It keeps rounding away:
        equal rewards deviate from their mean by exactly 0, and nearly equal ones keep their digits.
        A single sequence has nothing to be compared with and keeps its reward.
        """
        lowest_B = torch.full_like(self.rewards_B, -torch.inf)
        counted_rewards_B = torch.where(self.counted_B, self.rewards_B, lowest_B)
        largest_P = lowest_B.scatter_reduce(0, self.group_B, counted_rewards_B, "amax")
        shift_B = largest_P[self.group_B].masked_fill(self.single_B, 0)
        return (self.rewards_B - shift_B).masked_fill(~self.scored_B, 0)

    def group_sum(self, values_B: Tensor) -> Tensor:
        """Return the sum of each sequence's group, [B] float64."""
        return self.group_B.bincount(weights=values_B)[self.group_B]

    @cached_property
    def group_count_B(self) -> Tensor:
        """Return how many sequences of each sequence's group were scored, [B] float64."""
        return self.group_sum(self.counted_B.double())

    def group_mean(self, weights_B: Tensor | None = None) -> Tensor:
        """Return the mean of ``relative_rewards_B`` in each sequence's group, [B] float64.

        ``weights_B`` are whole numbers; left out, every scored sequence counts once. The mean of a
        single sequence is 0.
        """
        weights_B = self.counted_B.double() if weights_B is None else weights_B.double()
        total_B = self.group_sum(weights_B * self.relative_rewards_B)
        mean_B = total_B / self.group_sum(weights_B).clamp(min=1)
        return mean_B.masked_fill(self.single_B, 0)

    def group_std(self) -> Tensor:
        """Return the standard deviation of each sequence's group, [B] float64.

        It has Bessel's correction, and is 1 for fewer than two scored sequences.
        """
        deviations_B = (self.relative_rewards_B - self.group_mean()).masked_fill(~self.counted_B, 0)
        variance_B = self.group_sum(deviations_B.square()) / (self.group_count_B - 1).clamp(min=1)
        return torch.where(self.group_count_B > 1, variance_B.sqrt(), 1.0)

    # -- actions: the tokens that the policy wrote in scored sequences ----------------------------

    @cached_property
    def active_N(self) -> Tensor:
        """Return the tokens that can carry an advantage, [N] bool."""
        return self.response_mask.bool() & spread_over_tokens(self.scored_B, self.lengths)

    @cached_property
    def actions_B(self) -> Tensor:
        """Return how many active tokens each sequence has, [B] int64."""
        return count_by_sequence(self.active_N, self.lengths)

    def actions(self, values_N: Tensor) -> Tensor:
        """Return the values of the active tokens alone, [M].

        The next entry is the next token that the policy wrote; ``actions_B`` has the lengths.
        """
        return values_N[self.active_N]

    def action_rewards(self) -> Tensor:
        """Return the reward of each active token, [M].

        A sequence's own reward stands at its last active token. That need not be the last token of
        the response: if that is a tool's output, GAE and returns would never see the reward.
        """
        rewards = self.reward.new_zeros(int(self.actions_B.sum()))
        if self.token_rewards is not None:
            rewards = rewards + self.actions(self.token_rewards)
        writes_B = self.actions_B > 0
        rewards[self.actions_B.cumsum(0)[writes_B] - 1] += self.reward[writes_B]
        return rewards

    def at_actions(self, values_M: Tensor) -> Tensor:
        """Put values of the active tokens at their places, [M] -> [N], with 0 elsewhere."""
        return values_M.new_zeros(self.active_N.shape).masked_scatter(self.active_N, values_M)

    def spread(self, advantage_B: Tensor) -> Tensor:
        """Put a sequence's number on each of its active tokens, [B] -> [N] in reward's dtype."""
        advantage_N = spread_over_tokens(advantage_B.to(self.reward.dtype), self.lengths)
        return torch.where(self.active_N, advantage_N, 0)


def estimator(name: str) -> Estimator:
    """Return the estimator of this name, or a user's own by its path. Raises InputError."""
    return load_object(registry.estimator(name).function, "algorithm.adv_estimator")


def inputs_of(
    batch: TrainBatch, config: AlgorithmConfig, token_rewards_N: Tensor | None = None
) -> AdvantageInputs:
    """Return what an estimator reads of a batch.

    ``token_rewards_N`` is what tokens add to the rewards of their sequences.
    """
    return AdvantageInputs(
        reward=batch.reward,
        lengths=batch.lengths,
        response_mask=batch.response_mask,
        group=batch.group,
        token_rewards=token_rewards_N,
        in_group_stats=batch.optional("in_group_stats"),
        is_branch=batch.optional("is_branch"),
        values=batch.optional("values"),
        baseline=batch.optional("baseline"),
        gamma=config.gamma,
        lam=config.lam,
        norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
    )


# -- estimators ----------------------------------------------------------------------------------


def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    r"""Estimate generalised advantages (arXiv:1506.02438, eq. 16), whitened over the batch.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, where "t+1"
    is the next token that the policy wrote: a stretch of tool output is stepped over without decay.
    Returns are ``A + V`` before whitening. Raises ValueError: no values, or fewer than two tokens
    to whiten.
    """
    values = inputs.actions(inputs.need("values", "gae"))
    next_values = values.roll(-1)
    last_M = inputs.actions_B.cumsum(0)[inputs.actions_B > 0] - 1
    next_values[last_M] = 0
    delta = inputs.action_rewards() + inputs.gamma * next_values - values
    advantages = discounted_sums(delta, inputs.actions_B, inputs.gamma * inputs.lam)
    return inputs.at_actions(whiten(advantages)), inputs.at_actions(advantages + values)


def grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Compare rewards within a group (arXiv:2402.03300, section 4.1.2: the outcome form of eq. 3).

    ``A_i = (R_i - mean_group) / (std_group + epsilon)``, std with Bessel's correction. Without the
    division (``norm_adv_by_std_in_grpo=False``) it is Dr. GRPO's (arXiv:2503.20783). A group of one
    keeps its reward.
    """
    advantage_B = inputs.relative_rewards_B - inputs.group_mean()
    if inputs.norm_adv_by_std_in_grpo:
        advantage_B = advantage_B / (inputs.group_std() + inputs.epsilon)
    advantages = inputs.spread(advantage_B)
    return advantages, advantages


def rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract a leave-one-out baseline (arXiv:2402.14740).

    ``A_i = R_i - mean of the group's other rewards``, computed as
    ``n / (n - 1) * (R_i - mean_group)``. A group of one keeps its reward.
    """
    count_B = inputs.group_count_B
    deviation_B = inputs.relative_rewards_B - inputs.group_mean()
    advantages = inputs.spread(deviation_B * count_B / (count_B - 1).clamp(min=1))
    return advantages, advantages


def opo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract a length-weighted baseline (arXiv:2505.23585).

    ``A_i = R_i - sum_j L_j R_j / sum_j L_j``, where ``L_j`` is the number of response tokens of
    sequence j. A group of one keeps its reward.
    """
    mean_B = inputs.group_mean(weights_B=inputs.actions_B)
    advantages = inputs.spread(inputs.relative_rewards_B - mean_B)
    return advantages, advantages


def gpg(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Scale deviations by ``alpha``, group policy gradient (arXiv:2504.02546).

    ``A_i = alpha (R_i - mean_group)``. ``alpha = B / number of sequences with R != 0`` makes up for
    the groups that carry no gradient; it is taken over the whole batch.
    """
    # In float32, as published
    alpha = inputs.counted_B.sum() / inputs.rewards_B[inputs.counted_B].count_nonzero().clamp(min=1)
    advantages = inputs.spread(alpha * (inputs.relative_rewards_B - inputs.group_mean()))
    return advantages, advantages


def grpo_passk(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Reward only the best answer of a group, by its lead over the second (arXiv:2503.19595).

    ``A = R_best - R_second``, divided by ``std_group + epsilon`` as in grpo unless
    ``norm_adv_by_std_in_grpo=False``; a tie gives 0. Raises ValueError: a group of one answer,
    which has no second best.
    """
    if inputs.single_B.any():
        raise ValueError(
            "grpo_passk compares a prompt's two best answers: "
            "actor_rollout_ref.rollout.n must be >= 2"
        )
    reward_B = torch.where(inputs.counted_B, inputs.rewards_B, -torch.inf)
    # Sequences group by group, the best answer of each first
    ranked = reward_B.argsort(descending=True, stable=True)
    ranked = ranked[inputs.group_B[ranked].argsort(stable=True)]
    size_P = inputs.group_B.bincount()
    first_P = size_P.cumsum(0) - size_P
    best_P = ranked[first_P]
    second_P = ranked[first_P + 1]
    lead_P = reward_B[best_P] - reward_B[second_P]
    advantage_B = torch.zeros_like(reward_B)
    # Where fewer than two answers were scored the lead is infinite or NaN
    advantage_B[best_P] = torch.where(lead_P.isfinite(), lead_P, 0)
    if inputs.is_branch is not None:  # a branch stands behind its episode and has its advantage
        first_B = (~inputs.is_branch).nonzero()[:, 0]
        advantage_B = advantage_B[first_B[(~inputs.is_branch).cumsum(0) - 1]]
    if inputs.norm_adv_by_std_in_grpo:
        advantage_B = advantage_B / (inputs.group_std() + inputs.epsilon)
    advantages = inputs.spread(advantage_B)
    return advantages, advantages


def remax(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract the greedy answer's reward from the undiscounted reward to go (arXiv:2310.10505).

    Raises ValueError: no baseline.
    """
    baseline_B = inputs.need("baseline", "remax")
    rewards_to_go = discounted_sums(inputs.action_rewards(), inputs.actions_B, decay=1.0)
    returns = inputs.at_actions(rewards_to_go)
    return returns - inputs.spread(baseline_B), returns


def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Whiten the discounted reward to go over the batch's tokens (arXiv:2501.03262).

    ``G_t = r_t + gamma G_{t+1}``, where "t+1" is the next token that the policy wrote.
    Raises ValueError: fewer than two tokens to whiten.
    """
    rewards_to_go = discounted_sums(inputs.action_rewards(), inputs.actions_B, inputs.gamma)
    return inputs.at_actions(whiten(rewards_to_go)), inputs.at_actions(rewards_to_go)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Subtract the group's mean, then whiten over the batch's tokens (arXiv:2501.03262).

    Raises ValueError: fewer than two tokens to whiten.
    """
    deviation_N = inputs.spread(inputs.relative_rewards_B - inputs.group_mean())
    advantages = inputs.at_actions(whiten(inputs.actions(deviation_N)))
    return advantages, advantages
