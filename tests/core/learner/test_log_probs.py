"""The chunked head: the numbers of an explicit softmax, its gradients, and what it must not
materialise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from core.learner.log_probs import KeptIds, token_log_probs_and_entropy
from tests import reference


def make(n=7, v=11, h=5, dtype=torch.float64, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((n, h), (v, h), (v,))
    )
    labels = torch.randint(0, v, (n,), generator=generator)
    return *(x.requires_grad_(grad) for x in (hidden, weight, bias)), labels


def naive(hidden, weight, labels, temperature=1.0, bias=None):
    logits = torch.nn.functional.linear(hidden, weight, bias).to(
        torch.promote_types(hidden.dtype, torch.float32)
    )
    log_probs = torch.log_softmax(logits / temperature, -1)
    return log_probs.gather(1, labels[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


CHUNKS = [1, 25, 22, 10**6]  # one token at a time; two, with a rest; exactly two; all at once


@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    chunk=st.sampled_from(CHUNKS),
)
@settings(max_examples=30, deadline=None)
def test_it_is_the_softmax(seed, temperature, chunk):
    hidden, weight, bias, labels = make(seed=seed, grad=False)
    for b in (None, bias):
        got = token_log_probs_and_entropy(
            hidden, weight, labels, temperature=temperature, bias=b, chunk_elements=chunk
        )
        arrays = [x.numpy() for x in (hidden, weight, labels)]
        want = reference.head(*arrays, temperature, None if b is None else b.numpy())
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("entropy_grad", [True, False])
def test_gradients_by_finite_differences(chunk, entropy_grad):
    hidden, weight, bias, labels = make()

    def outputs(hidden, weight, bias):
        log_prob, entropy = token_log_probs_and_entropy(
            hidden,
            weight,
            labels,
            temperature=0.7,
            bias=bias,
            entropy_grad=entropy_grad,
            chunk_elements=chunk,
        )
        assert entropy.requires_grad == entropy_grad
        return (log_prob, entropy) if entropy_grad else log_prob

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_over_kept_ids_it_is_a_masked_softmax_with_its_gradients(chunk):
    """Sets of 1 to 11 ids; the third token has none, which stands for the whole vocabulary."""
    hidden, weight, bias, labels = make()
    is_kept = torch.rand(7, 11, generator=torch.Generator().manual_seed(1)) < 0.4
    is_kept[0] = False
    is_kept[torch.arange(7), labels] = True
    counts = is_kept.sum(1)
    counts[2] = 0
    ids = is_kept[counts > 0].nonzero()[:, 1]
    is_kept[2] = True
    logits = (hidden @ weight.T + bias) / 0.7
    log_probs = logits.masked_fill(~is_kept, -torch.inf).log_softmax(-1)
    kept_log_probs = log_probs.masked_fill(~is_kept, 0)
    expected = (
        log_probs.gather(1, labels[:, None])[:, 0],
        -(kept_log_probs.exp() * is_kept * kept_log_probs).sum(-1),
    )
    found = token_log_probs_and_entropy(
        hidden,
        weight,
        labels,
        temperature=0.7,
        bias=bias,
        kept=KeptIds(ids, counts),
        chunk_elements=chunk,
        entropy_grad=True,
    )
    assert found[0][0] == 0  # one id is certain
    grads = []
    for log_prob, entropy in (expected, found):
        loss = torch.linspace(-1, 2, 7).double() @ log_prob + entropy.square().sum()
        grads.append(torch.autograd.grad(loss, (hidden, weight, bias)))
    for one, other in zip((*expected, *grads[0]), (*found, *grads[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_low_precision_weights_get_sums_of_full_precision():
    """2,000 tokens in chunks of one: bfloat16 sums would stop growing at a few hundred."""
    hidden, weight, labels = (
        torch.ones(2000, 4),
        torch.zeros(8, 4),
        torch.zeros(2000, dtype=torch.int64),
    )
    hidden, weight = hidden.bfloat16(), weight.bfloat16().requires_grad_()
    log_prob, entropy = token_log_probs_and_entropy(hidden, weight, labels, chunk_elements=8)
    log_prob.sum().backward()
    assert log_prob.dtype == entropy.dtype == torch.float32 and weight.grad.dtype == torch.bfloat16
    assert weight.grad[0].tolist() == [1752.0] * 4  # 2000 * (1 - 1/8) = 1750, in bfloat16
    assert weight.grad[1].tolist() == [-250.0] * 4


def test_autocast_does_not_touch_the_reductions():
    hidden, weight, _, labels = make(n=64, v=500, h=32, dtype=torch.float32, seed=1)
    log_prob, entropy = token_log_probs_and_entropy(hidden, weight, labels)
    log_prob.sum().backward()
    plain, hidden.grad = hidden.grad, None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = token_log_probs_and_entropy(hidden, weight, labels)
        again[0].sum().backward()
    assert (
        torch.equal(again[0], log_prob)
        and torch.equal(again[1], entropy)
        and torch.equal(hidden.grad, plain)
    )


def test_extreme_logits_stay_finite():
    hidden, weight = (
        torch.tensor([[100.0], [-100.0]], requires_grad=True),
        torch.tensor([[10.0], [0.0], [-10.0]]),
    )
    log_prob, entropy = token_log_probs_and_entropy(
        hidden, weight, torch.tensor([0, 0]), entropy_grad=True
    )
    assert log_prob.tolist() == [0, -2000] and entropy.tolist() == [0, 0]
    (log_prob + entropy).sum().backward()
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("wanted", [0, 1])
def test_gradients_are_computed_where_they_are_wanted(wanted):
    """A frozen head gets none; no token gives one of zero."""
    *inputs, _, labels = make(grad=False)
    inputs[wanted].requires_grad_()
    found = token_log_probs_and_entropy(*inputs, labels, chunk_elements=25)[0].sum()
    expected = naive(*inputs, labels)[0].sum()
    torch.testing.assert_close(
        *(torch.autograd.grad(one, inputs[wanted])[0] for one in (found, expected))
    )
    nothing, entropy = token_log_probs_and_entropy(inputs[0][:0], inputs[1], labels[:0])
    assert nothing.shape == entropy.shape == (0,)
    assert not torch.autograd.grad(nothing.sum(), inputs[wanted])[0].any()


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor):
                self.elements = max(self.elements, item.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_larger_than_a_chunk_is_ever_made(dtype):
    """40 tokens of 1,000 words in chunks of 4,000: neither pass makes the 40,000 logits."""
    hidden, weight, _, labels = make(n=40, v=1000, h=3, dtype=dtype)
    with Largest() as largest:
        log_prob, entropy = token_log_probs_and_entropy(
            hidden, weight, labels, chunk_elements=4000, entropy_grad=True
        )
        (log_prob + entropy).sum().backward()
    assert largest.elements == 4000
