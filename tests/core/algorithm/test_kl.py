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


@pytest.mark.parametrize("kind", [kind for kind in KL_KINDS if not kind.endswith("+")])
def test_gradients_are_those_of_the_value(kind):
    ref = -torch.rand(8, dtype=torch.float64)
    logp = (ref + torch.linspace(-1, 1, 8, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref, kind), (logp,))


@pytest.mark.parametrize("kind", [kind for kind in KL_KINDS if kind.endswith("+")])
def test_straight_through_forms_have_the_gradient_of_k2(kind):
    difference = torch.tensor([-1.5, -0.25, 0.5, 2.0], dtype=torch.float64)
    logp = difference.clone().requires_grad_()
    value = kl_penalty(logp, torch.zeros(4, dtype=torch.float64), kind)
    value.sum().backward()
    torch.testing.assert_close(logp.grad, difference)
    torch.testing.assert_close(value.detach(), kl_penalty(difference, torch.zeros(4).double(), kind[:-1]))


def test_by_hand():
    """p = 2 q (d = log 2) and p = q / 2, which tell k1, k2, k3 and the sign apart."""
    d = math.log(2)
    logp, ref = torch.tensor([d, -d]), torch.zeros(2)
    assert kl_penalty(logp, ref, "k1").tolist() == pytest.approx([d, -d])
    assert kl_penalty(logp, ref, "abs").tolist() == pytest.approx([d, d])
    assert kl_penalty(logp, ref, "k2").tolist() == pytest.approx([d * d / 2, d * d / 2])
    assert kl_penalty(logp, ref, "k3").tolist() == pytest.approx([d - 0.5, 1 - d])


def test_estimators_estimate_the_kl():
    """Over the exact expectation of a small distribution k1 and k3 are unbiased; k2 is close."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    exact = float((p * (p / q).log()).sum())
    means = {kind: float((p * kl_penalty(p.log(), q.log(), kind)).sum()) for kind in ("k1", "k2", "k3")}
    assert means["k1"] == pytest.approx(exact) and means["k3"] == pytest.approx(exact)
    assert means["k2"] == pytest.approx(exact, rel=0.1) and means["k2"] != pytest.approx(exact, rel=0.01)


def test_expected_gradient_of_the_straight_through_form_is_the_kl_s():
    """Of ``E_p[k3+]`` differentiated through the samples' log-probs only; plain k1's is zero."""
    logits, q = torch.tensor([0.3, -0.2, 0.1]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    x = logits.clone().requires_grad_()
    p = x.log_softmax(-1).exp()
    exact = torch.autograd.grad((p * (p / q).log()).sum(), x)[0]
    for kind, expected in (("k3+", exact), ("k1+", exact), ("k2", exact), ("k1", torch.zeros(3).double())):
        x = logits.clone().requires_grad_()
        logp = x.log_softmax(-1)
        estimate = (logp.exp().detach() * kl_penalty(logp, q.log(), kind)).sum()
        torch.testing.assert_close(torch.autograd.grad(estimate, x)[0], expected, atol=1e-12, rtol=1e-9)


def test_a_mask_keeps_garbage_out():
    logp = torch.tensor([0.5, math.nan], requires_grad=True)
    value = kl_penalty(logp, torch.tensor([0.0, math.inf]), "k3", torch.tensor([True, False]))
    value.sum().backward()
    assert value[1] == 0 and logp.grad[1] == 0 and value[0] > 0


@pytest.mark.parametrize("kind", ["full", "k4", "k3++"])
def test_an_unknown_kind_names_the_known_ones(kind):
    with pytest.raises(NotImplementedError, match="choose one of kl, k1, abs"):
        kl_penalty(torch.zeros(1), torch.zeros(1), kind)


# -- in the reward ----------------------------------------------------------------------------------------------------


def test_penalty_by_hand():
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


# -- controllers ------------------------------------------------------------------------------------------------------


def test_adaptive_controller_by_hand():
    controller = KLController("adaptive", 0.1, target_kl=2.0, horizon=100)
    assert controller.updated(2.2, 50).value == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    assert controller.updated(9.0, 50).value == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    assert controller.updated(0.0, 50).value == pytest.approx(0.1 * (1 - 0.2 * 0.5))
    assert KLController("fixed", 0.1).updated(9.0, 50).value == 0.1


def test_controllers_come_back_from_their_state():
    configured = KLController("adaptive", 0.1, target_kl=2.0, horizon=100)
    moved = configured.updated(9.0, 50)
    assert configured.with_state(moved.state_dict()) == moved
    assert KLController("fixed", 0.3).with_state({"value": 0.1}).value == 0.3  # a fixed one is what is configured
