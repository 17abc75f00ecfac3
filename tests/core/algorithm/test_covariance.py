"""Clip-Cov and KL-Cov: what is selected among an optimizer step's tokens, and what the losses do with it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.algorithm.losses import clip_cov_tokens, covariances, kl_cov_tokens
from core.config import code_by_path, registry
from core.config.training_keys import ActorConfig, PolicyLossConfig
from tests.padded import padded_loss

ALL = torch.ones(4).bool()


def numbers(**overrides) -> PolicyLossConfig:
    return PolicyLossConfig(**overrides)


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_step(seed: int, tokens: int = 400) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    made = -rng.exponential(size=tokens), rng.normal(size=tokens), rng.random(tokens) < 0.8
    return tuple(map(torch.from_numpy, made))


def test_covariances_by_hand():
    """Means 1 and -2 of the first three; the fourth carries no loss, whatever it holds."""
    logp, adv = double(-1, -2, -3, math.nan), double(3, 1, -1, math.inf)
    found = covariances(logp, adv, torch.tensor([True, True, True, False]))
    assert found.tolist() == [2, 0, 2, 0]


@pytest.mark.parametrize("seed", range(4))
def test_kl_cov_takes_the_highest_covariances(seed):
    logp, adv, carries = random_step(seed)
    chosen = kl_cov_tokens(logp, adv, carries, numbers(kl_cov_ratio=0.05))
    at = np.flatnonzero(carries.numpy())
    a, b = adv.numpy()[at], logp.numpy()[at]
    mean_a, mean_b = math.fsum(a) / len(a), math.fsum(b) / len(b)
    order = sorted(range(len(at)), key=lambda i: -(a[i] - mean_a) * (b[i] - mean_b))
    assert sorted(at[order[: int(0.05 * len(at))]]) == np.flatnonzero(chosen.numpy()).tolist()


def test_kl_cov_takes_one_at_least_and_of_equal_ones_the_first():
    config = numbers(kl_cov_ratio=0.3)
    assert kl_cov_tokens(double(-1, -1, -2, -2), double(1, 1, -1, -1), ALL, config).tolist() == [True, *3 * [False]]
    assert not kl_cov_tokens(double(-1, -1, -2, -2), double(1, 1, -1, -1), ~ALL, config).any()
    half = numbers(kl_cov_ratio=0.5)
    assert kl_cov_tokens(double(-1, -1, -2, -2), double(1, 1, -1, -1), ALL, half).tolist() == [True, True, False, False]


@pytest.mark.parametrize("seed", range(4))
def test_clip_cov_draws_between_the_bounds_and_repeats(seed):
    step = random_step(seed)
    config = numbers(clip_cov_ratio=0.02, clip_cov_lb=0.5, clip_cov_ub=2.0)
    chosen, covariance = clip_cov_tokens(*step, config), covariances(*step)
    inside = (covariance > 0.5) & (covariance < 2.0) & step[2]
    assert int(chosen.sum()) == int(0.02 * int(step[2].sum())) < int(inside.sum())
    assert not (chosen & ~inside).any()
    assert torch.equal(clip_cov_tokens(*step, config), chosen)
    every = clip_cov_tokens(*step, numbers(clip_cov_ratio=1.0, clip_cov_lb=0.5, clip_cov_ub=2.0))
    assert torch.equal(every, inside)
    assert not clip_cov_tokens(*step, numbers(clip_cov_lb=1e6, clip_cov_ub=2e6)).any()


def test_the_draw_of_clip_cov_favours_no_place():
    """Of 40 equal candidates each is drawn about as often: 2,000 draws of two, of steps of other sizes."""
    hits = torch.zeros(40)
    for tokens in range(100, 2100):
        adv, logp = torch.zeros(tokens), torch.zeros(tokens)
        adv[:20], logp[:20], adv[20:40], logp[20:40] = 5.0, 1.0, -5.0, -1.0
        drawn = clip_cov_tokens(logp, adv, torch.ones(tokens), numbers(clip_cov_ratio=2.01 / tokens, clip_cov_ub=9.0))
        hits += drawn[:40]
    assert hits.sum() == 4000
    assert hits.min() > 60 and hits.max() < 140  # 100 expected, standard deviation 10


CONFIG = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, policy_loss=numbers(ppo_kl_coef=0.25))


def test_clip_cov_by_hand():
    """Ratios 2, 2, 0.5, 1 with advantages 2, -1, 2, 3; the last is selected and has neither loss nor gradient."""
    ratio, adv = double(2, 2, 0.5, 1)[None], double(2, -1, 2, 3)[None]
    logp, mask = ratio.log().requires_grad_(), ALL[None]
    selected = torch.tensor([[False, False, False, True]])
    loss, stats = padded_loss("clip_cov")(logp, torch.zeros_like(logp), adv, mask, CONFIG, selected)
    loss.sum().backward()
    assert loss[0].tolist() == pytest.approx([-2.6, 2, -1, 0])
    assert logp.grad[0].tolist() == pytest.approx([0, 2, -1, 0])
    assert stats["cov_selected"][0].tolist() == [0, 0, 0, 1] and stats["pg_clipfrac"][0].tolist() == [1, 0, 0, 0]


def test_kl_cov_by_hand():
    """The gradient is -A r, and 0.25 sign(log r) more where selected: towards the old policy from both sides."""
    ratio, adv = double(2, 2, 0.5, 1)[None], double(2, -1, 0, 3)[None]
    logp, selected = ratio.log().requires_grad_(), torch.tensor([[True, False, True, True]])
    loss, stats = padded_loss("kl_cov")(logp, torch.zeros_like(logp), adv, ALL[None], CONFIG, selected)
    loss.sum().backward()
    assert loss[0].tolist() == pytest.approx([-4 + 0.25 * math.log(2), 2, 0.25 * math.log(2), -3])
    assert logp.grad[0].tolist() == pytest.approx([-4 + 0.25, 2, -0.25, -3])
    assert stats["cov_selected"][0].tolist() == [1, 0, 1, 1]


def test_rounding_decides_nothing_in_kl_cov():
    """A policy that has not moved, up to rounding of either sign, has the policy gradient alone."""
    old, adv = torch.log(double(0.5, 0.25, 0.5, 0.25))[None], double(1, 1, -1, -1)[None]
    gradients = []
    for error in (1e-7, -1e-7):
        logp = (old + error).requires_grad_()
        padded_loss("kl_cov")(logp, old, adv, ALL[None], CONFIG, ALL[None])[0].sum().backward()
        gradients.append(logp.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients[0], -adv, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_gradients_are_those_of_the_loss(name):
    rng = np.random.default_rng(2)
    old = torch.from_numpy(-rng.exponential(size=(3, 5)))
    logp = (old + torch.from_numpy(rng.normal(scale=0.4, size=(3, 5)))).requires_grad_()
    adv, mask = torch.from_numpy(rng.normal(size=(3, 5))), torch.from_numpy(rng.random((3, 5)) < 0.8)
    selected = torch.from_numpy(rng.random((3, 5)) < 0.5) & mask

    def total(x: torch.Tensor) -> torch.Tensor:
        return padded_loss(name)(x, old, adv, mask, CONFIG, selected)[0].sum()

    assert torch.autograd.gradcheck(total, (logp,))


def test_the_losses_that_select_are_known():
    assert {name for name, entry in registry.POLICY_LOSSES.items() if entry.selects} == {"clip_cov", "kl_cov"}
    for name in ("clip_cov", "kl_cov"):
        select = code_by_path.load_object(registry.POLICY_LOSSES[name].selects)
        config = SimpleNamespace(clip_cov_ratio=0.5, clip_cov_lb=-9.0, clip_cov_ub=9.0, kl_cov_ratio=0.5)
        assert int(select(double(-1, -2, -3, -4), double(1, 2, 3, 5), ALL, config).sum()) == 2
