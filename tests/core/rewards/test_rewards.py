"""The reward layer: dispatch, what a scorer sees, users' functions, failures, checks at start."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken

from core.config.schema import CustomRewardFunctionConfig, RewardModelConfig
from core.data.parquet import Example
from core.errors import InputError
from core.rewards.batch_calls import BatchCalls
from core.rewards.grading import ScoreError, as_score
from core.rewards.layer import RewardError, RewardLayer
from core.rewards.scorer_check import check_hooks, check_scorers
from core.tracking.tracker import generation_rows
from core.types import Prompt, ScoredGroup, Segment, Stop, Trajectory
from reward_scores.score import Score, ScoreStatus
from tests.tiny import tiny_tokenizer

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"


@pytest.fixture
def make_layer(write):
    """Makes layers; a body without a ``def`` is that of a user's function."""
    layers = []

    def make(body=None, *, name="compute_score", kwargs=None, file="mine.py", **reward):
        path = body
        if body is not None and " " in body:
            path = write(body if "def " in body else f"{HEAD}    {body}\n", file)
        reward = RewardModelConfig(**{"num_workers": 1, "memory_limit_mb": 512, **reward})
        custom = CustomRewardFunctionConfig(path=path, name=name, reward_kwargs=kwargs or {})
        layers.append(
            RewardLayer(SimpleNamespace(reward_model=reward, custom_reward_function=custom))
        )
        return layers[-1]

    yield make
    for layer in layers:
        layer.close()


def prompt(data_source="openai/gsm8k", ground_truth="72", extra_info=None, **more):
    return Prompt(0, "row-7", (1, 2), (), ground_truth, data_source, extra_info or {}, **more)


def row(data_source="tests/a", ground_truth="7", number=0, **extra_info):
    return Example(
        "rows.parquet", number, data_source, "?", ground_truth, {"index": number, **extra_info}
    )


def trajectory(*segments, stop=Stop.EOS, turns=1, tool_calls=0, tokens=3, **more):
    segments = tuple(Segment("policy", s) if isinstance(s, str) else Segment(*s) for s in segments)
    ids = np.arange(tokens)
    return Trajectory(
        (7, 8), ids, ids >= 0, ids * 0.0, segments, stop, 0, 0, turns, tool_calls, **more
    )


def grade(layer, asked, *trajectories):
    async def everything():
        return await asyncio.gather(*(layer.score(asked, one) for one in trajectories))

    found = asyncio.run(everything())
    return found[0] if len(found) == 1 else found


def refused(layer, *rows):
    with pytest.raises(InputError) as caught:
        check_scorers(layer, rows or [row()])
    return caught.value.problems


# --- scorers of this repository ---


def test_the_data_source_picks_the_scorer_and_options_are_given_by_its_name(make_layer):
    layer = make_layer()
    assert grade(layer, prompt(), trajectory("#### 72")).value == 1.0
    wrong = grade(layer, prompt(), trajectory("#### 71"))
    assert (wrong.value, wrong.status, wrong.pred) == (0.0, ScoreStatus.WRONG, "71")
    assert grade(layer, prompt("lab/hops", "d"), trajectory("abcd#d")).parts == {
        "acc": 1.0,
        "chain": 1.0,
    }
    assert (
        grade(layer, prompt("lighteval/MATH", "2"), trajectory("#### 2")).status
        is ScoreStatus.PARSE_ERROR
    )
    assert grade(layer, prompt(), trajectory("so 72")).acc == 0.0
    flexible = make_layer(reward_kwargs={"gsm8k": {"method": "flexible"}, "hops": None})
    assert grade(flexible, prompt(), trajectory("so 72")).acc == 1.0


def test_a_users_function_gets_plain_dicts_and_lists(make_layer):
    body = """
        import json

        def compute_score(data_source, solution_str, ground_truth, extra_info, weights):
            return float(json.dumps(weights) == '{"x": [1, 2]}')
    """
    layer = make_layer(body, kwargs={"weights": {"x": [1, 2]}})
    assert grade(layer, prompt(), trajectory("72")).value == 1.0


