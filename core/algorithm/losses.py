"""Policy losses, the value loss, and the weights that turn per-token losses into the objective.

A policy loss is a pure function ``f(log_prob_BT, old_log_prob_BT, advantages_BT, response_mask_BT, config) ->
(loss_BT, stats)``. It returns a loss for each token; the objective is ``(loss_BT * weight_BT).sum()`` with the
weights of :func:`loss_weights`, which are computed once an optimizer step over all its sequences. Sums of parts then
add up to the whole, however the sequences are split into micro-batches and ranks.

A loss whose entry in the table ``selects`` gets one more argument, ``selected_BT``: the tokens that it treats apart,
chosen by :mod:`core.extensions.variants.covariance` among all of the optimizer step, before it was split.

``stats`` are detached ``[B, T]`` tensors, to be averaged over the response tokens. Losses and stats are 0 outside the
mask, also where the inputs are NaN there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.config import registry
from core.config.registry import chosen

if TYPE_CHECKING:
    from core.config.sections.actor import ActorConfig

LOG_RATIO_BOUND = 20.0  # exp(20) is 5e8: beyond it a float32 ratio has no digits left
SAME_POLICY = 1e-4  # a float32 log-ratio below it may be rounding: its sign would depend on the micro-batch
Stats = dict[str, Tensor]
PolicyLoss = Callable[..., tuple[Tensor, Stats]]


def clipped(ratio_BT: Tensor, config: ActorConfig) -> Tensor:
    """Clamp the ratio to ``[1 - low, 1 + high]``; a bound that is not given is ``clip_ratio``."""
    low, high = _bounds(config)
    return ratio_BT.clamp(1 - low, 1 + high)


def _bounds(config: ActorConfig) -> tuple[float, float]:
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    return low, config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high


def _inside(mask_BT: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Set the tensors to 0 outside the mask, before anything is computed: gradients there are 0, never NaN."""
    outside = ~mask_BT.bool()
    return tuple(tensor.masked_fill(outside, 0) for tensor in tensors)


def _stats(mask_BT: Tensor, **stats: Tensor) -> Stats:
    return {name: value.detach().float().masked_fill(~mask_BT.bool(), 0) for name, value in stats.items()}


