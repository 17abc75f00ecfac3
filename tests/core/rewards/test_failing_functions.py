"""Reward functions that people bring: what fails is said with its cause, counted, and never a silent 0."""

from __future__ import annotations

import asyncio
import logging
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest

from core.config import examine
from core.config.sections.reward import RewardModelConfig
from core.data.parquet import Example
from core.errors import InputError
from core.rewards.grading import ScoreError, as_score
from core.rewards.layer import RewardError, RewardLayer
from core.tracking.samples import generation_rows
from core.types import Prompt, ScoredGroup, Segment, Stop, Trajectory
from tests.tiny import tiny_tokenizer

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"


@pytest.fixture
def make_layer(write):
    layers = []

    def make(body, name="mine.py", function="compute_score", **reward_model):
        path = write(body if "def " in body else f"{HEAD}    {body}\n", name)
        reward = RewardModelConfig(**{"num_workers": 1, "memory_limit_mb": 512, **reward_model})
        custom = SimpleNamespace(path=path, name=function, reward_kwargs=None)
        layers.append(RewardLayer(SimpleNamespace(reward_model=reward, custom_reward_function=custom)))
        return layers[-1]

    yield make
    for layer in layers:
        layer.close()


def row(data_source="tests/a", ground_truth="7", number=0, **extra_info):
    return Example("rows.parquet", number, data_source, "?", ground_truth, {"index": number, **extra_info})


def asked(text="x", ordinal=0, *more, **changes):
    segments = tuple(Segment(*one) if isinstance(one, tuple) else Segment("policy", one) for one in (text, *more))
    prompt = Prompt(ordinal, f"q{ordinal}", (1,), (), "7", "tests/a", {"index": ordinal})
    return prompt, Trajectory([1], [5], [True], [0.0], segments, Stop.EOS, 0, 0, **changes)


def scores_of(layer, answers):
    async def everything():
        return await asyncio.gather(*(layer.score(*answer) for answer in answers))

    return asyncio.run(everything())


def refused(layer, *rows):
    with pytest.raises(InputError) as caught:
        layer.check(rows or [row()])
    return caught.value.problems


# --- what a function returns ---


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "None .is a return missing"),
        ((1.0, {"x": 1}), "a tuple"),
        ([1.0], "a list"),
        ("1.0", "a str .'1.0'"),
        ({"reward": 1.0}, "without 'score' .it has 'reward'"),
        ({}, "it has nothing"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ({"score": None}, "None"),
        ({"score": 1.0, "acc": float("nan")}, "nan as its 'acc'"),
        ({"score": 1.0, "acc": "yes"}, "a str .'yes'. as its 'acc'"),
        pytest.param(10**400, "1000000", id="big"),
        pytest.param(10**5000, "without a repr", id="no-text"),
        (1e300, "1e.300"),
        (np.array([1.0, 2.0]), "a ndarray"),
        (1j, "a complex"),
    ],
)
def test_what_is_no_score_gets_a_message_that_says_what_to_return(result, says):
    with pytest.raises(ScoreError, match=f"(?s){says}.*return a number, or a dict with the number under 'score'"):
        as_score(result)


def test_numbers_of_any_kind_are_scores():
    for one in (True, 1, 1.0, np.float32(1), np.array(1.0), np.array([1.0]), Decimal(1), np.bool_(True)):
        assert as_score(one).value == as_score({"score": one}).value == 1.0


def test_parts_that_are_no_numbers_are_kept_as_texts_with_one_warning(make_layer, caplog):
    layer = make_layer(
        "return {'score': 1, 'hits': ['a'], 'why': 'so', 'd': {'f': 1}, 'bleu': float('nan'), 'none': None, 'n': 2}"
    )
    layer.check([row()])
    with caplog.at_level(logging.WARNING, logger="core"):
        first, second = scores_of(layer, [asked(), asked()])
    assert first.value == 1.0 and first.parts == {"acc": 1.0, "n": 2.0} and second == first
    assert first.notes == {"hits": "['a']", "why": "so", "d": "{'f': 1}", "bleu": "nan"}
    (said,) = [record.getMessage() for record in caplog.records]
    assert "hits=\"['a']\"" in said and "bleu='nan'" in said and "kept as texts" in said
    prompt, trajectory = asked()
    (shown,) = generation_rows(1, [ScoredGroup(prompt, (trajectory,), (first,))], tiny_tokenizer())
    assert shown["why"] == "so" and shown["score"] == 1.0