def test_only_what_the_policy_wrote_is_judged(make_layer):
    found = trajectory("let me look", ("tool", "#### 72"), " no idea")
    assert grade(make_layer(), prompt(), found).status is ScoreStatus.PARSE_ERROR


def test_a_tag_that_the_prompt_opened_counts_for_the_format(make_layer):
    policy = trajectory("hm</think><answer>Paris</answer>")
    for opened, form in (("<think>", 1.0), (None, 0.0), ("<answer>", 0.0)):
        begun = dataclasses.replace(prompt("qa_em_format", {"target": "Paris"}), opened_tag=opened)
        assert grade(make_layer(), begun, policy).parts["format"] == form
    assert grade(make_layer(), begun, trajectory("Paris</answer>")).acc == 1.0


# --- what a user's function gets ---


def test_a_custom_function_sees_the_rollout_and_cannot_touch_the_row(make_layer):
    layer = make_layer(
        """
        def compute_score(data_source, solution_str, ground_truth, extra_info, cost):
            rollout = extra_info["rollout"]
            assert solution_str == "a"
            assert rollout["segments"] == [{"role": "policy", "text": "a"}, {"role": "tool", "text": "b"}]
            assert (rollout["num_turns"], rollout["truncated"], rollout["response_length"]) == (2, True, 5)
            extra_info["seen"] = True
            extra_info["nested"]["list"].append(1)
            ground_truth["target"].append("x")
            return {"score": 1 - cost * rollout["num_tool_calls"], "acc": True, "why": "text", "pred": 72}
        """,
        kwargs={"cost": 0.25},
    )
    extra_info, gold = {"nested": {"list": []}}, {"target": []}
    steps = trajectory("a", ("tool", "b"), stop=Stop.LENGTH, turns=2, tool_calls=3, tokens=5)
    score = grade(layer, prompt("anything", gold, extra_info), steps)
    assert (score.value, dict(score.parts), score.status, score.pred) == (
        0.25,
        {"acc": 1.0},
        ScoreStatus.OK,
        "72",
    )
    assert extra_info == {"nested": {"list": []}} and gold == {"target": []}


def test_a_function_of_lists_gets_and_returns_lists_of_one_answer(make_layer):
    body = """
        def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
            assert len(data_sources) == len(ground_truths) == len(extra_infos) == 1
            return [] if solution_strs == ["none"] else [solution_strs == ground_truths]
    """
    layer = make_layer(body, reward_manager="batch")
    right, wrong, none = grade(layer, prompt(), *map(trajectory, ("72", "71", "none")))
    assert (right.value, wrong.value) == (1.0, 0.0)
    assert none.status is ScoreStatus.CRASH and "one result an answer" in layer.failures.first


def test_a_function_written_for_verl_finds_its_facts(make_layer):
    """As in verl, turns count the prompt and each answer of the tools, and what happened wins over
    the row."""
    names = (
        "('num_turns', 'num_tool_calls', 'turn_scores', 'tool_rewards', 'rollout_reward_scores')"
    )
    layer = make_layer(
        f"return {{'score': 1.0, 'seen': repr([extra_info[name] for name in {names}])}}"
    )
    asked = prompt("anything", {}, {"num_turns": 99})
    two_calls = ("a", ("tool", "b"), ("tool", "b2"), "c", ("tool", "d"), "e")
    rewards = {"user_scores": (-0.5, 1.0), "tool_rewards": (0.25,)}
    for segments, turns, calls, given, seen in (
        (("one answer",), 1, 0, {}, [2, 0, [], [], {}]),
        (two_calls, 3, 3, {}, [6, 3, [], [], {}]),
        (
            ("a", ("tool", "b")),
            1,
            1,
            rewards,
            [3, 1, [-0.5, 1.0], [0.25], {"user_turn_rewards": [-0.5, 1.0]}],
        ),
    ):
        steps = trajectory(*segments, turns=turns, tool_calls=calls, **given)
        assert grade(layer, asked, steps).notes["seen"] == repr(seen)


