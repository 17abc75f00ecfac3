"""Computing a group's prompt once gives what the plain pass gives: log-probs, entropies and gradients."""

import copy
import logging

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification, MistralConfig, MistralForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from core.algorithm.losses import MetricSums
from core.engines.hf import HFEngine
from core.learner import attention, learner, packing
from core.learner.attention import ATTENTION, SharedPrompts, can_keep_keys, can_share
from core.learner.batching import make_batch
from core.learner.learner import PADDED, Critic, LearnerModel, MicroBatchSize, Policy, Ranks, token_log_probs
from core.learner.model_checks import logprob_noise
from core.learner.packing import Layout
from core.types import Prompt, ScoredGroup, Stop, Trajectory
from reward_scores.score import Score
from tests.core.learner.test_learner import actor_config, gradient
from tests.tiny import VOCAB_SIZE, tiny_config, tiny_model, tiny_tokenizer

PAD = 0
PACKED = Layout(packed=True)
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def in_own_precision(norm, hidden):
    """The root mean square in the precision of what comes in, where transformers takes float32."""
    return norm.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)


@pytest.fixture
def float64(monkeypatch):
    """Everything in float64, and prompts are shared in it."""
    for norm in (LlamaRMSNorm, Qwen2RMSNorm):
        monkeypatch.setattr(norm, "forward", in_own_precision)
    for module in (learner, packing, attention):
        monkeypatch.setattr(module, "can_share", lambda module: True)


def model_in_float64(arch="qwen2", **overrides):
    return tiny_model(arch, **(NO_DROPOUT if arch == "gpt2" else {}), **overrides).double()


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


