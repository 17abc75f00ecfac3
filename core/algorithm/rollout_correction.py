"""How far the engine's log-probs are from the learner's, and importance correction for it.

Samples come from an engine of its own precision, from a policy that is a step old, or from a
truncated distribution. Written ``d = log pi_learner - log pi_rollout`` below, token by token, with
the learner's weights before the update. Two remedies, alone or together (Yao et al. 2025, "Your
efficient RL framework secretly brings you off-policy RL training"; Liu et al. 2025, "When speed
kills stability"):

* weights (``rollout_is``): the policy-gradient loss of a token is multiplied by ``exp(d)``, or by
  the product over its sequence; truncated at a bound (TIS), or 0 outside two (MIS, also called
  IcePop). A weight changes a token's loss, never the denominators.
* rejection (``rollout_rs``): tokens or sequences whose divergence is out of bounds leave
  ``loss_mask``, and with it every denominator, as a masked sample does. Their rewards stay in their
  group's statistics: the answer is real, only its gradient is not to be trusted.

PPO's own ratio stays between the learner and itself, before and during the update (decoupled PPO,
arXiv:2110.00641). ``bypass_mode`` takes the engine's log-probs for the old ones instead: one ratio
then does both, and a pass is saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.algorithm.correction_bounds import Bounds, Criterion, criteria, weight_bounds
from core.algorithm.losses import LOG_RATIO_BOUND
from core.algorithm.sequences import (
    count_by_sequence,
    max_by_sequence,
    mean_by_sequence,
    spread_over_tokens,
    sum_by_sequence,
)
from core.config.training_keys import RolloutCorrectionConfig
from core.tracking.metric_sums import MetricSums
from core.types import TrainBatch

# By add_mismatch
MISMATCH_READS = ("response_mask", "sampled_mask", "old_log_probs", "rollout_log_probs")
PERPLEXITY_BOUND = 80.0  # nats: a metric must be finite


def sampled(batch: TrainBatch) -> Tensor:
    """Return the tokens for which the engine has a log-prob, [N] bool."""
    return batch.sampled_mask if batch.has("sampled_mask") else batch.response_mask


def log_ratio(log_prob_N: Tensor, rollout_log_prob_N: Tensor, mask_N: Tensor) -> Tensor:
    """Return ``d``, [N] float64 and 0 outside the mask."""
    difference = log_prob_N.detach().double() - rollout_log_prob_N.double()
    return difference.masked_fill(~mask_N.bool(), 0)


# -- how far they are apart ------------------------------------------------------------------------


def add_mismatch(
    means: MetricSums, log_prob_N: Tensor, batch: TrainBatch, entropy_N: Tensor | None = None
) -> None:
    """Measure how far the engine's log-probs are from the learner's (verl's ``rollout_corr/*``),
    corrected or not.

    ``kl`` and ``k3_kl`` estimate KL(engine, learner) on the engine's own samples (Schulman's k1 and
    k3), per token. ``*_ppl`` are means over sequences of ``exp(-mean log p)``; ``chi2_*`` is ``mean
    w^2 - 1``, per token or sequence. Sequences are complete in a micro-batch, so the parts of
    ``means`` add up. ``entropy_gap`` is the mean of entropy + log p of the sampled tokens, whose
    expectation is 0 for samples of the whole distribution.
    """
    mask, lengths = sampled(batch), batch.lengths
    if entropy_N is not None:
        gap = entropy_N.detach().double() + log_prob_N.detach().double()
        means.tokens({"entropy_gap": gap, "entropy_gap_square": gap.square()}, mask)
    d = log_ratio(log_prob_N, batch.rollout_log_probs, mask)
    bounded = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    k3, chi2 = bounded.exp() - d - 1, (2 * bounded).exp() - 1
    means.tokens({"kl": -d, "k3_kl": k3, "logp_diff_mean": d.abs(), "chi2_token": chi2}, mask)
    means.extreme("logp_diff_max", float(d.abs().max()) if d.numel() else 0.0)
    filled = count_by_sequence(mask, lengths) > 0
    if not bool(filled.any()):
        return
    training = -mean_by_sequence(log_prob_N.detach().double(), mask, lengths)
    rollout = -mean_by_sequence(batch.rollout_log_probs.double(), mask, lengths)
    gap = training - rollout
    of_sequences = {
        "training_ppl": training.clamp(max=PERPLEXITY_BOUND).exp(),
        "training_log_ppl": training,
        "rollout_ppl": rollout.clamp(max=PERPLEXITY_BOUND).exp(),
        "rollout_log_ppl": rollout,
        "log_ppl_diff": gap,
        "log_ppl_abs_diff": gap.abs(),
        "ppl_ratio": gap.clamp(max=PERPLEXITY_BOUND).exp(),
        "chi2_seq": (2 * sum_by_sequence(d, lengths).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp()
        - 1,
    }
    means.tokens(of_sequences, filled)
    means.extreme("log_ppl_diff_max", float(gap[filled].max()))
    means.extreme("log_ppl_diff_min", float(gap[filled].min()))


def log_prob_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return the mean entropy of a batch's policy tokens, ``actor/entropy``, and what
    :func:`add_mismatch` measures."""
    means, mismatch = MetricSums(), MetricSums()
    batch = batch.only((*MISMATCH_READS, "entropy"))
    # In float64 a piece of a large batch fits where the whole would not
    for start in range(0, len(batch), 64):
        piece = batch.rows(slice(start, start + 64))
        means.tokens({"entropy": piece.entropy}, piece.response_mask)
        add_mismatch(mismatch, piece.old_log_probs, piece, piece.entropy)
    return {**means.result("actor"), **mismatch.result("rollout_corr")}


