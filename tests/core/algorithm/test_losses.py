"""Policy losses, the value loss and the weights of an objective: by hand. Formulas are held to
tests/golden."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.algorithm.losses import clip_cov_tokens, covariances, kl_cov_tokens, value_loss
from core.config.registry import LOSS_AGG_MODES, POLICY_LOSSES
from core.config.training_keys import PolicyLossConfig
from tests.padded import padded_loss, padded_loss_weights

NUMBERS = {
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.1,
    "clip_ratio_high": 0.3,
    "clip_ratio_c": 1.5,
    "tau_pos": 1.0,
    "tau_neg": 1.7,
}
CONFIG = SimpleNamespace(**NUMBERS, policy_loss=SimpleNamespace(ppo_kl_coef=0.25))


def make(seed: int, rows: int = 5, width: int = 6):
    """(log_prob, old_log_prob, advantages, mask): ratios on both sides of every bound, advantages
    of both signs."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=(rows, width))
    logp = np.minimum(old + rng.normal(scale=0.4, size=(rows, width)), -0.01)
    mask = rng.random((rows, width)) < 0.7
    mask[0] = False
    return (*map(torch.from_numpy, (logp, old, rng.normal(size=(rows, width)), mask)),)


def called(name, logp, old, adv, mask, config=CONFIG):
    """Call a policy loss; one that treats tokens apart gets every second one."""
    apart = (
        (torch.arange(logp.numel()).reshape(logp.shape) % 2 == 0,)
        if POLICY_LOSSES[name].selects
        else ()
    )
    return padded_loss(name)(logp, old, adv, mask, config, *apart)


def test_vanilla_by_hand():
    """Ratios 2, 2, 0.5, 0.5, 4 with advantages 2, -1, 2, -1, -1; bounds 0.9 and 1.3, dual clip
    3."""
    config = SimpleNamespace(**{**NUMBERS, "clip_ratio_c": 3.0})
    ratio = torch.tensor([[2.0, 2, 0.5, 0.5, 4]], dtype=torch.float64)
    logp, adv = (
        ratio.log().requires_grad_(),
        torch.tensor([[2.0, -1, 2, -1, -1]], dtype=torch.float64),
    )
    mask = torch.ones(1, 5).bool()
    loss, stats = padded_loss("vanilla")(logp, torch.zeros_like(logp), adv, mask, config)
    assert loss[0].tolist() == pytest.approx([-2.6, 2, -1, 0.9, 3])
    loss.sum().backward()
    # Only unclipped tokens move, by -A r
    assert logp.grad[0].tolist() == pytest.approx([0, 2, -1, 0, 0])
    assert stats["pg_clipfrac"][0].tolist() == [1, 0, 0, 1, 0]
    # What the upper bound alone holds back
    assert stats["pg_clipfrac_high"][0].tolist() == [1, 0, 0, 0, 0]
    assert stats["pg_clipfrac_lower"][0].tolist() == [0, 0, 0, 0, 1]
    assert stats["ppo_kl"][0].tolist() == pytest.approx(
        [-math.log(2), -math.log(2), math.log(2), math.log(2), -math.log(4)]
    )


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(seed=st.integers(0, 10**6), garbage=st.sampled_from([math.nan, math.inf, -1e30]))
@settings(max_examples=10, deadline=None)
def test_what_lies_outside_the_mask_reaches_neither_loss_nor_gradient_nor_stats(
    name, seed, garbage
):
    results = []
    for dirty in (False, True):
        tensors = make(seed)
        mask = tensors[3]
        logp, old, adv = (x.masked_fill(~mask, garbage) if dirty else x for x in tensors[:3])
        logp.requires_grad_()
        loss, stats = called(name, logp, old, adv, mask)
        loss.sum().backward()
        results.append((loss.detach(), logp.grad, *stats.values()))
        assert not any(value[~mask].any() for value in results[-1])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


