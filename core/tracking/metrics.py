"""Numbers of a step, under verl's names: of its data, and where its seconds went. Imports no torch.

``critic/score/*`` is what the scorer gave, ``critic/rewards/*`` what trained (shaped, and less a KL
penalty). ``response_length/*`` counts every token after the prompt, tool output included.
``perf/throughput`` is verl's: tokens of prompts and responses, a second of the step, a GPU of the
learner (on a CPU: a learner rank).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from core.types import ScoredGroup, StepMetrics, TrainBatch
from reward_scores.score import ScoreStatus

# Part -> its timers. With the rest the parts add up to timing_s/whole, the seconds since the line
# before
PARTS: Mapping[str, tuple[str, ...]] = {
    "decode": ("decode",),
    "score": ("reward",),
    "log-probs": ("old_log_prob",),
    "reference": ("ref",),
    "values": ("values",),
    "advantages": ("adv",),
    "update": ("update_critic", "update_actor"),
    "sync": ("update_weights",),
    "next step's samples": ("wait_ahead",),
    "validation": ("testing",),
    "checkpoint": ("save_checkpoint",),
}
REST = "other"
PREFIX = "timing_s/"


# -- the data of a step ----------------------------------------------------------------------------


def data_metrics(groups: Sequence[ScoredGroup], batch: TrainBatch) -> dict[str, float]:
    """Return means and extremes over the step's trajectories."""
    scores = [score for group in groups for score in group.scores]
    trajectories = [t for group in groups for t in group.trajectories]
    mask = batch.response_mask
    series = {
        "critic/score": [score.raw for score in scores],
        "critic/rewards": batch.reward,
        "response_length": [len(t.response_ids) for t in trajectories],
        "prompt_length": [len(t.prompt_ids) for t in trajectories],
        "num_turns": [t.turns for t in trajectories],
    }
    has_critic = batch.has("values")
    for name in ("advantages", "returns", "values") if has_critic else ("advantages",):
        if batch.has(name):
            series[f"critic/{name}"] = getattr(batch, name)[mask]
    means = {
        "critic/acc/mean": [score.acc for score in scores],
        "response_length/clip_ratio": [t.truncated for t in trajectories],
        "tool_call_counts/mean": [t.tool_calls for t in trajectories],
        "reward/masked_share": [score.masked for score in scores],
    }
    for name in sorted({name for score in scores for name in score.parts}):
        means[f"reward/{name}/mean"] = [
            score.parts[name] for score in scores if name in score.parts
        ]
    are_equal = [spread_of_scores(group) <= 1e-6 for group in groups if len(group) > 1]
    if are_equal:
        means["reward/zero_variance_share"] = are_equal
    metrics = {name: float(np.mean(values)) for name, values in means.items()}
    for name, values in series.items():
        # The series is empty if no answer of the step holds a token
        values = np.asarray(values) if len(values) else np.zeros(1)
        metrics[f"{name}/mean"] = float(values.mean())
        metrics[f"{name}/max"] = float(values.max())
        metrics[f"{name}/min"] = float(values.min())
    if has_critic:
        # 1 - Var(returns - values) / Var(returns) over the policy's tokens: 1 is a perfect critic
        returns = batch.returns[mask]
        errors = returns - batch.values[mask]
        unexplained = errors.var(correction=0) / (returns.var(correction=0) + 1e-5)
        metrics["critic/vf_explained_var"] = float(1 - unexplained)
    if scores:
        counts = Counter(score.status for score in scores)
        for status in ScoreStatus:
            metrics[f"reward/{status.value}_rate"] = counts[status] / len(scores)
    tokens = sum(len(t.response_ids) + len(t.prompt_ids) for t in trajectories)
    metrics["perf/total_num_tokens"] = float(tokens)
    return metrics


def spread_of_scores(group: ScoredGroup) -> float:
    """Return the difference of the highest and the lowest score of a group that train."""
    values = [score.value for score in group.scores if not score.left_out]
    return max(values) - min(values) if values else 0.0


def progress_metrics(metrics: StepMetrics, epoch: float, ranks: int) -> dict[str, float]:
    """Return the numbers of a step that follow from its others."""
    seconds = metrics.values["timing_s/step"]
    return {
        "training/global_step": metrics.step,
        "training/epoch": epoch,
        "perf/time_per_step": seconds,  # unlike verl's without validation
        "perf/throughput": metrics.values["perf/total_num_tokens"] / (seconds * ranks),
    }


# -- the seconds of a step -------------------------------------------------------------------------


class BusyClock:
    """Wall time by activity. A second counts once, for the first activity of ``order`` that runs.

    Samples decode while others are scored. Scoring behind decoding costs nothing: only the seconds
    in which nothing decodes are the scorer's. Used from one thread at a time.
    """

    def __init__(self, *order: str, now: Callable[[], float] = time.perf_counter):
        self.order = order
        self.now = now
        self.running = dict.fromkeys(order, 0)  # blocks of each activity that run now
        self.seconds = dict.fromkeys(order, 0.0)
        self.since = now()

    @contextmanager
    def busy(self, activity: str) -> Iterator[None]:
        """Count one more of this activity while the block runs. Blocks may overlap."""
        self._charge()
        self.running[activity] += 1
        try:
            yield
        finally:
            self._charge()
            self.running[activity] -= 1

    def _charge(self) -> None:
        now = self.now()
        first = next((name for name in self.order if self.running[name]), None)
        if first is not None:
            self.seconds[first] += now - self.since
        self.since = now

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by activity."""
        self._charge()
        seconds = self.seconds
        self.seconds = dict.fromkeys(self.order, 0.0)
        return seconds


def time_parts(row: Mapping[str, float]) -> dict[str, float]:
    """Return a step's seconds by part, the rest last; they sum to the whole.

    A part that never began is left out. A line without ``timing_s/whole``, the validation before
    the first step, has no parts.
    """
    if f"{PREFIX}whole" not in row:
        return {}
    seconds = {}
    for name, timers in PARTS.items():
        timed = [row[PREFIX + timer] for timer in timers if PREFIX + timer in row]
        if timed:
            seconds[name] = sum(timed)
    return {**seconds, REST: row[f"{PREFIX}whole"] - sum(seconds.values())}
