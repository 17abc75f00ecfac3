"""Validation numbers with a 95 % interval each: pure functions of the validation records.

Every interval takes a question as one observation: samples of one question are not independent.
Records that share ``(data_source, uid)`` are one question. Names are verl's:
``val-core/<source>/acc/{mean,pass,maj}@N``, ``val-aux/`` the rest. Unlike verl, subsets for
``pass@k`` are drawn without replacement (Chen et al. 2021, arXiv 2107.03374, eq. 1), and ``maj@N``
is one vote of all N samples in which samples without an answer have no vote.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from core.types import ScoredGroup
from reward_scores.score import ScoreStatus

LOST = (ScoreStatus.TIMEOUT.value, ScoreStatus.CRASH.value)  # an answer of these has no score
FAILURES = (ScoreStatus.PARSE_ERROR, ScoreStatus.TIMEOUT, ScoreStatus.CRASH)
Z95 = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` units with its 95 % interval; a single unit gives no bounds."""

    value: float
    low: float | None
    high: float | None
    n: int


def t_probability(t: float, df: int) -> float:
    """Return P(-t < T < t) of Student's t."""
    from mpmath import betainc

    return 1.0 - float(betainc(df / 2, 0.5, 0, df / (df + t * t), regularized=True))


@cache
def t_quantile(df: int) -> float:
    """Return the two-sided 95 % quantile of Student's t; the normal one from 10,000 degrees on."""
    from mpmath import findroot

    if df >= 10_000:
        return Z95
    bracket = (Z95, 13.0)  # 12.706 is the quantile of one degree of freedom
    return float(findroot(lambda t: t_probability(t, df) - 0.95, bracket, solver="anderson"))


