"""Importance correction: training on samples that another policy than the learner's drew.

Samples come from an engine of its own precision, from a policy that is a step old, or from a truncated distribution.
Written ``d = log pi_learner - log pi_rollout`` below, token by token, with the learner's weights of before the update.
Two remedies, alone or together (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training"; Liu et al. 2025, "When speed kills stability"):

* weights (``rollout_is``): the policy-gradient loss of a token is multiplied by ``exp(d)``, or by the product over
  its sequence; truncated at a bound (TIS), or 0 outside two (MIS, also called IcePop). A weight changes a token's
  loss, never the denominators.
* rejection (``rollout_rs``): tokens or sequences whose divergence is out of bounds leave ``loss_mask``, and with it
  every denominator, as a masked sample does. Their rewards stay in their group's statistics: the answer is real, only
  its gradient is not to be trusted.

PPO's own ratio stays between the learner and itself, before and during the update (decoupled PPO, arXiv:2110.00641).
``bypass_mode`` takes the engine's log-probs for the old ones instead: one ratio then does both, and a pass is saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.algorithm.losses import LOG_RATIO_BOUND, Means
from core.algorithm.masked import masked_mean
from core.config.correction_bounds import Bounds, Criterion, criteria, weight_bounds
from core.types import TrainBatch

if TYPE_CHECKING:
    from core.config.sections.rollout_correction import RolloutCorrectionConfig

MISMATCH_READS = ("response_mask", "sampled_mask", "old_log_probs", "rollout_log_probs")  # by add_mismatch
PERPLEXITY_BOUND = 80.0  # nats: a metric must be finite


def sampled(batch: TrainBatch) -> Tensor:
    """Return the tokens for which the engine has a log-prob, [B, T] bool."""
    return batch.response_mask if batch.sampled_mask is None else batch.sampled_mask


def log_ratio(log_prob_BT: Tensor, rollout_log_prob_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return ``d``, [B, T] float64 and 0 outside the mask."""
    difference = log_prob_BT.detach().double() - rollout_log_prob_BT.double()
    return difference.masked_fill(~mask_BT.bool(), 0)


