"""The difference of the engine's and the learner's log-probs, and importance correction for it.

Samples come from an engine with a precision of its own, from a policy that is a step old, or from a
truncated distribution. Below, ``d = log pi_learner - log pi_rollout`` of each token, with the
learner's weights before the update. There are two remedies, alone or together (Yao et al. 2025,
"Your efficient RL framework secretly brings you off-policy RL training"; Liu et al. 2025, "When
speed kills stability"):

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

# The fields that add_mismatch reads
MISMATCH_READS = ("response_mask", "sampled_mask", "old_log_probs", "rollout_log_probs")
PERPLEXITY_BOUND = 80.0  # nats: a metric must be finite
PIECE = 64  # sequences: in float64 a piece of a large batch fits where the whole would not


def sampled(batch: TrainBatch) -> Tensor:
    """Return the tokens for which the engine has a log-prob, [N] bool."""
    return batch.sampled_mask if batch.has("sampled_mask") else batch.response_mask


def log_ratio(log_prob_N: Tensor, rollout_log_prob_N: Tensor, mask_N: Tensor) -> Tensor:
    """Return ``d``, [N] float64; 0 outside the mask."""
    difference = log_prob_N.detach().double() - rollout_log_prob_N.double()
    return difference.masked_fill(~mask_N.bool(), 0)


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio to +-20, so that its exponential is finite."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


# -- how far they are apart ----------------------------------------------------------------------


def add_mismatch(
    means: MetricSums, log_prob_N: Tensor, batch: TrainBatch, entropy_N: Tensor | None = None
) -> None:
    """Measure the difference of the log-probs, corrected or not (verl's ``rollout_corr/*``).

    ``kl`` and ``k3_kl`` estimate KL(engine, learner) on the engine's own samples (Schulman's k1 and
    k3), per token. ``*_ppl`` are means over sequences of ``exp(-mean log p)``; ``chi2_*`` is
    ``mean w^2 - 1``, per token or sequence. Sequences are complete in a micro-batch, so the parts
    of ``means`` add up. ``entropy_gap`` is the mean of entropy + log p of the sampled tokens, whose
    expectation is 0 for samples of the whole distribution.
    """
    mask = sampled(batch)
    lengths = batch.lengths
    log_prob = log_prob_N.detach().double()
    if entropy_N is not None:
        gap = entropy_N.detach().double() + log_prob
        means.add_tokens({"entropy_gap": gap, "entropy_gap_square": gap.square()}, mask)
    d = log_ratio(log_prob, batch.rollout_log_probs, mask)
    per_token = {
        "kl": -d,
        "k3_kl": bounded(d).exp() - d - 1,
        "logp_diff_mean": d.abs(),
        "chi2_token": (2 * bounded(d)).exp() - 1,
    }
    means.add_tokens(per_token, mask)
    means.keep_extreme("logp_diff_max", float(d.abs().max()) if d.numel() else 0.0)
    filled = count_by_sequence(mask, lengths) > 0
    if not bool(filled.any()):
        return
    training = -mean_by_sequence(log_prob, mask, lengths)
    rollout = -mean_by_sequence(batch.rollout_log_probs.double(), mask, lengths)
    gap = training - rollout
    per_sequence = {
        "training_ppl": training.clamp(max=PERPLEXITY_BOUND).exp(),
        "training_log_ppl": training,
        "rollout_ppl": rollout.clamp(max=PERPLEXITY_BOUND).exp(),
        "rollout_log_ppl": rollout,
        "log_ppl_diff": gap,
        "log_ppl_abs_diff": gap.abs(),
        "ppl_ratio": gap.clamp(max=PERPLEXITY_BOUND).exp(),
        "chi2_seq": (2 * bounded(sum_by_sequence(d, lengths))).exp() - 1,
    }
    means.add_tokens(per_sequence, filled)
    means.keep_extreme("log_ppl_diff_max", float(gap[filled].max()))
    means.keep_extreme("log_ppl_diff_min", float(gap[filled].min()))


def log_prob_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return ``actor/entropy`` of the policy's tokens, and what :func:`add_mismatch` measures."""
    actor_sums = MetricSums()
    mismatch_sums = MetricSums()
    batch = batch.only((*MISMATCH_READS, "entropy"))
    for start in range(0, len(batch), PIECE):
        piece = batch.rows(slice(start, start + PIECE))
        actor_sums.add_tokens({"entropy": piece.entropy}, piece.response_mask)
        add_mismatch(mismatch_sums, piece.old_log_probs, piece, piece.entropy)
    return {**actor_sums.result("actor"), **mismatch_sums.result("rollout_corr")}


# -- weights and rejection -----------------------------------------------------------------------