@pytest.mark.parametrize("on_error", ["zero", "mask", "raise"])
def test_an_episode_that_failed_counts_as_an_answer_whose_scorer_failed(make_layer, on_error):
    layer = make_layer("return 1.0", on_error=on_error)
    failed = trajectory("72", failure="the simulated user failed: KeyError")
    if on_error == "raise":
        with pytest.raises(RewardError, match="the simulated user failed: KeyError"):
            grade(layer, prompt(), failed)
        return
    score = grade(layer, prompt(), failed)
    assert (score.value, score.masked, score.status) == (0, on_error == "mask", ScoreStatus.CRASH)
    assert layer.failures.rate("rate") == {"rate": 1.0}


def test_an_agent_s_own_reward_of_0_counts_as_wrong(make_layer):
    layer = make_layer("return 1.0")
    scores = [grade(layer, prompt(), trajectory("72", reward=value)) for value in (0.0, 0.5)]
    assert [score.status for score in scores] == [ScoreStatus.WRONG, ScoreStatus.OK]
    assert [score.value for score in scores] == [0.0, 0.5]


def test_a_function_may_be_asynchronous_leave_arguments_out_and_lie_anywhere(
    make_layer, write, monkeypatch, tmp_path
):
    body = "import asyncio\nasync def mine(solution_str):\n    await asyncio.sleep(0)\n    return 3"
    assert grade(make_layer(body, name="mine"), prompt(), trajectory("x")).value == 3
    path = write("def compute_score(solution_str, **rest): return 4", "pkgx/modx.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    # No collision of names
    other = write("def compute_score(solution_str): return 5", "other/modx.py")
    for where, value in (
        ("pkgx.modx", 4),
        ("pkg://pkgx.modx", 4),
        (path, 4),
        (f"file://{path}", 4),
        (other, 5),
    ):
        assert grade(make_layer(where), prompt(), trajectory("x")).value == value


@pytest.mark.parametrize(
    ("body", "kwargs", "message"),
    [
        ("missing.py", {}, "no file .*missing.py"),
        ("no_such_module_x", {}, "no module 'no_such_module_x'"),
        ("def compute_scor(): pass", {}, "has no 'compute_score'"),
        ("import nothing_of_that_name # def ", {}, "nothing_of_that_name"),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1",
            {"k": 1},
            "'k'",
        ),
        ("def compute_score(**k): return 1", {"ground_truth": 1}, "ground_truth"),
    ],
)
def test_a_custom_function_that_cannot_work_is_a_configuration_problem(
    make_layer, body, kwargs, message
):
    with pytest.raises(InputError, match=f"(?s){message}") as caught:
        make_layer(body, kwargs=kwargs)
    assert len(caught.value.problems) == 1


# --- what a function returns ---


NO_SCORES = [
    None,
    "1.0",
    {"reward": 1.0},
    float("nan"),
    {"score": 1, "acc": float("nan")},
    {"score": 1, "acc": "yes"},
]
NO_SCORES += [Score(1.0, {"acc": float("nan")}), 10**400, np.array([1.0, 2.0])]


def test_numbers_of_any_kind_are_scores_and_all_else_is_none():
    for one in (True, 1, 1.0, np.float32(1), np.array([1.0]), Decimal(1), np.bool_(True)):
        assert as_score(one).value == as_score({"score": one}).value == 1.0
    minus = as_score({"score": np.int64(-1), "acc": np.bool_(False), "note": None, "pred": None})
    assert (minus.value, minus.acc, minus.status, minus.pred) == (
        -1.0,
        0.0,
        ScoreStatus.WRONG,
        None,
    )
    with pytest.raises(ScoreError, match="a part named 'step'.* rename it, to 'my_step'"):
        as_score({"score": 1, "step": 3})
    given = Score(0.5, status=ScoreStatus.PARSE_ERROR)
    assert as_score(given) == given
    for result in NO_SCORES:
        with pytest.raises(ScoreError):
            as_score(result)