def importance_weights(log_ratio_BT: Tensor, mask_BT: Tensor, level: str, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Return the weights as applied, and as they were before the bounds.

    ``token``: ``exp(d_t)``. ``sequence``: ``exp(sum_t d_t)`` for all its tokens. Exponents are clamped to +-20.
    One bound truncates, ``min(w, upper)``; two of them mask, ``w`` where ``lower <= w <= upper`` and 0 elsewhere.

    Shapes:
        log_ratio_BT    [B, T], 0 outside the mask
        applied, raw    [B, T], 0 outside the mask
    """
    exponent = log_ratio_BT if level == "token" else log_ratio_BT.sum(-1, keepdim=True).expand_as(log_ratio_BT)
    raw = exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().masked_fill(~mask_BT, 0)
    if bounds.lower is None:
        return raw.clamp(max=bounds.upper), raw
    return raw.masked_fill((raw < bounds.lower) | (raw > bounds.upper), 0), raw


def normalising_factor(weights_BT: Tensor, mask_BT: Tensor, level: str) -> float:
    """Return the mean weight, over tokens or over sequences; 1 where all weights are 0."""
    mean = float((weights_BT[mask_BT] if level == "token" else _means_of_sequences(weights_BT, mask_BT)).mean())
    return mean if mean > 1e-8 else 1.0


def divergence(log_ratio_BT: Tensor, mask_BT: Tensor, name: str) -> Tensor:
    """Return a statistic of ``core.config.correction_bounds.STATISTICS``, [B, T]; a sequence's is in all of its tokens.

    ``k1 = -d``, ``k2 = d^2 / 2``, ``k3 = exp(d) - 1 - d`` (Schulman 2020, "Approximating KL divergence"), d clamped to
    +-20; per token, or summed, averaged or maximised over the sequence.
    """
    d = log_ratio_BT.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    over, _, estimate = name.rpartition("_")
    value = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - 1 - d}[estimate].masked_fill(~mask_BT, 0)
    if over == "seq_sum":
        value = value.sum(-1, keepdim=True)
    elif over == "seq_mean":
        value = value.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    elif over == "seq_max":  # k2 and k3 are at least 0
        value = value.amax(-1, keepdim=True)
    return value.expand_as(log_ratio_BT)


def kept_tokens(log_ratio_BT: Tensor, mask_BT: Tensor, wanted: tuple[Criterion, ...]) -> Tensor:
    """Return the tokens of the mask that meet every criterion, [B, T] bool."""
    kept = mask_BT.clone()
    for one in wanted:
        value = divergence(log_ratio_BT, mask_BT, one.name)
        kept &= (value >= one.lower) & (value <= one.upper)
    return kept


def correct(batch: TrainBatch, config: RolloutCorrectionConfig) -> tuple[TrainBatch, dict[str, float]]:
    """Set ``rollout_is_weights`` and take rejected tokens out of ``loss_mask``; return ``rollout_corr/...`` too.

    The weights belong to the whole batch: a driver computes them once, before sequences are split over ranks.
    Tokens that train and that no policy sampled (``batch.sampled_mask``) have weight 1, and stay where their sequence
    does.
    """
    given = (config.rollout_is, config.rollout_rs, config.rollout_token_veto_threshold)
    if batch.sampled_mask is None and all(value is None for value in given):
        return batch, {}  # the usual case, and padding a large batch costs a second a field
    mask, metrics = sampled(batch), {}
    if not bool(mask.any()):
        return batch, metrics
    others = batch.response_mask & ~mask
    ratio_BT = log_ratio(batch.need("old_log_probs"), batch.rollout_log_probs, mask)
    if config.rollout_is is not None:
        bounds = weight_bounds(config.rollout_is_threshold)
        applied, raw = importance_weights(ratio_BT, mask, config.rollout_is, bounds)
        metrics.update(weight_metrics(applied, raw, mask, config.rollout_is, bounds))
        if config.rollout_is_batch_normalize:
            metrics["rollout_is_batch_norm_factor"] = factor = normalising_factor(applied, mask, config.rollout_is)
            applied = applied / factor
        batch = batch.adding(rollout_is_weights=applied.masked_fill(others, 1.0).float()).sealed("rollout_is_weights")
    kept = mask
    if config.rollout_rs is not None:
        wanted = criteria(config.rollout_rs, config.rollout_rs_threshold, config.rollout_rs_threshold_lower)
        kept = kept_tokens(ratio_BT, mask, wanted)
        metrics.update(rejection_metrics(ratio_BT, mask, wanted))
    if config.rollout_token_veto_threshold is not None:
        # One token that the learner finds less likely than the engine by this factor drops its sequence.
        vetoed = (ratio_BT.exp() < config.rollout_token_veto_threshold).any(-1)
        kept = kept & ~vetoed[:, None]
        metrics["rollout_is_veto_fraction"] = float(vetoed.double().mean())
    kept = kept | (others & kept.any(-1, keepdim=True))
    corrected = batch.adding(loss_mask=batch.loss_mask & kept).sealed("loss_mask")
    return corrected, {f"rollout_corr/{k}": v for k, v in metrics.items()}


# -- metrics, under verl's names --------------------------------------------------------------------------------------


def weight_metrics(applied_BT: Tensor, raw_BT: Tensor, mask_BT: Tensor, level: str, bounds: Bounds) -> dict[str, float]:
    """Return ``rollout_is_*``: of the weights as applied; the shares beyond the bounds, of the weights before.

    ``eff_sample_size`` is Kish's, ``(mean w)^2 / mean w^2`` over tokens: 1 where all weights are equal, 0 where all
    are 0. Without a lower bound ``fraction_low`` counts what is below the upper one's reciprocal.
    """
    lower = 1 / bounds.upper if bounds.lower is None else bounds.lower
    inside = Bounds(lower, bounds.upper)
    found = _spread(applied_BT, raw_BT, mask_BT, level == "sequence", inside, ideal=1.0, floor=0.0)
    tokens = applied_BT[mask_BT]
    square = float(tokens.square().mean())
    found["eff_sample_size"] = float(tokens.mean()) ** 2 / square if square else 0.0
    found["ratio_fraction_high"], found["ratio_fraction_low"] = found.pop("fraction_high"), found.pop("fraction_low")
    if bounds.lower is not None:
        raw = raw_BT[mask_BT]
        found["oob_ratio"] = float(((raw < lower) | (raw > bounds.upper)).double().mean())
    return {f"rollout_is_{name}": value for name, value in found.items()}


def rejection_metrics(log_ratio_BT: Tensor, mask_BT: Tensor, wanted: tuple[Criterion, ...]) -> dict[str, float]:
    """Return ``rollout_rs_*``: each criterion's statistic, and the shares of tokens and of sequences rejected."""
    metrics = {}
    for one in wanted:
        value, by_sequence = divergence(log_ratio_BT, mask_BT, one.name), one.name.startswith("seq")
        inside = Bounds(one.lower, one.upper)
        found = _spread(value, value, mask_BT, by_sequence, inside, ideal=0.0, floor=one.lower)
        found |= _rejected(kept_tokens(log_ratio_BT, mask_BT, (one,)), mask_BT)
        metrics |= {f"rollout_rs_{one.name}_{name}": number for name, number in found.items()}
    together = _rejected(kept_tokens(log_ratio_BT, mask_BT, wanted), mask_BT)
    return metrics | {f"rollout_rs_{name}": number for name, number in together.items()}


def _rejected(kept_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """Return the share of tokens that were rejected, and of sequences that lost one."""
    touched = (mask_BT & ~kept_BT).any(-1)[mask_BT.any(-1)]
    return {
        "masked_fraction": float((~kept_BT[mask_BT]).double().mean()),
        "seq_masked_fraction": float(touched.double().mean()),
    }


def _spread(
    applied_BT: Tensor, raw_BT: Tensor, mask_BT: Tensor, by_sequence: bool, bounds: Bounds, ideal: float, floor: float
) -> dict[str, float]:
    """Return mean and spread over tokens, and over the means of sequences in ``seq_*``.

    Extremes and shares are those of tokens or, ``by_sequence``, of sequences' means.
    """
    tokens, means = applied_BT[mask_BT], _means_of_sequences(applied_BT, mask_BT)
    raw_means, lower, upper = _means_of_sequences(raw_BT, mask_BT), bounds.lower, bounds.upper
    extremes, compared = (raw_means, raw_means) if by_sequence else (tokens, raw_BT[mask_BT])
    found = {
        "mean": tokens.mean(),
        "max": extremes.max(),
        "min": extremes.min(),
        "std": tokens.clamp(min=floor, max=upper).std(correction=0),
        "fraction_high": (compared > upper).double().mean(),
        "fraction_low": (compared < lower).double().mean(),
        "seq_mean": means.mean(),
        "seq_std": means.std() if len(means) > 1 else torch.zeros(()),
        "seq_max": means.max(),
        "seq_min": means.min(),
        "seq_max_deviation": (means - ideal).abs().max(),
        "seq_fraction_high": (raw_means > upper).double().mean(),
        "seq_fraction_low": (raw_means < lower).double().mean(),
    }
    return {name: float(value) for name, value in found.items()}


def _means_of_sequences(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean over each sequence's tokens, [sequences that have a token]."""
    return masked_mean(values_BT, mask_BT, dim=-1)[mask_BT.any(-1)]


def add_mismatch(means: Means, log_prob_BT: Tensor, batch: TrainBatch, entropy_BT: Tensor | None = None) -> None:
    """Measure how far the engine's log-probs are from the learner's (verl's ``rollout_corr/*``), corrected or not.

    ``kl`` and ``k3_kl`` estimate KL(engine, learner) on the engine's own samples (Schulman's k1 and k3), per token.
    ``*_ppl`` are means over sequences of ``exp(-mean log p)``; ``chi2_*`` is ``mean w^2 - 1``, per token or sequence.
    Sequences are complete in a micro-batch, so the parts of ``means`` add up. ``surprise_gap`` is the mean of entropy
    + log p of the sampled tokens, whose expectation is 0 for samples of the whole distribution.
    """
    mask = sampled(batch)
    if entropy_BT is not None:
        surprise = entropy_BT.detach().double() + log_prob_BT.detach().double()
        means.tokens({"surprise_gap": surprise, "surprise_gap_square": surprise.square()}, mask)
    d = log_ratio(log_prob_BT, batch.rollout_log_probs, mask)
    bounded = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    of_tokens = {
        "kl": -d,
        "k3_kl": bounded.exp() - d - 1,
        "logp_diff_mean": d.abs(),
        "chi2_token": (2 * bounded).exp() - 1,
    }
    means.tokens(of_tokens, mask)
    means.peak("logp_diff_max", float(d.abs().max()) if d.numel() else 0.0)
    sequences = mask.any(-1, keepdim=True)
    if not bool(sequences.any()):
        return
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    training, rollout = (
        -value.detach().double().masked_fill(~mask, 0).sum(-1, keepdim=True) / count
        for value in (log_prob_BT, batch.rollout_log_probs)
    )
    gap = training - rollout
    of_sequences = {
        "training_ppl": training.clamp(max=PERPLEXITY_BOUND).exp(),
        "training_log_ppl": training,
        "rollout_ppl": rollout.clamp(max=PERPLEXITY_BOUND).exp(),
        "rollout_log_ppl": rollout,
        "log_ppl_diff": gap,
        "log_ppl_abs_diff": gap.abs(),
        "ppl_ratio": gap.clamp(max=PERPLEXITY_BOUND).exp(),
        "chi2_seq": (2 * d.sum(-1, keepdim=True).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp() - 1,
    }
    means.tokens(of_sequences, sequences)
    means.peak("log_ppl_diff_max", float(gap[sequences].max()))
    means.trough("log_ppl_diff_min", float(gap[sequences].min()))