# --- at start ---


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_a_function_that_fails_on_every_answer_stops_at_start_with_its_traceback(make_layer, manager):
    layer = make_layer("return float(extra_info['reference'] == solution_str)", reward_manager=manager)
    (problem,) = refused(layer)
    first, *trace = problem.splitlines()
    assert "data_source='tests/a' (rows.parquet row 0)" in first and "the key 'reference' is missing" in first
    assert "index, num_turns" in first and "str '7'" in first
    assert trace[0].startswith("Traceback") and trace[-1] == "KeyError: 'reference'"
    assert "mine.py" in trace[1] and "core/rewards" not in problem  # the function's own frames alone


def test_each_data_source_has_to_be_graded(make_layer):
    layer = make_layer("return {'tests/a': 1.0}[data_source]")
    layer.check([row()])
    (problem,) = refused(layer, row(), row("tests/b", number=3))
    assert "data_source='tests/b' (rows.parquet row 3)" in problem
    refused(layer, asked()[0], row("tests/b"))  # validation prompts beside training examples


@pytest.mark.parametrize(
    "body",
    [
        "return float(solution_str)",
        "import re; return float(re.search(r'#### (.+)', solution_str).group(1) == ground_truth)",
        "import json; return float(json.loads(solution_str)['answer'] == ground_truth)",
        "return solution_str.split('<answer>')[1] == ground_truth",
        "import re; return bool(re.search(r'boxed{(.+?)}', solution_str).group(1))",
        "return extra_info['num_turns'] + extra_info['rollout']['num_turns'] + len(extra_info['rollout']['segments'])",
    ],
)
def test_a_function_that_grades_some_answer_starts(make_layer, body):
    make_layer(body).check([row()])


@pytest.mark.parametrize("gold", [{"target": ["7"], "numbers": [1]}, ["7", "8"], 7, {"a": {"b": "7"}}])
def test_the_ground_truth_is_tried_as_an_answer_whatever_its_form(make_layer, gold):
    make_layer("return {'7': 1.0}[solution_str]").check([row(ground_truth=gold)])


def test_examples_of_the_module_are_tried_in_place_of_guesses(make_layer):
    body = HEAD + "    return {'only this': 1.0}[solution_str] + 0 * extra_info['index']\n"
    assert "EXAMPLES" in refused(make_layer(body, "a.py"))[0]
    make_layer(f"EXAMPLES = (('only this', '7', 1.0),)\n{body}", "b.py").check([row()])


def test_a_users_manager_that_always_fails_stops_too(write):
    path = write("""
        class Mine:
            def __init__(self, reward_model, scorers): pass
            async def run(self, job): return job.extra_info["absent"]
            def close(self): pass
    """)
    module = {"path": path, "name": "Mine"}
    reward = RewardModelConfig(source="importlib", module=module)
    none = SimpleNamespace(path=None, name=None, reward_kwargs=None)
    with pytest.raises(InputError, match="absent"):
        RewardLayer(SimpleNamespace(reward_model=reward, custom_reward_function=none)).check(
            [row("openai/gsm8k", "72")]
        )


def test_a_function_that_exits_is_a_failure_and_ends_no_process(make_layer):
    layer = make_layer(f"{HEAD}    return exit() if solution_str == 'bad' else 1.0\n")
    score, other = scores_of(layer, [asked("bad"), asked("good")])
    assert score.status.value == "crash" and other.value == 1.0


# --- in a run ---