def test_parts_that_are_no_numbers_are_kept_as_texts_beside_the_answers(make_layer):
    layer = make_layer(
        "return {'score': 1, 'hits': ['a'], 'why': 'so', 'bleu': float('nan'), "
        "'none': None, 'n': 2}"
    )
    found = grade(layer, prompt("tests/a"), trajectory("x"))
    assert found.value == 1.0 and found.parts == {"acc": 1.0, "n": 2.0}
    assert found.notes == {"hits": "['a']", "why": "so", "bleu": "nan"}
    (shown,) = generation_rows(
        1, [ScoredGroup(prompt(), (trajectory("x"),), (found,))], tiny_tokenizer()
    )
    assert shown["why"] == "so" and shown["score"] == 1.0


# --- failures ---


@pytest.mark.parametrize(
    "body",
    [
        "raise KeyError('no such thing')",
        "return float('nan')",
        "return None",
        "return exit()",
        "raise KeyboardInterrupt('an Error')",
        "raise GeneratorExit('an Error')",
        "import asyncio\n    raise asyncio.CancelledError('an Error')",
        "raise StopIteration('an Error')",
    ],
    ids=str.split,
)
def test_a_failing_function_is_a_status_and_on_error_decides(make_layer, body):
    zero = grade(make_layer(body), prompt(), trajectory("x"))
    assert (zero.value, zero.status, zero.masked, zero.acc) == (0.0, ScoreStatus.CRASH, False, 0.0)
    masked = grade(make_layer(body, on_error="mask"), prompt(), trajectory("x"))
    assert masked.masked and masked.status is ScoreStatus.CRASH
    with pytest.raises(RewardError, match=r"(?s)row-7.*the answer text.*(Error|SystemExit)"):
        grade(make_layer(body, on_error="raise"), prompt(), trajectory("the answer text"))


ASYNC_CANCEL = """import asyncio
async def compute_score(solution_str):
    if solution_str == "cancels":
        raise asyncio.CancelledError
    await asyncio.sleep(3600)
"""


def test_a_function_that_cancels_itself_fails_and_one_that_is_cancelled_ends(make_layer):
    layer = make_layer(ASYNC_CANCEL)
    assert grade(layer, prompt(), trajectory("cancels")).status is ScoreStatus.CRASH

    async def main():
        task = asyncio.create_task(layer.score(prompt(), trajectory("waits")))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    assert asyncio.run(main())


@pytest.mark.parametrize(
    "body",
    [
        "return asyncio.run(score())",
        "return asyncio.get_event_loop().run_until_complete(score())",
        "loop = asyncio.new_event_loop(); return loop.run_until_complete(score())",
        "loop = asyncio.get_event_loop(); value = loop.run_until_complete(score()); loop.close(); "
        "return value",
    ],
)
def test_a_function_may_run_an_event_loop(make_layer, body):
    layer = make_layer(
        f"import asyncio\nasync def score(): return 2.0\ndef "
        f"compute_score(solution_str):\n    {body}"
    )

    async def main():
        scores = [await layer.score(prompt(), trajectory("x")) for _ in range(2)]
        await asyncio.sleep(0)  # the loop of the run goes on
        assert asyncio.get_event_loop() is asyncio.get_running_loop()
        return [score.value for score in scores]

    assert asyncio.run(main()) == [2.0, 2.0]


def test_the_first_failure_is_printed_once_and_the_rate_counted(make_layer, caplog):
    layer = make_layer("return {'good': 1.0}[solution_str]", on_error="mask")
    with caplog.at_level(logging.WARNING, logger="core"):
        scores = grade(layer, prompt("tests/a"), *map(trajectory, ("good", "bad", "worse")))
    assert [score.masked for score in scores] == [False, True, True]
    (said,) = [record.getMessage() for record in caplog.records]
    assert (
        "uid='row-7'" in said
        and "Traceback" in said
        and "KeyError: 'bad'" in said
        and "on_error=mask" in said
    )
    assert layer.failures.rate("reward/failed_rate") == {"reward/failed_rate": 2 / 3}
    assert layer.failures.rate("reward/failed_rate") == {}


