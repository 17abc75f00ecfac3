"""Find what is wrong with the rewards before anything is trained: options, examples of the data, scorers, hooks."""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core.data.parquet import Example, Problems
from core.rewards.graders import GraderPool, to_json
from core.rewards.grading import Failure, InProcess, Job, ModelScore, RewardManager, Scorers
from core.types import Prompt, ScoredGroup, Stop, Trajectory
from reward_scores import SCORERS, Scorer, UnknownDataSource
from reward_scores.score import Score

if TYPE_CHECKING:
    from core.config.sections.reward import RewardModelConfig

log = logging.getLogger(__name__)

Row = Prompt | Example

MODEL_STYLE = "model"
NO_MODEL = (
    "reward_model.enable=False",
    "a reward_model.style of 'model' requires a reward model",
    "set it to True and name reward_model.model.path or reward_model.judge.url, or give the rows style 'rule' and a "
    "ground truth",
)
IDLE_MODEL = (
    "reward_model.enable=True",
    "the model would score nothing",
    "give rows the reward_model.style 'model', or set reward_model.weight to what the model counts beside the rules",
)
NO_REFERENCE = (
    "reward_model.ground_truth",
    "reward_model.judge.template shows a reference, and there is none",
    "fill it, or take {reference} out of the template",
)
GOLD_REMARK = ("a gold answer is graded in a special way", "look whether it is the answer that was meant")
NOT_JSON = "its graders receive ground_truth and extra_info as JSON"


def option_problems(reward_kwargs: Mapping[str, Any], others: bool = False) -> list[str]:
    """Return what is wrong with the scorers' options; the other keys are checked with the configuration.

    ``others``: names that are no scorer's may be arguments of a manager of the user's.
    """
    problems = []
    scorers = {scorer.name: scorer for scorer in SCORERS.values()}
    for name, options in reward_kwargs.items():
        key = f"reward_model.reward_kwargs.{name}"
        if name not in scorers and others:
            continue
        if name not in scorers:
            near = difflib.get_close_matches(str(name), scorers, n=1) or sorted(scorers)
            problems.append(f"{key}: not a scorer's name; use {', '.join(near)}")
        elif not isinstance(options or {}, Mapping):
            problems.append(f"{key}={options!r}: must map the scorer's options to values, as in {{method: flexible}}")
        else:
            known = list(inspect.signature(scorers[name].score).parameters)[3:]
            if unknown := sorted(set(options or {}) - set(known)):
                has = f"it has {', '.join(known)}" if known else "it has none"
                problems.append(f"{key}: no option {', '.join(unknown)}; {has}")
    return problems


def check_rows(
    reward: RewardModelConfig,
    scorers: Scorers,
    manager: RewardManager,
    rows: Iterable[Row],
    *,
    model_compares: bool = False,
) -> tuple[Problems, dict[str, Row]]:
    """Check that every row can be scored. Return the problems, and the first row of each data source with a scorer.

    The manager's pool learns which libraries the scorers call. With ``model_compares`` a judge reads ground truths.
    """
    problems = Problems(shown=3)  # rows named for one kind of problem; the rest is counted
    first: dict[str, Row] = {}
    libraries: dict[str, str] = {}  # -> the name of a scorer that calls it
    for_model, remarks = 0, Problems(shown=3)
    for row in rows:
        where = where_of(row)
        if row.style == MODEL_STYLE:
            for_model += 1
            if not reward.uses_model:
                problems.add(*NO_MODEL, where)
            elif model_compares and row.ground_truth is None:
                problems.add(*NO_REFERENCE, where)
            continue
        try:
            scorer, needed = scorers.scorer(row.data_source), scorers.libraries(row.data_source)
        except UnknownDataSource as error:
            problems.add("data.reward_fn_key", str(error), "correct it, or set custom_reward_function.path", where)
            continue
        if isinstance(manager, GraderPool) or (needed and isinstance(manager, InProcess)):
            try:
                to_json([row.ground_truth, row.extra_info])
            except (TypeError, ValueError) as error:
                problems.add(scorer.name, NOT_JSON, "convert what is not", where, str(error))
        libraries.update(dict.fromkeys(needed, scorer.name))
        first.setdefault(row.data_source, row)
        options = scorers.options(scorer)
        if trouble := scorer.problem(row.ground_truth, **options):
            rule = f"{scorer.name} cannot grade it"
            problems.add("reward_model.ground_truth", rule, "correct it, or leave the row out", where, trouble)
        elif remark := scorer.note_ground_truth(row.ground_truth, **options):
            remarks.add("reward_model.ground_truth", *GOLD_REMARK, where, remark)
    for line in remarks.lines():
        log.warning(line)
    if reward.uses_model and not for_model and not reward.model_weight:
        problems.add(*IDLE_MODEL)
    if isinstance(manager, GraderPool | InProcess):
        (manager.pool if isinstance(manager, InProcess) else manager).preload(libraries)
    if libraries and isinstance(manager, InProcess):
        log.info(
            "reward_model.reward_manager=naive: %s calls on a library that may not end, so that its answers are graded "
            "in processes that are killed after reward_model.timeout_s=%g s",
            ", ".join(sorted(set(libraries.values()))),
            manager.pool.timeout_s,
        )
    return problems, first


