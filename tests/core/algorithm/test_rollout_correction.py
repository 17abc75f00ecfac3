"""Importance correction: golden vectors, an independent reference, unbiasedness by enumeration, and
what it does to a step."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from core.algorithm import rollout_correction as rc
from core.algorithm.correction_bounds import Bounds, criteria
from core.config.composition import compose
from core.config.training_keys import RolloutCorrectionConfig
from core.learner.batching import mini_batches
from core.learner.learner import Actor
from core.learner.step_settings import needs_old_log_probs
from core.tracking.metric_sums import MetricSums
from tests.core.learner.test_learner import (
    actor,
    actor_config,
    gradient,
    one_step,
    policy_module,
    random_batch,
)
from tests.golden_mismatch import batch_of

KEY = "algorithm.rollout_correction"
HALF = math.log(2)


def flat(log_ratio, mask):
    """Return log-ratio and mask of rows without padding, and their lengths."""
    return log_ratio.flatten(), mask.flatten(), torch.full((len(mask),), mask.shape[1])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weighted_samples_of_the_engine_have_the_learners_expectation(level):
    """Over all sequences of two tokens: E_rollout[w f] = E_learner[f], exactly, for what each level
    can correct."""
    rng = np.random.default_rng(3)
    # First token, then one row a first token
    rollout, learner = (rng.dirichlet(np.ones(3), size=4) for _ in range(2))
    f = rng.normal(size=(3, 3))
    total = expected = 0.0
    for a, b in itertools.product(range(3), repeat=2):
        q, p = ((x[0, a], x[1 + a, b]) for x in (rollout, learner))
        d = torch.tensor([[math.log(p[0] / q[0]), math.log(p[1] / q[1])]], dtype=torch.float64)
        weights, _ = rc.importance_weights(
            *flat(d, torch.ones(1, 2).bool()), level, Bounds(None, math.inf)
        )
        if level == "sequence":  # of any function of the sequence
            total += q[0] * q[1] * float(weights[0]) * f[a, b]
            expected += p[0] * p[1] * f[a, b]
        else:  # of a function of the last token, given the first
            total += q[0] * q[1] * float(weights[1]) * f[a, b]
            expected += q[0] * p[1] * f[a, b]
    assert total == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "options, spec, lower, kept",
    # Ratios 4, 1, 1/2 in the first row (product 2, geometric mean 2^(1/3)), 1, 1, 1 in the second
    [
        ("token", 2.0, None, [[0, 1, 1], [1, 1, 1]]),
        ("token", 2.0, 0.6, [[0, 1, 0], [1, 1, 1]]),
        ("sequence", 2.1, None, [[1, 1, 1], [1, 1, 1]]),
        ("sequence", 1.9, None, [[0, 0, 0], [1, 1, 1]]),
        ("geometric", 1.3, None, [[1, 1, 1], [1, 1, 1]]),
        ("geometric", 1.2, None, [[0, 0, 0], [1, 1, 1]]),
        ("token_k1", "0.3_1.5", None, [[0, 1, 0], [1, 1, 1]]),  # of the inverse ratios 1/4, 1, 2
        ("seq_max_k2", 0.9, None, [[0, 0, 0], [1, 1, 1]]),  # log(4)^2 / 2 = 0.96
        ("seq_max_k2", 1.0, None, [[1, 1, 1], [1, 1, 1]]),
        ("token,sequence", "5.0,1.9", None, [[0, 0, 0], [1, 1, 1]]),
    ],
)
def test_rejection_by_hand(options, spec, lower, kept):
    d = torch.tensor([[2 * HALF, 0.0, -HALF], [0.0, 0.0, 0.0]], dtype=torch.float64)
    got = rc.kept_tokens(*flat(d, torch.ones(2, 3).bool()), criteria(options, spec, lower))
    assert got.view(2, 3).int().tolist() == kept


def corrected(**settings):
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1]]).bool()
    rollout = torch.tensor([[0.0, -1.0, -1.0, -1.0], [0.0, -1.0, -1.0, -1.0]])
    old = rollout + torch.tensor([[9.0, 2 * HALF, 0.0, -HALF], [9.0, 0.0, 0.0, 0.0]])
    return rc.correct(batch_of(old, rollout, mask), RolloutCorrectionConfig(**settings))


def test_rejected_tokens_leave_the_denominators_and_nothing_else():
    batch, metrics = corrected(rollout_rs="token", rollout_rs_threshold=2.01)
    assert batch.padded("loss_mask").tolist() == [
        [False, False, True, True],
        [False, True, True, True],
    ]
    assert bool(batch.in_group_stats.all()) and not batch.has("rollout_is_weights")
    (step,) = mini_batches(batch, prompts=2, agg_mode="token-mean", scale_factor=1.0)
    assert step.padded("loss_weight").flatten().tolist() == pytest.approx(
        [0, 0, 0.2, 0.2, 0, 0.2, 0.2, 0.2]
    )
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 2)
    whole, _ = corrected(rollout_rs="sequence", rollout_rs_threshold=1.5)
    (step,) = mini_batches(whole, prompts=2, agg_mode="seq-mean-token-mean", scale_factor=1.0)
    assert step.padded("loss_weight").sum(dim=1).tolist() == pytest.approx([0.0, 1.0])


def test_a_veto_drops_the_sequence_of_one_impossible_token():
    for threshold, kept in ((0.6, [False, True]), (0.4, [True, True])):
        batch, metrics = corrected(rollout_token_veto_threshold=threshold)
        assert batch.padded("loss_mask").any(dim=1).tolist() == kept
        assert metrics["rollout_corr/rollout_is_veto_fraction"] == 1 - sum(kept) / 2


def test_weights_leave_the_denominators_alone_and_count_what_they_truncate():
    batch, metrics = corrected(rollout_is="token", rollout_is_threshold=2.0)
    assert batch.padded("rollout_is_weights").tolist() == [
        [0, 2.0, 1.0, pytest.approx(0.5)],
        [0, 1.0, 1.0, 1.0],
    ]
    assert torch.equal(batch.loss_mask, batch.response_mask)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(
        (6.5 / 6) ** 2 / (8.25 / 6)
    )
    sequence, _ = corrected(rollout_is="sequence", rollout_is_threshold=5.0)
    assert sequence.padded("rollout_is_weights")[0].tolist() == pytest.approx([0, 2.0, 2.0, 2.0])
    cut, found = corrected(
        rollout_is="token", rollout_is_threshold=2.0, rollout_is_batch_normalize=True
    )
    # Of the weights as truncated
    assert found["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(6.5 / 6)
    assert float(cut.rollout_is_weights[1]) == pytest.approx(2 / (6.5 / 6))
    off, nothing = corrected()
    assert (
        not off.has("rollout_is_weights")
        and torch.equal(off.loss_mask, off.response_mask)
        and not nothing
    )


def test_tokens_that_nobody_sampled_are_not_weighed_and_go_with_their_row():
    """Without state masking a tool's tokens train too; the engine's log-prob of 0 there is no
    probability."""
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1]]).bool()
    tool = torch.tensor([[0, 0, 1, 0], [0, 0, 1, 0]]).bool()
    old = torch.tensor([[0.0, -1.0, -7.0, -1.0], [0.0, -1.0, -7.0, -1.0 + math.log(9)]])
    rollout = torch.where(mask & ~tool, -1.0, 0.0)
    batch = batch_of(old, rollout, mask).adding(sampled_mask=(mask & ~tool).flatten())
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_rs="sequence", rollout_rs_threshold=3.0
    )
    batch, metrics = rc.correct(batch, config)
    assert batch.padded("rollout_is_weights").tolist() == [[0, 1.0, 1.0, 1.0], [0, 1.0, 1.0, 2.0]]
    assert batch.padded("loss_mask").tolist() == [[False, True, True, True], [False] * 4]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5


def test_a_step_without_a_token_is_left_alone():
    empty = batch_of(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert rc.correct(empty, RolloutCorrectionConfig(rollout_is="token")) == (empty, {})
    means = MetricSums()
    rc.add_mismatch(means, torch.zeros(6), empty)
    assert means.result("x")["x/kl"] == 0


@pytest.mark.parametrize("rest", [{}, {"use_kl_loss": True, "entropy_coeff": 0.03}])
def test_the_actor_weighs_the_policy_gradient_only(rest):
    """Weights multiply the surrogate of a token; the KL loss and the entropy bonus keep theirs,
    however it is split."""
    batch = random_batch()
    batch = batch.adding(advantages=batch.advantages.double())
    weights = torch.rand(batch.tokens, generator=torch.Generator().manual_seed(1)).double() * 2
    weighed = batch.adding(rollout_is_weights=weights)
    # Without the clip that is the same thing
    scaled = batch.adding(advantages=batch.advantages * weights)
    gradients = []
    for one, rows in ((scaled, 100), (weighed, 100), (weighed, 3), (weighed, 1)):
        part = actor(**rest, ppo_micro_batch_size_per_gpu=rows)
        part.mismatch = MetricSums()
        part.accumulate(one_step(one.adding(old_log_probs=None)), MetricSums())
        gradients.append(gradient(part))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-9, atol=1e-12)


def test_bypass_takes_the_engines_log_probs_for_the_old_ones_and_measures_before_weights_move():
    batch = random_batch()
    bypassing = Actor(
        policy_module().double().train(), actor_config(), temperature=0.7, bypass=True
    )
    given_them = actor()
    halves = [one_step(batch.rows(index)) for index in (slice(0, 6), slice(6, 12))]
    seen = bypassing.update([half.adding(old_log_probs=None) for half in halves], 1.0)
    other = given_them.update(
        [half.adding(old_log_probs=half.rollout_log_probs) for half in halves], 1.0
    )
    for a, b in zip(bypassing.module.parameters(), given_them.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    first = MetricSums()
    log_prob, _ = actor().token_stats(halves[0])
    rc.add_mismatch(first, log_prob, halves[0])
    assert seen["rollout_corr/kl"] == pytest.approx(
        first.result("rollout_corr")["rollout_corr/kl"], rel=1e-9
    )
    assert "actor/entropy" in seen and "rollout_corr/kl" not in other


@pytest.mark.parametrize(
    "settings, pass_needed",
    [
        ((), False),
        (("rollout_is=token",), True),
        (("rollout_rs=geometric", "rollout_rs_threshold=1.01"), True),
        (("rollout_token_veto_threshold=1e-4",), True),
        (("bypass_mode=True",), False),
    ],
)
def test_the_old_log_prob_pass_is_made_where_weights_are_made_of_it(settings, pass_needed):
    config = compose("grpo", ["preset=lab", *(f"{KEY}.{one}" for one in settings)])
    assert needs_old_log_probs(config, prompts=1) == pass_needed
    assert needs_old_log_probs(config, prompts=99) == (settings != ("bypass_mode=True",))
