"""Each check holds of a sound step, and fails where one value is another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.algorithm import checks
from core.config.training_keys import AlgorithmConfig
from core.errors import BrokenInvariant, InputError
from core.learner.batching import make_batch
from core.types import Prompt, ScoredGroup, Stop, Trajectory
from reward_scores.score import Score

GRPO = AlgorithmConfig(adv_estimator="grpo")


def made_groups() -> list[ScoredGroup]:
    """Two prompts with three answers of two turns each, with a tool's two tokens between them."""
    rng, groups = np.random.default_rng(0), []
    for number, values in enumerate(((1.0, 0.0, 0.5), (0.0, 2.0, 0.0))):
        trajectories = []
        for index in range(3):
            mask = np.array([True] * (2 + index) + [False] * 2 + [True] * 2)
            ids, logprobs = (
                rng.integers(7, 30, len(mask)),
                np.where(mask, -rng.random(len(mask)), 0),
            )
            seed = 10 * number + index
            trajectories.append(
                Trajectory([3, 5, 6], ids, mask, logprobs, (), Stop.EOS, 0, seed, 2, 1)
            )
        prompt = Prompt(number, f"q{number}", (3, 5, 6), (), None, "tests")
        groups.append(ScoredGroup(prompt, tuple(trajectories), tuple(map(Score, values))))
    return groups


def broken(match: str):
    return pytest.raises(BrokenInvariant, match=match)


@pytest.mark.parametrize("second", [dict, torch.Tensor])
def test_what_a_loss_or_an_estimator_returns_has_a_number_for_each_token(second):
    """A mean, returned by mistake, would spread over the tokens of a micro-batch and train on
    another objective."""
    one, other = torch.ones(3), {} if second is dict else torch.ones(3)
    assert checks.call_and_check(lambda x: (x, other), one, one.shape, second) == (one, other)
    wrong = (
        one,
        (one.mean(), other),
        (one[:2], other),
        (0.5, other),
        (one, other, other),
        [one, other],
        None,
    )
    for found in (*wrong, (one, None)):
        with pytest.raises(InputError, match=r"<lambda> returned .*, expected \[\[3\], "):
            checks.call_and_check(lambda x, found=found: found, one, one.shape, second)


def test_nothing_is_infinite():
    batch = make_batch(made_groups(), 0)
    batch = batch.adding(old_log_probs=torch.zeros(batch.tokens), values=torch.zeros(batch.tokens))
    checks.finite(batch, "old_log_probs", "values", "ref_log_prob", phase="log_probs")
    with broken("phase log_probs: 1 numbers of values are not finite"):
        value = batch.values.masked_fill(torch.arange(batch.tokens) == 7, float("nan"))
        checks.finite(batch.adding(values=value), "old_log_probs", "values", phase="log_probs")


def gap_z(entropy, log_prob, **more):
    gap = (entropy + log_prob).double()
    found = {
        "entropy_gap": float(gap.mean()),
        "entropy_gap_square": float(gap.square().mean()),
        **more,
    }
    return checks.entropy_gap_z(
        {f"rollout_corr/{name}": value for name, value in found.items()}, len(gap)
    )


def test_entropy_and_samples_agree_at_the_same_temperature_alone():
    torch.manual_seed(0)
    log_probs = (2 * torch.randn(3000, 40)).log_softmax(-1)
    sampled = log_probs.gather(1, log_probs.exp().multinomial(1))[:, 0]
    right, wrong = ((log_probs / temperature).log_softmax(-1) for temperature in (1.0, 0.8))
    entropies = [-(one.exp() * one).sum(-1) for one in (right, wrong)]
    assert abs(gap_z(entropies[0], sampled)) < 3 and gap_z(entropies[1], sampled) < -8
    assert gap_z(entropies[1], sampled, logp_diff_mean=0.2) == 0  # the engine is apart
    assert checks.entropy_gap_z({}, 3000) is None
