"""Estimators that read a group at a time give the same in pieces; all others get the whole batch, padded."""

import numpy as np
import pytest
import torch

from core import types
from core.algorithm import advantages
from core.config import registry
from core.config.sections.algorithm import AlgorithmConfig
from core.learner.batching import make_batch, token_rewards
from core.types import Prompt, ScoredGroup, Stop, Trajectory
from reward_scores.score import Score, ScoreStatus

BY_GROUP = [name for name, entry in registry.ESTIMATORS.items() if entry.by_group]


@pytest.fixture
def batch():
    """Eight groups of four answers of 1 to 40 tokens, one of them not graded; values stand for a critic."""
    rng, groups = np.random.default_rng(0), []
    for ordinal in range(8):
        answers = [rng.integers(1, 9, rng.integers(1, 41)) for _ in range(4)]
        trajectories = tuple(
            Trajectory([1, 2], ids, rng.random(len(ids)) < 0.8, [-0.5] * len(ids), (), Stop.EOS, 0, 1)
            for ids in answers
        )
        scores = [Score(abs(float(rng.normal()))) for _ in answers]  # maxrl refuses those below 0
        if ordinal == 3:
            scores[1] = Score(0.0, status=ScoreStatus.CRASH, masked=True)
        if ordinal == 5:
            scores[0] = Score(0.0)  # gpg counts these
        prompt = Prompt(ordinal, "", (1, 2), (), "", "")
        groups.append(ScoredGroup(prompt, trajectories, tuple(scores), Score(0.25)))
    made = make_batch(groups, 0)
    noise = torch.randn(made.shape, generator=torch.Generator().manual_seed(0)) * made.response_mask
    old = -noise.abs() - 0.1
    return made.adding(
        token_level_rewards=token_rewards(made), values=noise, old_log_probs=old, sum_pi_squared=old.exp().square()
    )


def in_pieces(batch, name, monkeypatch, slots):
    monkeypatch.setattr(types, "PIECE_SLOTS", slots)
    return advantages.estimate(batch, AlgorithmConfig(adv_estimator=name))


@pytest.mark.parametrize("name", registry.ESTIMATORS)
def test_pieces_change_no_advantage(batch, name, monkeypatch):
    whole, pieces = (in_pieces(batch, name, monkeypatch, slots) for slots in (2**24, 200))
    expected = advantages.compute(batch.token_level_rewards, batch, AlgorithmConfig(adv_estimator=name))
    for found in (whole, pieces):
        assert torch.equal(found.advantages, expected[0]) and torch.equal(found.returns, expected[1])
        assert found.token_level_rewards is None


def test_estimators_that_read_a_group_at_a_time_are_known(batch, monkeypatch):
    """Given one group alone, they find for it what they find in the batch."""
    monkeypatch.setattr(types, "PIECE_SLOTS", 2**24)
    same = []
    for name in registry.ESTIMATORS:
        config = AlgorithmConfig(adv_estimator=name)
        alone, whole = (advantages.estimate(one, config) for one in (batch.rows(slice(12, 16)), batch))
        if torch.allclose(alone.advantages, whole.rows(slice(12, 16)).advantages):
            same.append(name)
    assert same == BY_GROUP


@pytest.mark.parametrize(
    ("name", "lengths"), [("grpo", [4] * 8), ("gae", [32]), ("gpg", [32]), ("my/own_file.py:function", [32])]
)
def test_an_estimator_that_may_read_everything_gets_the_whole_batch(batch, monkeypatch, name, lengths):
    """A user's own may average over all sequences."""
    shapes = []
    monkeypatch.setattr(advantages, "compute", lambda rewards, one, config: shapes.append(one.shape) or (rewards,) * 2)
    in_pieces(batch, name, monkeypatch, slots=1)
    assert [length for length, _ in shapes] == lengths
