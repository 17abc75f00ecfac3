"""Estimators beyond those of the four papers: golden vectors, and their formulas written a second time.

What holds for every estimator is in tests/core/algorithm/test_advantages.py, which tries these, too.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from core.algorithm import advantages
from core.algorithm.padded import PaddedAdvantageInputs as AdvantageInputs
from tests import reference
from tests.core.algorithm.test_advantages import TWO_GROUPS, changed, make_inputs, numpy_of
from tests.golden_io import check, parameters
from tests.golden_variants import ADAPTERS
from tests.padded import on_padded

NAMES = ("grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax")
ESTIMATORS = {name: on_padded(advantages.estimator(name)) for name in NAMES}
MAXRL, OTB = (on_padded(advantages.estimator(name)) for name in ("maxrl", "optimal_token_baseline"))


@pytest.mark.parametrize("case", parameters(name for name in ADAPTERS if name.startswith("adv_")))
def test_golden_advantages(case):
    for precision in ("f64", "f32"):
        check(ADAPTERS[case.file](case, precision), case.want(precision))


def test_by_hand():
    """Two groups of three, rewards (5, 2, -1) and (4, 4, 1): every estimator gives another number."""

    def first_column(name):
        return ESTIMATORS[name](TWO_GROUPS)[0][:, 0].tolist()

    assert first_column("rloo") == pytest.approx([4.5, 0, -4.5, 1.5, 1.5, -3])
    assert first_column("opo") == pytest.approx([3, 0, -3, 0.6, 0.6, -2.4])
    assert first_column("gpg") == pytest.approx([3, 0, -3, 1, 1, -2])
    assert first_column("grpo_passk") == pytest.approx([1, 0, 0, 0, 0, 0], 1e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("norm", [True, False])
def test_passk_is_its_formula(norm, seed):
    rewards = torch.rand(12, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    inputs = make_inputs(seed, norm_adv_by_std_in_grpo=norm, token_level_rewards=rewards)
    rewards, mask, group, counted = numpy_of(inputs)
    expected = reference.outcome_advantage("grpo_passk", rewards, mask, group, counted, norm)[:, None] * mask
    np.testing.assert_allclose(ESTIMATORS["grpo_passk"](inputs)[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_reinforce_family_is_its_formula(seed):
    inputs = make_inputs(seed)
    rewards, mask, group, counted = numpy_of(inputs)

    returns = reference.discounted_returns(rewards, mask, 0.9)
    got = ESTIMATORS["reinforce_plus_plus"](inputs)
    np.testing.assert_allclose(got[1], returns, rtol=1e-12)
    np.testing.assert_allclose(got[0], reference.whiten(returns, mask), rtol=1e-9, atol=1e-12)

    centred = reference.outcome_advantage("centred", rewards, mask, group, counted)[:, None] * mask
    got = ESTIMATORS["reinforce_plus_plus_baseline"](inputs)[0]
    np.testing.assert_allclose(got, reference.whiten(centred, mask), rtol=1e-9, atol=1e-12)

    returns = reference.discounted_returns(rewards, mask, 1.0)
    got = ESTIMATORS["remax"](inputs)
    np.testing.assert_allclose(got[1], returns, rtol=1e-12)
    np.testing.assert_allclose(got[0], np.where(mask, returns - inputs.baseline.numpy()[:, None], 0), rtol=1e-9)


def outcomes(*rewards: float, **fields) -> AdvantageInputs:
    """Return one group of one-token answers with these rewards."""
    column = torch.tensor(rewards, dtype=torch.float64)[:, None]
    given = {"response_mask": torch.ones(len(rewards), 1).bool(), "group": torch.zeros(len(rewards)).long(), **fields}
    return AdvantageInputs(token_level_rewards=column, **given)


def test_maxrl_by_hand():
    """One of four right: (1 - 1/4) / (1/4) = 3 and -1; three of four: 1/3 and -1; none or all: 0."""
    for rewards, expected in (
        ((1, 0, 0, 0), [3, -1, -1, -1]),
        ((1, 1, 0, 1), [1 / 3, 1 / 3, -1, 1 / 3]),
        ((0, 0, 0, 0), [0, 0, 0, 0]),
        ((1, 1, 1, 1), [0, 0, 0, 0]),
        ((2, 0.5, 0.5, 1), [1, -0.5, -0.5, 0]),
    ):
        assert MAXRL(outcomes(*rewards))[0][:, 0].tolist() == pytest.approx(expected, abs=1e-12)
    unscored = outcomes(1, 0, 1, 0, in_group_stats=torch.tensor([True, True, False, True]))
    assert MAXRL(unscored)[0][:, 0].tolist() == pytest.approx([2, -1, 0, -1], abs=1e-12)


@pytest.mark.parametrize("p", [0.03, 0.4, 0.95])
@pytest.mark.parametrize("n", [2, 5])
def test_maxrl_is_the_gradient_of_a_truncated_log_likelihood(n, p):
    """All outcomes of n answers: the expected update is d/dp of ``-sum_{k < n} (1 - p)^k / k``, which nears 1/p."""
    expected = 0.0
    for right in itertools.product((0, 1), repeat=n):
        score = [1 / p if one else -1 / (1 - p) for one in right]  # d log pi / dp
        update = float((MAXRL(outcomes(*right))[0][:, 0] * torch.tensor(score, dtype=torch.float64)).mean())
        expected += p ** sum(right) * (1 - p) ** (n - sum(right)) * update
    assert expected == pytest.approx(math.fsum((1 - p) ** k for k in range(n - 1)), rel=1e-10)


def test_maxrl_does_not_depend_on_the_scale_of_rewards_and_refuses_negative_ones():
    inputs = make_inputs(1, token_level_rewards=make_inputs(1).token_level_rewards.abs())
    larger = changed(inputs, token_level_rewards=17 * inputs.token_level_rewards)
    torch.testing.assert_close(MAXRL(larger)[0], MAXRL(inputs)[0], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="rewards must be at least 0, and one is -0.5"):
        MAXRL(outcomes(1, -0.5))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("weighted", [False, True])
def test_optimal_token_baseline_is_its_formula(seed, weighted):
    """Token by token, in plain Python, over the own tokens of each answer."""
    weights = torch.from_numpy(np.random.default_rng(seed).uniform(0.3, 2, (12, 7))) if weighted else None
    inputs = make_inputs(seed, rollout_is_weights=weights)
    rewards, mask, group, counted = numpy_of(inputs)
    old, square = inputs.old_log_probs.numpy(), inputs.sum_pi_squared.numpy()
    own = [np.flatnonzero(row) for row in mask]

    def energy(i, k):
        scale = (weights.numpy()[i] if weighted else np.ones(7)) ** 2
        return math.fsum(scale[t] * max(1 - 2 * math.exp(old[i, t]) + square[i, t], 0) for t in own[i][: k + 1])

    def to_go(i, k):
        return math.fsum(rewards[i, t] for t in own[i][k:])

    expected = np.zeros((12, 7))
    for i in np.flatnonzero(counted):
        others = [j for j in np.flatnonzero(counted) if group[j] == group[i]]
        for k, t in enumerate(own[i]):
            long = [j for j in others if len(own[j]) > k]
            total = math.fsum(energy(j, k) for j in long)
            mean = math.fsum(energy(j, k) * to_go(j, k) for j in long) / total if len(long) > 1 and total else 0.0
            expected[i, t] = 0.0 if len(others) == 1 else to_go(i, k) - mean
    np.testing.assert_allclose(OTB(inputs)[0], expected, rtol=1e-9, atol=1e-12)


def test_optimal_token_baseline_by_hand():
    """Two answers of one and two tokens. pi = 1/2 of a fair coin: 1 - 1 + 1/2; pi = 1/4 of four: 1 - 1/2 + 1/4."""
    inputs = AdvantageInputs(
        token_level_rewards=torch.tensor([[1.0, 0.0], [0.0, 4.0]], dtype=torch.float64),
        response_mask=torch.tensor([[True, False], [True, True]]),
        group=torch.zeros(2).long(),
        old_log_probs=torch.tensor([[0.5, 1.0], [0.25, 0.5]], dtype=torch.float64).log(),
        sum_pi_squared=torch.tensor([[0.5, 1.0], [0.25, 0.5]], dtype=torch.float64),
    )
    # Energies 0.5 and 0.75: the baseline of the first token is (0.5 * 1 + 0.75 * 4) / 1.25 = 2.8; the second has none.
    advantages, returns = OTB(inputs)
    assert advantages.tolist() == [pytest.approx([-1.8, 0]), pytest.approx([1.2, 4.0])]
    assert returns.tolist() == [[1, 0], [4, 4]]


def test_the_energy_is_the_squared_norm_of_the_gradient_in_the_logits():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(logits, -1)
    (gradient,) = torch.autograd.grad(log_probs[1], logits)
    pi = log_probs.detach().exp()
    assert float(gradient.square().sum()) == pytest.approx(float(1 - 2 * pi[1] + pi.square().sum()), rel=1e-12)


def test_the_optimal_token_baseline_has_the_least_variance_of_all_baselines():
    """One token, softmax of four: the sampled gradient's spread around 0 is least at B, of a million answers."""
    generator = torch.Generator().manual_seed(0)
    pi = torch.tensor([0.7, 0.2, 0.08, 0.02], dtype=torch.float64)
    draws = torch.multinomial(pi, 4000, replacement=True, generator=generator)
    rewards = torch.tensor([0.0, 1.0, 0.5, 3.0], dtype=torch.float64)[draws]
    fields = {"old_log_probs": pi.log()[draws][:, None], "sum_pi_squared": pi.square().sum().expand(4000, 1)}
    baseline = rewards - OTB(outcomes(*rewards.tolist(), **fields))[0][:, 0]
    assert float(baseline.std()) < 1e-9
    score = torch.eye(4, dtype=torch.float64)[draws] - pi

    def spread(b):
        return float(((rewards - b)[:, None] * score).square().sum(-1).mean())

    best = float(baseline[0])
    assert all(spread(best) < spread(best + shift) for shift in (-0.1, -0.01, 0.01, 0.1))
    assert spread(best) < spread(float(rewards.mean())) < spread(0.0)


def test_without_others_the_optimal_token_baseline_is_nothing_and_a_lone_survivor_gets_none():
    fields = {"old_log_probs": torch.zeros(4, 1) - 1, "sum_pi_squared": torch.ones(4, 1) / 2}
    inputs = outcomes(3, 3, 3, 3, **fields, group=torch.arange(4))
    assert OTB(inputs)[0][:, 0].tolist() == [3, 3, 3, 3]
    survivor = changed(inputs, group=torch.zeros(4).long(), in_group_stats=torch.tensor([False, True, False, False]))
    assert not OTB(survivor)[0].any()


def test_passk_refuses_a_group_of_one():
    with pytest.raises(ValueError, match="rollout.n must be >= 2"):
        ESTIMATORS["grpo_passk"](make_inputs(0, prompts=1, n=1))