def where_of(row: Row) -> str:
    return row.where if isinstance(row, Example) else f"uid {row.uid}"


def check_examples(problems: Problems, scorer: Scorer, grade: Callable[[str, Any], Score | Failure]) -> None:
    """Check that a scorer grades its own examples as stated; ``grade`` takes a response and a ground truth."""
    for response, ground_truth, acc in scorer.examples:
        result = grade(response, ground_truth)
        what = f"its own example {response!r:.200} (ground truth {ground_truth!r:.100})"
        if isinstance(result, Failure):
            reason = f"failed ({result.status.value}): {result.detail.strip().splitlines()[-1]}"
            problems.add(scorer.name, f"{what} {reason}", "correct the scorer's options or the example")
        elif result.acc != acc:
            problems.add(scorer.name, f"{what} got acc={result.acc}, not {acc}", "correct the scorer or the example")


def trial_answers(scorer: Scorer, ground_truth: Any) -> tuple[str, ...]:
    """Return answers of which a user's function should be able to grade one, right or wrong.

    They are its module's ``EXAMPLES``, or the ground truth in the forms in which functions look for an answer, and the
    empty answer.
    """
    if scorer.examples:
        return tuple(response for response, _, _ in scorer.examples)
    gold = ground_truth
    while isinstance(gold, Mapping | list | tuple) and gold:
        gold = next(iter(gold.values() if isinstance(gold, Mapping) else gold))
    gold = "" if gold is None else str(gold)
    usual = f"<think>\n{gold}\n</think>\n<answer>{gold}</answer> \\boxed{{{gold}}}\n#### {gold}"
    return (gold, usual, json.dumps({"answer": gold}), "")


def fails_on_all(key: str, row: Row, job: Job, failure: Failure) -> str:
    """Return the problem of a function that failed on every answer that was tried, with its own report."""
    *trace, last = failure.detail.strip().splitlines() or ["no reason is known"]
    missing = re.fullmatch(r"KeyError: (.+)", last)
    reason = f"the key {missing[1]} is missing ({last})" if missing else last
    gold = f"{type(row.ground_truth).__name__} {row.ground_truth!r:.100}"
    return (
        f"{key}: failed on every answer tried for data_source={row.data_source!r} ({where_of(row)}): {reason}. "
        f"The row's ground_truth is {gold}; extra_info has {', '.join(map(str, job.extra_info))}. Correct the function "
        "or the data; if it is to fail on such answers, give its module EXAMPLES = ((answer, ground_truth, acc), ...)"
        + "".join(f"\n{line}" for line in [*trace, last] if trace)
    )


def check_hooks(
    rows: Sequence[Example],
    reward: Any,
    tokenizer: Any,
    shape_reward: Callable[[Score, Trajectory], Score],
    keep_group: Callable[[ScoredGroup], bool],
) -> None:
    """Call both training hooks with a group of one example answer for each data source of ``rows``.

    A hook that cannot work with what a scorer returns (a filter on a part that is not there) then ends the run at its
    start. ``reward`` is the :class:`core.rewards.layer.RewardLayer`, which has checked the scorers before.
    The answer is the scorer's first example; for a user's function one that it graded at start: a function must return
    the same parts for every answer. A row for a reward model has that model's parts. Raises what the hooks raise.
    """
    for row in {row.data_source: row for row in reversed(rows)}.values():  # the first row of each source
        if row.style == MODEL_STYLE:  # which need not have a scorer
            answer, score = "", Score(0.0, ModelScore(0.0).parts)
        else:
            answer, score = reward.known_answer(row)
        ids = tokenizer.encode(answer, add_special_tokens=False) or [tokenizer.pad_token_id]
        length = len(ids)
        trajectory = Trajectory([0], ids, [True] * length, [0.0] * length, (), Stop.EOS, 0, 0)
        shaped = shape_reward(score.keeping_raw(), trajectory)
        prompt = Prompt(0, row.where, (0,), (), row.ground_truth, row.data_source)
        keep_group(ScoredGroup(prompt, (trajectory,) * 2, (shaped,) * 2))
