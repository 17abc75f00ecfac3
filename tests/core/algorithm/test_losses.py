"""Policy losses, the value loss and the weights that make an objective of them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.algorithm.losses import policy_loss, value_loss
from core.config.registry import LOSS_AGG_MODES, POLICY_LOSSES
from core.errors import InputError
from tests import reference
from tests.golden_adapters import ADAPTERS
from tests.golden_io import check, parameters
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
FILES = [name for name in ADAPTERS if name.startswith(("policy_", "agg_loss", "value_loss"))]


@pytest.mark.parametrize("case", parameters(FILES))
def test_golden_losses(case):
    for precision in ("f64", "f32"):
        check(ADAPTERS[case.file](case, precision), case.want(precision))


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


@pytest.mark.parametrize("name", ["vanilla", "gspo", "sapo", "cispo", "dppo_tv", "dppo_kl"])
def test_at_the_old_policy_the_gradient_is_the_policy_gradient(name):
    _, old, adv, mask = make(4)
    logp = old.clone().requires_grad_()
    padded_loss(name)(logp, old, adv, mask, CONFIG)[0].sum().backward()
    torch.testing.assert_close(logp.grad, torch.where(mask, -adv, 0))


def test_a_loss_of_the_user_s_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def loss(logp, old, adv, mask, config):\n    return -adv * mask, {}\n")
    logp, old, adv, mask = make(0)
    assert torch.equal(padded_loss(f"{path}:loss")(logp, old, adv, mask, CONFIG)[0], -adv * mask)
    with pytest.raises(InputError, match="policy_loss.loss_mode=vanila: choose one of .*vanilla"):
        policy_loss("vanila")


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
GROUP = torch.tensor([7, 7, 3, 3, 7])  # of the rows that make returns


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_weights_are_the_published_aggregations(mode, seed):
    loss, _, _, mask = make(seed)
    expected = reference.aggregate(loss.numpy(), mask.numpy(), mode, width=11, group=GROUP.numpy())
    got = (loss * padded_loss_weights(mask.double(), mode, scale_factor=11, group_B=GROUP)).sum()
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
    one, two, empty = torch.tensor([4, 4, 4]), torch.tensor([4, 9, 9]), torch.tensor([4, 4, 9])
    assert first_two("prompt-mean-token-mean", group_B=one) == pytest.approx([1 / 4, 1 / 4])
    assert first_two("prompt-mean-token-mean", group_B=two) == pytest.approx([1 / 6, 1 / 2])
    assert first_two("prompt-mean-token-mean", group_B=empty) == pytest.approx([1 / 4, 1 / 4])  # 9 has no token


def test_every_prompt_weighs_the_same_however_long_its_answers_are():
    mask, group = make(3)[3], GROUP
    weight = padded_loss_weights(mask.double(), "prompt-mean-token-mean", group_B=group)
    assert [float(weight[group == one].sum()) for one in (3, 7)] == pytest.approx([0.5, 0.5], abs=1e-12)
    with pytest.raises(ValueError, match="prompt-mean-token-mean needs the group"):
        padded_loss_weights(mask, "prompt-mean-token-mean")


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(seed=st.integers(0, 10**6), pieces=st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_parts_add_up_to_the_whole_however_the_rows_are_split(mode, seed, pieces):
    """Micro-batches and ranks slice the step's weights: one objective."""
    loss, _, _, mask = make(seed)
    weight = padded_loss_weights(mask.double(), mode, scale_factor=6, group_B=GROUP)
    whole = float((loss * weight).sum())
    parts = np.array_split(np.random.default_rng(seed).permutation(len(loss)), pieces)
    assert sum(float((loss[p] * weight[p]).sum()) for p in parts) == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "prompt-mean-token-mean"])
@given(mask=masks)
@settings(max_examples=15, deadline=None)
def test_the_means_weights_sum_to_one(mode, mask):
    assert float(padded_loss_weights(mask.double(), mode, group_B=GROUP).sum()) == pytest.approx(float(mask.any()))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_step_without_a_token_weighs_nothing(mode):
    assert not padded_loss_weights(torch.zeros(3, 4).bool(), mode, group_B=torch.zeros(3)).any()


def test_an_unknown_mode_names_the_known_ones():
    with pytest.raises(ValueError, match="loss_agg_mode=mean: choose one of token-mean"):
        padded_loss_weights(torch.ones(1, 1).bool(), "mean")
