"""Policy losses, the value loss, the KL penalty, and the weights that turn per-token losses into
the objective.

A policy loss is a pure function ``f(inputs: LossInputs) -> (loss_N, stats)`` of the tokens of a
micro-batch, one of :data:`core.config.registry.POLICY_LOSSES` or a user's own. The objective is
``(loss_N * weight_N).sum()`` with the weights of :func:`loss_weights`, of a whole mini-batch: parts
add up to the whole, however it is split. ``stats`` are detached [N] tensors, to be averaged over
response tokens; like losses they are 0 outside the mask, also where inputs are NaN there. Written
``r = exp(log p - log p_old)`` and ``A``, the advantage, below.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.algorithm.sequences import mean_by_sequence, spread_over_tokens, sum_by_sequence
from core.config import registry
from core.config.code_by_path import load_object

if TYPE_CHECKING:
    from core.config.training_keys import ActorConfig, PolicyLossConfig
    from core.types import TrainBatch

LOG_RATIO_BOUND = 20.0  # exp(20) is 5e8: beyond it a float32 ratio has no digits left
# A float32 log-ratio below it may be rounding: its sign would depend on the micro-batch
SAME_POLICY = 1e-4
Stats = dict[str, Tensor]
PolicyLoss = Callable[["LossInputs"], tuple[Tensor, Stats]]


@dataclass(frozen=True, eq=False)
class LossInputs:
    """The inputs of every policy loss, of N tokens in B sequences, prompts included.

    Tensors of tokens are 0 outside the mask, and so are gradients, never NaN.
    """

    log_prob: Tensor  # [N] float: of the policy that trains
    old_log_prob: Tensor  # [N] float: of the policy before the update
    advantages: Tensor  # [N] float
    mask: Tensor  # [N] bool: written by the policy
    config: ActorConfig
    lengths: Tensor  # [B] int64: tokens of each sequence
    # [N] bool: treated apart, chosen among all of the mini-batch; None: none are
    selected: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", self.mask.bool())
        for name in ("log_prob", "old_log_prob", "advantages"):
            object.__setattr__(self, name, getattr(self, name).masked_fill(~self.mask, 0))

    @property
    def log_ratio(self) -> Tensor:
        """Return ``log r``, [N], bounded by +-20."""
        return (self.log_prob - self.old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def clipped(self, ratio_N: Tensor) -> Tensor:
        """Clamp a ratio to ``[1 - clip_ratio_low, 1 + clip_ratio_high]``."""
        return ratio_N.clamp(1 - self.config.clip_ratio_low, 1 + self.config.clip_ratio_high)

    def surrogate(self, ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``max(-A r, -A clip(r))`` (arXiv:1707.06347, eq. 7), [N], and where the clip
        decides it, [N] bool."""
        plain, bounded = -self.advantages * ratio_N, -self.advantages * self.clipped(ratio_N)
        return torch.maximum(plain, bounded), bounded > plain

    def mean_over_sequence(self, values_N: Tensor) -> Tensor:
        """Return [N]: the mean over the policy's tokens of a sequence, at each of its tokens."""
        return spread_over_tokens(mean_by_sequence(values_N, self.mask, self.lengths), self.lengths)

    def stats(self, **stats: Tensor | None) -> Stats:
        """Return the stats of a loss; None stands for one that is always 0."""
        zeros = torch.zeros_like(self.log_prob)
        found = {name: zeros if value is None else value for name, value in stats.items()}
        return {
            name: value.detach().float().masked_fill(~self.mask, 0) for name, value in found.items()
        }


def policy_loss(name: str) -> PolicyLoss:
    """Return the policy loss of this name, or a user's own: ``package.module:function`` or
    ``path/file.py:function``.

    Raises InputError: neither a name of the table nor a path that leads to a function.
    """
    return load_object(
        registry.policy_loss(name).function, "actor_rollout_ref.actor.policy_loss.loss_mode"
    )


# -- with a clip -----------------------------------------------------------------------------------


