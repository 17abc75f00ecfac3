"""Drawing tokens: the hash, the inverse of the distribution function, truncation, stop strings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from core.engines import sampling
from core.engines.engine import SamplingParams, StopRule
from core.engines.sampling import draw, uniforms
from core.types import Stop


def plain(rows: int) -> list[SamplingParams]:
    return [SamplingParams(1)] * rows


def test_uniforms_are_uniform_and_unrelated_between_seeds_and_positions():
    seeds, positions = np.meshgrid(
        np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64), indexing="ij"
    )
    table = uniforms(seeds.ravel(), positions.ravel()).reshape(200, 200)
    assert table.min() >= 0 and table.max() < 1 and len(np.unique(table)) == table.size
    counts = np.histogram(table, 50, (0, 1))[0]
    assert ((counts - 800) ** 2 / 800).sum() < 49 + 4 * (2 * 49) ** 0.5
    pairs = (table[1:], table[:-1]), (table[:, 1:], table[:, :-1]), (table[1:, :-1], table[:-1, 1:])
    for one, other in pairs:  # neighbours, and seed + 1 one position earlier
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("vocab_size", [1, 5, 1000, 4099])
def test_the_token_is_the_inverse_of_the_distribution_function(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(400, vocab_size, generator=generator) * 3
    logits[:, ::7] = -torch.inf if vocab_size > 1 else 0.0
    logits[:, -1] = 0.5
    uniform = torch.rand(400, dtype=torch.float64, generator=generator)
    uniform[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    token, logprob, _ = draw(logits, plain(400), uniform)
    cdf = np.cumsum(logits.double().softmax(-1).numpy(), -1)
    expected = (cdf <= uniform[:, None].numpy() * cdf[:, -1:]).sum(-1)
    # The rest: rounding at an edge
    assert (token.numpy() == expected.clip(max=vocab_size - 1)).mean() > 0.995
    np.testing.assert_allclose(
        logprob, logits.log_softmax(-1).gather(-1, token[:, None])[:, 0], atol=1e-6
    )
    assert token[0] == logits[0].isfinite().nonzero()[0] and token[1] == vocab_size - 1


def test_rare_tokens_of_a_large_vocabulary_are_reachable():
    """Half of the mass on one token, the rest over 150,000: float32 sums would skip most of
    them."""
    logits = torch.zeros(1, 150_001)
    logits[0, 0] = np.log(150_000)
    uniform = torch.linspace(0.5, 1, 201, dtype=torch.float64)[:-1] + 1e-7
    token, _, _ = draw(logits.expand(200, -1), plain(200), uniform)
    expected = 1 + ((uniform - 0.5) * 300_000).floor()
    assert (token - expected).abs().max() <= 1


def test_truncation_is_each_row_s_own_keeps_ties_and_takes_the_token_that_reaches_top_p():
    logits, inf = torch.tensor([[1.0, 3.0, 2.0, 0.0]] * 3), -torch.inf
    params = SamplingParams(1, top_k=2), SamplingParams(1), SamplingParams(1, top_p=0.7)
    out = sampling.processed_logits(logits, params)
    assert out.tolist() == [[inf, 3.0, 2.0, inf], [1.0, 3.0, 2.0, 0.0], [inf, 3.0, 2.0, inf]]
    tied = sampling.processed_logits(
        torch.tensor([[2.0, 1.0, 2.0, 2.0]]), [SamplingParams(1, top_k=2)]
    )
    assert tied.isfinite().tolist() == [[True, False, True, True]]
    halves = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for top_p, kept in ((0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (1e-9, 1)):
        out = sampling.processed_logits(halves, [SamplingParams(1, top_p=top_p)])
        assert int(out.isfinite().sum()) == kept, top_p


def test_of_equal_logits_at_the_border_the_lowest_ids_stay_alone_and_beside_others():
    flat = torch.zeros(3000)
    steps = torch.tensor([5.0, 1, 5, 1, 1] + 2995 * [-60.0])
    rows = torch.stack([flat, steps, flat])
    params = [
        SamplingParams(1, top_p=0.89995),
        SamplingParams(1, top_p=0.9905),
        SamplingParams(1, top_k=2000, top_p=0.49995),
    ]
    found = sampling.processed_logits(rows, params)
    kept = [row.isfinite().nonzero()[:, 0].tolist() for row in found]
    assert kept == [list(range(2700)), [0, 1, 2, 3], list(range(3000))[:1500]]
    for number, one in enumerate(params):
        alone = sampling.processed_logits(rows[number : number + 1], [one])
        assert torch.equal(alone[0], found[number])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_have_no_log_prob(bad, temperature):
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    params = [SamplingParams(1, temperature=temperature)] * 3
    _, logprob, _ = draw(logits, params, torch.full((3,), 0.5, dtype=torch.float64))
    assert logprob.isfinite().tolist() == [True, False, True]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, so that a character may take several; ids 256 and up are special."""
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)} | {"<eos>": 256, "<pad>": 257}
    backend = Tokenizer(WordLevel(vocab, unk_token="<pad>"))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def byte_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    symbols = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    return tokenizer.convert_tokens_to_ids(list(symbols))


def ends_at(tokenizer, ids: list[int], stop: tuple[str, ...]) -> int | None:
    rule = StopRule(SamplingParams(1000, stop=stop), frozenset(), tokenizer)
    return next(
        (i + 1 for i in range(len(ids)) if rule.ended(ids[: i + 1]) is Stop.STOP_STRING), None
    )


def test_stop_strings_match_where_decoding_everything_would():
    """Random bytes, broken characters and special tokens included: the same place as the
    definition."""
    tokenizer, rng = byte_tokenizer(), np.random.default_rng(0)
    letters = byte_ids(tokenizer, "ab é€")
    found = 0
    for _ in range(300):
        ids = rng.choice(letters + [256], 30).tolist()
        stop = (("ab", "b a", "€"), ("aa",), ("é b", "bbb"))[int(rng.integers(3))]
        by_definition = next(
            (
                n
                for n in range(1, 31)
                if any(s in tokenizer.decode(ids[:n], skip_special_tokens=True) for s in stop)
            ),
            None,
        )
        assert ends_at(tokenizer, ids, stop) == by_definition
        found += by_definition is not None
    assert 50 < found < 290
    assert ends_at(tokenizer, byte_ids(tokenizer, "日本語です"), ("本語",)) == len(
        byte_ids(tokenizer, "日本語")
    )


def test_the_kept_ids_of_a_row_are_all_that_it_may_draw():
    """However low their logits; a row that truncates nothing, or does not ask, has none."""
    logits = torch.tensor([[-30.0, -31, -29, -90], [0, 1, 2, 3], [0, 1, 2, 3]])
    params = [
        SamplingParams(1, top_k=3, kept_sets=True),
        SamplingParams(1, kept_sets=True),
        SamplingParams(1, top_p=0.7),
    ]
    _, _, kept = sampling.draw(logits, params, torch.full((3,), 0.5, dtype=torch.float64))
    assert kept[0].tolist() == [0, 1, 2] and kept[1] is None and kept[2] is None
