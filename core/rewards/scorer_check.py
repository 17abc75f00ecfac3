"""Checks of the rewards before anything is trained: examples of the data, scorers and hooks."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from core.data.parquet import Example
from core.errors import InputError, Problems, WorkersLost
from core.rewards.graders import to_json
from core.rewards.grading import MODEL_STYLE, Failure, model_score
from core.rewards.layer import RewardLayer, trajectory_of_text
from core.types import Prompt, ScoredGroup, Trajectory
from reward_scores import Scorer, UnknownDataSource
from reward_scores.score import Score
from reward_scores.unit_tests import SandboxOptions

log = logging.getLogger(__name__)

STANDARD_LIBRARY = (
    "programs have Python's standard library alone: a program that imports numpy fails and scores "
    "0; reward_model.sandbox_fusion.url names a server with other packages"
)

Row = Prompt | Example
Known = dict[str, tuple[str, Score]]  # data source -> an answer that was graded


class ScorerCheck:
    """Checks that every example can be scored, and then the scorers themselves.

    The graders learn which libraries the scorers call. ``agent_scores``: an outside agent may give
    each reward itself, so that no scorer need know the examples.
    """

    def __init__(self, layer: RewardLayer, *, agent_scores: bool = False):
        self.layer = layer
        self.agent_scores = agent_scores
        self.problems = Problems(shown=3)
        # The first example of each data source that a scorer grades
        self.first: dict[str, Row] = {}
        self.examples_for_model = 0

    def add(self, row: Row) -> None:
        """Check an example of the data."""
        scorers = self.layer.scorers
        where = row.where if isinstance(row, Example) else f"uid {row.uid}"
        if row.style == MODEL_STYLE:
            self._add_for_model(row, where)
            return
        try:
            scorer = scorers.scorer(row.data_source)
            libraries = scorers.libraries(row.data_source)
        except UnknownDataSource as error:
            if self.agent_scores:
                return
            fix = (
                "correct it, name its scorer in reward_model.scorers, or set "
                "custom_reward_function.path"
            )
            self.problems.add("data.reward_fn_key", str(error), fix, where)
            return
        if self.layer.manager is self.layer.pool or libraries:
            try:
                to_json([row.ground_truth, row.extra_info])
            except (TypeError, ValueError) as error:
                rule = "its graders receive ground_truth and extra_info as JSON"
                self.problems.add(scorer.name, rule, "convert what is not", where, str(error))
        self.layer.pool.preload(libraries)
        self.first.setdefault(row.data_source, row)
        if trouble := scorer.problem(row.ground_truth, **scorers.options(scorer)):
            key = "reward_model.ground_truth"
            rule = f"{scorer.name} cannot grade it"
            self.problems.add(key, rule, "correct it, or leave the row out", where, trouble)

    def _add_for_model(self, row: Row, where: str) -> None:
        """Check an example whose answers the reward model or the judge scores."""
        self.examples_for_model += 1
        judge = self.layer.judge
        if not self.layer.config.enable:
            key = "reward_model.enable=False"
            rule = "style 'model' requires a reward model"
            fix = (
                "name a reward model (or a judge) and set it to True, or give the rows style 'rule'"
            )
            self.problems.add(key, rule, fix, where)
        elif judge is not None and judge.reads_reference and row.ground_truth is None:
            rule = "judge.template shows a reference, and there is none"
            fix = "fill it, or change the template"
            self.problems.add("reward_model.ground_truth", rule, fix, where)

    def finish(self, tokenizer: Any = None) -> Known:
        """Grade known answers where the answers will be graded, and try the judge.

        Known answers are each scorer's own examples, and for a user's function answers of which it
        must be able to grade one. Return one of them for each data source, with its score. Warn of
        tokens that the tokenizer takes out of them. Raises InputError with all problems.
        """
        config = self.layer.config
        if config.enable and not self.examples_for_model and not config.weight:
            fix = (
                "give rows the reward_model.style 'model', or set reward_model.weight to what it "
                "counts beside the rules"
            )
            self.problems.add("reward_model.enable=True", "the model would score nothing", fix)
        try:
            known, scorer_names = self._grade_known_answers()
            if tokenizer is not None:
                _warn_of_lost_tokens(self.layer, self.first, tokenizer)
        except WorkersLost as error:
            fix = (
                "its traceback is above; correct the function's module, or raise "
                "reward_model.memory_limit_mb"
            )
            raise InputError(f"reward_model.reward_manager: {error}; {fix}") from error
        options = self.layer.scorers.reward_kwargs["prime_code"]
        if "prime_code" in scorer_names and "sandbox_fusion" not in options:
            # Report how programs are isolated on this machine
            print(SandboxOptions(**options["sandbox"]).isolation().line, flush=True)
            print(STANDARD_LIBRARY, flush=True)
        if self.layer.judge is not None:
            self.layer.judge.check()
        return known

    def _grade_known_answers(self) -> tuple[Known, set[str]]:
        """Return a graded answer for each data source, and the names of the scorers."""
        scorers = self.layer.scorers
        known: Known = {}
        graded: dict[str, tuple[str, Score] | None] = {}  # by the scorer's name
        for row in self.first.values():
            scorer = scorers.scorer(row.data_source)
            if scorer.name not in graded:
                graded[scorer.name] = _check_examples(self.problems, scorer, self.layer, row)
            known[row.data_source] = graded[scorer.name]
        self.problems.raise_if_any()
        if scorers.custom:
            for row in self.first.values():
                known[row.data_source] = _try_function(self.problems, self.layer, row)
        self.problems.raise_if_any()
        return known, set(graded)


def check_scorers(layer: RewardLayer, rows: Iterable[Row], tokenizer: Any = None) -> Known:
    """Check rows that are in memory, and then the scorers: :meth:`ScorerCheck.finish`."""
    check = ScorerCheck(layer)
    for row in rows:
        check.add(row)
    return check.finish(tokenizer)


def _check_examples(
    problems: Problems, scorer: Scorer, layer: RewardLayer, row: Row
) -> tuple[str, Score] | None:
    """Check that a scorer grades its own examples as stated; return one of them with its score."""
    graded = None
    for response, ground_truth, acc in scorer.examples:
        result = layer.grade_text(row, response, ground_truth)
        if isinstance(result, Failure):
            outcome = result.detail.strip().splitlines()[-1]
        elif result.acc != acc:
            outcome = f"acc={result.acc}"
        else:
            graded = graded or (response, result)
            continue
        rule = (
            f"its own example {response!r:.200} (ground truth {ground_truth!r:.100}) got "
            f"{outcome}, not {acc}"
        )
        problems.add(scorer.name, rule, "correct the scorer, its options or the example")
    return graded


def _try_function(problems: Problems, layer: RewardLayer, row: Row) -> tuple[str, Score] | None:
    """Return an answer to a row that the user's function can grade, with its score.

    Add a problem if it fails on every answer.
    """
    failures: list[Failure] = []
    for answer in trial_answers(layer.scorers.scorer(row.data_source), row.ground_truth):
        result = layer.grade_text(row, answer, row.ground_truth)
        if not isinstance(result, Failure):
            return answer, result
        failures.append(result)
    trace = failures[0].detail.strip()
    fields = ", ".join(map(str, layer.job(row, trajectory_of_text("")).extra_info))
    rule = (
        f"failed on every answer tried for data_source={row.data_source!r}, ground_truth "
        f"{row.ground_truth!r:.100}, extra_info of {fields}: {trace.splitlines()[-1]}"
    )
    fix = (
        "correct it or the data, or give its module EXAMPLES = ((answer, ground_truth, acc), ...)"
        f"\n{trace}"
    )
    problems.add(f"custom_reward_function.path={layer.scorers.custom.name}", rule, fix)
    return None


def _warn_of_lost_tokens(layer: RewardLayer, first: Mapping[str, Row], tokenizer: Any) -> None:
    """Warn of special tokens that a scorer looks for: its text is decoded without them.

    They are the tokens without which an answer that was tried gets another score, and those in the
    code of a user's function.
    """
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    marks = special - {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token}
    custom = layer.scorers.custom
    for source, row in first.items():
        scorer = layer.scorers.scorer(source)
        lost = {token for token in marks if custom and token in custom.code}
        answers = [(text, ground_truth) for text, ground_truth, _ in scorer.examples]
        if not answers:
            texts = trial_answers(scorer, row.ground_truth)
            answers = [(text, row.ground_truth) for text in texts]
        for text, ground_truth in answers:
            ids = tokenizer.encode(text, add_special_tokens=False)
            decoded = tokenizer.decode(ids, skip_special_tokens=True)
            gone = {token for token in special if text.count(token) > decoded.count(token)}
            if gone <= lost:
                continue
            before = layer.grade_text(row, text, ground_truth)
            after = layer.grade_text(row, decoded, ground_truth)
            if before != after:
                lost |= gone
        if lost:
            log.warning(
                "%s looks for %s, special in this tokenizer, and text for scorers is without "
                "special tokens; set special to false for them in the model's tokenizer.json and "
                "tokenizer_config.json",
                scorer.name,
                ", ".join(map(repr, sorted(lost))),
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

    A hook that cannot work with a scorer's result (a filter on a part that is not there) then ends
    the run at its start. ``known`` has answers that were graded; a row for a reward model has that
    model's parts. Raises the errors of the hooks.
    """
    first = {row.data_source: row for row in reversed(rows)}
    for row in first.values():
        answer, score = known.get(row.data_source) or ("", Score(0.0))
        if row.style == MODEL_STYLE:
            answer = ""
            score = model_score(0.0)
        trajectory = trajectory_of_text(answer)
        shaped = shape_reward(score.keeping_raw(), trajectory)
        _check_result(shape_reward, shaped, Score, "shape_reward returns a Score")
        prompt = Prompt(0, row.where, (0,), (), row.ground_truth, row.data_source)
        kept = keep_group(ScoredGroup(prompt, (trajectory,) * 2, (shaped,) * 2))
        fix = "keep_group returns True to train on the group, or False"
        _check_result(keep_group, kept, bool | np.bool_, fix)


def _check_result(hook: Callable[..., Any], result: Any, kinds: Any, fix: str) -> None:
    if not isinstance(result, kinds):
        raise InputError(
            f"{hook.__qualname__} returned {type(result).__name__} {result!r:.50}; {fix}"
        )
