"""Reward managers for verl: one call a step with tokens, groups and facts; and functions with verl's helpers."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from core.config import compose, examine
from core.errors import InputError
from core.rewards import RewardLayer
from core.types import Segment, Stop, Trajectory
from reward_scores.score import ScoreStatus
from tests.core.rollout.test_agent_loop import prompt
from tests.tiny import tiny_tokenizer

PUBLIC = Path(__file__).parents[1] / "verl_classes" / "public"
WORDS = tiny_tokenizer()
IMPORTLIB = ("reward_model.source=importlib", f"reward_model.module.path={PUBLIC}/rank_manager.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    WORDS.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return f"actor_rollout_ref.model.path={folder}"


def layer(model, *options):
    named = ["reward_model.reward_manager=rank_in_group", f"reward_model.module.path={PUBLIC}/rank_manager.py"]
    return RewardLayer(compose("grpo", [model, *(options or named)]))


def answer(text: str, uid: str = "q", gold: str = "4"):
    ids = WORDS.encode(text, add_special_tokens=False)
    size = len(ids)
    trajectory = Trajectory([5, 6], ids, [True] * size, [0.0] * size, (Segment("policy", text),), Stop.EOS, 0, 0)
    return replace(prompt(), uid=uid, ground_truth=gold, data_source="openai/gsm8k"), trajectory


def test_a_manager_gets_the_whole_step_with_tokens_and_groups(model):
    made = layer(model)
    made.check([prompt_row()])
    answers = [answer("#### 4"), answer("so #### 4"), answer("#### 5"), answer("well, #### 4", uid="p")]
    scores = asyncio.run(made.score_all(answers))
    longer = len(answers[1][1].response_ids) - len(answers[0][1].response_ids)
    assert longer > 0 and made.manager.manager.batches[-1] == 4
    assert [score.value for score in scores] == pytest.approx([1.0, 1 - 0.1 * longer, 0.0, 1.0])
    assert [score.acc for score in scores] == [1.0, 1.0, 0.0, 1.0]
    assert scores[1].parts["longer"] == longer and scores[2].status is ScoreStatus.WRONG
    assert asyncio.run(made.score(*answer("#### 4"))).value == 1.0


def prompt_row():
    return answer("")[0]


def test_its_options_come_from_reward_kwargs_and_scorers_keep_theirs(model):
    named = ["reward_model.reward_manager=rank_in_group", f"reward_model.module.path={PUBLIC}/rank_manager.py"]
    made = layer(model, *named, "reward_model.reward_kwargs={cost: 0.0, gsm8k: {method: flexible}}")
    values = [one.value for one in asyncio.run(made.score_all([answer("4"), answer("so it is 4")]))]
    assert values == [1.0, 1.0]
    with pytest.raises(InputError, match="making it failed"):
        layer(model, *IMPORTLIB, "reward_model.module.name=PlainRewardManager", "reward_model.reward_kwargs={cots: 1}")
    wrong = "reward_model.reward_kwargs={gsm8kk: {method: flexible}}"
    with pytest.raises(InputError, match="not a scorer's name"):
        RewardLayer(compose("grpo", [wrong]))


def test_a_manager_under_a_name_that_exists_is_named_by_its_class(model, caplog):
    made = layer(model, *IMPORTLIB, "reward_model.module.name=PlainRewardManager")
    with caplog.at_level(logging.WARNING):
        (score,) = asyncio.run(made.score_all([answer("#### 4")]))
    assert score.value == 0.5 and "rewards several tokens of an answer" in caplog.text
    unused = examine("grpo", [f"reward_model.module.path={PUBLIC}/rank_manager.py"]).unused
    assert "reward_model.source=importlib" in unused["reward_model.module.path"][1]


def test_a_manager_extends_verls_naive_one_and_finds_it_in_the_registry(model):
    made = layer(model, "reward_model.reward_manager=halved_naive", f"reward_model.module.path={PUBLIC}/naive_child.py")
    answers = [answer("so #### 4"), answer("#### 5")]
    scores = asyncio.run(made.score_all(answers))
    assert [score.value for score in scores] == [0.5, 0.0]
    assert [score.parts["places"] for score in scores] == [len(answers[0][1].response_ids) - 1, -1]


def test_a_manager_that_raises_is_refused_at_start_and_a_crash_later(model):
    made = layer(model, *IMPORTLIB, "reward_model.module.name=FailingRewardManager")
    (score,) = asyncio.run(made.score_all([answer("#### 4")]))
    assert score.status is ScoreStatus.CRASH
    with pytest.raises(InputError, match="not_there"):
        made.check([prompt_row()])
