"""Policy losses, the value loss and the weights that make an objective of them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.algorithm.losses import clip_cov_tokens, covariances, kl_cov_tokens, policy_loss, value_loss
from core.config.registry import LOSS_AGG_MODES, POLICY_LOSSES
from core.config.training_keys import PolicyLossConfig
from core.errors import InputError
from tests import reference
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
    """(log_prob, old_log_prob, advantages, mask): ratios on both sides of every bound, advantages of both signs."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=(rows, width))
    logp = np.minimum(old + rng.normal(scale=0.4, size=(rows, width)), -0.01)
    mask = rng.random((rows, width)) < 0.7
    mask[0] = False
    return (*map(torch.from_numpy, (logp, old, rng.normal(size=(rows, width)), mask)),)


def called(name, logp, old, adv, mask, config=CONFIG):
    """Call a policy loss; one that treats tokens apart gets every second one."""
    apart = (torch.arange(logp.numel()).reshape(logp.shape) % 2 == 0,) if POLICY_LOSSES[name].selects else ()
    return padded_loss(name)(logp, old, adv, mask, config, *apart)


# -- policy losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_losses_are_their_formulas(name, seed):
    logp, old, adv, mask = make(seed)
    expected = reference.policy_loss(name, *(value.numpy() for value in (logp, old, adv, mask)), NUMBERS)
    np.testing.assert_allclose(called(name, logp, old, adv, mask)[0], expected, rtol=1e-12)


def test_vanilla_by_hand():
    """Ratios 2, 2, 0.5, 0.5, 4 with advantages 2, -1, 2, -1, -1; bounds 0.9 and 1.3, dual clip 3."""
    config = SimpleNamespace(**{**NUMBERS, "clip_ratio_c": 3.0})
    ratio = torch.tensor([[2.0, 2, 0.5, 0.5, 4]], dtype=torch.float64)
    logp, adv = ratio.log().requires_grad_(), torch.tensor([[2.0, -1, 2, -1, -1]], dtype=torch.float64)
    mask = torch.ones(1, 5).bool()
    loss, stats = padded_loss("vanilla")(logp, torch.zeros_like(logp), adv, mask, config)
    assert loss[0].tolist() == pytest.approx([-2.6, 2, -1, 0.9, 3])
    loss.sum().backward()
    assert logp.grad[0].tolist() == pytest.approx([0, 2, -1, 0, 0])  # only unclipped tokens move, by -A r
    assert stats["pg_clipfrac"][0].tolist() == [1, 0, 0, 1, 0]
    assert stats["pg_clipfrac_high"][0].tolist() == [1, 0, 0, 0, 0]  # what the upper bound alone holds back
    assert stats["pg_clipfrac_lower"][0].tolist() == [0, 0, 0, 0, 1]
    assert stats["ppo_kl"][0].tolist() == pytest.approx(
        [-math.log(2), -math.log(2), math.log(2), math.log(2), -math.log(4)]
    )


@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo"])
def test_a_bound_that_is_not_given_is_clip_ratio(name):
    logp, old, adv, mask = make(0)
    one = SimpleNamespace(**{**NUMBERS, "clip_ratio": 0.05, "clip_ratio_low": None, "clip_ratio_high": None})
    both = SimpleNamespace(**{**NUMBERS, "clip_ratio_low": 0.05, "clip_ratio_high": 0.05})
    low = SimpleNamespace(**{**NUMBERS, "clip_ratio": 0.05, "clip_ratio_high": None})
    loss = padded_loss(name)
    assert torch.equal(loss(logp, old, adv, mask, one)[0], loss(logp, old, adv, mask, both)[0])
    assert not torch.equal(loss(logp, old, adv, mask, one)[0], loss(logp, old, adv, mask, low)[0])


def test_a_dual_clip_that_would_cut_the_plain_ratio_is_refused():
    with pytest.raises(ValueError, match="clip_ratio_c=1.0"):
        padded_loss("vanilla")(*make(0), SimpleNamespace(**{**NUMBERS, "clip_ratio_c": 1.0}))


@pytest.mark.parametrize("name", ["vanilla", "sapo", "gpg"])
def test_gradients_are_those_of_the_loss(name):
    """Finite differences; away from the kinks, which random ratios are."""
    logp, old, adv, mask = make(1)
    logp.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: padded_loss(name)(x, old, adv, mask, CONFIG)[0].sum(), (logp,))


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(seed=st.integers(0, 10**6), garbage=st.sampled_from([math.nan, math.inf, -1e30]))
@settings(max_examples=10, deadline=None)
def test_what_lies_outside_the_mask_reaches_neither_loss_nor_gradient_nor_stats(name, seed, garbage):
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


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_stats_are_detached_and_of_the_losses_shape(name):
    logp, old, adv, mask = make(0)
    loss, stats = called(name, logp.requires_grad_(), old, adv, mask)
    assert loss.requires_grad and loss.dtype == torch.float64
    for value in stats.values():
        assert value.shape == loss.shape and not value.requires_grad and value.dtype == torch.float32


@pytest.mark.parametrize("name", ["vanilla", "gspo", "sapo", "cispo"])
def test_at_the_old_policy_the_gradient_is_the_policy_gradient(name):
    _, old, adv, mask = make(4)
    logp = old.clone().requires_grad_()
    padded_loss(name)(logp, old, adv, mask, CONFIG)[0].sum().backward()
    torch.testing.assert_close(logp.grad, torch.where(mask, -adv, 0))


