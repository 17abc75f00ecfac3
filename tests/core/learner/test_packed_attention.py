"""Passes over packed sequences give what a plain pass over each sequence gives, prompts shared or
not."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification, MistralConfig, MistralForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from core.learner import packed_attention, passes
from core.learner.batching import MicroBatchSize, make_batch
from core.learner.learner import Actor, Critic
from core.learner.log_probs import KeptIds
from core.learner.packed_attention import (
    ATTENTION,
    ForwardInputs,
    forward_inputs,
    predicting_tokens,
    shared_prompts,
    use_packed_attention,
)
from core.learner.passes import Policy, token_log_probs
from core.tracking.metric_sums import MetricSums
from core.types import Prompt, ScoredGroup, Stop, Trajectory, pad
from reward_scores.score import Score
from tests.core.learner.test_learner import actor_config, gradient, random_batch
from tests.tiny import VOCAB_SIZE, tiny_config, tiny_model

PAD = 0
ARCHITECTURES = ("qwen2", "llama", "gpt2")
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def in_own_precision(norm, hidden):
    """The root mean square in the precision of what comes in, where transformers takes float32."""
    return (
        norm.weight
        * hidden
        * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    )


@pytest.fixture
def float64(monkeypatch):
    """Everything in float64, and prompts are shared in it."""
    for norm in (LlamaRMSNorm, Qwen2RMSNorm):
        monkeypatch.setattr(norm, "forward", in_own_precision)
    monkeypatch.setattr(passes, "can_share", lambda module: True)


def model(arch="qwen2", dtype=torch.float64, **overrides):
    overrides |= NO_DROPOUT if arch == "gpt2" else {}
    return tiny_model(arch, initializer_range=0.08, **overrides).to(dtype).train()


def batch_of(prompt_lengths=(9, 14, 12), answers=4, longest=6, first_is_ours=True, seed=0):
    """Prompts of several lengths, each with answers of several lengths, with gaps that the policy
    did not write."""
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
            trajectories.append(
                Trajectory(prompt, ids, mask, -rng.random(length) * mask, (), Stop.EOS, 0, 0)
            )
        question = Prompt(ordinal, str(ordinal), tuple(prompt), (), "x", "test")
        groups.append(
            ScoredGroup(question, tuple(trajectories), tuple(Score(0.5) for _ in trajectories))
        )
    return make_batch(groups, PAD)


def shared_of(batch):
    return shared_prompts(batch.input_ids, batch.response_mask, batch.lengths, batch.group)


def plain(batch):
    """The inputs of a pass over padded sequences, in transformers' own attention."""
    ids, mask, lengths = batch.input_ids.long(), batch.response_mask, batch.lengths
    return ForwardInputs(
        pad(ids, lengths), pad(predicting_tokens(mask, lengths), lengths), ids[mask], mask
    )


def packed(batch, sharing=False):
    group = batch.group if sharing else None
    return forward_inputs(batch.input_ids.long(), batch.response_mask, batch.lengths, group_B=group)