def outcome(model, batch, shared, layout=None):
    """Log-probs, entropies, and the gradients of a sum that tells all of them apart; with a layout in one pass."""
    model.zero_grad(set_to_none=True)
    ids, mask, lengths = batch.input_ids.long(), batch.response_mask, batch.lengths
    if layout or shared is None:
        inputs, shared = (layout or PADDED).forward_inputs(ids, mask, lengths, shared=shared), None
    else:
        inputs = packing.ForwardInputs(ids, packing.predicting_tokens(mask, lengths), ids[mask], mask)
    log_prob, entropy = token_log_probs(model, inputs, temperature=0.7, entropy_grad=True, shared=shared)
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
    shared = SharedPrompts.of(batch.input_ids, batch.response_mask, batch.lengths, batch.group)
    assert shared is not None and len(shared.first_P) == 3
    plain, ours = outcome(model, batch, None), outcome(model, batch, shared)
    for expected, got in zip(plain[:2], ours[:2], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    for name, expected in plain[2].items():
        assert float((ours[2][name] - expected).norm()) <= 10 * tolerance * float(expected.norm() + 1e-3), name


def test_rows_in_any_order():
    model, batch = tiny_model("gpt2").double(), batch_of(seed=3)
    batch = batch.rows(torch.randperm(len(batch.group), generator=torch.Generator().manual_seed(0)))
    shared = SharedPrompts.of(batch.input_ids, batch.response_mask, batch.lengths, batch.group)
    plain, ours = outcome(model, batch, None), outcome(model, batch, shared)
    torch.testing.assert_close(ours[0], plain[0], rtol=0, atol=1e-10)


def test_a_group_whose_rows_begin_differently_is_computed_plainly():
    batch = batch_of(first_is_ours=False)  # what follows the prompt is a tool's, and differs
    assert SharedPrompts.of(batch.input_ids, batch.response_mask, batch.lengths, batch.group) is None


@pytest.mark.parametrize(
    "batch",
    [batch_of(answers=1), batch_of(prompt_lengths=(2, 3), longest=40), batch_of(prompt_lengths=(1, 1))],
    ids=["one answer a prompt", "short prompts", "nothing before a prompt's last token"],
)
def test_sharing_only_where_it_pays(batch):
    assert SharedPrompts.of(batch.input_ids, batch.response_mask, batch.lengths, batch.group) is None


def test_a_row_without_policy_tokens_is_computed_plainly():
    batch = batch_of()
    mask = batch.response_mask.clone()
    mask[batch.spans(torch.tensor([2]))[0]] = False
    assert SharedPrompts.of(batch.input_ids, mask, batch.lengths, batch.group) is None


def test_models_that_cannot_keep_keys_and_values_and_proofs_in_float64():
    sliding = tiny_config(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    assert not can_share(type(tiny_model())(sliding))
    model = tiny_model().train()
    model.gradient_checkpointing_enable()
    assert not can_keep_keys(model)
    assert can_keep_keys(model.eval()) and can_share(model)
    assert not can_share(model.double())


@pytest.mark.parametrize("arch", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
def test_one_pass_over_prompts_and_answers_is_the_plain_pass(float64, arch, layout):
    """Sequences in any order, with tokens inside that the policy did not write."""
    plain_model, model, batch = model_in_float64(arch), model_in_float64(arch), batch_of(longest=9)
    model.set_attn_implementation(ATTENTION)
    batch = batch.rows(torch.randperm(len(batch), generator=torch.Generator().manual_seed(1)))
    shared = SharedPrompts.of(batch.input_ids, batch.response_mask, batch.lengths, batch.group, packed=layout.packed)
    plain, ours = outcome(plain_model, batch, None), outcome(model, batch, shared, layout)
    for expected, got in zip(plain[:2], ours[:2], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        assert expected.abs().sum() > 1
    assert max(float(grad.norm()) for grad in plain[2].values()) > 1
    for name, expected in plain[2].items():
        torch.testing.assert_close(ours[2][name], expected, rtol=1e-11, atol=1e-12, msg=name)


def learner_of(part, layout, shares, checkpointing=False, **knobs):
    """A policy or critic that reads a shared prompt within a pass, or repeats prompts."""
    ranks = Ranks() if shares else learner.ALONE
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = AutoModelForTokenClassification.from_config(tiny_config(num_labels=1, classifier_dropout=0.0))
    module = (tiny_model() if part is learner.Actor else module).double().train()
    if checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    more = {"temperature": 0.7} if part is learner.Actor else {}
    one = part(module, actor_config(**knobs), ranks=ranks, layout=layout, **more)
    one.shares = shares
    return one


KNOBS = [{}, {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 130}, {"ppo_micro_batch_size_per_gpu": 7}]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "gradient checkpointing"])
@pytest.mark.parametrize("knobs", KNOBS, ids=["whole", "tokens", "sequences"])
@pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
def test_losses_and_gradients_are_those_without_sharing(float64, monkeypatch, layout, knobs, checkpointing):
    """With KL loss and entropy bonus; micro-batches cut groups, and some of them are not worth sharing."""
    batch, found, passes = batch_of(answers=6, seed=2), [], []
    generator, mask = torch.Generator().manual_seed(0), batch.response_mask
    noise = {name: torch.randn(len(mask), generator=generator, dtype=torch.float64) * mask for name in "abc"}
    step = batch.adding(
        advantages=noise["a"], old_log_probs=noise["b"] - 4, ref_log_prob=noise["c"] - 4, loss_weight=mask / mask.sum()
    )
    monkeypatch.setattr(attention.SharedPrompts, "in_one_pass", counted(attention.SharedPrompts.in_one_pass, passes))
    for shares in (False, True):
        more = {"use_kl_loss": True, "entropy_coeff": 0.03, "ppo_micro_batch_size_per_gpu": 100, **knobs}
        one, means = learner_of(learner.Actor, layout, shares, checkpointing, **more), MetricSums()
        one.mismatch = MetricSums()
        assert one.one_pass == (shares or layout.packed)
        one.module.zero_grad()
        passes.clear()
        one.accumulate(step, means)
        found.append((gradient(one), means.sums["pg_loss"], means.sums["kl_loss"], *one.log_probs(batch, one.size)))
        assert bool(passes) == shares
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(expected), rtol=1e-11, atol=1e-12)
    assert found[0][0].norm() > 0


def counted(function, calls):
    """The function, which notes its calls."""
    return lambda *arguments: (calls.append(1), function(*arguments))[1]


@pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
def test_values_and_the_critics_gradient_are_those_without_sharing(float64, layout):
    batch, found = batch_of(), []
    mask = batch.response_mask
    step = batch.adding(returns=mask * 0.5, values=mask * 0.1, loss_weight=mask / mask.sum())
    for shares in (False, True):
        critic = learner_of(Critic, layout, shares, ppo_micro_batch_size_per_gpu=100, cliprange_value=0.5)
        assert (critic.shared_prompts(batch) is not None) == shares
        critic.module.zero_grad()
        critic.micro_batch_loss(step, MetricSums()).backward()
        found.append((critic.token_values(batch).detach(), gradient(critic)))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
        assert expected.abs().sum() > 0.1


def test_a_pass_has_each_prompt_once_and_no_padding():
    batch, seen = batch_of(), []
    reader = Policy(tiny_model(), temperature=1.0, ranks=Ranks())
    reader.module.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    reader.log_probs(batch, MicroBatchSize(max_sequences=100))
    shared = reader.shared_prompts(batch)
    last = (batch.padded("response_mask") * torch.arange(int(batch.lengths.max()))).amax(1)
    tokens = int(shared.prefix_B[shared.first_P].sum() + (last - shared.prefix_B).sum())
    assert [one.shape for one in seen] == [(1, tokens)]


def test_a_model_that_reads_shared_prompts_otherwise_repeats_them(monkeypatch, caplog):
    def blind(module, query, key, value, shared, **options):
        return attention.sdpa_attention_forward(module, query, key, value, None, **options)[0]

    batch, expected = batch_of(), Policy(tiny_model(), temperature=1.0)
    monkeypatch.setattr(attention, "_behind_prompts", blind)
    with caplog.at_level(logging.WARNING):
        reader = Policy(tiny_model(), temperature=1.0, ranks=Ranks())
    assert "reads answers behind a shared prompt otherwise" in caplog.text
    assert reader.shared_prompts(batch) is None
    size = MicroBatchSize(max_sequences=100)
    torch.testing.assert_close(reader.log_probs(batch, size), expected.log_probs(batch, size), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def real_width():
    """The width and depth of a small published model, whose bf16 passes differ by more than float32's bound."""
    shape = {"hidden_size": 576, "intermediate_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}
    return tiny_model("llama", **shape, num_key_value_heads=3, initializer_range=0.04)


@pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("bf16_weights", [False, True], ids=["autocast", "weights"])
def test_bf16_of_real_width_shares_prompts_unless_sharing_is_broken(real_width, monkeypatch, layout, bf16_weights):
    """The bound is the precision's that computes, which under autocast is not that of the hidden states."""
    model = copy.deepcopy(real_width).bfloat16() if bf16_weights else real_width
    precision = {"compute_dtype": None if bf16_weights else torch.bfloat16}
    attend = attention.attend

    def off(by):
        def kernel(*args, shared_prompts=None, key_index=None, **options):
            out, nothing = attend(*args, shared_prompts=shared_prompts, key_index=key_index, **options)
            if shared_prompts is None and key_index is None:
                return out, nothing
            noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
            return (out * (1 + by * noise)).to(out.dtype), nothing

        return kernel

    for by, shares in ((2**-9, True), (0.5, False)):  # another kernel's rounding, and one that computes other numbers
        monkeypatch.setitem(attention.AttentionInterface._global_mapping, ATTENTION, off(by))
        assert LearnerModel(copy.deepcopy(model), ranks=Ranks(), layout=layout, **precision).shares == shares


def test_what_logprob_noises_bounds_how_far_an_engine_in_bf16_is_from_the_learner(real_width):
    ids = tuple(torch.randint(4, VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(0)).tolist())
    engine = HFEngine(real_width, tiny_tokenizer(), dtype=torch.bfloat16)
    costs, distances = [], []
    for dtype in (None, torch.bfloat16):
        policy = Policy(copy.deepcopy(real_width), temperature=1.0, compute_dtype=dtype)
        costs.append(logprob_noise(policy, ids))
        inputs = PADDED.forward_inputs(torch.tensor(ids), torch.arange(24) > 0, torch.tensor([24]))
        with torch.no_grad():
            distances.append(float(np.abs(policy.forward(inputs)[0].numpy() - engine.probe(ids)).mean()))
    assert costs[0] < 1e-4 and costs[1] > 0.01  # float32, bf16
    assert distances[0] < 2 * costs[1] and logprob_noise(policy, ids) == costs[1]
    assert distances[1] < 1e-4  # one pass in one precision on both sides: sums between layers and the head included


def test_windows_and_attention_from_inside_are_not_shared(caplog):
    shape = {name: getattr(tiny_config(), name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert not can_share(MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=5)))
    assert can_share(MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=None)))
    eager = tiny_model()
    eager.set_attn_implementation("eager")
    assert not LearnerModel(eager, ranks=Ranks()).shares and not caplog.text
    assert LearnerModel(tiny_model(), ranks=Ranks()).shares
