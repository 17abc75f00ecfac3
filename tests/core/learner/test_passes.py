"""What is said of a model when it is loaded."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from core.errors import InputError
from core.learner import packed_attention
from core.learner.packed_attention import ATTENTION
from core.learner.passes import LearnerModel, Policy, WeightSyncError, compare_probe
from tests.tiny import VOCAB_SIZE, tiny_model


@pytest.fixture(scope="module")
def real_width():
    """The width and depth of a small published model, whose bf16 passes differ by more than
    float32's bound."""
    shape = {
        "hidden_size": 576,
        "intermediate_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
    }
    return tiny_model("llama", **shape, num_key_value_heads=3, initializer_range=0.04)


@pytest.mark.parametrize("bf16_weights", [False, True], ids=["autocast", "weights"])
def test_bf16_of_real_width_shares_prompts_and_broken_sharing_is_refused(
    real_width, monkeypatch, bf16_weights
):
    """The bound is the precision's that computes, which under autocast is not that of the hidden
    states."""
    model = copy.deepcopy(real_width).bfloat16() if bf16_weights else real_width
    precision = {"compute_dtype": None if bf16_weights else torch.bfloat16}
    attend = packed_attention.attend

    def off(by):
        def kernel(*args, key_index=None, **options):
            out, nothing = attend(*args, key_index=key_index, **options)
            if key_index is None:
                return out, nothing
            noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
            return (out * (1 + by * noise)).to(out.dtype), nothing

        return kernel

    # Another kernel's rounding, and one that computes other numbers
    for by, fails in ((2**-9, False), (0.5, True)):
        monkeypatch.setitem(packed_attention.AttentionInterface._global_mapping, ATTENTION, off(by))
        refused = pytest.raises(InputError, match="reads answers behind a shared prompt otherwise")
        with refused if fails else nullcontext():
            assert LearnerModel(copy.deepcopy(model), **precision).shares


def test_a_model_that_reads_packed_sequences_otherwise_is_refused(monkeypatch):
    shape = dict(vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    config = Gemma2Config(**shape, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config.final_logit_softcapping = None
    with pytest.raises(InputError, match="needs softcap"):
        Policy(AutoModelForCausalLM.from_config(config), temperature=1.0)
    monkeypatch.setattr(
        packed_attention,
        "_by_length",
        lambda q, k, v, *_: packed_attention.F.scaled_dot_product_attention(
            q, *(one.repeat_interleave(2, 0) for one in (k, v)), is_causal=True
        ),
    )
    for dtype, compute in ((torch.float64, None), (torch.float32, torch.bfloat16)):
        module = tiny_model(initializer_range=0.08).to(dtype)
        with pytest.raises(InputError, match="reads packed sequences otherwise"):
            # Attention over all sequences at once
            Policy(module, temperature=0.7, compute_dtype=compute)


def test_a_probe_in_bf16_passes_what_rounding_moves_and_stops_at_most_tokens():
    learner = np.full(23, -15.0, np.float32)
    found = learner.copy()
    found[:3] += (0.9, -1.3, 3.1)  # a student of 135 million parameters, after eight steps
    assert compare_probe(learner, found, bf16=True) == pytest.approx(3.1)
    with pytest.raises(WeightSyncError, match="3 of 23"):
        compare_probe(learner, found, bf16=False)
    found[3:13] += 1
    with pytest.raises(WeightSyncError, match="stale"):
        compare_probe(learner, found, bf16=True)
    found[:] = learner
    found[0] = np.nan
    with pytest.raises(WeightSyncError):
        compare_probe(learner, found, bf16=True)