def test_a_step_in_which_no_answer_had_a_score_stops_the_run(make_layer):
    """Whatever earlier steps had; the rate is taken once a step."""
    layer = make_layer("return {'7': 1.0}[solution_str]")
    check_scorers(layer, [row()])  # what was graded at start is no answer of the run
    grade(layer, prompt("tests/a"), trajectory("7"))
    layer.failures.rate("reward/failed_rate")
    grade(layer, prompt("tests/a"), *map(trajectory, ("bad", "worse")))
    layer.failures.stop_if_every_answer_failed(least=3)
    with pytest.raises(RewardError, match="(?s)each of 2 answers.*KeyError: 'worse'"):
        layer.failures.stop_if_every_answer_failed(least=2)


# --- at start ---


def test_bad_options_are_reported_before_anything_is_graded(make_layer):
    with pytest.raises(InputError) as caught:
        make_layer(reward_kwargs={"gsm8": {}, "math_reward": "strict", "gsm8k": None})
    assert len(caught.value.problems) == 2 and "reward_kwargs.gsm8=" in str(caught.value)
    said = "\n".join(refused(make_layer(reward_kwargs={"gsm8k": {"metod": 1}}), prompt()))
    assert "unexpected keyword argument 'metod'" in said


def test_good_rows_pass_and_bad_ones_are_all_reported_at_once(make_layer):
    good = [
        row("openai/gsm8k", "72"),
        prompt("lab/hops", "d"),
        prompt("lighteval/MATH", r"\frac{1}{2}"),
    ]
    check_scorers(make_layer(reward_kwargs={"gsm8k": {"method": "robust"}}), good)
    bad = [
        prompt("openai/gsm8", "1"),
        *[prompt("openai/gsm8k", "1,000")] * 5,
        row("lighteval/MATH", None, 6),
    ]
    unknown, commas, missing = refused(make_layer(), *bad)
    assert "data_source='openai/gsm8'; nearest: openai/gsm8k" in unknown
    assert "in 5 rows" in commas and "and 2 more" in commas and "uid row-7" in commas
    assert "row 6" in missing and "None" in missing
    with pytest.raises(InputError, match="method='bogus': must be one of strict"):
        check_scorers(make_layer(reward_kwargs={"gsm8k": {"method": "bogus"}}), [prompt()])


def test_a_users_examples_and_check_of_ground_truths_are_used(make_layer):
    layer = make_layer("""
        EXAMPLES = (("yes", "72", 1.0), ("no", "72", 1.0))
        def check_ground_truth(ground_truth):
            return None if ground_truth["answer"] else "must not be empty"
        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            return float(solution_str == "yes")
    """)
    golds, example = refused(layer, prompt(ground_truth="5"), prompt(ground_truth={"answer": ""}))
    assert "uid row-7: the check of ground truths failed on it (TypeError: " in golds
    assert "must not be empty" in golds and "'no'" in example and "acc=0.0, not 1.0" in example


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_a_function_that_fails_on_every_answer_stops_at_start_with_its_traceback(
    make_layer, manager
):
    layer = make_layer(
        "return float(extra_info['reference'] == solution_str)", reward_manager=manager
    )
    (problem,) = refused(layer)
    first, *trace = problem.splitlines()
    assert "custom_reward_function.path=" in first and "data_source='tests/a'" in first
    assert "index, num_turns" in first and "'7'" in first and "KeyError: 'reference'" in first
    assert trace[0].startswith("Traceback") and trace[-1] == "KeyError: 'reference'"
    assert "mine.py" in problem
    picky = make_layer("return {'tests/a': 1.0}[data_source]", file="other.py")
    check_scorers(picky, [row()])
    # Each data source has to be graded
    (problem,) = refused(picky, row(), row("tests/b", number=3))
    assert "data_source='tests/b'" in problem


def test_what_a_grader_cannot_load_is_found_at_start(make_layer):
    layer = make_layer(
        "import torch\ndef compute_score(**k): return 1",
        reward_manager="prime",
        memory_limit_mb=300,
    )
    (problem,) = refused(layer)
    assert (
        problem.startswith("reward_model.reward_manager: ")
        and "reward_model.memory_limit_mb" in problem
    )


