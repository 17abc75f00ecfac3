"""Ulysses' exchange of tokens for heads over eight ranks, by the all-to-all that a GPU gets.

On a CPU DTensor gathers and cuts instead; ``LocalTensorMode``, which computes all ranks in one
process, does not. Whole updates over two real processes are in ``tests/core/cluster/test_fsdp.py``.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import _collective_utils

from core.learner.packed_attention import HEADS, TOKENS, attend
from tests.scale.fake_learner import group

RANKS, TOKENS_EACH, SIZE = 8, 8, 4
# No sequence ends where a rank's part does
STARTS = torch.tensor([0, 20, 50, RANKS * TOKENS_EACH], dtype=torch.int32)


def attention(query, key, value, mesh=None):
    ends = {
        "cu_seq_lens_q": STARTS,
        "cu_seq_lens_k": STARTS,
        "max_length_q": 30,
        "max_length_k": 30,
    }
    return attend(nn.Module(), query, key, value, None, **ends, sequence_mesh=mesh)[0]


def part(value, rank, axis):
    return value.narrow(axis, rank * TOKENS_EACH, TOKENS_EACH)


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (16, 4), (8, 1), (40, 8)])
def test_eight_ranks_attend_as_one(heads, kv_heads, monkeypatch):
    """Outputs and all gradients in float64; fewer key heads than ranks are repeated."""
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(
            1, count, RANKS * TOKENS_EACH, SIZE, dtype=torch.float64, generator=generator
        ).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    expected = attention(*whole)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    expected.backward(weight)
    calls = []
    monkeypatch.setattr(
        _collective_utils.funcol, "all_gather_single", lambda *_, **__: calls.append("all-gather")
    )
    with group(RANKS), LocalTensorMode(RANKS) as ranks:
        mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("rows", "sequence"))["sequence"]
        local = [
            ranks.rank_map(
                lambda rank, one=one: part(one.detach(), rank, TOKENS).clone()
            ).requires_grad_()
            for one in whole
        ]
        found = attention(*local, mesh)
        found.backward(ranks.rank_map(lambda rank: part(weight, rank, HEADS).clone()))
    assert not calls  # the fallback of a CPU did not run
    pairs = [(found, expected.detach(), HEADS)]
    pairs += [(one.grad, other.grad, TOKENS) for one, other in zip(local, whole, strict=True)]
    for rank in range(RANKS):
        for one, other, axis in pairs:
            torch.testing.assert_close(
                one._local_tensors[rank], part(other, rank, axis), rtol=1e-12, atol=1e-12
            )
