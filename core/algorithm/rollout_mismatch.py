"""How far the engine's log-probs are from the learner's: metrics under verl's names, of every step.

Written ``d = log pi_learner - log pi_rollout`` below, token by token, with the learner's weights of before the update.
``core/algorithm/variants/rollout_correction.py`` weighs or rejects samples by it, where a key asks for that.
"""

from __future__ import annotations

from torch import Tensor

from core.algorithm.losses import LOG_RATIO_BOUND, MetricSums
from core.algorithm.sequences import count_by_sequence, mean_by_sequence, spread_over_tokens, sum_by_sequence
from core.types import TrainBatch

MISMATCH_READS = ("response_mask", "sampled_mask", "old_log_probs", "rollout_log_probs")  # by add_mismatch
PERPLEXITY_BOUND = 80.0  # nats: a metric must be finite


def sampled(batch: TrainBatch) -> Tensor:
    """Return the tokens for which the engine has a log-prob, [N] bool."""
    return batch.response_mask if batch.sampled_mask is None else batch.sampled_mask


def log_ratio(log_prob_N: Tensor, rollout_log_prob_N: Tensor, mask_N: Tensor) -> Tensor:
    """Return ``d``, [N] float64 and 0 outside the mask."""
    difference = log_prob_N.detach().double() - rollout_log_prob_N.double()
    return difference.masked_fill(~mask_N.bool(), 0)


def without_unsampled_sequences(batch: TrainBatch) -> TrainBatch:
    """Return the batch in which sequences of which the engine sampled no token carry no loss."""
    if batch.sampled_mask is None or not bool(batch.sampled_mask.any()):
        return batch
    has_samples_B = count_by_sequence(batch.sampled_mask, batch.lengths) > 0
    has_samples_N = spread_over_tokens(has_samples_B, batch.lengths)
    return batch.adding(loss_mask=batch.loss_mask & has_samples_N)


def add_mismatch(means: MetricSums, log_prob_N: Tensor, batch: TrainBatch, entropy_N: Tensor | None = None) -> None:
    """Measure how far the engine's log-probs are from the learner's (verl's ``rollout_corr/*``), corrected or not.

    ``kl`` and ``k3_kl`` estimate KL(engine, learner) on the engine's own samples (Schulman's k1 and k3), per token.
    ``*_ppl`` are means over sequences of ``exp(-mean log p)``; ``chi2_*`` is ``mean w^2 - 1``, per token or sequence.
    Sequences are complete in a micro-batch, so the parts of ``means`` add up. ``entropy_gap`` is the mean of entropy
    + log p of the sampled tokens, whose expectation is 0 for samples of the whole distribution.
    """
    mask, lengths = sampled(batch), batch.lengths
    if entropy_N is not None:
        gap = entropy_N.detach().double() + log_prob_N.detach().double()
        means.tokens({"entropy_gap": gap, "entropy_gap_square": gap.square()}, mask)
    d = log_ratio(log_prob_N, batch.rollout_log_probs, mask)
    bounded = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    of_tokens = {
        "kl": -d,
        "k3_kl": bounded.exp() - d - 1,
        "logp_diff_mean": d.abs(),
        "chi2_token": (2 * bounded).exp() - 1,
    }
    means.tokens(of_tokens, mask)
    means.peak("logp_diff_max", float(d.abs().max()) if d.numel() else 0.0)
    sequences = count_by_sequence(mask, lengths) > 0
    if not bool(sequences.any()):
        return
    training, rollout = (
        -mean_by_sequence(value.detach().double(), mask, lengths) for value in (log_prob_N, batch.rollout_log_probs)
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
        "chi2_seq": (2 * sum_by_sequence(d, lengths).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp() - 1,
    }
    means.tokens(of_sequences, sequences)
    means.peak("log_ppl_diff_max", float(gap[sequences].max()))
    means.trough("log_ppl_diff_min", float(gap[sequences].min()))