def vanilla(
    log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantages_BT: Tensor, response_mask_BT: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    """Return PPO's clipped surrogate (arXiv:1707.06347, eq. 7) with dual clip (arXiv:1912.09729).

    ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and where A < 0 at most ``-A c``. With high > low it is
    DAPO's clip-higher (arXiv:2503.14476, eq. 10). The log-ratio is clamped to +-20.

    Shapes:
        all tensors  [B, T]
        stats        pg_clipfrac, pg_clipfrac_high (its part above 1), pg_clipfrac_lower (dual clip), ppo_kl  [B, T]

    Raises:
        ValueError: ``clip_ratio_c`` is not above 1.
    """
    if config.clip_ratio_c <= 1:
        raise ValueError(f"actor.clip_ratio_c={config.clip_ratio_c}: the dual clip's bound on the ratio must be > 1")
    logp, old, adv = _inside(response_mask_BT, log_prob_BT, old_log_prob_BT, advantages_BT)
    log_ratio = (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    plain, bounded = -adv * ratio, -adv * clipped(ratio, config)
    surrogate, floor = torch.maximum(plain, bounded), -adv * config.clip_ratio_c
    negative = adv < 0
    loss = torch.where(negative, torch.minimum(surrogate, floor), surrogate)
    return loss, _stats(
        response_mask_BT,
        pg_clipfrac=bounded > plain,
        pg_clipfrac_high=(bounded > plain) & ~negative,
        pg_clipfrac_lower=(surrogate > floor) & negative,
        ppo_kl=-log_ratio,
    )


def gspo(
    log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantages_BT: Tensor, response_mask_BT: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    """Use a sequence-level ratio with a token-level gradient: GSPO-token (arXiv:2507.18071, eq. 13 and 14).

    ``s = exp(mean over the sequence's tokens of log r)`` is clipped as in PPO; its gradient flows through each
    token's log-prob. Its paper averages per sequence first (``aggregation`` in the table).

    Shapes:
        all tensors  [B, T]
        stats        pg_clipfrac, pg_clipfrac_lower (always 0), ppo_kl  [B, T]
    """
    logp, old, adv = _inside(response_mask_BT, log_prob_BT, old_log_prob_BT, advantages_BT)
    log_ratio = logp - old
    sequence = log_ratio.detach().sum(-1) / response_mask_BT.bool().sum(-1).clamp(min=1)
    ratio = (logp - logp.detach() + sequence[:, None]).clamp(max=10.0).exp()
    plain, bounded = -adv * ratio, -adv * clipped(ratio, config)
    clips, never = bounded > plain, torch.zeros_like(plain)
    stats = _stats(response_mask_BT, pg_clipfrac=clips, pg_clipfrac_lower=never, ppo_kl=-log_ratio)
    return torch.maximum(plain, bounded), stats


def sapo(
    log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantages_BT: Tensor, response_mask_BT: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    """Use a soft gate in place of the clip (SAPO, arXiv:2511.20347).

    ``-A * 4 / tau * sigmoid(tau (r - 1))``, tau by the sign of A. Averaged per sequence.

    Shapes:
        all tensors  [B, T]
        stats        pg_clipfrac, pg_clipfrac_lower (both always 0), ppo_kl  [B, T]
    """
    logp, old, adv = _inside(response_mask_BT, log_prob_BT, old_log_prob_BT, advantages_BT)
    log_ratio = (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    tau = torch.full_like(adv, config.tau_neg).masked_fill(adv > 0, config.tau_pos)
    loss = -adv * torch.sigmoid(tau * (log_ratio.exp() - 1)) * (4.0 / tau)
    never = torch.zeros_like(loss)
    return loss, _stats(response_mask_BT, pg_clipfrac=never, pg_clipfrac_lower=never, ppo_kl=-log_ratio)


def gpg(
    log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantages_BT: Tensor, response_mask_BT: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    """Return the plain policy gradient ``-A log p`` of GPG (arXiv:2504.02546), which is REINFORCE's.

    Shapes:
        all tensors  [B, T]
        stats        ppo_kl  [B, T]
    """
    logp, old, adv = _inside(response_mask_BT, log_prob_BT, old_log_prob_BT, advantages_BT)
    return -adv * logp, _stats(response_mask_BT, ppo_kl=old - logp)


def cispo(
    log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantages_BT: Tensor, response_mask_BT: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    """Clip the importance weight, not the gradient: CISPO (arXiv:2506.13585, eq. 4 and 5).

    ``-stop_gradient(clip(r, 1 - low, 1 + high)) A log p``: every token keeps a gradient.

    Shapes:
        all tensors  [B, T]
        stats        pg_clipfrac, pg_clipfrac_lower (always 0), ppo_kl  [B, T]
    """
    logp, old, adv = _inside(response_mask_BT, log_prob_BT, old_log_prob_BT, advantages_BT)
    log_ratio = (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.detach().exp()
    weight = clipped(ratio, config)
    clips, never = weight != ratio, torch.zeros_like(ratio)
    stats = _stats(response_mask_BT, pg_clipfrac=clips, pg_clipfrac_lower=never, ppo_kl=-log_ratio)
    return -weight * adv * logp, stats


def clip_cov(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    config: ActorConfig,
    selected_BT: Tensor,
) -> tuple[Tensor, Stats]:
    """Return PPO's clipped surrogate without dual clip, and 0 for the selected tokens: Clip-Cov (arXiv:2505.22617).

    A selected token loses its gradient and keeps its place in the denominators.

    Shapes:
        all tensors  [B, T]
        stats        pg_clipfrac (by the bounds), cov_selected, pg_clipfrac_lower (always 0), ppo_kl  [B, T]
    """
    logp, old, adv = _inside(response_mask_BT, log_prob_BT, old_log_prob_BT, advantages_BT)
    log_ratio = (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    plain, bounded = -adv * ratio, -adv * clipped(ratio, config)
    clips, never = bounded > plain, torch.zeros_like(plain)
    stats = {"pg_clipfrac": clips, "cov_selected": selected_BT, "pg_clipfrac_lower": never, "ppo_kl": -log_ratio}
    return torch.maximum(plain, bounded).masked_fill(selected_BT, 0), _stats(response_mask_BT, **stats)


def kl_cov(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    config: ActorConfig,
    selected_BT: Tensor,
) -> tuple[Tensor, Stats]:
    """Return ``-A r``, and ``ppo_kl_coef |log r|`` more for the selected tokens: KL-Cov (arXiv:2505.22617).

    Nothing is clipped. Where the policy is still the old one ``|log r|`` has no gradient: with one optimizer step a
    rollout this is the plain policy gradient. Published, the sign of a rounding error is its gradient there; here
    ``|log r|`` below 1e-4 is 0. In bf16 rounding is larger, and decides still.

    Shapes:
        all tensors  [B, T]
        stats        cov_selected, pg_clipfrac, pg_clipfrac_lower (both always 0), ppo_kl (here ``|log r|``)  [B, T]
    """
    logp, old, adv = _inside(response_mask_BT, log_prob_BT, old_log_prob_BT, advantages_BT)
    log_ratio = (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    distance = log_ratio.abs()
    held = selected_BT & (distance > SAME_POLICY)
    loss = -adv * log_ratio.exp() + config.policy_loss.ppo_kl_coef * distance.masked_fill(~held, 0)
    never = torch.zeros_like(loss)
    stats = {"cov_selected": selected_BT, "pg_clipfrac": never, "pg_clipfrac_lower": never, "ppo_kl": distance}
    return loss, _stats(response_mask_BT, **stats)


def dppo_tv(
    log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantages_BT: Tensor, response_mask_BT: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    """Drop tokens whose probability has moved too far in the advantage's direction: DPPO, Binary-TV.

    ``-stop_gradient(min(r, c) M) A log p``. M is 0 where A > 0 and ``p - p_old > high``, and where A <= 0 and
    ``p - p_old < -low``: the total variation of "this token or another one". The bounds are ``clip_ratio_low`` and
    ``clip_ratio_high``, c is ``clip_ratio_c``, as in verl's loss of this name. Source: arXiv:2602.04879, in the form of
    verl's implementation; the paper's text was read in excerpts alone, and c is verl's.

    Shapes:
        all tensors  [B, T]
        stats        pg_clipfrac (dropped), pg_clipfrac_lower (the weight is c), ppo_kl  [B, T]
    """
    logp, old, adv = _inside(response_mask_BT, log_prob_BT, old_log_prob_BT, advantages_BT)
    low, high = _bounds(config)
    moved = logp.detach().exp() - old.exp()
    return _masked_gradient(logp, old, adv, torch.where(adv > 0, moved > high, moved < -low), response_mask_BT, config)


def dppo_kl(
    log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantages_BT: Tensor, response_mask_BT: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    """Drop tokens as :func:`dppo_tv`, by the binary KL from the old policy in place of the total variation.

    ``p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))``; M is 0 where it exceeds ``high`` and p has risen
    under A > 0, or exceeds ``low`` and p has fallen under A <= 0. Source: as :func:`dppo_tv`, Binary-KL.

    Shapes:
        all tensors  [B, T]
        stats        pg_clipfrac (dropped), pg_clipfrac_lower (the weight is c), ppo_kl  [B, T]
    """
    logp, old, adv = _inside(response_mask_BT, log_prob_BT, old_log_prob_BT, advantages_BT)
    low, high = _bounds(config)
    now = logp.detach()
    # log(1 - p) by expm1; the floor of 1e-8 (verl's, too) is for p = 1, where it would be infinite.
    other, old_other = ((-torch.expm1(one)).clamp(min=1e-8) for one in (now, old))
    divergence = old.exp() * (old - now) + old_other * (old_other / other).log()
    far = torch.where(adv > 0, (divergence > high) & (now > old), (divergence > low) & (now < old))
    return _masked_gradient(logp, old, adv, far, response_mask_BT, config)


def _masked_gradient(
    logp: Tensor, old: Tensor, adv: Tensor, dropped: Tensor, mask_BT: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    log_ratio = (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.detach().exp()
    truncated = (ratio > config.clip_ratio_c) & ~dropped
    stats = _stats(mask_BT, pg_clipfrac=dropped, pg_clipfrac_lower=truncated, ppo_kl=-log_ratio)
    return -ratio.clamp(max=config.clip_ratio_c).masked_fill(dropped, 0) * adv * logp, stats


def policy_loss(name: str) -> PolicyLoss:
    """Return the policy loss of this name, or a user's own: ``package.module:function`` or ``path/file.py:function``.

    Raises:
        InputError: neither a name of the table nor a path that leads to a function.
    """
    return chosen(name, registry.POLICY_LOSSES, "actor_rollout_ref.actor.policy_loss.loss_mode")


def value_loss(
    values_BT: Tensor, returns_BT: Tensor, old_values_BT: Tensor, cliprange_value: float, response_mask_BT: Tensor
) -> tuple[Tensor, Stats]:
    """Return the critic's clipped squared error, ``0.5 max((V - R)^2, (clip(V, V_old +- eps) - R)^2)``.

    The value-function clipping of PPO's reference implementation (Huang et al. 2022, "The 37 implementation
    details of PPO", detail 9).

    Shapes:
        all tensors  [B, T]
        stats        vf_clipfrac  [B, T]
    """
    values, returns, old = _inside(response_mask_BT, values_BT, returns_BT, old_values_BT)
    near = torch.clamp(values, old - cliprange_value, old + cliprange_value)
    plain, bounded = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(plain, bounded), _stats(response_mask_BT, vf_clipfrac=bounded > plain)


def loss_weights(
    loss_mask_BT: Tensor, mode: str, *, scale_factor: float = 1.0, group_B: Tensor | None = None
) -> Tensor:
    """Return each token's share of the objective, so that the loss is ``(loss_BT * weight_BT).sum()``.

    With N tokens, S sequences and P prompts that have a token, over the whole optimizer step, L_i tokens in sequence i
    and N_p in all answers to prompt p together:

        token-mean               1 / N            (arXiv:2503.14476, eq. 12)
        seq-mean-token-mean      1 / (S L_i)      (arXiv:2402.03300, eq. 3)
        seq-mean-token-sum       1 / S
        seq-mean-token-sum-norm  1 / (S C), C = ``scale_factor``   (arXiv:2503.20783)
        prompt-mean-token-mean   1 / (P N_p)      (arXiv:2510.13786, "prompt-level" in its objective of section 4)

    The first two and the last sum to one. A step without a token gets zeros.

    Shapes:
        loss_mask_BT  [B, T]  bool or 0/1
        group_B       [B]     int64  sequences of one prompt share a number; prompt-mean-token-mean alone reads it
        result        [B, T]  float32; float64 for a float64 mask

    Raises:
        ValueError: an unknown mode, or prompt-mean-token-mean without ``group_B``.
    """
    dtype = torch.float64 if loss_mask_BT.dtype == torch.float64 else torch.float32
    mask = loss_mask_BT.bool()
    weight_B = token_weights(mask.sum(-1), mode, scale_factor=scale_factor, group_B=group_B).to(dtype)
    return torch.where(mask, weight_B[:, None], 0)


def token_weights(counts_B: Tensor, mode: str, *, scale_factor: float = 1.0, group_B: Tensor | None = None) -> Tensor:
    """Return :func:`loss_weights` of any one token of each sequence, which has ``counts_B`` tokens that carry loss.

    Shapes:
        counts_B, group_B  [B] int64
        result             [B] float64
    """
    if mode not in registry.LOSS_AGG_MODES:
        raise ValueError(f"actor.loss_agg_mode={mode}: choose one of {', '.join(registry.LOSS_AGG_MODES)}")
    counts, sequences = counts_B.double(), max(float((counts_B > 0).sum()), 1.0)
    one = torch.ones_like(counts)
    if mode == "token-mean":
        return one / counts.sum().clamp(min=1)
    if mode == "seq-mean-token-mean":
        return one / counts.clamp(min=1) / sequences
    if mode == "prompt-mean-token-mean":
        if group_B is None:
            raise ValueError("actor.loss_agg_mode=prompt-mean-token-mean needs the group of each sequence")
        group = torch.unique(group_B, return_inverse=True)[1]
        of_prompt = torch.zeros(len(counts), dtype=torch.float64, device=counts.device).index_add(0, group, counts)
        return one / of_prompt[group].clamp(min=1) / of_prompt.count_nonzero().clamp(min=1)
    return one / sequences / (scale_factor if mode.endswith("-norm") else 1.0)


class Means:
    """Token-weighted means over the optimizer steps of one update, per name over the tokens it was computed on."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, float] = {}
        self.troughs: dict[str, float] = {}

    def tokens(self, stats: dict[str, Tensor], mask_BT: Tensor) -> None:
        for name, value_BT in stats.items():
            self.sums[name] += float(torch.where(mask_BT, value_BT.detach(), 0.0).sum())
            self.counts[name] += float(mask_BT.sum())

    def value(self, name: str, value: float, *, counts: bool = True) -> None:
        """Add a number for an optimizer step; ``counts=False`` adds another partial sum to the same step."""
        self.sums[name] += value
        self.counts[name] += counts

    def peak(self, name: str, value: float) -> None:
        """Keep a maximum over everything, beside the means."""
        self.peaks[name] = max(self.peaks.get(name, value), value)

    def trough(self, name: str, value: float) -> None:
        """Keep a minimum over everything."""
        self.troughs[name] = min(self.troughs.get(name, value), value)

    def merge(self, other: Means) -> None:
        for name, total in other.sums.items():
            self.sums[name] += total
            self.counts[name] += other.counts[name]
        for name, value in other.peaks.items():
            self.peak(name, value)
        for name, value in other.troughs.items():
            self.trough(name, value)

    def result(self, prefix: str) -> dict[str, float]:
        means = {name: total / max(self.counts[name], 1.0) for name, total in self.sums.items()}
        return {f"{prefix}/{name}": value for name, value in {**means, **self.peaks, **self.troughs}.items()}