def correct(
    batch: TrainBatch, config: RolloutCorrectionConfig
) -> tuple[TrainBatch, dict[str, float]]:
    """Set ``rollout_is_weights``, take rejected tokens out of ``loss_mask`` and measure both.

    The weights belong to the whole batch: a driver computes them once, before sequences are split
    over ranks. Tokens that train and that no policy sampled (they are outside
    ``batch.sampled_mask``) have weight 1, and stay if a token of their sequence does.
    """
    mask = sampled(batch)
    lengths = batch.lengths
    veto_threshold = config.rollout_token_veto_threshold
    remedies = (config.rollout_is, config.rollout_rs, veto_threshold)
    nothing_to_do = all(remedy is None for remedy in remedies) and not batch.has("sampled_mask")
    if nothing_to_do or not bool(mask.any()):
        return batch, {}
    metrics: dict[str, float] = {}
    unsampled = batch.response_mask & ~mask
    kept = mask
    ratio = log_ratio(batch.old_log_probs, batch.rollout_log_probs, mask)
    if (level := config.rollout_is) is not None:
        bounds = weight_bounds(config.rollout_is_threshold)
        weights, raw_weights = importance_weights(ratio, mask, lengths, level, bounds)
        metrics |= weight_metrics(weights, raw_weights, mask, lengths, level, bounds)
        if config.rollout_is_batch_normalize:
            factor = normalising_factor(weights, mask, lengths, level)
            metrics["rollout_is_batch_norm_factor"] = factor
            weights = weights / factor
        batch = batch.adding(rollout_is_weights=weights.masked_fill(unsampled, 1.0).float())
    if config.rollout_rs is not None:
        rules = criteria(
            config.rollout_rs, config.rollout_rs_threshold, config.rollout_rs_threshold_lower
        )
        kept = kept_tokens(ratio, mask, lengths, rules)
        metrics |= rejection_metrics(ratio, mask, lengths, rules)
    if veto_threshold is not None:
        # One token that the learner finds less likely than the engine by this factor drops its
        # sequence
        vetoed_B = count_by_sequence(ratio.exp() < veto_threshold, lengths) > 0
        kept = kept & ~spread_over_tokens(vetoed_B, lengths)
        metrics["rollout_is_veto_fraction"] = float(vetoed_B.double().mean())
    keeps_any_B = count_by_sequence(kept, lengths) > 0
    kept = kept | (unsampled & spread_over_tokens(keeps_any_B, lengths))
    batch = batch.adding(loss_mask=batch.loss_mask & kept)
    return batch, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def importance_weights(
    log_ratio_N: Tensor, mask_N: Tensor, lengths_B: Tensor, level: str, bounds: Bounds
) -> tuple[Tensor, Tensor]:
    """Return the weights that are applied, and those before the bounds, [N] each.

    Both are 0 outside the mask. ``token``: ``exp(d_t)``. ``sequence``: ``exp(sum_t d_t)`` for all
    its tokens. Exponents are clamped to +-20. One bound truncates: ``min(w, upper)``. Two bounds
    mask: ``w`` where ``lower <= w <= upper``, and 0 elsewhere.
    """
    exponent_N = log_ratio_N
    if level == "sequence":
        exponent_N = spread_over_tokens(sum_by_sequence(log_ratio_N, lengths_B), lengths_B)
    raw_N = bounded(exponent_N).exp().masked_fill(~mask_N, 0)
    if bounds.lower is None:
        return raw_N.clamp(max=bounds.upper), raw_N
    outside = (raw_N < bounds.lower) | (raw_N > bounds.upper)
    return raw_N.masked_fill(outside, 0), raw_N


def normalising_factor(weights_N: Tensor, mask_N: Tensor, lengths_B: Tensor, level: str) -> float:
    """Return the mean weight, over tokens or over sequences; 1 if all weights are 0."""
    if level == "token":
        mean = float(weights_N[mask_N].mean())
    else:
        mean = float(_means_of_sequences(weights_N, mask_N, lengths_B).mean())
    return mean if mean > 1e-8 else 1.0


def divergence(log_ratio_N: Tensor, mask_N: Tensor, lengths_B: Tensor, name: str) -> Tensor:
    """Return a statistic of ``correction_bounds.STATISTICS``, [N].

    ``k1 = -d``, ``k2 = d^2 / 2``, ``k3 = exp(d) - 1 - d`` (Schulman 2020, "Approximating KL
    divergence"), with d clamped to +-20. It is per token, or summed, averaged or maximised over the
    sequence; a sequence's statistic stands at all of its tokens.
    """
    d = bounded(log_ratio_N)
    scope, _, estimate = name.rpartition("_")
    values_N = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - 1 - d}[estimate]
    values_N = values_N.masked_fill(~mask_N, 0)
    if scope == "token":
        return values_N
    if scope == "seq_sum":
        statistic_B = sum_by_sequence(values_N, lengths_B)
    elif scope == "seq_mean":
        statistic_B = mean_by_sequence(values_N, mask_N, lengths_B)
    else:  # seq_max, of k2 and k3, which are at least 0
        statistic_B = max_by_sequence(values_N, lengths_B)
    return spread_over_tokens(statistic_B, lengths_B)


