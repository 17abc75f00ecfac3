"""What can be known to be wrong with the rewards before anything is trained."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from core.data.parquet import Row
from core.rewards.grading import Executor, Failure, Grader, Job
from core.rewards.managers import Batched, Naive
from core.rewards.pool import Pool, unsendable
from core.types import Prompt
from reward_scores import SCORERS, UnknownDataSource

log = logging.getLogger(__name__)

SENT = "a worker gets a row's ground_truth and extra_info as JSON"
MODEL_STYLE = "model"
NO_MODEL = (
    "reward_model.enable=False: rows whose reward_model.style is 'model' want a reward model; "
    "set it to True and name reward_model.model.path, or give the rows style 'rule' and a ground truth"
)
IDLE_MODEL = (
    "reward_model.enable=True: the model would score nothing; give rows the reward_model.style 'model', or set "
    "reward_model.weight to what the model counts beside the rules"
)
SHOWN = 3  # rows named for one kind of problem; the rest is counted


def option_problems(reward_kwargs: Mapping[str, Any]) -> list[str]:
    """What is wrong with the scorers' options; the other keys are checked with the configuration."""
    problems = []
    scorers = {scorer.name: scorer for scorer in SCORERS.values()}
    for name, options in reward_kwargs.items():
        key = f"reward_model.reward_kwargs.{name}"
        if name not in scorers:
            near = difflib.get_close_matches(str(name), scorers, n=1) or sorted(scorers)
            problems.append(f"{key}: not a scorer's name; use {', '.join(near)}")
        elif not isinstance(options or {}, Mapping):
            problems.append(f"{key}={options!r}: must map the scorer's options to values, as in {{method: flexible}}")
        else:
            known = list(inspect.signature(scorers[name].score).parameters)[3:]
            unknown = sorted(set(options or {}) - set(known))
            if unknown:
                has = f"it has {', '.join(known)}" if known else "it has none"
                problems.append(f"{key}: no option {', '.join(unknown)}; {has}")
    return problems


def find_problems(
    grader: Grader,
    executor: Executor,
    rows: Iterable[Prompt | Mapping[str, Any]],
    *,
    model: bool = False,
    weight: float = 0.0,
) -> list[str]:
    """Rows without a scorer or that their scorer cannot grade, and scorers that fail on their own examples.

    ``model`` says whether there is a reward model, ``weight`` what it counts beside a scorer.
    """
    found = _Findings()
    used: dict[str, str] = {}
    libraries: dict[str, str] = {}  # -> the name of a scorer that calls on it
    for_model = 0
    for number, row in enumerate(rows):
        where, data_source, ground_truth, extra_info, style = _read(row, number)
        if style == MODEL_STYLE:
            for_model += 1
            if not model:
                found.add(NO_MODEL, where)
            continue
        try:
            scorer, needed = grader.scorer(data_source), grader.libraries(data_source)
        except UnknownDataSource as error:
            found.add(f"data.reward_fn_key: {error}; or set custom_reward_function.path", where)
            continue
        sends = isinstance(executor, Pool | Batched) or (needed and isinstance(executor, Naive))
        if sends and (trouble := unsendable([ground_truth, extra_info])):
            found.add(f"{SENT}: {trouble}", where)
        libraries.update(dict.fromkeys(needed, scorer.name))
        used.setdefault(scorer.name, data_source)
        trouble = scorer.check_ground_truth(ground_truth, **grader.options(scorer))
        if trouble:
            found.add(f"ground truth that {scorer.name} cannot grade", f"{where}: {trouble}")
    if model and not for_model and not weight:
        found.add(IDLE_MODEL)
    _announce(executor, libraries)
    for data_source in used.values():
        for problem in asyncio.run(_grade_examples(grader, executor, data_source)):
            found.add(problem)
    return found.lines()


def _announce(executor: Executor, libraries: Mapping[str, str]) -> None:
    """Has the workers start with what they need, and says which answers do not stay in this process."""
    if isinstance(executor, Pool | Batched | Naive):
        executor.preload(libraries)
    if libraries and isinstance(executor, Naive):
        log.info(
            "reward_model.reward_manager=naive: %s calls on a library that may not end, so that its answers are graded "
            "in processes that are killed after reward_model.timeout_s=%g s",
            ", ".join(sorted(set(libraries.values()))),
            executor.pool.timeout_s,
        )


async def _grade_examples(grader: Grader, executor: Executor, data_source: str) -> list[str]:
    problems = []
    scorer = grader.scorer(data_source)
    for response, ground_truth, acc in scorer.examples:
        result = await executor.run(Job(data_source, response, ground_truth, {}))
        what = f"{scorer.name}: its own example {response!r:.200} (ground truth {ground_truth!r:.100})"
        if isinstance(result, Failure):
            problems.append(f"{what} failed ({result.status.value}): {result.detail.strip().splitlines()[-1]}")
        elif result.acc != acc:
            problems.append(f"{what} got acc={result.acc}, not {acc}")
    return problems


class _Findings:
    """Problems in the order found, each once, with the first few rows that have it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.rows: dict[str, list[str]] = {}

    def add(self, problem: str, row: str | None = None) -> None:
        self.counts[problem] += 1
        rows = self.rows.setdefault(problem, [])
        if row is not None and len(rows) < SHOWN:
            rows.append(row)

    def lines(self) -> list[str]:
        return [self._line(problem, count) for problem, count in self.counts.items()]

    def _line(self, problem: str, count: int) -> str:
        rows = self.rows[problem]
        if not rows:
            return problem
        more = f"; and {count - len(rows)} more" if count > len(rows) else ""
        return f"{problem} ({count} rows): {'; '.join(rows)}{more}"


def _read(row: Prompt | Row | Mapping[str, Any], number: int) -> tuple[str, str, Any, Any, str]:
    """Where the row is, its data source, its ground truth, its extra_info and its style."""
    if isinstance(row, Prompt):
        return f"uid {row.uid}", row.data_source, row.ground_truth, row.extra_info, row.style
    if isinstance(row, Row):
        return row.where, row.data_source, row.ground_truth, row.extra_info, row.style
    reward = row.get("reward_model") or {}
    return f"row {number}", row["data_source"], reward.get("ground_truth"), row.get("extra_info"), reward.get("style")
