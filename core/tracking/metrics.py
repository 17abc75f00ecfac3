"""Metrics of a step's data, under verl's names.

``critic/score/*`` is what the scorer gave, ``critic/rewards/*`` what trained (shaped, and less the KL penalty
where the reward carries one). ``response_length/*`` counts every token after the prompt, tool output included;
``clip_ratio`` is the share that ran into the limit. ``reward/<part>/mean`` follows each part of the scores, so that
``reward/acc/mean`` equals ``critic/acc/mean``; published runs have the latter. ``perf/throughput`` is verl's:
tokens of prompts and responses, a second of the step, a GPU of the learner (on a CPU: a learner rank).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from core.data.vocabulary import count_unknown
from core.types import ScoredGroup, StepMetrics, TrainBatch
from reward_scores.score import Score, ScoreStatus


def data_metrics(groups: Sequence[ScoredGroup], batch: TrainBatch) -> dict[str, float]:
    """Return means and extremes over the step's trajectories."""
    scores = [score for group in groups for score in group.scores]
    trajectories = [t for group in groups for t in group.trajectories]
    lengths = np.array([len(t.response_ids) for t in trajectories])
    prompts = np.array([len(t.prompt_ids) for t in trajectories])
    values = np.array([[score.acc for score in group.scores] for group in groups if len(group)], dtype=float)
    metrics = {
        **_spread("critic/score", np.array([score.raw for score in scores])),
        "critic/acc/mean": float(np.mean([score.acc for score in scores])),
        **_spread("critic/rewards", batch.reward.numpy()),
        **_spread("response_length", lengths),
        "response_length/clip_ratio": float(np.mean([t.truncated for t in trajectories])),
        "response/repeated_trigrams": float(np.mean([repeated_share(t.response_ids) for t in trajectories])),
        **_spread("prompt_length", prompts),
        **_spread("num_turns", np.array([t.turns for t in trajectories])),
        "tool_call_counts/mean": float(np.mean([t.tool_calls for t in trajectories])),
        **{f"reward/{name}/mean": mean for name, mean in part_means(scores).items()},
        **status_rates(scores),
        "reward/zero_variance_share": float(np.mean(np.ptp(values, axis=1) <= 1e-6)),
        "reward/masked_share": float(np.mean([score.masked for score in scores])),
        "perf/total_num_tokens": float(lengths.sum() + prompts.sum()),
    }
    written = batch.response_mask
    for name in ("advantages", "returns", "values"):
        if name in batch.stored and (name != "returns" or "values" in batch.stored):
            metrics.update(_spread(f"critic/{name}", batch.require(name)[written].numpy()))
    if "values" in batch.stored:
        metrics["critic/vf_explained_var"] = explained_variance(
            batch.require("values"), batch.require("returns"), written
        )
    return metrics


def repeated_share(ids: np.ndarray, size: int = 3) -> float:
    """Return the share of an answer's n-grams that occurred in it before: 0 without any, near 1 in a loop."""
    if len(ids) < size:
        return 0.0
    ngrams = np.lib.stride_tricks.sliding_window_view(ids, size)
    return 1 - len(np.unique(ngrams, axis=0)) / len(ngrams)


def unknown_ids(groups: Sequence[ScoredGroup], known: np.ndarray | None) -> int:
    """Count the tokens of the policy that are not among its tokenizer's ids, ``known``: engines never sample others."""
    return sum(count_unknown(known, t.response_ids[t.response_mask]) for group in groups for t in group.trajectories)


def progress_metrics(metrics: StepMetrics, epoch: float, ranks: int) -> dict[str, float]:
    """Return the numbers of a step that follow from its others."""
    return {
        "training/global_step": metrics.step,
        "training/epoch": epoch,
        "perf/time_per_step": (seconds := metrics.values["timing_s/step"]),  # unlike verl's without validation
        "perf/throughput": metrics.values["perf/total_num_tokens"] / (seconds * ranks),
    }


def part_means(scores: Iterable[Score]) -> dict[str, float]:
    """Return the mean of each part over the scores that have it."""
    parts = defaultdict(list)
    for score in scores:
        for name, value in score.parts.items():
            parts[name].append(value)
    return {name: float(np.mean(values)) for name, values in sorted(parts.items())}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)`` over the policy tokens: 1 is a perfect critic.

    Shapes:
        all tensors  [...]  of one shape
    """
    returns, residual = returns[mask], (returns - values)[mask]
    return float(1 - residual.var(correction=0) / (returns.var(correction=0) + 1e-5))


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):  # a step in which no answer holds a token
        values = np.zeros(1)
    return {f"{name}/{of}": float(getattr(values, of)()) for of in ("mean", "max", "min")}


def status_rates(scores: Sequence[Score]) -> dict[str, float]:
    """Return ``reward/<status>_rate`` for every status, 0 included; nothing for no scores."""
    counts = Counter(score.status for score in scores)
    return {f"reward/{status.value}_rate": counts[status] / len(scores) for status in ScoreStatus if scores}
