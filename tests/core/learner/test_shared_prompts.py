"""Computing a group's prompt once gives what the plain pass gives: log-probs, entropies and gradients."""

import numpy as np
import pytest
import torch

from core.learner.batching import make_batch
from core.learner.learner import PADDED, read_tokens
from core.learner.packing import SharedPrompts, can_share
from core.types import Prompt, ScoredGroup, Stop, Trajectory
from reward_scores.score import Score
from tests.tiny import VOCAB_SIZE, tiny_config, tiny_model

PAD = 0


def batch_of(prompt_lengths=(9, 14, 12), answers=4, longest=6, first_is_ours=True, seed=0):
    """Prompts of several lengths, each with answers of several lengths, with gaps that the policy did not write."""
    rng = np.random.default_rng(seed)
    groups = []
    for ordinal, size in enumerate(prompt_lengths):
        prompt = rng.integers(4, VOCAB_SIZE, size)
        trajectories = []
        for _ in range(answers):
            length = int(rng.integers(3, longest + 1))
            mask = rng.random(length) < 0.7
            mask[:2], mask[2] = first_is_ours, True
            ids = rng.integers(4, VOCAB_SIZE, length)
            trajectories.append(Trajectory(prompt, ids, mask, -rng.random(length) * mask, (), Stop.EOS, 0, 0))
        question = Prompt(ordinal, str(ordinal), tuple(prompt), (), "x", "test")
        groups.append(ScoredGroup(question, tuple(trajectories), tuple(Score(0.5) for _ in trajectories)))
    return make_batch(groups, PAD)


def outcome(model, batch, shared):
    """Log-probs, entropies, and the gradients of a sum that tells all of them apart."""
    model.zero_grad(set_to_none=True)
    reading = PADDED.read(batch.input_ids, batch.attention_mask, batch.response_mask)
    log_prob, entropy = read_tokens(model, reading, temperature=0.7, entropy_grad=True, shared=shared)
    weights = torch.linspace(-1, 2, len(log_prob), dtype=log_prob.dtype)
    (weights @ log_prob + weights.flip(0) @ entropy).backward()
    return log_prob.detach(), entropy.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


# Qwen2 and Llama take the root mean square in float32, whatever the weights are.
@pytest.mark.parametrize("arch, tolerance", [("qwen2", 3e-6), ("llama", 3e-6), ("gpt2", 1e-10)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sharing_is_the_plain_pass(arch, tolerance, attention):
    model = tiny_model(arch).double()
    model.set_attn_implementation(attention)
    batch = batch_of()
    shared = SharedPrompts.of(batch.input_ids, batch.response_mask, batch.group)
    assert shared is not None and len(shared.first_P) == 3
    plain, ours = outcome(model, batch, None), outcome(model, batch, shared)
    for expected, got in zip(plain[:2], ours[:2], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    for name, expected in plain[2].items():
        assert float((ours[2][name] - expected).norm()) <= 10 * tolerance * float(expected.norm() + 1e-3), name


def test_rows_in_any_order():
    model, batch = tiny_model("gpt2").double(), batch_of(seed=3)
    batch = batch.rows(torch.randperm(len(batch.group), generator=torch.Generator().manual_seed(0)))
    shared = SharedPrompts.of(batch.input_ids, batch.response_mask, batch.group)
    plain, ours = outcome(model, batch, None), outcome(model, batch, shared)
    torch.testing.assert_close(ours[0], plain[0], rtol=0, atol=1e-10)


def test_a_group_whose_rows_begin_differently_is_computed_plainly():
    batch = batch_of(first_is_ours=False)  # what follows the prompt is a tool's, and differs
    assert SharedPrompts.of(batch.input_ids, batch.response_mask, batch.group) is None


@pytest.mark.parametrize(
    "batch",
    [batch_of(answers=1), batch_of(prompt_lengths=(2, 3), longest=40), batch_of(prompt_lengths=(1, 1))],
    ids=["one answer a prompt", "short prompts", "nothing before a prompt's last token"],
)
def test_sharing_only_where_it_pays(batch):
    assert SharedPrompts.of(batch.input_ids, batch.response_mask, batch.group) is None


def test_a_row_without_policy_tokens_is_computed_plainly():
    batch = batch_of()
    mask = batch.response_mask.clone()
    mask[2] = False
    assert SharedPrompts.of(batch.input_ids, mask, batch.group) is None


def test_models_that_cannot_keep_keys_and_values_and_proofs_in_float64():
    sliding = tiny_config(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    assert not can_share(type(tiny_model())(sliding))
    model = tiny_model().train()
    model.gradient_checkpointing_enable()
    assert not can_share(model)
    assert can_share(model.eval())
    assert not can_share(model.double())