def kept_tokens(
    log_ratio_N: Tensor, mask_N: Tensor, lengths_B: Tensor, rules: tuple[Criterion, ...]
) -> Tensor:
    """Return the tokens of the mask that meet every criterion, [N] bool."""
    kept_N = mask_N.clone()
    for rule in rules:
        statistic_N = divergence(log_ratio_N, mask_N, lengths_B, rule.name)
        kept_N &= (statistic_N >= rule.lower) & (statistic_N <= rule.upper)
    return kept_N


# -- metrics, under verl's names -----------------------------------------------------------------


def weight_metrics(
    applied_N: Tensor, raw_N: Tensor, mask_N: Tensor, lengths_B: Tensor, level: str, bounds: Bounds
) -> dict[str, float]:
    """Return ``rollout_is_*``: statistics of the weights that are applied.

    The shares beyond the bounds are of the weights before the bounds; without a lower bound
    ``fraction_low`` counts what is below the reciprocal of the upper one. ``eff_sample_size`` is
    Kish's, ``(mean w)^2 / mean w^2`` over tokens: 1 if all weights are equal, 0 if all are 0.
    """
    lower = 1 / bounds.upper if bounds.lower is None else bounds.lower
    inside = Bounds(lower, bounds.upper)
    by_sequence = level == "sequence"
    metrics = _distribution(
        applied_N, raw_N, mask_N, lengths_B, by_sequence, inside, ideal=1.0, floor=0.0
    )
    metrics["ratio_fraction_high"] = metrics.pop("fraction_high")
    metrics["ratio_fraction_low"] = metrics.pop("fraction_low")
    weights = applied_N[mask_N]
    mean_square = float(weights.square().mean())
    metrics["eff_sample_size"] = float(weights.mean()) ** 2 / mean_square if mean_square else 0.0
    if bounds.lower is not None:
        raw = raw_N[mask_N]
        outside = (raw < bounds.lower) | (raw > bounds.upper)
        metrics["oob_ratio"] = float(outside.double().mean())
    return {f"rollout_is_{name}": value for name, value in metrics.items()}


def rejection_metrics(
    log_ratio_N: Tensor, mask_N: Tensor, lengths_B: Tensor, rules: tuple[Criterion, ...]
) -> dict[str, float]:
    """Return ``rollout_rs_*``: each criterion's statistic, and what it and all of them reject."""

    def rejected_shares(*rules: Criterion) -> dict[str, float]:
        """Return the shares of tokens that are rejected and of sequences that lose a token."""
        kept_N = kept_tokens(log_ratio_N, mask_N, lengths_B, rules)
        filled_B = count_by_sequence(mask_N, lengths_B) > 0
        loses_token_B = count_by_sequence(mask_N & ~kept_N, lengths_B) > 0
        return {
            "masked_fraction": float((~kept_N[mask_N]).double().mean()),
            "seq_masked_fraction": float(loses_token_B[filled_B].double().mean()),
        }

    metrics = rejected_shares(*rules)
    for rule in rules:
        statistic_N = divergence(log_ratio_N, mask_N, lengths_B, rule.name)
        of_rule = _distribution(
            statistic_N,
            statistic_N,
            mask_N,
            lengths_B,
            by_sequence=rule.name.startswith("seq"),
            bounds=Bounds(rule.lower, rule.upper),
            ideal=0.0,
            floor=rule.lower,
        )
        of_rule |= rejected_shares(rule)
        metrics |= {f"{rule.name}_{name}": number for name, number in of_rule.items()}
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
    """Return mean and spread over tokens, and in ``seq_*`` over the means of sequences.

    Extremes and shares are those of tokens or, if ``by_sequence``, of sequences' means.
    """
    applied = applied_N[mask_N]
    raw = raw_N[mask_N]
    applied_means = _means_of_sequences(applied_N, mask_N, lengths_B)
    raw_means = _means_of_sequences(raw_N, mask_N, lengths_B)
    extremes = raw_means if by_sequence else applied
    compared = raw_means if by_sequence else raw
    metrics = {
        "mean": applied.mean(),
        "max": extremes.max(),
        "min": extremes.min(),
        "std": applied.clamp(min=floor, max=bounds.upper).std(correction=0),
        "fraction_high": (compared > bounds.upper).double().mean(),
        "fraction_low": (compared < bounds.lower).double().mean(),
        "seq_mean": applied_means.mean(),
        "seq_std": applied_means.std() if len(applied_means) > 1 else torch.zeros(()),
        "seq_max": applied_means.max(),
        "seq_min": applied_means.min(),
        "seq_max_deviation": (applied_means - ideal).abs().max(),
        "seq_fraction_high": (raw_means > bounds.upper).double().mean(),
        "seq_fraction_low": (raw_means < bounds.lower).double().mean(),
    }
    return {name: float(value) for name, value in metrics.items()}


def _means_of_sequences(values_N: Tensor, mask_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the mean over each sequence's tokens, [sequences that have a token]."""
    has_token_B = count_by_sequence(mask_N, lengths_B) > 0
    return mean_by_sequence(values_N, mask_N, lengths_B)[has_token_B]