def vanilla(x: LossInputs) -> tuple[Tensor, Stats]:
    """Return PPO's clipped surrogate (arXiv:1707.06347, eq. 7) with dual clip (arXiv:1912.09729).

    ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and where A < 0 at most ``-A c``. With high > low
    it is DAPO's clip-higher (arXiv:2503.14476, eq. 10). Raises ValueError: ``clip_ratio_c`` is not
    above 1.
    """
    c = x.config.clip_ratio_c
    if c <= 1:
        raise ValueError(f"actor.clip_ratio_c={c}: the dual clip's bound on the ratio must be > 1")
    surrogate, clips = x.surrogate(x.log_ratio.exp())
    negative, floor = x.advantages < 0, -x.advantages * c
    loss = torch.where(negative, torch.minimum(surrogate, floor), surrogate)
    return loss, x.stats(
        pg_clipfrac=clips,
        pg_clipfrac_high=clips & ~negative,  # its part above 1
        pg_clipfrac_lower=(surrogate > floor) & negative,
        ppo_kl=-x.log_ratio,
    )


def gspo(x: LossInputs) -> tuple[Tensor, Stats]:
    """Use a sequence-level ratio with a token-level gradient: GSPO-token (arXiv:2507.18071, eq. 13
    and 14).

    ``s = exp(mean over the sequence's tokens of log r)`` is clipped as in PPO; its gradient flows
    through each token's log-prob. Its paper averages per sequence first (``aggregation`` in the
    table).
    """
    log_ratio = x.log_prob - x.old_log_prob
    sequence = x.mean_over_sequence(log_ratio.detach())
    ratio = (x.log_prob - x.log_prob.detach() + sequence).clamp(max=10.0).exp()
    loss, clips = x.surrogate(ratio)
    return loss, x.stats(pg_clipfrac=clips, pg_clipfrac_lower=None, ppo_kl=-log_ratio)


def geo_mean(x: LossInputs) -> tuple[Tensor, Stats]:
    """Return ``-A`` times the geometric mean of a sequence's ratios: GMPO (arXiv:2507.20673).

    Each token's log-ratio is bounded by ``[-clip_ratio_low, clip_ratio_high]``, where that makes
    the objective smaller. Averaged per sequence, whose tokens share an advantage.
    """
    log_ratio, adv, sign = x.log_prob - x.old_log_prob, x.advantages, x.advantages.sign()
    bounded = log_ratio.clamp(-x.config.clip_ratio_low, x.config.clip_ratio_high)
    smaller = sign * torch.minimum(sign * log_ratio, sign * bounded)
    ratio, clips = x.mean_over_sequence(smaller).clamp(max=10.0).exp(), log_ratio != bounded
    stats = x.stats(
        pg_clipfrac=clips & (adv > 0), pg_clipfrac_lower=clips & (adv < 0), ppo_kl=-log_ratio
    )
    return -adv * ratio, stats


def cispo(x: LossInputs) -> tuple[Tensor, Stats]:
    """Clip the importance weight, not the gradient: CISPO (arXiv:2506.13585, eq. 4 and 5).

    ``-stop_gradient(clip(r, 1 - low, 1 + high)) A log p``: every token keeps a gradient.
    """
    ratio = x.log_ratio.detach().exp()
    weight = x.clipped(ratio)
    stats = x.stats(pg_clipfrac=weight != ratio, pg_clipfrac_lower=None, ppo_kl=-x.log_ratio)
    return -weight * x.advantages * x.log_prob, stats


# -- without one -----------------------------------------------------------------------------------


def sapo(x: LossInputs) -> tuple[Tensor, Stats]:
    """Use a soft gate in place of the clip (SAPO, arXiv:2511.20347).

    ``-A * 4 / tau * sigmoid(tau (r - 1))``, tau by the sign of A. Averaged per sequence.
    """
    tau = torch.full_like(x.advantages, x.config.tau_neg).masked_fill(
        x.advantages > 0, x.config.tau_pos
    )
    loss = -x.advantages * torch.sigmoid(tau * (x.log_ratio.exp() - 1)) * (4.0 / tau)
    return loss, x.stats(pg_clipfrac=None, pg_clipfrac_lower=None, ppo_kl=-x.log_ratio)


def gpg(x: LossInputs) -> tuple[Tensor, Stats]:
    """Return the plain policy gradient ``-A log p`` of GPG (arXiv:2504.02546), which is
    REINFORCE's."""
    return -x.advantages * x.log_prob, x.stats(ppo_kl=x.old_log_prob - x.log_prob)


