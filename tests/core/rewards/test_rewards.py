"""The reward layer in process: dispatch, what a scorer sees, custom functions, failures, checks at start."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest

from core.config.sections.reward import RewardModelConfig
from core.data.parquet import Example
from core.errors import InputError
from core.rewards.grading import as_score
from core.rewards.layer import RewardError, RewardLayer
from core.tracking.metrics import status_rates
from core.types import Prompt, Segment, Stop, Trajectory
from reward_scores.score import Score, ScoreStatus


def layer(path=None, name="compute_score", kwargs=None, on_error="zero", manager="naive", reward_kwargs=None):
    options = {"reward_kwargs": reward_kwargs or {}, "num_workers": 1}
    reward = RewardModelConfig(on_error=on_error, reward_manager=manager, **options)
    custom = SimpleNamespace(path=path, name=name, reward_kwargs=kwargs)
    return RewardLayer(SimpleNamespace(reward_model=reward, custom_reward_function=custom))


def prompt(data_source="openai/gsm8k", ground_truth="72", extra_info=None):
    return Prompt(0, "row-7", (1, 2), (), ground_truth, data_source, extra_info or {})


def trajectory(*segments, stop=Stop.EOS, turns=1, tool_calls=0, tokens=3):
    segments = tuple(Segment("policy", s) if isinstance(s, str) else Segment(*s) for s in segments)
    ids = np.arange(tokens)
    return Trajectory(ids, ids, ids >= 0, ids * 0.0, segments, stop, 0, 0, turns, tool_calls)


def grade(rewards, a_prompt, a_trajectory):
    return asyncio.run(rewards.score(a_prompt, a_trajectory))


def test_the_data_source_picks_the_scorer():
    rewards = layer()
    assert grade(rewards, prompt(), trajectory("#### 72")).value == 1.0
    wrong = grade(rewards, prompt(), trajectory("#### 71"))
    assert (wrong.value, wrong.status, wrong.pred) == (0.0, ScoreStatus.WRONG, "71")
    assert grade(rewards, prompt("lab/hops", "d"), trajectory("abcd#d")).parts == {"acc": 1.0, "chain": 1.0}
    assert grade(rewards, prompt("lighteval/MATH", "2"), trajectory("#### 2")).status is ScoreStatus.PARSE_ERROR
    rewards.close()


def test_only_what_the_policy_wrote_is_judged():
    found = trajectory("let me look", ("tool", "#### 72"), " no idea")
    assert grade(layer(), prompt(), found).status is ScoreStatus.PARSE_ERROR


def test_a_start_says_which_isolation_holds(monkeypatch, capsys):
    from reward_scores import sandbox, unit_tests

    row = prompt("apps", {"inputs": ["1"], "outputs": ["1"]})
    for mode, refused, said in (
        ("namespaces", (), "isolation: programs run in namespaces with seccomp\n"),
        ("landlock", ("namespaces: no",), "programs run in landlock with seccomp (refused here: namespaces: no)\n"),
    ):
        how = sandbox.Isolation(mode, True, refused)
        if problem := sandbox.probe(how):
            pytest.skip(problem)
        for module in (sandbox, unit_tests):
            monkeypatch.setattr(module, "isolation", lambda how=how: how)
        with contextlib.closing(layer()) as rewards:
            rewards.check([row])
        assert said in capsys.readouterr().out
    for module in (sandbox, unit_tests):
        monkeypatch.setattr(module, "isolation", lambda: sandbox.Isolation("none", False))
    with contextlib.closing(layer(reward_kwargs={"prime_code": {"sandbox": {"allow_unisolated": True}}})) as rewards:
        rewards.check([row])
    assert "isolation: none; programs run with this user's rights" in capsys.readouterr().out
    with contextlib.closing(layer()) as rewards:
        rewards.check([prompt()])  # nothing there runs programs
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("source", "gold", "policy", "acc"),
    [
        ("hiyouga/geometry3k", "48", "AB = CD\n</think> \\boxed{48}", 1.0),
        ("qa_em_format", {"target": "Paris"}, "hm</think><answer>Paris</answer>", 1.0),
    ],
)
def test_a_tag_that_the_prompt_opened_counts_for_the_format(source, gold, policy, acc):
    for opened, form in (("<think>", 1.0), (None, 0.0), ("<answer>", 0.0)):
        begun = dataclasses.replace(prompt(source, gold), opened_tag=opened)
        score = grade(layer(), begun, trajectory(policy))
        assert score.parts["format"] == form
    assert grade(layer(), begun, trajectory("Paris</answer>")).acc == (source == "qa_em_format")


def test_options_are_given_by_scorer_name():
    flexible = layer(reward_kwargs={"gsm8k": {"method": "flexible"}, "hops": None})
    assert grade(flexible, prompt(), trajectory("so 72")).acc == 1.0
    assert grade(layer(), prompt(), trajectory("so 72")).acc == 0.0


def test_a_custom_function_sees_the_rollout_and_cannot_touch_the_row(write):
    path = write("""
        def compute_score(data_source, solution_str, ground_truth, extra_info, cost):
            rollout = extra_info["rollout"]
            assert rollout["segments"] == [{"role": "policy", "text": "a"}, {"role": "tool", "text": "b"}]
            assert (rollout["num_turns"], rollout["truncated"], rollout["response_length"]) == (2, True, 5)
            extra_info["seen"] = True
            extra_info["nested"]["list"].append(1)
            ground_truth["target"].append("x")
            return {"score": 1 - cost * rollout["num_tool_calls"], "acc": True, "why": "text", "pred": 72}
    """)
    row = {"nested": {"list": []}}
    gold = {"target": []}
    steps = trajectory("a", ("tool", "b"), stop=Stop.LENGTH, turns=2, tool_calls=3, tokens=5)
    score = grade(layer(path, kwargs={"cost": 0.25}), prompt("anything", gold, row), steps)
    assert (score.value, dict(score.parts), score.status, score.pred) == (0.25, {"acc": 1.0}, ScoreStatus.OK, "72")
    assert row == {"nested": {"list": []}} and gold == {"target": []}


@pytest.mark.parametrize(
    "segments, turns, calls, seen",
    [
        (("one answer",), 1, 0, 2),  # verl counts the prompt and the answer
        (("a", ("tool", "b"), "c"), 2, 1, 4),
        (("a", ("tool", "b"), ("tool", "b2"), "c", ("tool", "d"), "e"), 3, 3, 6),  # two calls of a turn, one answer
        (("a", ("tool", "b")), 1, 1, 3),
    ],
)
def test_a_function_written_for_verl_finds_turns_and_tool_calls(write, segments, turns, calls, seen):
    path = write("""
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return {"score": extra_info["num_turns"] + 0.1 * extra_info["num_tool_calls"], "acc": 0.0}
    """)
    steps = trajectory(*segments, turns=turns, tool_calls=calls)
    row = {"num_turns": 99}  # as in verl, what happened wins over what the row holds
    assert grade(layer(path), prompt("anything", {}, row), steps).value == pytest.approx(seen + 0.1 * calls)


def test_an_asynchronous_function_is_awaited(write):
    path = write("""
        import asyncio
        async def mine(data_source, solution_str, ground_truth, extra_info=None):
            await asyncio.sleep(0)
            return 0.5
    """)
    assert grade(layer(path, "mine"), prompt(), trajectory("x")).value == 0.5


def test_two_files_of_one_name_do_not_collide(write):
    body = "def compute_score(data_source, solution_str, ground_truth, extra_info): return {}"
    first, second = layer(write(body.format(1), "a/r.py")), layer(write(body.format(2), "b/r.py"))
    assert grade(first, prompt(), trajectory("x")).value == 1
    assert grade(second, prompt(), trajectory("x")).value == 2


def test_a_module_name_and_urls_work(write, monkeypatch, tmp_path):
    file = write("def compute_score(data_source, solution_str, ground_truth, extra_info): return 3", "pkgx/modx.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    for path in ("pkgx.modx", "pkg://pkgx.modx", file, f"file://{file}"):
        assert grade(layer(path), prompt(), trajectory("x")).value == 3


FAILING = {
    "raises": "raise KeyError('no such thing')",
    "nan": "return float('nan')",
    "infinite acc": "return {'score': 1, 'acc': float('inf')}",
    "no score": "return {'acc': 1}",
    "none": "return None",
    "text": "return '1'",
    "nan in a Score": "from reward_scores.score import Score\n    return Score(1.0, {'acc': float('nan')})",
}


@pytest.mark.parametrize("body", FAILING.values(), ids=FAILING)
def test_a_failing_function_is_a_status_and_on_error_decides(write, body):
    path = write(f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n")
    zero = grade(layer(path), prompt(), trajectory("x"))
    assert (zero.value, zero.status, zero.masked, zero.acc) == (0.0, ScoreStatus.CRASH, False, 0.0)
    masked = grade(layer(path, on_error="mask"), prompt(), trajectory("x"))
    assert masked.masked and masked.status is ScoreStatus.CRASH
    with pytest.raises(RewardError, match=r"(?s)row-7.*the answer text.*Error"):
        grade(layer(path, on_error="raise"), prompt(), trajectory("the answer text"))


def test_what_a_result_may_be():
    assert as_score(True).value == 1.0
    assert as_score(np.float32(0.25)).value == 0.25
    assert as_score(-1).status is ScoreStatus.WRONG
    minus = as_score({"score": np.int64(-1), "acc": np.bool_(False), "note": None, "pred": None})
    assert (minus.value, minus.acc, minus.status, minus.pred) == (-1.0, 0.0, ScoreStatus.WRONG, None)
    given = Score(0.5, status=ScoreStatus.PARSE_ERROR)
    assert as_score(given) == given


BAD_CUSTOM = [
    ("missing.py", {}, "no file .*missing.py"),
    ("no_such_module_x", {}, "no module 'no_such_module_x'"),
    ("def compute_scor(): pass", {}, "has no 'compute_score'.*compute_scor"),
    ("compute_score = 3", {}, "not a function"),
    ("import nothing_of_that_name", {}, "importing it failed(?s:.*)nothing_of_that_name"),
    ("def compute_score(text): return 1", {}, "called by name as compute_score.data_source"),
    ("def compute_score(data_source, solution_str, ground_truth, extra_info): return 1", {"k": 1}, "'k'"),
    ("def compute_score(**k): return 1", {"ground_truth": 1}, "ground_truth come from the data"),
]


@pytest.mark.parametrize(("body", "kwargs", "message"), BAD_CUSTOM)
def test_a_custom_function_that_cannot_work_is_a_configuration_problem(write, tmp_path, body, kwargs, message):
    module = body if " " not in body else write(body)
    path = str(tmp_path / module) if module == "missing.py" else module
    with pytest.raises(InputError, match=message) as caught:
        layer(path, kwargs=kwargs)
    assert len(caught.value.problems) == 1


def test_bad_options_are_all_reported_with_the_nearest_name():
    with pytest.raises(InputError) as caught:
        layer(reward_kwargs={"gsm8": {}, "gsm8k": {"metod": 1}, "math_reward": "strict"})
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    for part in ("gsm8: not a scorer's name; use gsm8k", "no option metod", "'strict'"):
        assert part in text


def test_check_passes_on_good_rows():
    rows = [
        Example("file", 0, "openai/gsm8k", "?", "72", {}),
        prompt("lab/hops", "d"),
        prompt("lighteval/MATH", r"\frac{1}{2}"),
    ]
    layer().check(rows)
    for method in ("flexible", "robust"):
        layer(reward_kwargs={"gsm8k": {"method": method}}).check(rows)


def test_check_reports_every_problem_at_once():
    rows = [
        prompt("openai/gsm8", "1"),
        *[prompt("openai/gsm8k", "1,000")] * 5,
        Example("file", 6, "lighteval/MATH", "?", None, {}),
    ]
    with pytest.raises(InputError) as caught:
        layer().check(rows)
    assert len(caught.value.problems) == 3
    unknown, commas, missing = caught.value.problems
    assert "data_source='openai/gsm8'; nearest: openai/gsm8k" in unknown
    assert "in 5 rows" in commas and "and 2 more" in commas and "uid row-7" in commas
    assert "row 6" in missing and "None" in missing


def test_check_names_the_field_of_an_odd_ground_truth_and_warns_of_one_that_is_graded_as_written(caplog):
    odd = [
        Example("file", 3, "nq", "?", {"target": ["x", None]}, {}),
        Example("file", 4, "countdown", "?", {"target": 3, "numbers": "1 2"}, {}),
    ]
    with pytest.raises(InputError) as caught:
        layer().check(odd)
    null, text = caught.value.problems
    assert "file row 3: target[1] must be a text or a number, got None" in null
    assert "file row 4: numbers must be a list of whole numbers, got '1 2'" in text
    layer().check(
        [Example("file", 5, "nq", "?", {"target": 1984}, {}), Example("file", 6, "nq", "?", {"target": "A+"}, {})]
    )
    assert "in 1 row (file row 6: target ['A+'] normalises to nothing" in caplog.text and "row 5" not in caplog.text


def test_a_users_check_that_raises_is_a_problem_of_the_row(write):
    path = write("""
        def check_ground_truth(ground_truth):
            return None if ground_truth["answer"] else "is empty"
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return 1.0
    """)
    with pytest.raises(InputError, match="uid row-7: the check of ground truths failed on it .TypeError: "):
        layer(path).check([prompt(ground_truth="5")])


def test_check_grades_the_examples_with_the_configured_options(write):
    with pytest.raises(InputError, match="method='bogus': must be one of strict"):
        layer(reward_kwargs={"gsm8k": {"method": "bogus"}}).check([prompt()])
    path = write("""
        EXAMPLES = (("yes", "72", 1.0), ("no", "72", 1.0))
        def check_ground_truth(ground_truth):
            return None if ground_truth else "must not be empty"
        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            return float(solution_str == "yes")
    """)
    with pytest.raises(InputError) as caught:
        layer(path).check([prompt(), prompt(ground_truth="")])
    empty, example = caught.value.problems
    assert "must not be empty" in empty and "'no'" in example and "acc=0.0, not 1.0" in example


def test_status_rates():
    scores = [Score(1.0), Score(0.0, status=ScoreStatus.WRONG), Score(0.0, status=ScoreStatus.CRASH), Score(1.0)]
    assert status_rates(scores) == {
        "reward/ok_rate": 0.5,
        "reward/wrong_rate": 0.25,
        "reward/parse_error_rate": 0.0,
        "reward/timeout_rate": 0.0,
        "reward/crash_rate": 0.25,
    }
    assert status_rates([]) == {}


def test_scoring_imports_nothing_heavy():
    code = """
        import sys
        import core.rewards, reward_scores
        heavy = {"torch", "ray", "vllm", "transformers", "datasets"}
        for scorer in sorted(set(reward_scores.SCORERS.values()), key=lambda scorer: len(scorer.libraries())):
            for response, ground_truth, acc in scorer.examples:
                assert scorer(response, ground_truth).acc == acc
            found = (heavy if scorer.libraries() else {*heavy, "sympy"}) & set(sys.modules)
            assert not found, (scorer.name, found)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