# -- what is done about it -------------------------------------------------------------------------


def correct(
    batch: TrainBatch, config: RolloutCorrectionConfig
) -> tuple[TrainBatch, dict[str, float]]:
    """Set ``rollout_is_weights`` and take rejected tokens out of ``loss_mask``; return
    ``rollout_corr/...`` too.

    The weights belong to the whole batch: a driver computes them once, before sequences are split
    over ranks. Tokens that train and that no policy sampled (``batch.sampled_mask``) have weight 1,
    and stay where their sequence does.
    """
    remedies = (config.rollout_is, config.rollout_rs, config.rollout_token_veto_threshold)
    mask, lengths, metrics = sampled(batch), batch.lengths, {}
    if not bool(mask.any()) or (
        not batch.has("sampled_mask") and all(remedy is None for remedy in remedies)
    ):
        return batch, metrics
    others, kept = batch.response_mask & ~mask, mask
    ratio = log_ratio(batch.old_log_probs, batch.rollout_log_probs, mask)
    if config.rollout_is is not None:
        bounds = weight_bounds(config.rollout_is_threshold)
        applied, raw = importance_weights(ratio, mask, lengths, config.rollout_is, bounds)
        metrics |= weight_metrics(applied, raw, mask, lengths, config.rollout_is, bounds)
        if config.rollout_is_batch_normalize:
            factor = metrics["rollout_is_batch_norm_factor"] = normalising_factor(
                applied, mask, lengths, config.rollout_is
            )
            applied = applied / factor
        batch = batch.adding(rollout_is_weights=applied.masked_fill(others, 1.0).float())
    if config.rollout_rs is not None:
        rules = criteria(
            config.rollout_rs, config.rollout_rs_threshold, config.rollout_rs_threshold_lower
        )
        kept = kept_tokens(ratio, mask, lengths, rules)
        metrics |= rejection_metrics(ratio, mask, lengths, rules)
    if config.rollout_token_veto_threshold is not None:
        # One token that the learner finds less likely than the engine by this factor drops its
        # sequence.
        vetoed = count_by_sequence(ratio.exp() < config.rollout_token_veto_threshold, lengths) > 0
        kept = kept & ~spread_over_tokens(vetoed, lengths)
        metrics["rollout_is_veto_fraction"] = float(vetoed.double().mean())
    kept = kept | (others & spread_over_tokens(count_by_sequence(kept, lengths) > 0, lengths))
    corrected = batch.adding(loss_mask=batch.loss_mask & kept)
    return corrected, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def importance_weights(
    log_ratio_N: Tensor, mask_N: Tensor, lengths_B: Tensor, level: str, bounds: Bounds
) -> tuple[Tensor, Tensor]:
    """Return the weights as applied, and as they were before the bounds, [N] each and 0 outside the
    mask.

    ``token``: ``exp(d_t)``. ``sequence``: ``exp(sum_t d_t)`` for all its tokens. Exponents are
    clamped to +-20. One bound truncates, ``min(w, upper)``; two of them mask, ``w`` where ``lower
    <= w <= upper`` and 0 elsewhere.
    """
    exponent = log_ratio_N
    if level == "sequence":
        exponent = spread_over_tokens(sum_by_sequence(log_ratio_N, lengths_B), lengths_B)
    raw = exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().masked_fill(~mask_N, 0)
    if bounds.lower is None:
        return raw.clamp(max=bounds.upper), raw
    return raw.masked_fill((raw < bounds.lower) | (raw > bounds.upper), 0), raw


def normalising_factor(weights_N: Tensor, mask_N: Tensor, lengths_B: Tensor, level: str) -> float:
    """Return the mean weight, over tokens or over sequences; 1 where all weights are 0."""
    weights = (
        weights_N[mask_N] if level == "token" else _means_of_sequences(weights_N, mask_N, lengths_B)
    )
    mean = float(weights.mean())
    return mean if mean > 1e-8 else 1.0


