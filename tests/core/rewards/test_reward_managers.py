"""Reward managers other than the plain pool: batch, a user's own, and results behind a barrier."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from core.config import examine
from core.config.sections.reward import CustomRewardFunctionConfig, RewardModelConfig, RewardModuleConfig
from core.errors import InputError
from core.rewards.grading import Job
from core.rewards.layer import RewardError, RewardLayer
from core.tracking.loggers import ConsoleLogger
from core.tracking.samples import print_examples
from core.types import Prompt, Segment, Stop, Trajectory
from reward_scores.score import ScoreStatus


@pytest.fixture
def make_layer():
    layers = []

    def make(path=None, **reward_model):
        reward = RewardModelConfig(**{"num_workers": 1, "memory_limit_mb": 512, **reward_model})

        class Both:
            reward_model = reward
            custom_reward_function = CustomRewardFunctionConfig(path=path)

        layers.append(RewardLayer(Both))
        return layers[-1]

    yield make
    for layer in layers:
        layer.close()


def grade(layer, responses):
    async def everything():
        return await asyncio.gather(*(layer.manager.run(Job("tests/x", text, "b", {})) for text in responses))

    return asyncio.run(everything())


# --- batch ---

LISTS = """
    import asyncio, os
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
        assert set(data_sources) == {"tests/x"} and set(ground_truths) == {"b"} and not any(extra_infos)
        if "bomb" in solution_strs:
            os._exit(3)
        if "short" in solution_strs:
            return [1.0] * (len(solution_strs) - 1)
        if "none" in solution_strs:
            return None
        return [
            None if text == "bad" else {"score": text == gold, "size": len(solution_strs)}
            for text, gold in zip(solution_strs, ground_truths)
        ]
    async def later(**lists):
        await asyncio.sleep(0)
        return compute_score(**lists)
"""


def together(layer, responses):
    jobs = [Job("tests/x", text, "b", {}) for text in responses]
    return asyncio.run(layer.manager.run_together(jobs))


def test_a_function_of_lists_gets_all_answers_in_one_call_in_their_order(make_layer, write):
    scores = together(make_layer(write(LISTS), reward_manager="batch", num_workers=2), ["a", "b", "a", "b"])
    assert [score.value for score in scores] == [0.0, 1.0, 0.0, 1.0]
    assert [score.parts["size"] for score in scores] == [4.0] * 4


def test_a_result_of_the_list_that_is_no_score_costs_its_own_answer_only(make_layer, write):
    results = together(make_layer(write(LISTS), reward_manager="batch"), ["a", "bad", "b"])
    assert [result.status.value for result in results] == ["wrong", "crash", "ok"]
    assert "returned None" in results[1].detail and results[2].parts["size"] == 3.0


def test_a_call_that_fails_fails_for_all_its_answers(make_layer, write):
    """A function that compares answers would grade others wrongly if it were called again without some of them."""
    results = together(make_layer(write(LISTS), reward_manager="batch"), ["a", "bomb", "b"])
    assert [result.status.value for result in results] == ["crash"] * 3 and "status 3" in results[0].detail


@pytest.mark.parametrize(
    ("bad", "says"), [("short", "got 1 results for 2 answers"), ("none", "got None .* and no list for 2 answers")]
)
@pytest.mark.parametrize("on_error", ["zero", "mask"])
def test_another_number_of_results_ends_the_run_whatever_on_error_is(make_layer, write, bad, says, on_error):
    body = LISTS.replace("and not any(extra_infos)", "")
    layer = make_layer(write(body), reward_manager="batch", on_error=on_error)
    segments = (Segment("policy", bad),)
    answer = Trajectory([1], [5], [True], [0.0], segments, Stop.EOS, 0, 0)
    with pytest.raises(RewardError, match=f"(?s)one result an answer: {says}"):
        asyncio.run(layer.score_group(Prompt(0, "q", (1,), (), "b", "tests/x"), [answer] * 2))


def test_another_number_of_results_is_found_at_start(make_layer, write):
    layer = make_layer(write("def compute_score(**lists): return [1.0]"), reward_manager="batch")
    with pytest.raises(InputError, match="failed on every answer tried.*got 1 results for 4 answers"):
        layer.check([Prompt(0, "q", (1,), (), "b", "tests/x")])


@pytest.mark.parametrize(
    "body",
    [
        "s = statistics.stdev(map(len, solution_strs)); return [1 / s] * len(solution_strs)",  # not of equal ones
        "return [float(t) for t in solution_strs]",  # not with the empty answer
    ],
)
def test_a_function_of_lists_that_grades_some_answers_starts(make_layer, write, body):
    head = "import statistics\ndef compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    "
    make_layer(write(head + body), reward_manager="batch").check([Prompt(0, "q", (1,), (), "7", "tests/x")])


def test_an_asynchronous_batch_function(make_layer, write):
    layer = make_layer(
        write(LISTS + "\n    compute_score, compute_score_ = later, compute_score"), reward_manager="batch"
    )
    assert grade(layer, ["x"])[0].status is ScoreStatus.CRASH  # it calls itself for ever: a status like any other
    body = LISTS.replace("def compute_score", "def inner").replace("return compute_score(**", "return inner(**")
    layer = make_layer(
        write(body.replace("async def later", "async def compute_score"), "b.py"), reward_manager="batch"
    )
    assert [score.value for score in grade(layer, ["a", "b"])] == [0.0, 1.0]


def test_batch_wants_a_function_that_takes_lists(make_layer, write):
    one = write("def compute_score(data_source, solution_str, ground_truth, extra_info): return 1")
    with pytest.raises(InputError, match="takes one answer"):
        make_layer(one, reward_manager="batch")
    with pytest.raises(InputError, match="compute_score: it takes lists"):
        make_layer(write(LISTS, "lists.py"), reward_manager="prime")


# --- a user's own ---

OWN = """
    from core.rewards.grading import InProcess
    class Halved:
        def __init__(self, reward_model, grader):
            self.inner, self.timeout_s = InProcess(grader), reward_model.timeout_s
        async def run(self, job):
            if job.response == "raise":
                raise KeyError("mine")
            if job.response == "dict":
                return {"score": 0.25, "acc": 1}
            return (await self.inner.run(job)).value / 2
        def close(self):
            self.closed = True
    class Lacking:
        def __init__(self, *_): pass
        def run(self, job): pass
    def broken(*_):
        raise ValueError("at start")