def test_a_loss_of_the_user_s_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def loss(x):\n    return -x.advantages, {}\n")
    logp, old, adv, mask = make(0)
    assert torch.equal(padded_loss(f"{path}:loss")(logp, old, adv, mask, CONFIG)[0], -adv * mask)
    with pytest.raises(ValueError, match="loss_agg_mode=mean: choose one of token-mean"):
        padded_loss_weights(torch.ones(1, 1).bool(), "mean")
    # A dual clip that would cut the plain ratio
    with pytest.raises(ValueError, match="clip_ratio_c=1.0"):
        padded_loss("vanilla")(
            logp, old, adv, mask, SimpleNamespace(**{**NUMBERS, "clip_ratio_c": 1.0})
        )


def test_geo_mean_is_the_geometric_mean_of_bounded_ratios():
    """Two sequences: A > 0 is bounded above, A < 0 below, each token by itself before the mean."""
    config = SimpleNamespace(clip_ratio_low=0.1, clip_ratio_high=0.2)
    logp = torch.tensor([[0.5, -0.3], [0.05, -0.4]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros_like(logp), torch.ones_like(logp).bool()
    adv = torch.tensor([[2.0, 2.0], [-1.0, -1.0]], dtype=torch.float64)
    loss, stats = padded_loss("geo_mean")(logp, old, adv, mask, config)
    ratios = torch.tensor([(0.2 - 0.3) / 2, (0.05 - 0.1) / 2], dtype=torch.float64).exp()
    torch.testing.assert_close(loss, -adv * ratios[:, None])
    loss.mean(1).sum().backward()
    expected = [[0.0, -2.0 * ratios[0] / 2], [ratios[1] / 2, 0.0]]
    torch.testing.assert_close(logp.grad, torch.tensor(expected, dtype=torch.float64))
    assert stats["pg_clipfrac"].sum() == 2 and stats["pg_clipfrac_lower"].sum() == 1


ALL = torch.ones(4).bool()
QUARTER = 0.25 * math.log(2)


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


def test_kl_cov_takes_the_highest_covariances_one_at_least_and_of_equal_ones_the_first():
    step = random_step(0)
    highest = (
        covariances(*step)
        .masked_fill(~step[2], -math.inf)
        .topk(int(0.05 * int(step[2].sum())))
        .indices
    )
    chosen = kl_cov_tokens(*step, PolicyLossConfig(kl_cov_ratio=0.05))
    assert chosen.nonzero().flatten().tolist() == sorted(highest.tolist())
    logp, adv = double(-1, -1, -2, -2), double(1, 1, -1, -1)
    for ratio, carries, count in ((0.3, ALL, 1), (0.3, ~ALL, 0), (0.5, ALL, 2)):
        chosen = kl_cov_tokens(logp, adv, carries, PolicyLossConfig(kl_cov_ratio=ratio))
        assert chosen.tolist() == [True] * count + [False] * (4 - count)


def test_clip_cov_draws_between_the_bounds_and_repeats():
    step, bounds = random_step(0), dict(clip_cov_lb=0.5, clip_cov_ub=2.0)
    config = PolicyLossConfig(clip_cov_ratio=0.02, **bounds)
    order, covariance = clip_cov_tokens(*step, config), covariances(*step)
    chosen, inside = order > 0, (covariance > 0.5) & (covariance < 2.0) & step[2]
    # The others wait
    assert torch.equal(order != 0, inside) and len(order[inside].unique()) == int(inside.sum())
    assert int(chosen.sum()) == int(0.02 * int(step[2].sum())) < int(inside.sum())
    assert not (chosen & ~inside).any()
    assert torch.equal(clip_cov_tokens(*step, config), order)
    assert torch.equal(
        clip_cov_tokens(*step, PolicyLossConfig(clip_cov_ratio=1.0, **bounds)) > 0, inside
    )


@pytest.mark.parametrize(
    ("name", "selected", "adv", "losses", "gradient"),
    # Ratios 2, 2, 0.5, 1: what clip_cov selects has neither loss nor gradient, kl_cov adds 0.25
    # sign(log r)
    [
        ("clip_cov", [0, 0, 0, 1], [2, -1, 2, 3], [-2.6, 2, -1, 0], [0, 2, -1, 0]),
        ("kl_cov", [1, 0, 1, 1], [2, -1, 0, 3], [QUARTER - 4, 2, QUARTER, -3], [-3.75, 2, -0.25, -3]),
    ],
)  # fmt: skip
def test_losses_that_select_by_hand(name, selected, adv, losses, gradient):
    logp = double(2, 2, 0.5, 1)[None].log().requires_grad_()
    chosen = torch.tensor([selected]).bool()
    loss, stats = padded_loss(name)(
        logp, torch.zeros_like(logp), double(*adv)[None], ALL[None], CONFIG, chosen
    )
    loss.sum().backward()
    assert loss[0].tolist() == pytest.approx(losses) and logp.grad[0].tolist() == pytest.approx(
        gradient
    )
    assert stats["cov_selected"][0].tolist() == selected


def test_rounding_decides_nothing_in_kl_cov():
    """A policy that has not moved, up to rounding of either sign, has the policy gradient alone."""
    old, adv = torch.log(double(0.5, 0.25, 0.5, 0.25))[None], double(1, 1, -1, -1)[None]
    for error in (1e-7, -1e-7):
        logp = (old + error).requires_grad_()
        padded_loss("kl_cov")(logp, old, adv, ALL[None], CONFIG, ALL[None])[0].sum().backward()
        torch.testing.assert_close(logp.grad, -adv, rtol=0, atol=1e-6)


def test_value_loss_by_hand():
    """Old value 1, bound 0.5. New values 3, 3, 1.2 against returns 0, 4, 2: clipped to 1.5, 1.5,
    1.2."""
    values = torch.tensor([[3.0, 3.0, 1.2]], requires_grad=True)
    returns, old = torch.tensor([[0.0, 4.0, 2.0]]), torch.ones(1, 3)
    loss, stats = value_loss(values, returns, old, 0.5, torch.ones(1, 3, dtype=torch.bool))
    assert loss[0].tolist() == pytest.approx([4.5, 3.125, 0.32])
    assert stats["vf_clipfrac"].tolist() == [[0, 1, 0]]
    loss.sum().backward()
    assert values.grad[0].tolist() == pytest.approx([3, 0, -0.8])


def test_what_lies_outside_the_mask_does_not_reach_the_value_loss():
    values, returns, old, mask = make(5)
    dirty, clean = (
        [x.masked_fill(~mask, fill) for x in (values, returns, old)] for fill in (math.nan, 0)
    )
    loss, stats = value_loss(*dirty, 0.1, mask)
    assert torch.equal(loss, value_loss(*clean, 0.1, mask)[0])
    assert not loss[~mask].any() and not stats["vf_clipfrac"][~mask].any()


def test_weights_by_hand():
    """Rows of 3, 1 and 0 tokens: four tokens, two rows that count."""
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()

    def first_two(mode, **kwargs):
        weight = padded_loss_weights(mask, mode, **kwargs)
        assert not weight[~mask].any() and weight.dtype == torch.float32
        return [weight[0, 0].item(), weight[1, 1].item()]

    assert first_two("token-mean") == pytest.approx([1 / 4, 1 / 4])
    assert first_two("seq-mean-token-mean") == pytest.approx([1 / 6, 1 / 2])
    assert first_two("seq-mean-token-sum") == pytest.approx([1 / 2, 1 / 2])
    assert first_two("seq-mean-token-sum-norm", scale_factor=5) == pytest.approx([1 / 10, 1 / 10])
    assert not any(
        padded_loss_weights(torch.zeros(3, 4).bool(), mode).any() for mode in LOSS_AGG_MODES
    )
