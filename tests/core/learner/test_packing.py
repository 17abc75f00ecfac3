"""Packed rows against padded ones: the same numbers, whatever lies beside a row."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForTokenClassification, Gemma2Config, MistralConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from core.algorithm.losses import MetricSums
from core.errors import InputError
from core.learner import attention
from core.learner.attention import ATTENTION, attend
from core.learner.batching import micro_batches
from core.learner.learner import Actor, Critic, MicroBatchSize, Policy
from core.learner.packing import Layout
from tests.core.learner.test_learner import actor_config, gradient, one_step, random_batch
from tests.tiny import VOCAB_SIZE, tiny_config, tiny_model

PACKED = Layout(packed=True)
ARCHITECTURES = ("qwen2", "llama", "gpt2")


def model(arch="qwen2", dtype=torch.float64, **overrides):
    if arch == "gpt2":
        overrides |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return tiny_model(arch, initializer_range=0.08, **overrides).to(dtype).train()


def policy(layout, arch="qwen2", dtype=torch.float64, **overrides):
    return Policy(model(arch, dtype, **overrides), temperature=0.7, layout=layout)


def trained(layout, dtype, **overrides):
    return Actor(model(dtype=dtype), actor_config(**overrides), temperature=0.7, layout=layout)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "size", [MicroBatchSize(max_tokens=70), MicroBatchSize(max_sequences=5)], ids=["tokens", "rows"]
)
def test_log_probs_and_entropies_are_those_of_padded_rows(arch, size):
    batch = random_batch()
    for found, expected in zip(
        policy(PACKED, arch).log_probs(batch, size), policy(Layout(), arch).log_probs(batch, size), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        assert found.abs().sum() > 1


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "gradient checkpointing"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-6)])
def test_losses_and_gradients_are_those_of_padded_rows(dtype, tolerance, checkpointing):
    """With KL loss and entropy bonus, several micro-batches, a masked row, and rows that only a metric reads."""
    step, found = one_step(random_batch()), []
    for layout in (Layout(), PACKED):
        knobs = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 50, "use_kl_loss": True, "entropy_coeff": 0.03}
        part, means = trained(layout, dtype, **knobs), MetricSums()
        if checkpointing:
            part.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        part.mismatch = MetricSums()
        part.accumulate(step, means)
        found.append((gradient(part), means.sums["pg_loss"], means.sums["kl_loss"]))
    (grads, *losses), (packed_grads, *packed_losses) = found
    assert packed_losses == pytest.approx(losses, rel=tolerance)
    assert float((packed_grads - grads).norm() / grads.norm()) < tolerance and grads.norm() > 0


def test_values_and_the_critics_gradient_are_those_of_padded_rows():
    step, found = one_step(random_batch()), []
    for layout in (Layout(), PACKED):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = AutoModelForTokenClassification.from_config(tiny_config(num_labels=1, classifier_dropout=0.0))
        config = actor_config(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=50)
        critic = Critic(module.to(torch.float64), config, layout=layout)
        critic.micro_batch_loss(step, MetricSums()).backward()
        found.append((critic.values(step), gradient(critic)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_a_row_does_not_see_its_neighbours():
    """Other tokens beside it, other neighbours, another order: its numbers stay."""
    batch, reader = random_batch(), policy(PACKED)
    whole = reader.log_probs(batch, MicroBatchSize(max_tokens=10_000))[0]
    for row in range(len(batch)):
        alone = reader.log_probs(batch.rows([row]), MicroBatchSize(max_sequences=1))[0]
        torch.testing.assert_close(alone, whole[batch.spans(torch.tensor([row]))[0]], rtol=1e-9, atol=1e-9)
    (span,) = batch.spans(torch.tensor([3]))
    others = torch.full_like(batch.input_ids, 7)
    others[span] = batch.input_ids[span]
    among_others = reader.log_probs(batch.adding(input_ids=others), MicroBatchSize(max_tokens=10_000))[0]
    torch.testing.assert_close(among_others[span], whole[span], rtol=1e-9, atol=1e-9)


def test_nothing_of_a_pass_is_padding():
    """Tokens that the model sees are the batch's real ones, no more, and each position counts from its row's start."""
    batch, seen = random_batch(), []
    reader = policy(PACKED)
    reader.module.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    reader.log_probs(batch, MicroBatchSize(max_tokens=60))
    assert sum(kwargs["input_ids"].numel() for kwargs in seen) == batch.tokens
    assert all(kwargs["input_ids"].shape[0] == 1 and kwargs["input_ids"].numel() <= 60 for kwargs in seen)
    starts = sum(int((kwargs["position_ids"] == 0).sum()) for kwargs in seen)
    assert starts == len(batch) == sum(len(kwargs["cu_seq_lens_q"]) - 1 for kwargs in seen)


def test_a_sliding_window_ends_where_it_should():
    config = MistralConfig(
        **{name: getattr(tiny_config(), name) for name in ("vocab_size", "hidden_size", "intermediate_size")},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5},
        initializer_range=0.08,
    )
    from transformers import MistralForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = MistralForCausalLM(config).to(torch.float64)
    batch, ids = random_batch(), []
    found = Policy(module, temperature=1.0, layout=PACKED).log_probs(batch, MicroBatchSize(max_tokens=100))[0]
    module.set_attn_implementation("sdpa")
    for row in range(len(batch)):
        (span,) = batch.spans(torch.tensor([row]))
        ids = batch.input_ids[span].long()
        logits = module(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1).detach()
        expected = logits[:-1].gather(1, ids[1:, None])[:, 0] * batch.response_mask[span][1:]
        torch.testing.assert_close(found[span][1:], expected, rtol=1e-9, atol=1e-9)


def test_the_kernel_of_a_gpu_is_called_as_it_wants_to_be(monkeypatch):
    """[N, H, D], row starts in int32, causal within a window: against a stand-in that computes it row by row."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    calls = []

    def kernel(q, k, v, starts_q, starts_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
        calls.append((q.shape, k.shape, starts_q.dtype, longest_q, longest_k, scale, window_size, enable_gqa))
        ends = starts_q, starts_k, longest_q, longest_k
        per_row = attention._by_length(*(one.transpose(0, 1) for one in (q, k, v)), ends, scale, None)
        return per_row.transpose(0, 1)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    ends = starts, starts, 5, 5
    found = attention._varlen(query, key, value, ends, 0.3, None)
    torch.testing.assert_close(found, attention._by_length(query, key, value, ends, 0.3, None))
    attention._varlen(query, key, value, ends, 0.3, 3)
    assert calls[0] == ((9, 4, 8), (9, 2, 8), torch.int32, 5, 5, 0.3, (-1, 0), True)
    assert calls[1][-2] == (2, 0)  # a window of 3 holds the token and two before it


@pytest.mark.parametrize("window", [None, 4])
def test_sequences_of_similar_lengths_are_read_together_as_each_alone(window, monkeypatch):
    """They are one call, wherever they lie; every sequence gets what it gets alone, gradients too."""
    # more keys than queries: a shared prompt's; at the end a rank's padding of nothing
    queries, keys = (3, 3, 3, 5, 3, 6, 6, 5, 2, 0), (3, 3, 7, 9, 7, 6, 6, 5, 12, 0)
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, sum(queries)), (2, sum(keys)), (2, sum(keys)))
    query, key, value, grad = (
        torch.randn(*size, 8, generator=generator, requires_grad=True) for size in (*sizes, sizes[0])
    )
    calls, kernel = [], attention.F.scaled_dot_product_attention

    def counted(one, *others, **options):
        calls.append(len(one))
        return kernel(one, *others, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", counted)
    ends = [torch.tensor((0, *lengths)).cumsum(0) for lengths in (queries, keys)]
    found = attention._by_length(query, key, value, (*ends, max(queries), max(keys)), 0.3, window)
    assert calls == [2, 2, 1, 3, 1, 1]  # (2, 12) and (5, 9) are alone; (6, 6) and (5, 5) are one
    parts = query.split(queries, 1), key.split(keys, 1), value.split(keys, 1)
    alone = []
    for count, total, *three in zip(queries, keys, *parts, strict=True):
        ends = torch.tensor([0, count]), torch.tensor([0, total]), count, total
        alone.append(attention._by_length(*three, ends, 0.3, window))
    expected = torch.cat(alone, 1)
    torch.testing.assert_close(found, expected)
    for first, second in zip(
        *(torch.autograd.grad(x, (query, key, value), grad) for x in (found, expected)), strict=True
    ):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("heads, shared, ranks", [(8, 2, 4), (8, 1, 2), (12, 4, 6), (8, 8, 2), (14, 2, 7)])
def test_each_rank_gets_the_heads_that_its_queries_need(heads, shared, ranks):
    """Keys serve several queries each; a rank has a run of the queries, and those keys and no others."""
    key = torch.arange(shared)[None, :, None, None]
    wanted = key.repeat_interleave(heads // shared, dim=1).chunk(ranks, dim=1)
    found = attention._enough_heads(key, ranks)
    assert found.shape[1] % ranks == 0 and heads % found.shape[1] == 0
    for mine, want in zip(found.chunk(ranks, dim=1), wanted, strict=True):
        assert torch.equal(mine.repeat_interleave(want.shape[1] // mine.shape[1], dim=1), want)


def test_without_rows_it_is_transformers_own_attention():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 9, 8, generator=generator) for _ in range(3))
    module = SimpleNamespace(is_causal=True)
    found, _ = attend(module, query, key, value, None, scaling=0.2, sliding_window=None, dropout=0.0)
    assert torch.equal(found, sdpa_attention_forward(module, query, key, value, None, scaling=0.2)[0])


def test_a_model_that_cannot_is_refused(monkeypatch):
    with pytest.raises(InputError, match="needs softcap; set it to False"):
        from transformers import AutoModelForCausalLM

        shape = dict(vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
        config = Gemma2Config(**shape, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
        config.final_logit_softcapping = None
        Policy(AutoModelForCausalLM.from_config(config), temperature=1.0, layout=PACKED)
    monkeypatch.setattr(
        attention,
        "_by_length",
        lambda q, k, v, *_: attention.F.scaled_dot_product_attention(
            q, *(one.repeat_interleave(2, 0) for one in (k, v)), is_causal=True
        ),
    )
    with pytest.raises(InputError, match="reads packed sequences otherwise"):
        policy(PACKED)  # attention over all rows at once
    with pytest.raises(InputError, match="reads packed sequences otherwise"):
        Policy(model(dtype=torch.float32), temperature=0.7, layout=PACKED, compute_dtype=torch.bfloat16)


def test_the_saved_configuration_does_not_name_this_attention(tmp_path):
    module = policy(PACKED).module
    assert module.config._attn_implementation == ATTENTION
    module.save_pretrained(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text()


def test_pieces_hold_as_many_rows_as_fit_without_padding():
    lengths = torch.tensor([9, 2, 7, 3, 1, 8, 5])
    batch = SimpleNamespace(lengths=lengths, rows=lambda index: index)
    pieces = list(micro_batches(batch, max_tokens=12, packed=True))
    assert sorted(torch.cat([index for index, _ in pieces]).tolist()) == list(range(7))
    for index, same in pieces:
        assert int(lengths[index].sum()) <= 12 and torch.equal(index, same)
    assert len(pieces) == 3 < len(list(micro_batches(batch, max_tokens=12)))