# -- with selected tokens (arXiv:2505.22617) -------------------------------------------------------
#
# The covariance of a token is ``(A - mean A) (log p - mean log p)``: where a likely token has a
# high advantage, its update lowers the entropy most. It is taken over all tokens of an optimizer
# step that carry loss, by old log-probs. Published implementations take it over a micro-batch, so
# that memory settings decide what is selected. Source: the paper's definition as verl implements
# it; of the paper the abstract alone was read. A token that is clipped at the weights of its
# optimizer step has no gradient to lose: the learner leaves it out of Clip-Cov's draw, as verl
# does.


def clip_cov(x: LossInputs) -> tuple[Tensor, Stats]:
    """Return PPO's clipped surrogate without dual clip, and 0 for the selected tokens: Clip-Cov.

    A selected token loses its gradient and keeps its place in the denominators.
    """
    loss, clips = x.surrogate(x.log_ratio.exp())
    stats = x.stats(
        pg_clipfrac=clips, cov_selected=x.selected, pg_clipfrac_lower=None, ppo_kl=-x.log_ratio
    )
    return loss.masked_fill(x.selected, 0), stats


def kl_cov(x: LossInputs) -> tuple[Tensor, Stats]:
    """Return ``-A r``, and ``ppo_kl_coef |log r|`` more for the selected tokens: KL-Cov.

    Nothing is clipped. Where the policy is still the old one ``|log r|`` has no gradient: with one
    optimizer step a rollout this is the plain policy gradient. Published, the sign of a rounding
    error is its gradient there; here ``|log r|`` below 1e-4 is 0. In bf16 rounding is larger, and
    decides still. ``ppo_kl`` is ``|log r|``.
    """
    distance = x.log_ratio.abs()
    held = x.selected & (distance > SAME_POLICY)
    penalty = x.config.policy_loss.ppo_kl_coef * distance.masked_fill(~held, 0)
    stats = x.stats(
        cov_selected=x.selected, pg_clipfrac=None, pg_clipfrac_lower=None, ppo_kl=distance
    )
    return -x.advantages * x.log_ratio.exp() + penalty, stats


def clip_cov_tokens(
    log_prob_N: Tensor, advantages_N: Tensor, carries_N: Tensor, config: PolicyLossConfig
) -> Tensor:
    """Put the tokens whose covariance is between ``clip_cov_lb`` and ``clip_cov_ub`` into a random
    order.

    Drawn are ``clip_cov_ratio`` of the tokens that carry loss, rounded down, at least one, or all
    candidates where those are fewer. The order is seeded with the number of tokens that carry loss:
    repeated, it is the same.

    Shapes:
        log_prob_N, advantages_N, carries_N  [N], all tokens of an optimizer step; carries_N is bool
        or 0/1
        result  [N] int32, the highest first: positive where drawn, negative where a token waits to
                take the place of a clipped one, 0 elsewhere
    """
    carries, covariance = carries_N.bool(), covariances(log_prob_N, advantages_N, carries_N.bool())
    tokens = int(carries.sum())
    candidates = (
        carries & (covariance > config.clip_cov_lb) & (covariance < config.clip_cov_ub)
    ).nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(tokens)).to(
        candidates.device
    )
    place = torch.arange(len(candidates), device=candidates.device).neg()
    place += max(int(config.clip_cov_ratio * tokens), 1)
    selected = torch.zeros_like(carries, dtype=torch.int32)
    selected[candidates[order]] = torch.where(place > 0, place, place - 1).int()
    return selected


def kl_cov_tokens(
    log_prob_N: Tensor, advantages_N: Tensor, carries_N: Tensor, config: PolicyLossConfig
) -> Tensor:
    """Return the tokens of the highest covariance: ``kl_cov_ratio`` of those with loss, rounded
    down, at least one.

    Of equal ones the first is taken. Shapes as :func:`clip_cov_tokens`, but the result is bool.
    """
    carries, tokens = carries_N.bool(), int(carries_N.bool().sum())
    covariance = covariances(log_prob_N, advantages_N, carries).masked_fill(~carries, -torch.inf)
    highest = covariance.argsort(descending=True, stable=True)
    selected = torch.zeros_like(carries)
    selected[highest[: min(max(int(config.kl_cov_ratio * tokens), 1), tokens)]] = True
    return selected