def test_rows_that_cannot_be_sent_are_found_at_start(make_layer):
    rows = [prompt(extra_info={"when": time}), prompt()]
    (problem,) = refused(make_layer(reward_manager="prime"), *rows)
    assert "as JSON in 1 row (uid row-7: module is not JSON" in problem
    check_scorers(make_layer(reward_manager="naive"), rows)


FUNCTIONS = {  # some answer that is tried at start has a score of it
    "a number": ("return float(solution_str)", "7"),
    "a mark": (
        "import re; return re.search(r'#### (.+)', solution_str).group(1) == ground_truth",
        "7",
    ),
    "json": ("import json; return json.loads(solution_str)['answer'] == ground_truth", "7"),
    "tags": ("return solution_str.split('<answer>')[1] == ground_truth", "7"),
    "a box": ("import re; return bool(re.search(r'boxed{(.+?)}', solution_str).group(1))", "7"),
    "the rollout": ("return extra_info['num_turns'] + len(extra_info['rollout']['segments'])", "7"),
    "a list": ("return {'7': 1.0}[solution_str]", {"target": ["7"], "numbers": [1]}),
    "an int": ("return {'7': 1.0}[solution_str]", 7),
}


@pytest.mark.parametrize(("body", "gold"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_that_grades_some_answer_starts(make_layer, body, gold):
    check_scorers(make_layer(body), [row(ground_truth=gold)])


def test_examples_of_the_module_are_tried_in_place_of_guesses(make_layer):
    body = HEAD + "    return {'only this': 1.0}[solution_str] + 0 * extra_info['index']\n"
    assert "EXAMPLES" in refused(make_layer(body, file="a.py"))[0]
    check_scorers(
        make_layer(f"EXAMPLES = (('only this', '7', 1.0),)\n{body}", file="b.py"), [row()]
    )


def test_a_start_says_where_programs_are_not_isolated(make_layer, monkeypatch, capsys):
    from reward_scores import unit_tests
    from reward_scores.sandbox import sandbox

    for module in (sandbox, unit_tests):
        monkeypatch.setattr(module, "isolation", lambda: sandbox.Isolation("none", False))
    layer = make_layer(reward_kwargs={"prime_code": {"sandbox": {"allow_unisolated": True}}})
    check_scorers(layer, [prompt("apps", {"inputs": ["1"], "outputs": ["1"]})])
    told = capsys.readouterr().out
    assert "isolation: none" in told and "a program that imports numpy" in told


def test_a_special_token_that_a_scorer_looks_for_is_told(make_layer, caplog):
    """Text for scorers has no special tokens: an answer's mark that is one would be scored as
    missing."""
    hops = make_layer(), row("lab/hops", "d")
    marked = make_layer("return float('<ans>' + ground_truth in solution_str)"), row()
    for (layer, asked), special, told in (
        (hops, "#", True),
        (hops, "####", False),
        (marked, "<ans>", True),
    ):
        caplog.clear()
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens([AddedToken(special, special=True)])
        check_scorers(layer, [asked], tokenizer)
        assert (f"looks for '{special}'," in caplog.text) is told


@pytest.mark.parametrize(
    "hooks", [(lambda *_: 0.5, lambda _: True), (lambda score, _: score, lambda _: None)]
)
def test_a_hook_that_returns_the_wrong_type_is_told_before_a_model_loads(hooks):
    row = SimpleNamespace(style="rule", data_source="s", where="x", ground_truth="1")
    with pytest.raises(InputError, match="returned (float 0.5|NoneType None)"):
        check_hooks([row], {"s": ("ab", Score(1.0))}, *hooks)


def test_a_call_with_too_few_results_fails_for_everyone_that_waits():
    async def ask() -> list[Exception]:
        calls = BatchCalls(lambda items: items[1:])
        return await asyncio.gather(*map(calls.submit, range(3)), return_exceptions=True)

    found = asyncio.run(asyncio.wait_for(ask(), 5))
    assert [str(error) for error in found] == ["2 results for 3 items"] * 3