def test_a_loss_of_the_user_s_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def loss(x):\n    return -x.advantages, {}\n")
    logp, old, adv, mask = make(0)
    assert torch.equal(padded_loss(f"{path}:loss")(logp, old, adv, mask, CONFIG)[0], -adv * mask)
    with pytest.raises(InputError, match="policy_loss.loss_mode=vanila: choose one of .*vanilla"):
        policy_loss("vanila")


def test_gradient_of_gspo_is_that_of_its_sequence_objective():
    """With one advantage a row, the token form has the gradient of ``-A s`` summed over the row's tokens."""
    logp, old, adv, mask = make(2)
    adv = adv[:, :1].expand_as(adv).clone()
    logp.requires_grad_()
    padded_loss("gspo")(logp, old, adv, mask, CONFIG)[0].sum().backward()

    def objective(x):
        loss = reference.policy_loss("gspo", x, old.numpy(), adv.numpy(), mask.numpy(), NUMBERS)
        return loss.sum()

    numeric, base = np.zeros(logp.shape), logp.detach().numpy()
    for at in np.ndindex(*base.shape):
        step = np.zeros_like(base)
        step[at] = 1e-6
        numeric[at] = (objective(base + step) - objective(base - step)) / 2e-6
    np.testing.assert_allclose(logp.grad, numeric, atol=1e-7)
    assert np.abs(numeric).max() > 0.1


def test_gradient_of_cispo_is_the_clipped_weight_on_every_token():
    logp, old, adv, mask = make(3)
    logp.requires_grad_()
    padded_loss("cispo")(logp, old, adv, mask, CONFIG)[0].sum().backward()
    weight = (logp - old).exp().clamp(0.9, 1.3)
    torch.testing.assert_close(logp.grad, torch.where(mask, -weight * adv, 0).detach())


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


# -- tokens that a loss selects ---------------------------------------------------------------------------------------

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
def test_gradients_of_losses_that_select(name):
    rng = np.random.default_rng(2)
    old = torch.from_numpy(-rng.exponential(size=(3, 5)))
    logp = (old + torch.from_numpy(rng.normal(scale=0.4, size=(3, 5)))).requires_grad_()
    adv, mask = torch.from_numpy(rng.normal(size=(3, 5))), torch.from_numpy(rng.random((3, 5)) < 0.8)
    selected = torch.from_numpy(rng.random((3, 5)) < 0.5) & mask

    def total(x: torch.Tensor) -> torch.Tensor:
        return padded_loss(name)(x, old, adv, mask, CONFIG, selected)[0].sum()

    assert torch.autograd.gradcheck(total, (logp,))


# -- the value loss ---------------------------------------------------------------------------------------------------


def test_value_loss_by_hand():
    """Old value 1, bound 0.5. New values 3, 3, 1.2 against returns 0, 4, 2: clipped to 1.5, 1.5, 1.2."""
    values = torch.tensor([[3.0, 3.0, 1.2]], requires_grad=True)
    returns, old = torch.tensor([[0.0, 4.0, 2.0]]), torch.ones(1, 3)
    loss, stats = value_loss(values, returns, old, 0.5, torch.ones(1, 3, dtype=torch.bool))
    assert loss[0].tolist() == pytest.approx([4.5, 3.125, 0.32])
    assert stats["vf_clipfrac"].tolist() == [[0, 1, 0]]
    loss.sum().backward()
    assert values.grad[0].tolist() == pytest.approx([3, 0, -0.8])


def test_value_loss_gradient_and_mask():
    values, returns, old, mask = make(5)
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, returns, old, 0.1, mask)[0].sum(), (values,))
    dirty = [x.detach().masked_fill(~mask, math.nan) for x in (values, returns, old)]
    clean = [x.detach().masked_fill(~mask, 0) for x in (values, returns, old)]
    for results in (value_loss(*dirty, 0.1, mask), value_loss(*clean, 0.1, mask)):
        assert not results[0][~mask].any() and not results[1]["vf_clipfrac"][~mask].any()
    assert torch.equal(value_loss(*dirty, 0.1, mask)[0], value_loss(*clean, 0.1, mask)[0])


# -- weights ----------------------------------------------------------------------------------------------------------

masks = st.integers(0, 10**6).map(lambda seed: make(seed)[3])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_weights_are_the_published_aggregations(mode, seed):
    loss, _, _, mask = make(seed)
    expected = reference.aggregate(loss.numpy(), mask.numpy(), mode, width=11)
    got = (loss * padded_loss_weights(mask.double(), mode, scale_factor=11)).sum()
    assert float(got) == pytest.approx(expected, rel=1e-9, abs=1e-12)


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


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(seed=st.integers(0, 10**6), pieces=st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_parts_add_up_to_the_whole_however_the_rows_are_split(mode, seed, pieces):
    """Micro-batches and ranks slice the step's weights: one objective."""
    loss, _, _, mask = make(seed)
    weight = padded_loss_weights(mask.double(), mode, scale_factor=6)
    whole = float((loss * weight).sum())
    parts = np.array_split(np.random.default_rng(seed).permutation(len(loss)), pieces)
    assert sum(float((loss[p] * weight[p]).sum()) for p in parts) == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@given(mask=masks)
@settings(max_examples=15, deadline=None)
def test_the_means_weights_sum_to_one(mode, mask):
    assert float(padded_loss_weights(mask.double(), mode).sum()) == pytest.approx(float(mask.any()))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_step_without_a_token_weighs_nothing(mode):
    assert not padded_loss_weights(torch.zeros(3, 4).bool(), mode).any()


def test_an_unknown_mode_names_the_known_ones():
    with pytest.raises(ValueError, match="loss_agg_mode=mean: choose one of token-mean"):
        padded_loss_weights(torch.ones(1, 1).bool(), "mean")
