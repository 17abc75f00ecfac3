"""The estimators that claims compare GRPO with, against numbers by hand."""

from __future__ import annotations

import torch

from core.algorithm.advantages import AdvantageInputs
from recipes.lab.estimators import positive_only


def test_only_right_answers_are_trained_on():
    rewards = torch.zeros(4, 3)
    rewards[:, 2] = torch.tensor([1.0, 0.2, 0.0, 1.0])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 1, 1]], dtype=torch.bool)
    scored = torch.tensor([True, True, True, True])
    inputs = AdvantageInputs(rewards, mask, torch.tensor([0, 0, 1, 1]), scored)
    advantages, returns = positive_only(inputs)
    assert advantages.tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0], [0, 1, 1]]
    assert returns is advantages and advantages.dtype == rewards.dtype


def test_an_answer_that_could_not_be_scored_is_left_out():
    rewards, mask = torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool)
    inputs = AdvantageInputs(rewards, mask, torch.tensor([0, 0]), torch.tensor([True, False]))
    assert positive_only(inputs)[0].tolist() == [[1], [0]]