def test_the_first_failure_is_printed_once_and_the_rate_counted(make_layer, caplog):
    layer = make_layer("return {'good': 1.0}[solution_str]", on_error="mask")
    with caplog.at_level(logging.WARNING, logger="core"):
        scores = scores_of(layer, [asked(text, at) for at, text in enumerate(["good", "bad", "worse"])])
    assert [score.masked for score in scores] == [False, True, True]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "uid='q1'" in said and "Traceback" in said and "KeyError: 'bad'" in said and "on_error=mask" in said
    assert layer.failures.rate("reward/failed_rate") == {"reward/failed_rate": 2 / 3}
    assert layer.failures.rate("reward/failed_rate") == {}
    layer.failures.stop_if_all()


def test_a_run_in_which_no_answer_ever_had_a_score_stops(make_layer):
    layer = make_layer("return {'7': 1.0}[solution_str]")
    layer.check([row()])  # what was graded at start is no answer of the run
    scores_of(layer, [asked("bad"), asked("worse")])
    layer.failures.stop_if_all(least=3)
    with pytest.raises(RewardError, match="(?s)each of the 2 answers.*KeyError: 'bad'"):
        layer.failures.stop_if_all()


# --- what a function gets ---


def test_facts_of_verl_are_always_there(make_layer):
    body = "return {'score': 1.0, 'seen': repr([extra_info[n] for n in ('turn_scores', 'tool_rewards', "
    layer = make_layer(body + "'rollout_reward_scores')])}")
    plain, told = scores_of(layer, [asked(), asked("x", 0, user_scores=(-0.5, 1.0), tool_rewards=(0.25,))])
    assert plain.notes["seen"] == "[[], [], {}]"
    assert told.notes["seen"] == "[[-0.5, 1.0], [0.25], {'user_turn_rewards': [-0.5, 1.0]}]"


@pytest.mark.parametrize(("whole", "text"), [("policy", "a c"), ("response", "a<result>b</result> c")])
def test_solution_str_is_what_the_policy_wrote_or_the_whole_response(make_layer, whole, text):
    layer = make_layer("return {'score': 1.0, 'seen': solution_str}", solution_str=whole)
    (score,) = scores_of(layer, [asked("a", 0, ("tool", "<result>b</result>"), " c")])
    assert score.notes["seen"] == text


def test_tools_text_never_reaches_a_scorer_of_this_repository():
    none = SimpleNamespace(path=None, name=None, reward_kwargs=None)
    reward = RewardModelConfig(solution_str="response")
    layer = RewardLayer(SimpleNamespace(reward_model=reward, custom_reward_function=none))
    prompt, trajectory = asked("no idea", 0, ("tool", "#### 7"))
    assert layer.job(prompt, trajectory).response == "no idea"


def test_a_custom_function_beside_tools_is_warned_of_what_it_does_not_get():
    mine, tools = "custom_reward_function.path=mine.py", "actor_rollout_ref.rollout.multi_turn.enable=True"

    def warned(recipe, *overrides):
        return [one for one in examine(recipe, overrides).warnings if "reward_model.solution_str" in one]

    assert len(warned("grpo", mine, tools)) == len(warned("search_r1", mine)) == 1
    assert not warned("grpo", mine) and not warned("grpo", tools) and not warned("search_r1", "preset=format")
    for chosen in ("policy", "response"):
        assert not warned("grpo", mine, tools, f"reward_model.solution_str={chosen}")
    assert "reward_model.solution_str" in examine("grpo", ["reward_model.solution_str=response"]).unused


BATCHED = "def compute_score_batch(data_sources, solution_strs, ground_truths, extra_infos): return [1.0]"


@pytest.mark.parametrize(
    ("function", "manager", "says"),
    [
        ("compute_score_batch", "naive", "takes lists.*set reward_model.reward_manager=batch"),
        ("compute_score_batch", "prime", "takes lists.*set reward_model.reward_manager=batch"),
        ("compute_score", "naive", "it has compute_score_batch"),
    ],
)
def test_a_function_of_lists_is_told_of_its_manager(make_layer, function, manager, says):
    with pytest.raises(InputError, match=says):
        make_layer(BATCHED, function=function, reward_manager=manager)


def test_a_function_of_one_answer_is_told_of_its_managers(make_layer):
    with pytest.raises(InputError, match="takes one answer.*set naive or prime"):
        make_layer("return 1.0", reward_manager="batch")
