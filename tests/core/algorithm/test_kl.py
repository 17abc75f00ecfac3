"""KL estimators and the controllers of a coefficient, beyond what tests/golden has of both."""

import math

import pytest
import torch

from core.algorithm.kl import KLController, kl_penalty


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
        torch.testing.assert_close(
            torch.autograd.grad(estimate, x)[0], expected, atol=1e-12, rtol=1e-9
        )


def test_a_mask_keeps_garbage_out():
    logp = torch.tensor([0.5, math.nan], requires_grad=True)
    value = kl_penalty(logp, torch.tensor([0.0, math.inf]), "k3", torch.tensor([True, False]))
    value.sum().backward()
    assert value[1] == 0 and logp.grad[1] == 0 and value[0] > 0


def test_an_unknown_kind_is_an_error_and_not_another_kind():
    with pytest.raises(
        NotImplementedError, match="KL estimator 'k4' is not known: choose one of kl"
    ):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def test_controllers_come_back_from_their_state():
    configured = KLController("adaptive", 0.1, target_kl=2.0, horizon=100)
    moved = configured.updated(9.0, 50)
    assert configured.with_state(moved.state_dict()) == moved != configured
    # A fixed one is what is configured
    assert KLController("fixed", 0.3).with_state({"value": 0.1}).value == 0.3
