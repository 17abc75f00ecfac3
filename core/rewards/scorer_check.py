"""Find what is wrong with the rewards before anything is trained: options, examples of the data,
scorers, hooks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from core.data.parquet import Example, Problems
from core.errors import InputError, WorkersLost
from core.rewards.graders import to_json
from core.rewards.grading import Failure, model_score
from core.types import Prompt, ScoredGroup, Segment, Stop, Trajectory
from reward_scores import Scorer, UnknownDataSource
from reward_scores.score import Score
from reward_scores.unit_tests import SandboxOptions

if TYPE_CHECKING:
    from core.rewards.layer import RewardLayer

log = logging.getLogger(__name__)

Row = Prompt | Example
Known = dict[str, tuple[str, Score]]  # data source -> an answer that was graded

MODEL_STYLE = "model"


def check_scorers(layer: RewardLayer, rows: Iterable[Row], tokenizer: Any = None) -> Known:
    """Check every row, then grade known answers where the answers will be graded.

    They are each scorer's own examples, and for a user's function answers of which it must be able
    to grade one. Return one of them for each data source, with its score; warn of what the
    tokenizer takes out of them. Raises InputError with all problems.
    """
    problems, first = check_rows(layer, rows)
    known: Known = {}
    examples: dict[str, tuple[str, Score] | None] = {}  # of a scorer, by its name
    try:
        for row in first.values():
            scorer = layer.scorers.scorer(row.data_source)
            if scorer.name not in examples:
                examples[scorer.name] = _check_examples(problems, scorer, layer, row)
            known[row.data_source] = examples[scorer.name]
        problems.raise_if_any()
        for row in first.values() if layer.scorers.custom else ():
            known[row.data_source] = _try(problems, layer, row)
        problems.raise_if_any()
        if tokenizer is not None:
            _warn_of_lost_tokens(layer, first, tokenizer)
    except WorkersLost as error:
        fix = (
            "its traceback is above; correct the function's module, or raise "
            "reward_model.memory_limit_mb"
        )
        raise InputError(f"reward_model.reward_manager: {error}; {fix}") from error
    options = layer.scorers.reward_kwargs["prime_code"]
    # What holds the programs on this machine
    if "prime_code" in examples and "sandbox_fusion" not in options:
        print(SandboxOptions(**options["sandbox"]).isolation().line, flush=True)
    return known


def check_rows(layer: RewardLayer, rows: Iterable[Row]) -> tuple[Problems, dict[str, Row]]:
    """Check that every row can be scored. Return the problems, and the first row of each data
    source with a scorer.

    The graders learn which libraries the scorers call.
    """
    scorers, problems = layer.scorers, Problems(shown=3)  # rows named for a kind of problem
    first: dict[str, Row] = {}
    for_model = 0
    for row in rows:
        where = row.where if isinstance(row, Example) else f"uid {row.uid}"
        if row.style == MODEL_STYLE:
            for_model += 1
            if not layer.config.enable:
                fix = (
                    "name a reward model (or a judge) and set it to True, or give the rows "
                    "style 'rule'"
                )
                problems.add(
                    "reward_model.enable=False", "style 'model' requires a reward model", fix, where
                )
            elif (
                layer.judge is not None and layer.judge.reads_reference and row.ground_truth is None
            ):
                rule, fix = (
                    "judge.template shows a reference, and there is none",
                    ("fill it, or change the template"),
                )
                problems.add("reward_model.ground_truth", rule, fix, where)
            continue
        try:
            scorer, libraries = scorers.scorer(row.data_source), scorers.libraries(row.data_source)
        except UnknownDataSource as error:
            problems.add(
                "data.reward_fn_key",
                str(error),
                "correct it, or set custom_reward_function.path",
                where,
            )
            continue
        if layer.manager is layer.pool or libraries:
            try:
                to_json([row.ground_truth, row.extra_info])
            except (TypeError, ValueError) as error:
                rule = "its graders receive ground_truth and extra_info as JSON"
                problems.add(scorer.name, rule, "convert what is not", where, str(error))
        layer.pool.preload(libraries)
        first.setdefault(row.data_source, row)
        if trouble := scorer.problem(row.ground_truth, **scorers.options(scorer)):
            rule = f"{scorer.name} cannot grade it"
            problems.add(
                "reward_model.ground_truth",
                rule,
                "correct it, or leave the row out",
                where,
                trouble,
            )
    if layer.config.enable and not for_model and not layer.config.weight:
        fix = (
            "give rows the reward_model.style 'model', or set reward_model.weight to what it "
            "counts beside the rules"
        )
        problems.add("reward_model.enable=True", "the model would score nothing", fix)
    return problems, first


def written(text: str) -> Trajectory:
    """Return a trajectory of one turn that holds a text and stands for an answer at start."""
    return Trajectory([0], [0], [True], [0.0], (Segment("policy", text),), Stop.EOS, 0, 0)


def _check_examples(
    problems: Problems, scorer: Scorer, layer: RewardLayer, row: Row
) -> tuple[str, Score] | None:
    """Check that a scorer grades its own examples as stated; return one of them with its score."""
    graded = None
    for response, ground_truth, acc in scorer.examples:
        result = layer.grade_text(row, response, ground_truth)
        if not isinstance(result, Failure) and result.acc == acc:
            graded = graded or (response, result)
            continue
        found = (
            f"acc={result.acc}"
            if isinstance(result, Score)
            else result.detail.strip().splitlines()[-1]
        )
        rule = (
            f"its own example {response!r:.200} (ground truth {ground_truth!r:.100}) got "
            f"{found}, not {acc}"
        )
        problems.add(scorer.name, rule, "correct the scorer, its options or the example")
    return graded


def _try(problems: Problems, layer: RewardLayer, row: Row) -> tuple[str, Score] | None:
    """Have a user's function grade answers to a row until one has a score, and return it; a problem
    where none has."""
    failures: list[Failure] = []
    for answer in trial_answers(layer.scorers.scorer(row.data_source), row.ground_truth):
        result = layer.grade_text(row, answer, row.ground_truth)
        if not isinstance(result, Failure):
            return answer, result
        failures.append(result)
    trace = failures[0].detail.strip()
    fields = ", ".join(map(str, layer.job(row, written("")).extra_info))
    what = (
        f"data_source={row.data_source!r}, ground_truth {row.ground_truth!r:.100}, extra_info "
        f"of {fields}"
    )
    rule = f"failed on every answer tried for {what}: {trace.splitlines()[-1]}"
    fix = (
        f"correct it or the data, or give its module EXAMPLES = ((answer, ground_truth, acc), "
        f"...)\n{trace}"
    )
    problems.add(f"custom_reward_function.path={layer.scorers.custom.name}", rule, fix)
    return None


def _warn_of_lost_tokens(layer: RewardLayer, first: Mapping[str, Row], tokenizer: Any) -> None:
    """Warn of special tokens that a scorer reads: it gets text that is decoded without them.

    They are those without which an answer tried at start is graded otherwise, and those in a user's
    code.
    """
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    marks = added - {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token}
    for source, row in first.items():
        scorer, custom = layer.scorers.scorer(source), layer.scorers.custom
        lost = {token for token in marks if custom and token in custom.code}
        answers = scorer.examples or [
            (text, row.ground_truth, 0) for text in trial_answers(scorer, row.ground_truth)
        ]
        for text, gold, _ in answers:
            read = tokenizer.decode(
                tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True
            )
            gone = {token for token in added if text.count(token) > read.count(token)}
            if gone - lost and layer.grade_text(row, text, gold) != layer.grade_text(
                row, read, gold
            ):
                lost |= gone
        if lost:
            rule = "special in this tokenizer, and text for scorers is without special tokens"
            fix = (
                "set special to false for them in the model's tokenizer.json and "
                "tokenizer_config.json"
            )
            log.warning(
                "%s looks for %s, %s; %s",
                scorer.name,
                ", ".join(map(repr, sorted(lost))),
                rule,
                fix,
            )


def trial_answers(scorer: Scorer, ground_truth: Any) -> tuple[str, ...]:
    """Return answers of which a user's function should be able to grade one, right or wrong.

    They are its module's ``EXAMPLES``, or the ground truth in the usual forms, and the empty
    answer.
    """
    if scorer.examples:
        return tuple(response for response, _, _ in scorer.examples)
    gold = ground_truth
    while isinstance(gold, Mapping | list | tuple) and gold:
        gold = next(iter(gold.values() if isinstance(gold, Mapping) else gold))
    gold = "" if gold is None else str(gold)
    usual = f"<think>\n{gold}\n</think>\n<answer>{gold}</answer> \\boxed{{{gold}}}\n#### {gold}"
    return (gold, usual, json.dumps({"answer": gold}), "")


def check_hooks(
    rows: Sequence[Example],
    known: Known,
    shape_reward: Callable[[Score, Trajectory], Score],
    keep_group: Callable[[ScoredGroup], bool],
) -> None:
    """Call both training hooks with a group of one example answer for each data source of ``rows``.

    A hook that cannot work with what a scorer returns (a filter on a part that is not there) then
    ends the run at its start. ``known`` has answers that were graded; a row for a reward model has
    that model's parts. Raises what the hooks raise.
    """
    # The first row of each source
    for row in {row.data_source: row for row in reversed(rows)}.values():
        answer, score = known.get(row.data_source) or ("", Score(0.0))
        if row.style == MODEL_STYLE:
            answer, score = "", model_score(0.0)
        trajectory = written(answer)
        shaped = shape_reward(score.keeping_raw(), trajectory)
        prompt = Prompt(0, row.where, (0,), (), row.ground_truth, row.data_source)
        kept = isinstance(shaped, Score) and keep_group(
            ScoredGroup(prompt, (trajectory,) * 2, (shaped,) * 2)
        )
        for hook, found, types in (
            (shape_reward, shaped, Score),
            (keep_group, kept, bool | np.bool_),
        ):
            if not isinstance(found, types):
                fix = (
                    "shape_reward returns a Score, and keep_group True to train on the group, "
                    "or False"
                )
                raise InputError(
                    f"{hook.__qualname__} returned {type(found).__name__} {found!r:.50}; {fix}"
                )
