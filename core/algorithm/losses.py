"""Policy losses, the value loss, and the weights that turn per-token losses into the objective.

A policy loss is a pure function ``f(log_prob_BT, old_log_prob_BT, advantages_BT, response_mask_BT, config) ->
(loss_BT, stats)``. It returns a loss for each token; the objective is ``(loss_BT * weight_BT).sum()`` with the
weights of :func:`loss_weights`, which are computed once an optimizer step over all its sequences. Sums of parts then
add up to the whole, however the sequences are split into micro-batches and ranks.

A loss whose entry in the table ``selects`` gets one more argument, ``selected_BT``: the tokens that it treats apart,
chosen among all of the optimizer step, before it was split.

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
from core.config.plugins import chosen

if TYPE_CHECKING:
    from core.config.sections.actor import ActorConfig

LOG_RATIO_BOUND = 20.0  # exp(20) is 5e8: beyond it a float32 ratio has no digits left
Stats = dict[str, Tensor]
PolicyLoss = Callable[..., tuple[Tensor, Stats]]


def clipped(ratio_BT: Tensor, config: ActorConfig) -> Tensor:
    """Clamp the ratio to ``[1 - low, 1 + high]``; a bound that is not given is ``clip_ratio``."""
    low, high = clip_bounds(config)
    return ratio_BT.clamp(1 - low, 1 + high)


def clip_bounds(config: ActorConfig) -> tuple[float, float]:
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    return low, config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high


def inside_mask(mask_BT: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Set the tensors to 0 outside the mask, before anything is computed: gradients there are 0, never NaN."""
    outside = ~mask_BT.bool()
    return tuple(tensor.masked_fill(outside, 0) for tensor in tensors)


def token_stats(mask_BT: Tensor, **stats: Tensor) -> Stats:
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
    logp, old, adv = inside_mask(response_mask_BT, log_prob_BT, old_log_prob_BT, advantages_BT)
    log_ratio = (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    plain, bounded = -adv * ratio, -adv * clipped(ratio, config)
    surrogate, floor = torch.maximum(plain, bounded), -adv * config.clip_ratio_c
    negative = adv < 0
    loss = torch.where(negative, torch.minimum(surrogate, floor), surrogate)
    return loss, token_stats(
        response_mask_BT,
        pg_clipfrac=bounded > plain,
        pg_clipfrac_high=(bounded > plain) & ~negative,
        pg_clipfrac_lower=(surrogate > floor) & negative,
        ppo_kl=-log_ratio,
    )


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
    values, returns, old = inside_mask(response_mask_BT, values_BT, returns_BT, old_values_BT)
    near = torch.clamp(values, old - cliprange_value, old + cliprange_value)
    plain, bounded = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(plain, bounded), token_stats(response_mask_BT, vf_clipfrac=bounded > plain)


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