def divergence(log_ratio_N: Tensor, mask_N: Tensor, lengths_B: Tensor, name: str) -> Tensor:
    """Return a statistic of ``core.config.training_keys.STATISTICS``, [N]; a sequence's is in all
    of its tokens.

    ``k1 = -d``, ``k2 = d^2 / 2``, ``k3 = exp(d) - 1 - d`` (Schulman 2020, "Approximating KL
    divergence"), d clamped to +-20; per token, or summed, averaged or maximised over the sequence.
    """
    d = log_ratio_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    over, _, estimate = name.rpartition("_")
    value = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - 1 - d}[estimate].masked_fill(
        ~mask_N, 0
    )
    if over == "token":
        return value
    if over == "seq_sum":
        of_sequence = sum_by_sequence(value, lengths_B)
    elif over == "seq_mean":
        of_sequence = mean_by_sequence(value, mask_N, lengths_B)
    else:  # seq_max, of k2 and k3, which are at least 0
        of_sequence = max_by_sequence(value, lengths_B)
    return spread_over_tokens(of_sequence, lengths_B)


def kept_tokens(
    log_ratio_N: Tensor, mask_N: Tensor, lengths_B: Tensor, rules: tuple[Criterion, ...]
) -> Tensor:
    """Return the tokens of the mask that meet every criterion, [N] bool."""
    kept = mask_N.clone()
    for rule in rules:
        value = divergence(log_ratio_N, mask_N, lengths_B, rule.name)
        kept &= (value >= rule.lower) & (value <= rule.upper)
    return kept


# -- metrics, under verl's names -------------------------------------------------------------------


def weight_metrics(
    applied_N: Tensor, raw_N: Tensor, mask_N: Tensor, lengths_B: Tensor, level: str, bounds: Bounds
) -> dict[str, float]:
    """Return ``rollout_is_*``: of the weights as applied; the shares beyond the bounds, of the
    weights before.

    ``eff_sample_size`` is Kish's, ``(mean w)^2 / mean w^2`` over tokens: 1 where all weights are
    equal, 0 where all are 0. Without a lower bound ``fraction_low`` counts what is below the upper
    one's reciprocal.
    """
    inside = Bounds(1 / bounds.upper if bounds.lower is None else bounds.lower, bounds.upper)
    metrics = _distribution(
        applied_N, raw_N, mask_N, lengths_B, level == "sequence", inside, ideal=1.0, floor=0.0
    )
    tokens, raw = applied_N[mask_N], raw_N[mask_N]
    square = float(tokens.square().mean())
    metrics["eff_sample_size"] = float(tokens.mean()) ** 2 / square if square else 0.0
    for name in ("fraction_high", "fraction_low"):
        metrics[f"ratio_{name}"] = metrics.pop(name)
    if bounds.lower is not None:
        metrics["oob_ratio"] = float(((raw < inside.lower) | (raw > inside.upper)).double().mean())
    return {f"rollout_is_{name}": value for name, value in metrics.items()}


def rejection_metrics(
    log_ratio_N: Tensor, mask_N: Tensor, lengths_B: Tensor, rules: tuple[Criterion, ...]
) -> dict[str, float]:
    """Return ``rollout_rs_*``: each criterion's statistic, and the shares of tokens and of
    sequences rejected."""

    def rejected(*rules: Criterion) -> dict[str, float]:
        kept_N, filled_B = (
            kept_tokens(log_ratio_N, mask_N, lengths_B, rules),
            count_by_sequence(mask_N, lengths_B) > 0,
        )
        loses_B = count_by_sequence(mask_N & ~kept_N, lengths_B) > 0
        return {
            "masked_fraction": float((~kept_N[mask_N]).double().mean()),
            "seq_masked_fraction": float(loses_B[filled_B].double().mean()),
        }

    metrics = rejected(*rules)
    for rule in rules:
        value, by_sequence = (
            divergence(log_ratio_N, mask_N, lengths_B, rule.name),
            rule.name.startswith("seq"),
        )
        inside = Bounds(rule.lower, rule.upper)
        found = _distribution(
            value, value, mask_N, lengths_B, by_sequence, inside, ideal=0.0, floor=rule.lower
        )
        metrics |= {
            f"{rule.name}_{name}": number for name, number in {**found, **rejected(rule)}.items()
        }
    return {f"rollout_rs_{name}": number for name, number in metrics.items()}


def _distribution(
    applied_N: Tensor,
    raw_N: Tensor,
    mask_N: Tensor,
    lengths_B: Tensor,
    by_sequence: bool,
    bounds: Bounds,
    ideal: float,
    floor: float,
) -> dict[str, float]:
    """Return mean and spread over tokens, and over the means of sequences in ``seq_*``.

    Extremes and shares are those of tokens or, ``by_sequence``, of sequences' means.
    """
    tokens, means = applied_N[mask_N], _means_of_sequences(applied_N, mask_N, lengths_B)
    raw_means, lower, upper = (
        _means_of_sequences(raw_N, mask_N, lengths_B),
        bounds.lower,
        bounds.upper,
    )
    extremes, compared = (raw_means, raw_means) if by_sequence else (tokens, raw_N[mask_N])
    metrics = {
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
    return {name: float(value) for name, value in metrics.items()}


def _means_of_sequences(values_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the mean over each sequence's tokens, [sequences that have a token]."""
    return mean_by_sequence(values_N, mask_N, lengths_B)[count_by_sequence(mask_N, lengths_B) > 0]