def outcome(module, inputs):
    """Log-probs, entropies, and the gradients of a sum that tells all of them apart."""
    module.zero_grad(set_to_none=True)
    log_prob, entropy = token_log_probs(module, inputs, temperature=0.7, entropy_grad=True)
    weights = torch.linspace(-1, 2, len(log_prob), dtype=log_prob.dtype)
    (weights @ log_prob + weights.flip(0) @ entropy).backward()
    return (
        log_prob.detach(),
        entropy.detach(),
        {n: p.grad.clone() for n, p in module.named_parameters()},
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("sharing", [False, True], ids=["whole", "shared"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "gradient checkpointing"])
def test_a_packed_pass_is_the_plain_pass(float64, arch, sharing, checkpointing):
    """Sequences in any order, with tokens inside that the policy did not write, values and
    gradients."""
    module, batch = model(arch), batch_of(longest=9)
    batch = batch.rows(torch.randperm(len(batch), generator=torch.Generator().manual_seed(1)))
    assert shared_of(batch) is not None
    if checkpointing:
        checkpointed(module)
    expected = outcome(module, plain(batch))
    use_packed_attention(module, 1)
    found = outcome(module, packed(batch, sharing))
    for want, got in zip(expected[:2], found[:2], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        assert want.abs().sum() > 1
    assert max(float(grad.norm()) for grad in expected[2].values()) > 1
    for name, want in expected[2].items():
        torch.testing.assert_close(found[2][name], want, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("sharing", [False, True], ids=["whole", "shared"])
def test_ranks_that_split_a_pass_have_the_kept_ids_of_their_labels(sharing):
    """Token n keeps n % 4 ids, each with the number n."""
    batch = batch_of(longest=9)
    mask = batch.response_mask
    numbers = torch.arange(batch.tokens)[mask]
    kept = KeptIds(numbers.repeat_interleave(numbers % 4), numbers % 4)
    arguments = (batch.input_ids.long(), mask, batch.lengths)
    group = batch.group if sharing else None
    whole = forward_inputs(*arguments, group_B=group, kept=kept)
    parts = []
    for rank in range(3):
        mesh = SimpleNamespace(size=lambda: 3, get_local_rank=lambda rank=rank: rank)
        parts.append(forward_inputs(*arguments, group_B=group, kept=kept, mesh=mesh))
        assert len(parts[rank].labels) == len(parts[rank].kept.counts)
        assert int(parts[rank].is_predicting.sum()) == len(parts[rank].labels)
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
    for name in ("ids", "counts"):
        joined = torch.cat([getattr(part.kept, name) for part in parts])
        assert torch.equal(joined, getattr(kept, name))


def test_kept_ids_of_tokens_that_nobody_reads_are_passed_over():
    """With one kept id, its own, a token is certain: also where prompts have kept ids."""
    batch, reader = random_batch(), Policy(model(), temperature=0.7)
    for has_ids in (batch.response_mask, torch.ones_like(batch.response_mask)):
        kept = {"kept_counts": has_ids.int(), "kept_ids": batch.input_ids[has_ids]}
        found = reader.log_probs(batch.adding(**kept), MicroBatchSize(max_sequences=5))
        assert max(float(values.abs().max()) for values in found) < 1e-20


def test_a_row_does_not_see_its_neighbours():
    """Alone its numbers are the same."""
    batch, reader = random_batch(), Policy(model(), temperature=0.7)
    whole = reader.log_probs(batch, MicroBatchSize(max_tokens=10_000))[0]
    for row in range(len(batch)):
        alone = reader.log_probs(batch.rows([row]), MicroBatchSize(max_sequences=1))[0]
        torch.testing.assert_close(
            alone, whole[batch.spans(torch.tensor([row]))[0]], rtol=1e-9, atol=1e-9
        )


def test_a_pass_has_each_prompt_once_and_no_padding():
    """A prompt but its last token, once, and from there each answer to the token before its last
    one."""
    batch, seen = batch_of(), []
    reader = Policy(tiny_model(), temperature=1.0)
    assert reader.shares
    reader.module.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    reader.log_probs(batch, MicroBatchSize(max_sequences=100))
    mask = batch.padded("response_mask")
    place = torch.arange(mask.shape[1]).expand_as(mask)
    last, prefix = (place * mask).amax(1), place.masked_fill(~mask, 99).amin(1) - 1
    prompts = sum(int(prefix[batch.group == group][0]) for group in range(3))
    assert seen == [prompts + int((last - prefix).sum())]
    whole = Policy(reader.module.double(), temperature=1.0)  # where nothing is shared
    seen.clear()
    whole.log_probs(batch, MicroBatchSize(max_tokens=60))
    assert sum(seen) == batch.tokens and max(seen) <= 60


def test_what_cannot_be_shared_is_read_whole():
    no_answer = batch_of()
    mask = no_answer.response_mask.clone()
    mask[no_answer.spans(torch.tensor([2]))[0]] = False
    other_begin = batch_of(first_is_ours=False)  # what follows the prompt is a tool's, and differs
    for batch in (batch_of(answers=1), batch_of(prompt_lengths=(1, 1)), other_begin):
        assert shared_of(batch) is None
    assert (
        shared_of(no_answer) is not None and shared_of(no_answer.adding(response_mask=mask)) is None
    )


def checkpointed(module):
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def learner_of(part, shares, checkpointing=False, **knobs):
    """A policy or critic that reads a shared prompt once, or repeats prompts."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = AutoModelForTokenClassification.from_config(
            tiny_config(num_labels=1, classifier_dropout=0.0)
        )
    module = (tiny_model() if part is Actor else module).double().train()
    if checkpointing:
        checkpointed(module)
    more = {"temperature": 0.7} if part is Actor else {}
    one = part(module, actor_config(**knobs), **more)
    one.shares = shares
    return one


KNOBS = [
    {},
    {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 130},
    {"ppo_micro_batch_size_per_gpu": 7},
]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "gradient checkpointing"])
@pytest.mark.parametrize("knobs", KNOBS, ids=["whole", "tokens", "sequences"])
def test_losses_and_gradients_are_those_without_sharing(float64, monkeypatch, knobs, checkpointing):
    """With KL loss and entropy bonus; micro-batches cut groups."""
    batch, found, reads = batch_of(answers=6, seed=2), [], []
    generator, mask = torch.Generator().manual_seed(0), batch.response_mask
    noise = {
        name: torch.randn(len(mask), generator=generator, dtype=torch.float64) * mask
        for name in "abc"
    }
    step = batch.adding(
        advantages=noise["a"],
        old_log_probs=noise["b"] - 4,
        ref_log_prob=noise["c"] - 4,
        loss_weight=mask / mask.sum(),
    )
    lay_out = packed_attention.shared_prompts
    monkeypatch.setattr(
        packed_attention, "shared_prompts", lambda *given: (reads.append(1), lay_out(*given))[1]
    )
    for shares in (False, True):
        more = {
            "use_kl_loss": True,
            "entropy_coeff": 0.03,
            "ppo_micro_batch_size_per_gpu": 100,
            **knobs,
        }
        one, means = learner_of(Actor, shares, checkpointing, **more), MetricSums()
        one.mismatch = MetricSums()
        one.module.zero_grad()
        reads.clear()
        one.accumulate(step, means)
        found.append(
            (
                gradient(one),
                means.sums["pg_loss"],
                means.sums["kl_loss"],
                *one.log_probs(batch, one.micro_batch_size),
            )
        )
        assert bool(reads) == shares
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(
            torch.as_tensor(got), torch.as_tensor(expected), rtol=1e-11, atol=1e-12
        )
    assert found[0][0].norm() > 0


def test_values_and_the_critics_gradient_are_those_without_sharing(float64):
    batch, found = batch_of(), []
    mask = batch.response_mask
    step = batch.adding(returns=mask * 0.5, values=mask * 0.1, loss_weight=mask / mask.sum())
    for shares in (False, True):
        critic = learner_of(Critic, shares, ppo_micro_batch_size_per_gpu=100, cliprange_value=0.5)
        critic.module.zero_grad()
        critic.micro_batch_loss(step, MetricSums()).backward()
        found.append((critic.token_values(batch).detach(), gradient(critic)))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
        assert expected.abs().sum() > 0.1


@pytest.mark.parametrize("sharing", [False, True], ids=["whole", "shared"])
def test_a_sliding_window_ends_where_it_should(sharing):
    shape = {
        name: getattr(tiny_config(), name)
        for name in ("vocab_size", "hidden_size", "intermediate_size")
    }
    heads = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 5,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = MistralForCausalLM(MistralConfig(**shape, **heads, initializer_range=0.08)).to(
            torch.float64
        )
    batch, reader = batch_of(), Policy(module, temperature=1.0)
    reader.shares = sharing
    found = reader.log_probs(batch, MicroBatchSize(max_tokens=1000))[0]
    module.set_attn_implementation("sdpa")
    for row in range(len(batch)):
        (span,) = batch.spans(torch.tensor([row]))
        ids = batch.input_ids[span].long()
        logits = module(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1).detach()
        expected = logits[:-1].gather(1, ids[1:, None])[:, 0] * batch.response_mask[span][1:]
        torch.testing.assert_close(found[span][1:], expected, rtol=1e-6, atol=1e-6)


def test_the_saved_configuration_does_not_name_this_attention(tmp_path):
    module = Policy(model(), temperature=0.7).module
    assert module.config._attn_implementation == ATTENTION
    module.save_pretrained(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text()
