"""Policy losses, the value loss, and the weights that turn per-token losses into the objective.

A policy loss is a pure function ``f(log_prob_N, old_log_prob_N, advantages_N, response_mask_N, config) ->
(loss_N, stats)`` of the N tokens of a micro-batch. It returns a loss for each token; the objective is
``(loss_N * weight_N).sum()`` with the weights of :func:`loss_weights`, which are computed once a mini-batch over all
its sequences. Sums of parts then add up to the whole, however the sequences are split into micro-batches and ranks.

A loss whose entry in the table ``selects`` gets ``selected_N`` as well: the tokens that it treats apart, chosen among
all of the mini-batch, before it was split. One with a ``sequence_ratio`` gets ``lengths_B``. A user's own loss, named
by its path, gets [B, T] tensors (:mod:`core.algorithm.padded`).

``stats`` are detached ``[N]`` tensors, to be averaged over the response tokens. Losses and stats are 0 outside the
mask, also where the inputs are NaN there.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.algorithm.padded import is_padded, pads_loss
from core.algorithm.sequences import spread_over_tokens, sum_by_sequence
from core.config import registry
from core.config.code_by_path import chosen

if TYPE_CHECKING:
    from core.config.sections.actor import ActorConfig

LOG_RATIO_BOUND = 20.0  # exp(20) is 5e8: beyond it a float32 ratio has no digits left
Stats = dict[str, Tensor]
PolicyLoss = Callable[..., tuple[Tensor, Stats]]


def clipped(ratio_N: Tensor, config: ActorConfig) -> Tensor:
    """Clamp the ratio to ``[1 - low, 1 + high]``; a bound that is not given is ``clip_ratio``."""
    low, high = clip_bounds(config)
    return ratio_N.clamp(1 - low, 1 + high)


def clip_bounds(config: ActorConfig) -> tuple[float, float]:
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    return low, config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high


def inside_mask(mask_N: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Set the tensors to 0 outside the mask, before anything is computed: gradients there are 0, never NaN."""
    outside = ~mask_N.bool()
    return tuple(tensor.masked_fill(outside, 0) for tensor in tensors)


def token_stats(mask_N: Tensor, **stats: Tensor) -> Stats:
    return {name: value.detach().float().masked_fill(~mask_N.bool(), 0) for name, value in stats.items()}


