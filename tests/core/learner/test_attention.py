"""Attention of packed sequences: kernels, batches of similar lengths, and heads that ranks
exchange."""

import pytest
import torch

from core.learner import packed_attention


def test_the_kernel_of_a_gpu_is_called_as_it_wants_to_be(monkeypatch):
    """[N, H, D], row starts in int32, causal within a window: against a stand-in that computes it
    row by row."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    calls = []

    def kernel(
        q, k, v, starts_q, starts_k, longest_q, longest_k, *, scale, window_size, enable_gqa
    ):
        calls.append(
            (q.shape, k.shape, starts_q.dtype, longest_q, longest_k, scale, window_size, enable_gqa)
        )
        ends = starts_q, starts_k, longest_q, longest_k
        per_row = packed_attention._by_length(
            *(one.transpose(0, 1) for one in (q, k, v)), ends, scale, None
        )
        return per_row.transpose(0, 1)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    ends = starts, starts, 5, 5
    found = packed_attention._varlen(query, key, value, ends, 0.3, None)
    torch.testing.assert_close(
        found, packed_attention._by_length(query, key, value, ends, 0.3, None)
    )
    packed_attention._varlen(query, key, value, ends, 0.3, 3)
    assert calls[0] == ((9, 4, 8), (9, 2, 8), torch.int32, 5, 5, 0.3, (-1, 0), True)
    assert calls[1][-2] == (2, 0)  # a window of 3 holds the token and two before it


@pytest.mark.parametrize("window", [None, 4])
def test_sequences_of_similar_lengths_are_read_together_as_each_alone(window, monkeypatch):
    """They are one call, wherever they lie; every sequence gets what it gets alone, gradients
    too."""
    # more keys than queries: a shared prompt's; at the end a rank's padding of nothing
    queries, keys = (3, 3, 3, 5, 3, 6, 6, 5, 2, 0), (3, 3, 7, 9, 7, 6, 6, 5, 12, 0)
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, sum(queries)), (2, sum(keys)), (2, sum(keys)))
    query, key, value, grad = (
        torch.randn(*size, 8, generator=generator, requires_grad=True)
        for size in (*sizes, sizes[0])
    )
    calls, kernel = [], packed_attention.F.scaled_dot_product_attention

    def counted(one, *others, **options):
        calls.append(len(one))
        return kernel(one, *others, **options)

    monkeypatch.setattr(packed_attention.F, "scaled_dot_product_attention", counted)
    ends = [torch.tensor((0, *lengths)).cumsum(0) for lengths in (queries, keys)]
    found = packed_attention._by_length(
        query, key, value, (*ends, max(queries), max(keys)), 0.3, window
    )
    assert calls == [2, 2, 1, 3, 1, 1]  # (2, 12) and (5, 9) are alone; (6, 6) and (5, 5) are one
    parts = query.split(queries, 1), key.split(keys, 1), value.split(keys, 1)
    alone = []
    for count, total, *three in zip(queries, keys, *parts, strict=True):
        ends = torch.tensor([0, count]), torch.tensor([0, total]), count, total
        alone.append(packed_attention._by_length(*three, ends, 0.3, window))
    expected = torch.cat(alone, 1)
    torch.testing.assert_close(found, expected)
    for first, second in zip(
        *(torch.autograd.grad(x, (query, key, value), grad) for x in (found, expected)), strict=True
    ):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "heads, shared, ranks", [(8, 2, 4), (8, 1, 2), (12, 4, 6), (8, 8, 2), (14, 2, 7)]
)
def test_each_rank_gets_the_heads_that_its_queries_need(heads, shared, ranks):
    """Keys serve several queries each; a rank has a run of the queries, and those keys and no
    others."""
    key = torch.arange(shared)[None, :, None, None]
    wanted = key.repeat_interleave(heads // shared, dim=1).chunk(ranks, dim=1)
    found = packed_attention._enough_heads(key, ranks)
    assert found.shape[1] % ranks == 0 and heads % found.shape[1] == 0
    for mine, want in zip(found.chunk(ranks, dim=1), wanted, strict=True):
        assert torch.equal(mine.repeat_interleave(want.shape[1] // mine.shape[1], dim=1), want)


def test_a_cpu_attends_in_float32_under_autocast(monkeypatch):
    """In 16 bits the gradient of short sequences takes three times as long."""
    seen, kernel = [], packed_attention.F.scaled_dot_product_attention

    def watched(query, *others, **options):
        seen.append((query.dtype, torch.is_autocast_enabled("cpu")))
        return kernel(query, *others, **options)

    monkeypatch.setattr(packed_attention.F, "scaled_dot_product_attention", watched)
    states = torch.randn(1, 2, 7, 8, dtype=torch.bfloat16)
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 4, "max_length_k": 4}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = packed_attention.attend(
            torch.nn.Identity(), states, states, states, None, **lengths
        )
    assert out.dtype == torch.bfloat16 and set(seen) == {(torch.float32, False)}
