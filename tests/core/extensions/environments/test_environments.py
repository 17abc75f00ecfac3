"""Environments of the real package ``verifiers``: questions, episodes, rubrics, and environments that fail."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="the package verifiers is not installed: pip install 'rlrepro[verifiers]'")

from core.config import compose, examine
from core.data.parquet import ExampleFile, Problems
from core.data.stream import load_val_prompts
from core.engines import SamplingParams
from core.errors import InputError
from core.extensions.environments.environment_loop import EnvironmentLoop
from core.rewards import RewardLayer
from core.rollout.agent_loop import Episode, Limits
from core.types import Stop
from data_preprocess import environment
from reward_scores.score import ScoreStatus
from tests.core.rollout.tools.test_tool_agent import call, tokenizer
from tests.scripted_engine import ScriptedEngine

FILE = Path(__file__).with_name("guessing.py")
ROLLOUT = "actor_rollout_ref.rollout"
NAMED = (f"{ROLLOUT}.agent_loop=verifiers", f"{ROLLOUT}.multi_turn.environment={FILE}")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    assert (
        environment.main(["--environment", str(FILE), "--arguments", '{"count": 3}', "--local_dir", str(folder)]) == 0
    )
    return folder


def configured(data, *options):
    files = [f"data.train_files={data}/train.parquet", f"data.val_files={data}/test.parquet"]
    return compose("grpo", [*NAMED, *files, *options])


def played(data, turns, *options, length=2000):
    """The trajectory, its score and the loop of an episode of the first question, whose answer is 4."""
    words, config = tokenizer(), configured(data, *options)
    loop = EnvironmentLoop(config, words)
    prompt, left = load_val_prompts(config.data, words, word=loop.worded)[0], list(turns)
    parts = {"engine": ScriptedEngine(words, lambda _: left.pop(0)), "tokenizer": words, "run_seed": 1}
    episode = Episode(prompt, 0, SamplingParams(max_tokens=length), Limits(length, length), **parts)
    asyncio.run(loop.run(episode))
    score = asyncio.run(RewardLayer(config).score(prompt, episode.trajectory()))
    return episode.trajectory(), score, loop


def kind(name: str) -> str:
    return f"{ROLLOUT}.multi_turn.environment_args={{kind: {name}}}"


def test_the_questions_become_rows(data):
    problems = Problems()
    rows = list(ExampleFile(data / "train.parquet").examples(problems))
    assert not problems.lines() and len(rows) == 3
    assert rows[1].data_source == "verifiers/guessing" and rows[1].ground_truth == "8"
    assert [one["content"] for one in rows[0].prompt] == ["Guess.", "a number below 10?"]
    assert json.loads(rows[1].extra_info["example"])["info"] == {"n": 2} and rows[1].extra_info["index"] == 1


def test_an_episode_is_the_environments_and_its_rubric_is_the_score(data):
    trajectory, score, loop = played(data, ["2", "7", "4"])
    assert [one.role for one in trajectory.segments] == ["policy", "user", "policy", "user", "policy"]
    words = tokenizer()
    assert words.decode(trajectory.response_ids[trajectory.response_mask]) == "2<eos>7<eos>4<eos>"
    added = trajectory.response_ids[~trajectory.response_mask].tolist()
    assert added.count(words.eos_token_id) == 2, "the template's ends of two turns; what the environment says is text"
    assert "higher than 2" in trajectory.segments[1].text and "lower than 7" in trajectory.segments[3].text
    assert trajectory.turns == 3 and score.value == pytest.approx(1 + 0.1 / 3)
    assert score.parts["found"] == 1.0 and score.parts["num_turns"] == 3.0
    assert loop.metrics() == {"agent/environment_failures": 0.0}


def test_limits_of_the_environment_and_of_the_response(data):
    short = f"{ROLLOUT}.multi_turn.environment_args={{max_turns: 2}}"
    trajectory, score, _ = played(data, ["1", "2", "3"], short)
    assert trajectory.turns == 2 and score.value == pytest.approx(0.05) and score.parts["found"] == 0.0
    trajectory, score, loop = played(data, ["1", "2"], length=12)
    assert trajectory.turns == 1 and trajectory.stop is Stop.LENGTH and score.status is not ScoreStatus.CRASH
    assert loop.metrics()["agent/environment_failures"] == 0.0


def test_an_environment_with_tools_and_one_of_a_single_turn(data):
    trajectory, score, _ = played(data, [call("add", a=1, b=3), "4"], kind("tool"))
    assert [one.role for one in trajectory.segments] == ["policy", "tool", "policy"]
    assert "<tool add>" in tokenizer().decode(trajectory.prompt_ids) and "tool\n4" in trajectory.segments[1].text
    assert score.value == 1.0 and score.parts["add_calls"] == 1.0
    _, score, _ = played(data, ["<tool_call>{nothing</tool_call>", "4"], kind("tool"))
    assert score.value == 1.0, "a call that cannot be read is answered by the environment"
    trajectory, score, _ = played(data, ["5"], kind("single"))
    assert trajectory.turns == 1 and score.value == 0.0 and score.status is ScoreStatus.WRONG


@pytest.mark.parametrize(
    ("name", "turns", "reason"),
    [("guessing", ["crash"], "not a number at all"), ("rewriting", ["1", "2"], "changed what was said before")],
)
def test_an_environment_that_fails_is_no_score_and_no_end_of_the_run(data, caplog, name, turns, reason):
    with caplog.at_level(logging.WARNING):
        trajectory, score, loop = played(data, turns, kind(name))
    assert score.status is ScoreStatus.CRASH and trajectory.turns == 1
    assert reason in caplog.text and loop.metrics() == {"agent/environment_failures": 1.0}


def test_what_cannot_be_played_is_refused_at_start(data):
    with pytest.raises(InputError, match="scored one by one"):
        EnvironmentLoop(configured(data, kind("grouped")), tokenizer())
    with pytest.raises(InputError, match="cannot be loaded .*nothing"):
        EnvironmentLoop(configured(data, f"{ROLLOUT}.multi_turn.environment_args={{nothing: 1}}"), tokenizer())
    with pytest.raises(InputError, match="no template"):
        EnvironmentLoop(configured(data), tokenizer(template=None))
    (problem,) = examine("grpo", [NAMED[0]]).problems
    assert "multi_turn.environment" in problem and "name an installed environment" in problem
    unused = examine("grpo", [NAMED[1], f"{ROLLOUT}.agent_loop=tests/x.py:Mine"]).unused
    assert "agent_loop=verifiers" in unused[f"{ROLLOUT}.multi_turn.environment"][1]