def vanilla(
    log_prob_N: Tensor, old_log_prob_N: Tensor, advantages_N: Tensor, response_mask_N: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    """Return PPO's clipped surrogate (arXiv:1707.06347, eq. 7) with dual clip (arXiv:1912.09729).

    ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and where A < 0 at most ``-A c``. With high > low it is
    DAPO's clip-higher (arXiv:2503.14476, eq. 10). The log-ratio is clamped to +-20.

    Shapes:
        all tensors  [N]
        stats        pg_clipfrac, pg_clipfrac_high (its part above 1), pg_clipfrac_lower (dual clip), ppo_kl  [N]

    Raises:
        ValueError: ``clip_ratio_c`` is not above 1.
    """
    if config.clip_ratio_c <= 1:
        raise ValueError(f"actor.clip_ratio_c={config.clip_ratio_c}: the dual clip's bound on the ratio must be > 1")
    logp, old, adv = inside_mask(response_mask_N, log_prob_N, old_log_prob_N, advantages_N)
    log_ratio = (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    plain, bounded = -adv * ratio, -adv * clipped(ratio, config)
    surrogate, floor = torch.maximum(plain, bounded), -adv * config.clip_ratio_c
    negative = adv < 0
    loss = torch.where(negative, torch.minimum(surrogate, floor), surrogate)
    return loss, token_stats(
        response_mask_N,
        pg_clipfrac=bounded > plain,
        pg_clipfrac_high=(bounded > plain) & ~negative,
        pg_clipfrac_lower=(surrogate > floor) & negative,
        ppo_kl=-log_ratio,
    )


def policy_loss(name: str) -> PolicyLoss:
    """Return the policy loss of this name, or a user's own: ``package.module:function`` or ``path/file.py:function``.

    It takes ``lengths_B`` and ``selected_N`` beside the arguments of every loss, and passes those that the loss reads.

    Raises:
        InputError: neither a name of the table nor a path that leads to a function.
    """
    function = chosen(name, registry.POLICY_LOSSES, "actor_rollout_ref.actor.policy_loss.loss_mode")
    entry, by_sequence = registry.policy_loss(name), registry.policy_loss(name).sequence_ratio
    if name not in registry.POLICY_LOSSES and is_padded(function):
        function, by_sequence = pads_loss(function), True

    @functools.wraps(function)
    def loss(*inputs: Any, lengths_B: Tensor | None = None, selected_N: Tensor | None = None) -> tuple[Tensor, Stats]:
        more = {"lengths_B": lengths_B} if by_sequence else {}
        return function(*inputs, **more, **({"selected_N": selected_N} if entry.selects else {}))

    return loss


def value_loss(
    values_N: Tensor, returns_N: Tensor, old_values_N: Tensor, cliprange_value: float, response_mask_N: Tensor
) -> tuple[Tensor, Stats]:
    """Return the critic's clipped squared error, ``0.5 max((V - R)^2, (clip(V, V_old +- eps) - R)^2)``.

    The value-function clipping of PPO's reference implementation (Huang et al. 2022, "The 37 implementation
    details of PPO", detail 9).

    Shapes:
        all tensors  [N]
        stats        vf_clipfrac  [N]
    """
    values, returns, old = inside_mask(response_mask_N, values_N, returns_N, old_values_N)
    near = torch.clamp(values, old - cliprange_value, old + cliprange_value)
    plain, bounded = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(plain, bounded), token_stats(response_mask_N, vf_clipfrac=bounded > plain)


def loss_weights(
    loss_mask_N: Tensor, lengths_B: Tensor, mode: str, *, scale_factor: float = 1.0, group_B: Tensor | None = None
) -> Tensor:
    """Return each token's share of the objective, so that the loss is ``(loss_N * weight_N).sum()``.

    With M tokens, S sequences and P prompts that have a token of the mask, over the whole mini-batch, L_i tokens in
    sequence i and M_p in all answers to prompt p together:

        token-mean               1 / M            (arXiv:2503.14476, eq. 12)
        seq-mean-token-mean      1 / (S L_i)      (arXiv:2402.03300, eq. 3)
        seq-mean-token-sum       1 / S
        seq-mean-token-sum-norm  1 / (S C), C = ``scale_factor``   (arXiv:2503.20783)
        prompt-mean-token-mean   1 / (P M_p)      (arXiv:2510.13786, "prompt-level" in its objective of section 4)

    The first two and the last sum to one. A mini-batch without a token gets zeros.

    Shapes:
        loss_mask_N  [N]  bool or 0/1
        lengths_B    [B]  int64  tokens of each sequence
        group_B      [B]  int64  sequences of one prompt share a number; prompt-mean-token-mean alone reads it
        result       [N]  float32; float64 for a float64 mask

    Raises:
        ValueError: an unknown mode, or prompt-mean-token-mean without ``group_B``.
    """
    if mode not in registry.LOSS_AGG_MODES:
        raise ValueError(f"actor.loss_agg_mode={mode}: choose one of {', '.join(registry.LOSS_AGG_MODES)}")
    mask = loss_mask_N.bool()
    counts = sum_by_sequence(mask.double(), lengths_B)
    sequences, share = max(float((counts > 0).sum()), 1.0), torch.ones_like(counts)
    if mode == "token-mean":
        share = share / counts.sum().clamp(min=1)
    elif mode == "seq-mean-token-mean":
        share = share / counts.clamp(min=1) / sequences
    elif mode == "prompt-mean-token-mean":
        if group_B is None:
            raise ValueError("actor.loss_agg_mode=prompt-mean-token-mean needs the group of each sequence")
        group = torch.unique(group_B, return_inverse=True)[1]
        of_prompt = torch.zeros_like(counts).index_add(0, group, counts)
        share = share / of_prompt[group].clamp(min=1) / of_prompt.count_nonzero().clamp(min=1)
    else:
        share = share / sequences / (scale_factor if mode.endswith("-norm") else 1.0)
    dtype = torch.float64 if loss_mask_N.dtype == torch.float64 else torch.float32
    return torch.where(mask, spread_over_tokens(share.to(dtype), lengths_B), 0)


class MetricSums:
    """Sums and counts of metrics, which add up over micro-batches, steps and ranks; the result is their means."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, float] = {}
        self.troughs: dict[str, float] = {}

    def tokens(self, stats: dict[str, Tensor], mask_N: Tensor) -> None:
        for name, value_N in stats.items():
            self.sums[name] += float(torch.where(mask_N, value_N.detach(), 0.0).sum())
            self.counts[name] += float(mask_N.sum())

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

    def merge(self, other: MetricSums) -> None:
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
