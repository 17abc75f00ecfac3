"""Policy losses beyond those of the four papers; ``core/algorithm/losses.py`` says what a loss is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.algorithm.losses import LOG_RATIO_BOUND, Stats, clip_bounds, clipped, inside_mask, token_stats
from core.algorithm.sequences import mean_by_sequence, spread_over_tokens

if TYPE_CHECKING:
    from core.config.sections.actor import ActorConfig

SAME_POLICY = 1e-4  # a float32 log-ratio below it may be rounding: its sign would depend on the micro-batch


def gspo(
    log_prob_N: Tensor,
    old_log_prob_N: Tensor,
    advantages_N: Tensor,
    response_mask_N: Tensor,
    config: ActorConfig,
    lengths_B: Tensor,
) -> tuple[Tensor, Stats]:
    """Use a sequence-level ratio with a token-level gradient: GSPO-token (arXiv:2507.18071, eq. 13 and 14).

    ``s = exp(mean over the sequence's tokens of log r)`` is clipped as in PPO; its gradient flows through each
    token's log-prob. Its paper averages per sequence first (``aggregation`` in the table).

    Shapes:
        all tensors  [N], but lengths_B, the tokens of each sequence
        stats        pg_clipfrac, pg_clipfrac_lower (always 0), ppo_kl  [N]
    """
    logp, old, adv = inside_mask(response_mask_N, log_prob_N, old_log_prob_N, advantages_N)
    log_ratio = logp - old
    sequence = spread_over_tokens(mean_by_sequence(log_ratio.detach(), response_mask_N.bool(), lengths_B), lengths_B)
    ratio = (logp - logp.detach() + sequence).clamp(max=10.0).exp()
    plain, bounded = -adv * ratio, -adv * clipped(ratio, config)
    clips, never = bounded > plain, torch.zeros_like(plain)
    stats = token_stats(response_mask_N, pg_clipfrac=clips, pg_clipfrac_lower=never, ppo_kl=-log_ratio)
    return torch.maximum(plain, bounded), stats


def geo_mean(
    log_prob_N: Tensor,
    old_log_prob_N: Tensor,
    advantages_N: Tensor,
    response_mask_N: Tensor,
    config: ActorConfig,
    lengths_B: Tensor,
) -> tuple[Tensor, Stats]:
    """Return ``-A`` times the geometric mean of a sequence's ratios: GMPO (arXiv:2507.20673).

    Each token's log-ratio is bounded by ``[-clip_ratio_low, clip_ratio_high]``, where that makes the objective smaller.
    Averaged per sequence, whose tokens share an advantage.

    Shapes:
        all tensors  [N], but lengths_B, the tokens of each sequence
        stats        pg_clipfrac (of A > 0), pg_clipfrac_lower (of A < 0), ppo_kl  [N]
    """
    logp, old, adv = inside_mask(response_mask_N, log_prob_N, old_log_prob_N, advantages_N)
    log_ratio = logp - old
    bounded = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    sign = adv.sign()
    smaller = sign * torch.minimum(sign * log_ratio, sign * bounded)
    means = mean_by_sequence(smaller, response_mask_N.bool(), lengths_B)
    ratio = spread_over_tokens(means, lengths_B).clamp(max=10.0).exp()
    clips = log_ratio != bounded
    stats = token_stats(
        response_mask_N, pg_clipfrac=clips & (adv > 0), pg_clipfrac_lower=clips & (adv < 0), ppo_kl=-log_ratio
    )
    return -adv * ratio, stats


def sapo(
    log_prob_N: Tensor, old_log_prob_N: Tensor, advantages_N: Tensor, response_mask_N: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    """Use a soft gate in place of the clip (SAPO, arXiv:2511.20347).

    ``-A * 4 / tau * sigmoid(tau (r - 1))``, tau by the sign of A. Averaged per sequence.

    Shapes:
        all tensors  [N]
        stats        pg_clipfrac, pg_clipfrac_lower (both always 0), ppo_kl  [N]
    """
    logp, old, adv = inside_mask(response_mask_N, log_prob_N, old_log_prob_N, advantages_N)
    log_ratio = (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    tau = torch.full_like(adv, config.tau_neg).masked_fill(adv > 0, config.tau_pos)
    loss = -adv * torch.sigmoid(tau * (log_ratio.exp() - 1)) * (4.0 / tau)
    never = torch.zeros_like(loss)
    return loss, token_stats(response_mask_N, pg_clipfrac=never, pg_clipfrac_lower=never, ppo_kl=-log_ratio)


def gpg(
    log_prob_N: Tensor, old_log_prob_N: Tensor, advantages_N: Tensor, response_mask_N: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    """Return the plain policy gradient ``-A log p`` of GPG (arXiv:2504.02546), which is REINFORCE's.

    Shapes:
        all tensors  [N]
        stats        ppo_kl  [N]
    """
    logp, old, adv = inside_mask(response_mask_N, log_prob_N, old_log_prob_N, advantages_N)
    return -adv * logp, token_stats(response_mask_N, ppo_kl=old - logp)


def cispo(
    log_prob_N: Tensor, old_log_prob_N: Tensor, advantages_N: Tensor, response_mask_N: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    """Clip the importance weight, not the gradient: CISPO (arXiv:2506.13585, eq. 4 and 5).

    ``-stop_gradient(clip(r, 1 - low, 1 + high)) A log p``: every token keeps a gradient.

    Shapes:
        all tensors  [N]
        stats        pg_clipfrac, pg_clipfrac_lower (always 0), ppo_kl  [N]
    """
    logp, old, adv = inside_mask(response_mask_N, log_prob_N, old_log_prob_N, advantages_N)
    log_ratio = (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.detach().exp()
    weight = clipped(ratio, config)
    clips, never = weight != ratio, torch.zeros_like(ratio)
    stats = token_stats(response_mask_N, pg_clipfrac=clips, pg_clipfrac_lower=never, ppo_kl=-log_ratio)
    return -weight * adv * logp, stats


def clip_cov(
    log_prob_N: Tensor,
    old_log_prob_N: Tensor,
    advantages_N: Tensor,
    response_mask_N: Tensor,
    config: ActorConfig,
    selected_N: Tensor,
) -> tuple[Tensor, Stats]:
    """Return PPO's clipped surrogate without dual clip, and 0 for the selected tokens: Clip-Cov (arXiv:2505.22617).

    A selected token loses its gradient and keeps its place in the denominators.

    Shapes:
        all tensors  [N]
        stats        pg_clipfrac (by the bounds), cov_selected, pg_clipfrac_lower (always 0), ppo_kl  [N]
    """
    logp, old, adv = inside_mask(response_mask_N, log_prob_N, old_log_prob_N, advantages_N)
    log_ratio = (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    plain, bounded = -adv * ratio, -adv * clipped(ratio, config)
    clips, never = bounded > plain, torch.zeros_like(plain)
    stats = {"pg_clipfrac": clips, "cov_selected": selected_N, "pg_clipfrac_lower": never, "ppo_kl": -log_ratio}
    return torch.maximum(plain, bounded).masked_fill(selected_N, 0), token_stats(response_mask_N, **stats)


def kl_cov(
    log_prob_N: Tensor,
    old_log_prob_N: Tensor,
    advantages_N: Tensor,
    response_mask_N: Tensor,
    config: ActorConfig,
    selected_N: Tensor,
) -> tuple[Tensor, Stats]:
    """Return ``-A r``, and ``ppo_kl_coef |log r|`` more for the selected tokens: KL-Cov (arXiv:2505.22617).

    Nothing is clipped. Where the policy is still the old one ``|log r|`` has no gradient: with one optimizer step a
    rollout this is the plain policy gradient. Published, the sign of a rounding error is its gradient there; here
    ``|log r|`` below 1e-4 is 0. In bf16 rounding is larger, and decides still.

    Shapes:
        all tensors  [N]
        stats        cov_selected, pg_clipfrac, pg_clipfrac_lower (both always 0), ppo_kl (here ``|log r|``)  [N]
    """
    logp, old, adv = inside_mask(response_mask_N, log_prob_N, old_log_prob_N, advantages_N)
    log_ratio = (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    distance = log_ratio.abs()
    held = selected_N & (distance > SAME_POLICY)
    loss = -adv * log_ratio.exp() + config.policy_loss.ppo_kl_coef * distance.masked_fill(~held, 0)
    never = torch.zeros_like(loss)
    stats = {"cov_selected": selected_N, "pg_clipfrac": never, "pg_clipfrac_lower": never, "ppo_kl": distance}
    return loss, token_stats(response_mask_N, **stats)


def dppo_tv(
    log_prob_N: Tensor, old_log_prob_N: Tensor, advantages_N: Tensor, response_mask_N: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    """Drop tokens whose probability has moved too far in the advantage's direction: DPPO, Binary-TV.

    ``-stop_gradient(min(r, c) M) A log p``. M is 0 where A > 0 and ``p - p_old > high``, and where A <= 0 and
    ``p - p_old < -low``: the total variation of "this token or another one". The bounds are ``clip_ratio_low`` and
    ``clip_ratio_high``, c is ``clip_ratio_c``, as in verl's loss of this name. Source: arXiv:2602.04879, in the form of
    verl's implementation; the paper's text was read in excerpts alone, and c is verl's.

    Shapes:
        all tensors  [N]
        stats        pg_clipfrac (dropped), pg_clipfrac_lower (the weight is c), ppo_kl  [N]
    """
    logp, old, adv = inside_mask(response_mask_N, log_prob_N, old_log_prob_N, advantages_N)
    low, high = clip_bounds(config)
    moved = logp.detach().exp() - old.exp()
    return _masked_gradient(logp, old, adv, torch.where(adv > 0, moved > high, moved < -low), response_mask_N, config)


def dppo_kl(
    log_prob_N: Tensor, old_log_prob_N: Tensor, advantages_N: Tensor, response_mask_N: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    """Drop tokens as :func:`dppo_tv`, by the binary KL from the old policy in place of the total variation.

    ``p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))``; M is 0 where it exceeds ``high`` and p has risen
    under A > 0, or exceeds ``low`` and p has fallen under A <= 0. Source: as :func:`dppo_tv`, Binary-KL.

    Shapes:
        all tensors  [N]
        stats        pg_clipfrac (dropped), pg_clipfrac_lower (the weight is c), ppo_kl  [N]
    """
    logp, old, adv = inside_mask(response_mask_N, log_prob_N, old_log_prob_N, advantages_N)
    low, high = clip_bounds(config)
    now = logp.detach()
    # log(1 - p) by expm1; the floor of 1e-8 (verl's, too) is for p = 1, where it would be infinite.
    other, old_other = ((-torch.expm1(one)).clamp(min=1e-8) for one in (now, old))
    divergence = old.exp() * (old - now) + old_other * (old_other / other).log()
    far = torch.where(adv > 0, (divergence > high) & (now > old), (divergence > low) & (now < old))
    return _masked_gradient(logp, old, adv, far, response_mask_N, config)


def _masked_gradient(
    logp: Tensor, old: Tensor, adv: Tensor, dropped: Tensor, mask_N: Tensor, config: ActorConfig
) -> tuple[Tensor, Stats]:
    log_ratio = (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.detach().exp()
    truncated = (ratio > config.clip_ratio_c) & ~dropped
    stats = token_stats(mask_N, pg_clipfrac=dropped, pg_clipfrac_lower=truncated, ppo_kl=-log_ratio)
    return -ratio.clamp(max=config.clip_ratio_c).masked_fill(dropped, 0) * adv * logp, stats