def covariances(log_prob_N: Tensor, advantages_N: Tensor, mask_N: Tensor) -> Tensor:
    """Return each token's covariance, [N] float64, 0 outside the mask."""
    count = mask_N.sum().clamp(min=1)
    a, b = (value.double().masked_fill(~mask_N, 0) for value in (advantages_N, log_prob_N))
    return ((a - a.sum() / count) * (b - b.sum() / count)).masked_fill(~mask_N, 0)


# -- the critic and the objective ------------------------------------------------------------------


def value_loss(
    values_N: Tensor,
    returns_N: Tensor,
    old_values_N: Tensor,
    cliprange_value: float,
    response_mask_N: Tensor,
) -> tuple[Tensor, Stats]:
    """Return the critic's clipped squared error, ``0.5 max((V - R)^2, (clip(V, V_old +- eps) -
    R)^2)``.

    The value-function clipping of PPO's reference implementation (Huang et al. 2022, "The 37
    implementation details of PPO", detail 9).

    Shapes:
        all tensors  [N]
        stats        vf_clipfrac  [N]
    """
    outside = ~response_mask_N.bool()
    values, returns, old = (
        value.masked_fill(outside, 0) for value in (values_N, returns_N, old_values_N)
    )
    near = torch.clamp(values, old - cliprange_value, old + cliprange_value)
    plain, bounded = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(plain, bounded), {"vf_clipfrac": (bounded > plain).detach().float()}


def loss_weights(
    loss_mask_N: Tensor, lengths_B: Tensor, mode: str, *, scale_factor: float = 1.0
) -> Tensor:
    """Return each token's share of the objective, so that the loss is ``(loss_N *
    weight_N).sum()``.

    With M tokens and S sequences that have a token of the mask in the whole mini-batch, and L_i
    tokens in sequence i:

        token-mean               1 / M            (arXiv:2503.14476, eq. 12)
        seq-mean-token-mean      1 / (S L_i)      (arXiv:2402.03300, eq. 3)
        seq-mean-token-sum       1 / S
        seq-mean-token-sum-norm  1 / (S C), C = ``scale_factor``   (arXiv:2503.20783)

    The first two sum to one. A mini-batch without a token gets zeros.

    Shapes:
        loss_mask_N  [N]  bool or 0/1
        result       [N]  float32; float64 for a float64 mask

    Raises ValueError: an unknown mode.
    """
    mask, ones = (
        loss_mask_N.bool(),
        torch.ones(len(lengths_B), dtype=torch.float64, device=lengths_B.device),
    )
    tokens_B = sum_by_sequence(mask.double(), lengths_B)
    sequences = tokens_B.count_nonzero().clamp(min=1)
    if mode == "token-mean":
        share_B = ones / tokens_B.sum().clamp(min=1)
    elif mode == "seq-mean-token-mean":
        share_B = ones / tokens_B.clamp(min=1) / sequences
    elif mode == "seq-mean-token-sum":
        share_B = ones / sequences
    elif mode == "seq-mean-token-sum-norm":
        share_B = ones / sequences / scale_factor
    else:
        raise ValueError(
            f"actor.loss_agg_mode={mode}: choose one of {', '.join(registry.LOSS_AGG_MODES)}"
        )
    dtype = torch.float64 if loss_mask_N.dtype == torch.float64 else torch.float32
    return torch.where(mask, spread_over_tokens(share_B.to(dtype), lengths_B), 0)


# -- distance to a reference policy ----------------------------------------------------------------