"""


def test_a_users_own_manager(make_layer, write):
    path = write("def compute_score(solution_str, ground_truth, **rest): return solution_str == ground_truth", "f.py")
    layer = make_layer(path, source="importlib", module=RewardModuleConfig(path=write(OWN), name="Halved"))
    half, given, raised = grade(layer, ["b", "dict", "raise"])
    assert (half.value, given.value, given.acc) == (0.5, 0.25, 1.0)
    assert raised.status is ScoreStatus.CRASH and "KeyError: 'mine'" in raised.detail
    layer.close()
    assert layer.manager.manager.closed


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Lacking", "has no close"),
        ("broken", "ValueError: at start"),
        ("Nobody", "has no 'Nobody'.*Halved"),
        (None, ""),
    ],
)
def test_a_users_manager_that_cannot_work(make_layer, write, name, says):
    with pytest.raises(InputError, match=f"(?s)reward_model.module.*{says}"):
        make_layer(source="importlib", module=RewardModuleConfig(path=write(OWN), name=name))


REGISTERED = """
    from core.rewards.graders import register

    @register("{name}")
    class Quarter:
        def __init__(self, reward_model, scorers):
            pass
        async def run(self, job):
            return 0.25
        def close(self):
            pass
"""


def test_a_users_manager_by_the_name_that_a_decorator_gives_it(make_layer, write):
    own = RewardModuleConfig(path=write(REGISTERED.format(name="quarter")))
    layer = make_layer(reward_manager="quarter", module=own)
    assert grade(layer, ["b"])[0].value == 0.25 and not layer.in_process
    with pytest.raises(InputError, match='(?s)reward_manager=third: .*it has .*quarter.*@register."third"'):
        make_layer(reward_manager="third", module=own)
    with pytest.raises(InputError, match="registers 'naive', which is taken"):
        taken = RewardModuleConfig(path=write(REGISTERED.format(name="naive"), "taken.py"))
        make_layer(reward_manager="mine", module=taken)


def test_a_registered_name_passes_the_configuration_with_its_module_alone(write):
    where = write(REGISTERED.format(name="quarter"))
    chosen = "reward_model.reward_manager=quarter"
    (problem,) = examine("grpo", [chosen]).problems
    assert problem.startswith(f"{chosen}: must be one of naive, batch, prime, dapo")
    report = examine("grpo", [chosen, f"reward_model.module.path={where}"])
    assert not report.problems and not report.unused
    unused = examine("grpo", [f"reward_model.module.path={where}"]).unused
    assert unused["reward_model.module.path"][1].startswith("reward_model.reward_manager=naive is a manager of")


# --- samples in full ---


def test_printed_answers_are_the_first_of_each_source(capsys):
    rows = [
        {"data_source": source, "input": f"q{i}", "output": "o", "gts": "g", "score": 0.5}
        for i, source in enumerate("aabb")
    ]
    print_examples(rows, 1)
    text = capsys.readouterr().out
    assert text.splitlines()[:4] == ["[prompt] q0", "[response] o", "[ground_truth] g", "[score] 0.5"]
    assert text.count("[prompt]") == 2 and "[prompt] q2" in text
    print_examples(rows, 0)
    print_examples([], 3)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("field", ["input", "output", "gts"])
def test_no_answer_acts_on_the_terminal(field, capsys):
    """Write to the clipboard, clear the screen, turn the text round, overwrite the line, ring, half a character."""
    evil = "\x1b]52;c;aGk=\x07\x1b[2J\u202egnp\u2066\rover\x08\x9b2J\ud800"
    row = {"data_source": "a", "input": "q", "output": "o", "gts": "g", "score": 0.5, field: f"two\nlines\t{evil}é中"}
    print_examples([row], 1)
    text = capsys.readouterr().out
    assert all(c.isprintable() or c in "\n\t" for c in text)
    assert "two\nlines\t\\x1b]52;c;aGk=\\x07\\x1b[2J\\u202egnp\\u2066\\rover" in text and "\\ud800é中" in text
    console = ConsoleLogger(SimpleNamespace(total=None))
    console.samples(1, [row])
    console.log(1, {f"val-core/{evil}/acc/mean@1": 1.0})
    assert all(c.isprintable() or c in "\n\t" for c in capsys.readouterr().out)