def wilson(mean: float, n: float) -> tuple[float, float]:
    """Return Wilson's 95 % score interval of a proportion in ``n`` independent trials.

    Wilson 1927.
    """
    z2 = Z95**2
    centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def t_interval(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with Student's 95 % interval.

    A single value has no bounds.
    """
    n = len(values)
    mean = statistics.fmean(values)
    if n < 2:
        return Estimate(mean, None, None, n)
    half = t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def question_interval(per_question: Sequence[float], draws: int = 1) -> Estimate:
    """Return the mean over questions of their frequencies of 1 in ``draws`` samples, with interval.

    It is Wilson's interval at the effective sample size ``p (1-p) / var(mean)``, which stays
    sensible near 0 and 1 where Student's has no width. The size is kept between the number of
    questions (as if a question's draws always agreed) and that times ``draws`` (as if they were
    independent).
    """
    n = len(per_question)
    mean = statistics.fmean(per_question)
    if n < 2:
        return Estimate(mean, None, None, n)
    variance = statistics.variance(per_question) / n
    size = mean * (1 - mean) / variance if variance > 0 else float(n)
    if draws > 1:
        # The variance was itself estimated from n questions (Korn and Graubard 1998)
        size *= (Z95 / t_quantile(n - 1)) ** 2
    low, high = wilson(mean, min(max(size, n), n * draws))
    return Estimate(mean, low, high, n)


@dataclass(frozen=True)
class ValRecord:
    """One validation question: ``values[name][i]`` belongs to sample ``i``. ``acc`` is there."""

    uid: str
    data_source: str
    values: Mapping[str, tuple[float, ...]]
    preds: tuple[str | None, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(series) for series in self.values.values()}
        if self.preds:
            lengths.add(len(self.preds))
        if "acc" not in self.values or len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                f"validation record {self.uid!r}: needs acc, and equally many samples in each "
                "series"
            )

    @classmethod
    def of(cls, group: ScoredGroup) -> ValRecord:
        """Return the record of a scored group.

        A part that only some samples have counts as 0 in the others.
        """
        parts = sorted({name for score in group.scores for name in score.parts})
        values = {
            name: tuple(float(score.parts.get(name, 0.0)) for score in group.scores)
            for name in parts
        }
        values["reward"] = tuple(float(score.value) for score in group.scores)
        if values.get("score") == values["reward"]:  # the trainer's copy of an unshaped reward
            del values["score"]
        values["response_length"] = tuple(float(t.response_mask.sum()) for t in group.trajectories)
        values["truncated"] = tuple(float(t.truncated) for t in group.trajectories)
        for status in FAILURES:
            values[status.value] = tuple(float(score.status is status) for score in group.scores)
        preds = tuple(score.pred for score in group.scores)
        if all(pred is None for pred in preds):
            preds = ()
        return cls(group.prompt.uid, group.prompt.data_source, values, preds)

    def to_json(self) -> dict[str, Any]:
        row = {"uid": self.uid, "data_source": self.data_source}
        row |= {name: list(series) for name, series in self.values.items()}
        if self.preds:
            row["pred"] = list(self.preds)
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ValRecord:
        others = ("uid", "data_source", "pred", "step")
        values = {name: tuple(series) for name, series in row.items() if name not in others}
        return cls(row["uid"], row["data_source"], values, tuple(row.get("pred", ())))


def best_at_k(values: Sequence[float], k: int) -> float:
    """Return the expected best of ``k`` samples drawn without replacement.

    For 0/1 values it is the unbiased ``pass@k``.
    """
    n = len(values)
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: must lie between 1 and the {n} samples of the question")
    subsets = math.comb(n, k)
    # The i-th smallest value is the best of the subsets whose other k - 1 samples are smaller
    return sum(math.comb(i, k - 1) / subsets * value for i, value in enumerate(sorted(values)))


def majority(values: Sequence[float], preds: Sequence[str | None]) -> float:
    """Return the value of the answer that most samples gave, the first seen of several.

    Without any answer it is the first sample's value.
    """
    votes = Counter(pred for pred in preds if pred is not None)
    if not votes:
        return values[0]
    ((winner, _),) = votes.most_common(1)  # of equal counts the one that was seen first
    return values[list(preds).index(winner)]


def merge_by_question(records: Iterable[ValRecord]) -> dict[str, list[ValRecord]]:
    """Return ``data_source -> records`` in order of appearance, one record a question.

    The samples of records with equal ``(data_source, uid)`` are joined. A part that not every one
    of them has is left out, so that samples stay aligned.
    """
    by_source: dict[str, dict[str, ValRecord]] = defaultdict(dict)
    for record in records:
        by_uid = by_source[record.data_source]
        if earlier := by_uid.get(record.uid):
            values = {
                name: series + record.values[name]
                for name, series in earlier.values.items()
                if name in record.values
            }
            preds = earlier.preds + record.preds if earlier.preds and record.preds else ()
            record = ValRecord(record.uid, record.data_source, values, preds)
        by_uid[record.uid] = record
    return {source: list(by_uid.values()) for source, by_uid in by_source.items()}


def variable_estimates(
    variable: str, rows: Sequence[ValRecord], n: int, sizes: Sequence[int] | None = None
) -> dict[str, Estimate]:
    """Return ``mean@n`` of one variable, and for acc and reward over several samples also others.

    They are ``pass`` or ``best``, and ``maj``. ``sizes`` are the k of ``pass@k``, by default the
    powers of two below ``n`` and ``n``. Raises ValueError for a k above the number of samples.
    """
    series = [row.values[variable] for row in rows]
    binary = all(value in (0.0, 1.0) for values in series for value in values)

    def over_questions(values: list[float], draws: int) -> Estimate:
        return question_interval(values, draws) if binary else t_interval(values)

    estimates = {f"mean@{n}": over_questions([statistics.fmean(values) for values in series], n)}
    if n == 1 or variable not in ("acc", "reward"):
        return estimates
    if not sizes:
        sizes = [*(2**i for i in range(1, n.bit_length()) if 2**i < n), n]
    name = "pass@{}" if binary and variable == "acc" else "best@{}/mean"
    for k in sizes:
        best = [best_at_k(values, k) for values in series]
        estimates[name.format(k)] = over_questions(best, n // k)
    if all(row.preds for row in rows):
        votes = [majority(values, row.preds) for values, row in zip(series, rows, strict=True)]
        estimates[f"maj@{n}"] = over_questions(votes, 1)
    return estimates


def are_shares(values: Iterable[float]) -> bool:
    """Return whether the values can be accuracies; otherwise ``acc`` is a score."""
    return all(0 <= value <= 1 for value in values)


def failed_share(records: Iterable[ValRecord]) -> float:
    """Return the share of answers that the scorer failed on."""
    failed = 0.0
    answers = 0
    for record in records:
        answers += len(record.values["acc"])
        failed += sum(sum(record.values.get(status, ())) for status in LOST)
    return failed / max(1, answers)


def validation_metrics(records: Iterable[ValRecord]) -> dict[str, float]:
    """Return all numbers of one validation pass, under the names in the head of this module."""
    metrics: dict[str, float] = {}
    for source, rows in merge_by_question(records).items():
        aux = f"val-aux/{source}"
        n = min(len(row.values["acc"]) for row in rows)
        for variable in rows[0].values:
            if not all(variable in row.values for row in rows):
                continue
            for name, estimate in variable_estimates(variable, rows, n).items():
                is_core = variable == "acc" and name.partition("/")[0].endswith(f"@{n}")
                section = f"val-core/{source}" if is_core else aux
                metrics[f"{section}/{variable}/{name}"] = estimate.value
                if estimate.low is not None and estimate.high is not None:
                    metrics[f"{aux}/{variable}/{name}/ci_low"] = estimate.low
                    metrics[f"{aux}/{variable}/{name}/ci_high"] = estimate.high
            if n > 1 and variable in ("acc", "reward"):
                spread = statistics.fmean(statistics.pstdev(row.values[variable]) for row in rows)
                metrics[f"{aux}/{variable}/std@{n}"] = spread
        accuracies = [value for row in rows for value in row.values["acc"]]
        if not are_shares(accuracies):
            metrics[f"{aux}/acc/min"] = min(accuracies)
            metrics[f"{aux}/acc/max"] = max(accuracies)
        metrics[f"{aux}/num_questions"] = float(len(rows))
        metrics[f"{aux}/num_samples"] = float(len(accuracies))
    return metrics
