"""Policy losses beyond those of the four papers: golden vectors, and their gradients.

What holds for every policy loss is in tests/core/algorithm/test_losses.py, which tries these, too.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.config import registry
from core.config.registry import POLICY_LOSSES
from tests import reference
from tests.core.algorithm.test_losses import CONFIG, NUMBERS, make
from tests.golden_io import check, parameters
from tests.golden_variants import ADAPTERS
from tests.padded import padded_loss


@pytest.mark.parametrize("case", parameters(name for name in ADAPTERS if name.startswith("policy_")))
def test_golden_losses(case):
    for precision in ("f64", "f32"):
        check(ADAPTERS[case.file](case, precision), case.want(precision))


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


def test_dppo_by_hand():
    """Old and new probabilities, advantages; bounds 0.1 down and 0.3 up, weights of at most 1.5.

    A rare token that becomes ten times as likely (0.001 to 0.01) keeps its gradient, and so does one that moves against
    its advantage; 0.5 to 0.9 and 0.9 to 0.7 do not.
    """
    old = torch.tensor([[0.001, 0.5, 0.9, 0.9, 0.2, 0.2]], dtype=torch.float64)
    new = torch.tensor([[0.01, 0.9, 0.7, 0.7, 0.4, 0.19]], dtype=torch.float64)
    adv = torch.tensor([[1.0, 1.0, -1.0, 2.0, 1.0, -3.0]], dtype=torch.float64)
    logp, mask = new.log().requires_grad_(), torch.ones(1, 6).bool()
    _, stats = tv = padded_loss("dppo_tv")(logp, old.log(), adv, mask, CONFIG)
    tv[0].sum().backward()
    assert logp.grad[0].tolist() == pytest.approx([-1.5, 0, 0, -2 * 0.7 / 0.9, -1.5, 3 * 0.95])
    assert stats["pg_clipfrac"][0].tolist() == [0, 1, 1, 0, 0, 0]
    assert stats["pg_clipfrac_lower"][0].tolist() == [1, 0, 0, 0, 1, 0]
    # KL: 0.5 log(0.5/0.9) + 0.5 log(0.5/0.1) = 0.511; 0.9 log(0.9/0.7) + 0.1 log(0.1/0.3) = 0.116; 0.092 from 0.2 up.
    assert padded_loss("dppo_kl")(logp, old.log(), adv, mask, CONFIG)[1]["pg_clipfrac"][0].tolist() == [
        0,
        1,
        1,
        0,
        0,
        0,
    ]
    near = SimpleNamespace(**{**NUMBERS, "clip_ratio_high": None, "clip_ratio": 0.09, "clip_ratio_low": 0.12})
    assert padded_loss("dppo_kl")(logp, old.log(), adv, mask, near)[1]["pg_clipfrac"][0].tolist() == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_gradient_of_dppo_is_the_masked_weight_and_of_certain_tokens_finite(name):
    logp, old, adv, mask = make(3)
    logp[1, :2], old[1, :2] = torch.tensor([0.0, -1e-12]), torch.tensor([-1e-3, 0.0])
    logp.requires_grad_()
    loss, stats = padded_loss(name)(logp, old, adv, mask, CONFIG)
    loss.sum().backward()
    kept = mask & (stats["pg_clipfrac"] == 0)
    assert kept.any() and (mask & ~kept).any()
    torch.testing.assert_close(logp.grad, torch.where(kept, -(logp - old).exp().clamp(max=1.5) * adv, 0).detach())
    assert stats["ppo_kl"].isfinite().all()


def test_gradient_of_cispo_is_the_clipped_weight_on_every_token():
    logp, old, adv, mask = make(3)
    logp.requires_grad_()
    padded_loss("cispo")(logp, old, adv, mask, CONFIG)[0].sum().backward()
    weight = (logp - old).exp().clamp(0.9, 1.3)
    torch.testing.assert_close(logp.grad, torch.where(mask, -weight * adv, 0).detach())


def test_losses_that_fix_their_aggregation():
    fixed = {name: entry.aggregation for name, entry in POLICY_LOSSES.items() if entry.aggregation}
    assert set(fixed) == {"gspo", "geo_mean", "sapo"} and set(fixed.values()) == {"seq-mean-token-mean"}
    assert registry.policy_loss("my.module:loss").aggregation is None


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
