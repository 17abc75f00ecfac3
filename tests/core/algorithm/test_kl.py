"""KL estimators, the penalty in the reward, and the controllers of its coefficient."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.algorithm.losses import KLController, kl_penalty, kl_rewards
from core.config.registry import KL_KINDS
from tests import reference
from tests.padded import batch_of_padded


@pytest.mark.parametrize("kind", KL_KINDS)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.01, 1.0, 30.0]))
@settings(max_examples=10, deadline=None)
def test_estimators_are_their_formulas(kind, seed, scale):
    rng = np.random.default_rng(seed)
    logp, ref = -rng.exponential(size=(2, 9)), -rng.exponential(size=(2, 9)) * scale
    got = kl_penalty(torch.from_numpy(logp), torch.from_numpy(ref), kind)
    np.testing.assert_allclose(got, reference.kl(kind, logp, ref), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_gradients_are_those_of_the_value_or_of_k2_in_straight_through_forms(kind):
    difference = torch.tensor([-1.5, -0.25, 0.5, 2.0], dtype=torch.float64)
    logp, ref = difference.clone().requires_grad_(), torch.zeros(4, dtype=torch.float64)
    if not kind.endswith("+"):
        assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref, kind), (logp,))
        return
    value = kl_penalty(logp, ref, kind)
    value.sum().backward()
    torch.testing.assert_close(logp.grad, difference)
    torch.testing.assert_close(value.detach(), kl_penalty(difference, ref, kind[:-1]))


def test_estimators_estimate_the_kl_and_the_straight_through_form_its_gradient():
    """Over the exact expectation of a small distribution; plain k1's expected gradient is zero."""
    logits, q = torch.tensor([0.3, -0.2, 0.1]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    x = logits.clone().requires_grad_()
    p = x.log_softmax(-1).exp()
    exact = (p * (p / q).log()).sum()
    (gradient,) = torch.autograd.grad(exact, x)
    for kind, unbiased, expected in (
        ("k3+", True, gradient),
        ("k1+", True, gradient),
        ("k2", False, gradient),
        ("k1", True, 0 * gradient),
    ):
        x = logits.clone().requires_grad_()
        estimate = (p.detach() * kl_penalty(x.log_softmax(-1), q.log(), kind)).sum()
        assert (estimate.item() == pytest.approx(exact.item())) == unbiased
        torch.testing.assert_close(torch.autograd.grad(estimate, x)[0], expected, atol=1e-12, rtol=1e-9)


def test_a_mask_keeps_garbage_out():
    logp = torch.tensor([0.5, math.nan], requires_grad=True)
    value = kl_penalty(logp, torch.tensor([0.0, math.inf]), "k3", torch.tensor([True, False]))
    value.sum().backward()
    assert value[1] == 0 and logp.grad[1] == 0 and value[0] > 0


def test_penalty_in_the_reward_by_hand():
    """d = 1, 3 in a row of two and 5 in a row of one: mean of row means (2 + 5 + 0) / 3, not mean of tokens 3."""
    old = torch.tensor([[1.0, 3.0], [5.0, 99.0], [7.0, 7.0]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    fields = {"response_mask": mask, "old_log_probs": old, "ref_log_prob": torch.zeros(3, 2)}
    batch = batch_of_padded(attention_mask=torch.ones(3, 2).bool(), **fields)
    controller = KLController("adaptive", 0.5, target_kl=10, horizon=30)
    rewards, after, metrics = kl_rewards(batch, controller, "k1")
    assert rewards.tolist() == [-0.5, -1.5, -2.5, 0, 0, 0]
    assert metrics == {"actor/reward_kl_penalty": pytest.approx(7 / 3), "actor/reward_kl_penalty_coeff": 0.5}
    assert after.value == pytest.approx(0.5 * (1 - 0.2 * 3 / 30)) and controller.value == 0.5


def test_adaptive_controller_by_hand_and_from_its_state():
    controller = KLController("adaptive", 0.1, target_kl=2.0, horizon=100)
    assert controller.updated(2.2, 50).value == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    assert controller.updated(9.0, 50).value == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    assert controller.updated(0.0, 50).value == pytest.approx(0.1 * (1 - 0.2 * 0.5))
    assert KLController("fixed", 0.1).updated(9.0, 50).value == 0.1
    moved = controller.updated(9.0, 50)
    assert controller.with_state(moved.state_dict()) == moved
    assert KLController("fixed", 0.3).with_state({"value": 0.1}).value == 0.3  # a fixed one is what is configured
