"""Validation numbers with a 95 % interval each: pure functions of the validation records, without
torch.

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
    """A mean over ``n`` units with its 95 % interval; the bounds are None where one unit cannot
    give any."""

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

    within = (Z95, 13.0)  # 12.706 belongs to one degree of freedom
    return (
        Z95
        if df >= 10_000
        else float(findroot(lambda t: t_probability(t, df) - 0.95, within, solver="anderson"))
    )


def wilson(mean: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % score interval of a proportion seen in ``n`` independent trials (Wilson
    1927)."""
    z2 = Z95**2
    centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def t_interval(values: Sequence[float]) -> Estimate:
    """Mean of independent values with Student's 95 % interval; no bounds for a single value."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Estimate(mean, None, None, n)
    half = t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def question_interval(per_question: Sequence[float], draws: int = 1) -> Estimate:
    """Mean over questions of their own 0/1 frequencies over ``draws`` samples, with a 95 %
    interval.

    Wilson's interval at the effective sample size ``p (1-p) / var(mean)``, which stays sensible
    near 0 and 1 where Student's has no width. The size is kept between the number of questions (as
    if a question's draws always agreed) and that times ``draws`` (as if they were independent).
    """
    n, mean = len(per_question), statistics.fmean(per_question)
    if n < 2:
        return Estimate(mean, None, None, n)
    variance = statistics.variance(per_question) / n
    size = mean * (1 - mean) / variance if variance > 0 else float(n)
    if draws > 1:  # the variance was itself estimated from n questions (Korn and Graubard 1998)
        size *= (Z95 / t_quantile(n - 1)) ** 2
    low, high = wilson(mean, min(max(size, n), n * draws))
    return Estimate(mean, low, high, n)


@dataclass(frozen=True)
class ValRecord:
    """One validation question: ``values[name][i]`` is what sample ``i`` got. ``acc`` is always
    there."""

    uid: str
    data_source: str
    values: Mapping[str, tuple[float, ...]]
    preds: tuple[str | None, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(series) for series in self.values.values()} | (
            {len(self.preds)} if self.preds else set()
        )
        if "acc" not in self.values or len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                f"validation record {self.uid!r}: needs acc, and equally many "
                f"samples in each series"
            )

    @classmethod
    def of(cls, group: ScoredGroup) -> ValRecord:
        """Return the record of a scored group. A part that only some samples have counts as 0 in
        the others."""
        parts = sorted({name for score in group.scores for name in score.parts})
        values = {
            name: tuple(float(score.parts.get(name, 0.0)) for score in group.scores)
            for name in parts
        }
        values["reward"] = tuple(float(score.value) for score in group.scores)
        if values.get("score") == values["reward"]:  # the loop's copy of an unshaped reward
            del values["score"]
        values["response_length"] = tuple(float(t.response_mask.sum()) for t in group.trajectories)
        values["truncated"] = tuple(float(t.truncated) for t in group.trajectories)
        for status in FAILURES:
            values[status.value] = tuple(float(score.status is status) for score in group.scores)
        voted = any(score.pred is not None for score in group.scores)
        preds = tuple(score.pred for score in group.scores) if voted else ()
        return cls(group.prompt.uid, group.prompt.data_source, values, preds)

    def to_json(self) -> dict[str, Any]:
        row = {
            "uid": self.uid,
            "data_source": self.data_source,
            **{k: list(v) for k, v in self.values.items()},
        }
        return {**row, "pred": list(self.preds)} if self.preds else row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ValRecord:
        values = {
            k: tuple(v) for k, v in row.items() if k not in ("uid", "data_source", "pred", "step")
        }
        return cls(row["uid"], row["data_source"], values, tuple(row.get("pred", ())))


def best_at_k(values: Sequence[float], k: int) -> float:
    """Return the expected best of ``k`` samples drawn without replacement; for 0/1 values, unbiased
    ``pass@k``."""
    n = len(values)
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: must lie between 1 and the {n} samples of the question")
    total = math.comb(n, k)
    return sum(math.comb(i, k - 1) / total * value for i, value in enumerate(sorted(values)))


def majority(values: Sequence[float], preds: Sequence[str | None]) -> float:
    """Return the value of the answer that most samples gave, the first seen of several; without
    answers the first."""
    # In the order in which they were first seen
    votes = Counter(pred for pred in preds if pred is not None)
    return values[list(preds).index(max(votes, key=votes.__getitem__))] if votes else values[0]


def merge_by_question(records: Iterable[ValRecord]) -> dict[str, list[ValRecord]]:
    """Return ``data_source -> records``, the samples of equal ``(data_source, uid)`` joined, in
    order of appearance."""
    by_source: dict[str, dict[str, ValRecord]] = defaultdict(dict)
    for record in records:
        same = by_source[record.data_source]
        # Of parts that not every repeat has none is kept, so that samples stay aligned
        if old := same.get(record.uid):
            values = {
                name: old.values[name] + record.values[name]
                for name in old.values
                if name in record.values
            }
            preds = old.preds + record.preds if old.preds and record.preds else ()
            record = ValRecord(record.uid, record.data_source, values, preds)
        same[record.uid] = record
    return {source: list(same.values()) for source, same in by_source.items()}


def variable_estimates(
    variable: str, rows: Sequence[ValRecord], n: int, sizes: Sequence[int] | None = None
) -> dict[str, Estimate]:
    """Return ``mean@n`` of one variable and, for acc and reward over several samples, ``pass``,
    ``best``, ``maj``.

    ``sizes`` are the k of ``pass@k``, by default the powers of two below ``n`` and ``n``. Raises
    ValueError for a k above the samples that there are.
    """
    columns = [row.values[variable] for row in rows]
    binary = all(value in (0.0, 1.0) for column in columns for value in column)

    def over_questions(values: list[float], draws: int) -> Estimate:
        return question_interval(values, draws) if binary else t_interval(values)

    out = {f"mean@{n}": over_questions([statistics.fmean(c) for c in columns], n)}
    if n == 1 or variable not in ("acc", "reward"):
        return out
    name = "pass@{}" if binary and variable == "acc" else "best@{}/mean"
    for k in sizes or [*(2**i for i in range(1, n.bit_length()) if 2**i < n), n]:
        out[name.format(k)] = over_questions([best_at_k(c, k) for c in columns], n // k)
    if all(row.preds for row in rows):
        out[f"maj@{n}"] = over_questions(
            [majority(c, r.preds) for c, r in zip(columns, rows, strict=True)], 1
        )
    return out


def are_shares(values: Iterable[float]) -> bool:
    """Return whether the values can be shares of what is right; otherwise ``acc`` is a score, and
    no accuracy."""
    return all(0 <= value <= 1 for value in values)


def failed_share(records: Iterable[ValRecord]) -> float:
    """Return the share of answers that the scorer failed on."""
    answers = [record.values.get(name, ()) for record in records for name in LOST]
    return sum(map(sum, answers)) * len(LOST) / max(1, sum(map(len, answers)))


def validation_metrics(records: Iterable[ValRecord]) -> dict[str, float]:
    """Return all numbers of one validation pass, by data source, under the names of the module's
    head."""
    out: dict[str, float] = {}
    for source, rows in merge_by_question(records).items():
        n = min(len(row.values["acc"]) for row in rows)
        for variable in [v for v in rows[0].values if all(v in row.values for row in rows)]:
            for name, estimate in variable_estimates(variable, rows, n).items():
                core = variable == "acc" and name.partition("/")[0].endswith(f"@{n}")
                out[f"val-{'core' if core else 'aux'}/{source}/{variable}/{name}"] = estimate.value
                if estimate.low is not None and estimate.high is not None:
                    out[f"val-aux/{source}/{variable}/{name}/ci_low"] = estimate.low
                    out[f"val-aux/{source}/{variable}/{name}/ci_high"] = estimate.high
            if n > 1 and variable in ("acc", "reward"):
                spread = statistics.fmean(statistics.pstdev(row.values[variable]) for row in rows)
                out[f"val-aux/{source}/{variable}/std@{n}"] = spread
        values = [value for row in rows for value in row.values["acc"]]
        if not are_shares(values):
            out[f"val-aux/{source}/acc/min"], out[f"val-aux/{source}/acc/max"] = (
                min(values),
                max(values),
            )
        out[f"val-aux/{source}/num_questions"] = float(len(rows))
        out[f"val-aux/{source}/num_samples"] = float(len(values))
    return out
