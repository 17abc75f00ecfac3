"""The estimators that claims compare GRPO with, against numbers by hand."""

from __future__ import annotations

import torch

from core.algorithm.advantages import AdvantageInputs
from recipes.lab.estimators import positive_only


def test_only_right_answers_are_trained_on():
    inputs = AdvantageInputs(
        reward=torch.tensor([1.0, 0.2, 0.0, 1.0]),
        lengths=torch.tensor([3, 3, 3, 3]),
        response_mask=torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 1, 1]], dtype=torch.bool).flatten(),
        group=torch.tensor([0, 0, 1, 1]),
        in_group_stats=torch.tensor([True, True, True, True]),
    )
    advantages, returns = positive_only(inputs)
    assert advantages.view(4, 3).tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0], [0, 1, 1]]
    assert returns is advantages and advantages.dtype == inputs.reward.dtype


def test_an_answer_that_could_not_be_scored_is_left_out():
    ones = torch.ones(2)
    scored = {"group": torch.tensor([0, 0]), "in_group_stats": torch.tensor([True, False])}
    inputs = AdvantageInputs(reward=ones, lengths=ones.long(), response_mask=ones.bool(), **scored)
    assert positive_only(inputs)[0].tolist() == [1, 0]