def kl_penalty(
    log_prob: Tensor, ref_log_prob: Tensor, kind: str, mask: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy || reference) at each token, [...] of [...]; with a mask 0 outside it,
    whatever is there.

    ``d = log p - log p_ref`` of a token that the policy sampled; the estimators are those of J.
    Schulman, "Approximating KL divergence" (2020, joschu.net/blog/kl-approx.html).

    ================  =============================  ============================
    kind              value                          gradient in ``log_prob``
    ================  =============================  ============================
    kl, k1            ``d``                          1
    abs               ``|d|``                        ``sign(d)``
    mse, k2           ``d^2 / 2``                    ``d``
    low_var_kl, k3    ``exp(-d) - 1 + d``            ``1 - exp(-d)``
    kind + "+"        that of the kind               that of k2
    ================  =============================  ============================

    k3 is clamped to [-10, 10] (and d to +-20 before), as published: beyond d = -2.6 or so its
    gradient is 0. The "+" forms are straight-through: k2's gradient is the one whose expectation is
    that of the KL itself. The full KL over the vocabulary is not one: log-probs are kept for
    sampled tokens only.
    """
    if kind not in registry.KL_KINDS:
        raise NotImplementedError(
            f"KL estimator {kind!r} is not known: choose one of {', '.join(registry.KL_KINDS)}"
        )
    difference = log_prob - ref_log_prob
    if mask is not None:
        difference = difference.masked_fill(~mask.bool(), 0)
    half_square, name = 0.5 * difference.square(), kind.removesuffix("+")
    if name in ("kl", "k1"):
        value = difference
    elif name == "abs":
        value = difference.abs()
    elif name in ("mse", "k2"):
        value = half_square
    else:
        bounded = difference.clamp(-20.0, 20.0)
        value = ((-bounded).exp() - 1 + bounded).clamp(-10.0, 10.0)
    return value.detach() + (half_square - half_square.detach()) if kind.endswith("+") else value


def kl_rewards(
    batch: TrainBatch, controller: KLController, kind: str
) -> tuple[Tensor, KLController, dict[str, float]]:
    """Return what the KL penalty adds to each token's reward, [N] (arXiv:1909.08593, eq. 2):
    ``-coefficient * kl``.

    Returns the next controller and the metrics too. ``actor/reward_kl_penalty`` is the mean over
    sequences of their token means, an empty one counts as 0, as published;
    ``actor/reward_kl_penalty_coeff`` is the coefficient that was used, the one before the update.
    """
    old, ref, mask = batch.old_log_probs, batch.ref_log_prob, batch.response_mask
    kl_N = kl_penalty(old.detach(), ref.detach(), kind, mask)
    mean = float(mean_by_sequence(kl_N, mask.bool(), batch.lengths).mean())
    metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": controller.value}
    return -controller.value * kl_N, controller.updated(mean, len(batch)), metrics


@dataclass(frozen=True)
class KLController:
    """The coefficient of the penalty: fixed, or steered towards a target (arXiv:1909.08593, section
    2.2).

    ``kind`` is fixed or adaptive, which moves by ``value *= 1 + clip(kl / target_kl - 1, -0.2, 0.2)
    * n_steps / horizon``.
    """

    kind: str
    value: float
    target_kl: float = 0.1
    horizon: float = 10000

    def updated(self, current_kl: float, n_steps: int) -> KLController:
        """Return the controller after a step of ``n_steps`` sequences whose mean KL was
        ``current_kl``."""
        if self.kind == "fixed":
            return self
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        return replace(self, value=self.value * (1 + error * n_steps / self.horizon))

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def with_state(self, state: dict[str, float]) -> KLController:
        """Return the controller as it was when ``state`` was saved; target and horizon stay the
        configured ones."""
        return self if self.kind == "fixed" else replace(self, value=float(state["value"]))


class MetricSums:
    """Sums and counts of metrics, which add up over micro-batches, steps and ranks; the result is
    their means."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)
        self.extremes: dict[str, float] = {}

    def tokens(self, stats: dict[str, Tensor], mask_N: Tensor) -> None:
        """Add the values of the tokens of the mask, one count a token."""
        for name, value_N in stats.items():
            self.sums[name] += float(torch.where(mask_N, value_N.detach(), 0.0).sum())
            self.counts[name] += float(mask_N.sum())

    def value(self, name: str, value: float, *, counts: bool = True) -> None:
        """Add a number for an optimizer step; ``counts=False`` adds another partial sum to the same
        step."""
        self.sums[name] += value
        self.counts[name] += counts

    def extreme(self, name: str, value: float) -> None:
        """Keep the smallest value of a name that ends in ``_min``, the largest of any other, beside
        the means."""
        choose = min if name.endswith("_min") else max
        self.extremes[name] = choose(self.extremes.get(name, value), value)

    def merge(self, other: MetricSums) -> None:
        """Add what another has seen."""
        for name, total in other.sums.items():
            self.sums[name] += total
            self.counts[name] += other.counts[name]
        for name, value in other.extremes.items():
            self.extreme(name, value)

    def result(self, prefix: str) -> dict[str, float]:
        """Return the means and extremes under ``prefix/``."""
        means = {name: total / max(self.counts[name], 1.0) for name, total in self.sums.items()}
        return {f"{prefix}/{name}": value for name, value in {**means, **self.extremes}.items()}
