"""Buckets of weights: what is packed comes out in another process, and a checksum tells any
change."""

from __future__ import annotations

import pickle
import random

import pytest
import torch

from core.engines.weight_buckets import (
    ALIGNMENT,
    SUMMED,
    Bucket,
    Staging,
    Weight,
    check_weights,
    checksum,
    held_weights,
    merged,
    node_key,
    pack,
    staged_size,
)
from core.errors import InputError
from tests.forked import forked
from tests.tiny import tiny_model

CPU = torch.device("cpu")


def some():
    """Weights of odd sizes and several number formats."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (1, 1), (7, 5), (64, 33), (1,), (9, 2, 3), (130,)]
    formats = [
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.int64,
        torch.float32,
        torch.uint8,
    ]
    pairs = zip(shapes, formats, strict=True)
    values = [torch.randint(0, 100, shape, generator=generator).to(dtype) for shape, dtype in pairs]
    return [Weight((f"w{i}",), tuple(v.shape), v.dtype) for i, v in enumerate(values)], values


@pytest.mark.parametrize(("limit", "count"), [(4224, 3), (5000, 1), (10**6, 1)])
def test_every_weight_comes_out_as_it_went_in(limit, count):
    weights, values = some()
    found, sent = [], []
    for bucket in pack(weights, values, limit, Staging(staged_size(weights, limit), CPU)):
        opened, received = bucket.open(CPU)
        assert received == bucket.checksum and bucket.size <= limit
        found += zip(bucket.weights, opened, strict=True)
        sent.append(bucket.weights)
    assert [weight for weight, _ in found] == weights and len(sent) == count
    assert all(
        torch.equal(value, expected) for (_, value), expected in zip(found, values, strict=True)
    )
    assert all(
        value.dtype == weight.dtype and value.shape == weight.shape for weight, value in found
    )
    # Of a rank without staging, which gathers alike
    unstaged = list(pack(weights, iter(values), limit, None))
    assert [bucket.weights for bucket in unstaged] == sent and not any(
        bucket.checksum for bucket in unstaged
    )


def read(pickled: bytes) -> None:
    values, checksums = pickle.loads(pickled).open(CPU)
    print(list(checksums), [value.sum().item() for value in values], sep="; ")


def test_another_process_reads_the_same_memory():
    weights, values = some()
    staging = Staging(10**4, CPU)
    (bucket,) = pack(weights, values, 10**6, staging)
    other = forked(read, pickle.dumps(bucket))
    sums = [value.sum().item() for value in values]
    assert other.stdout == f"{list(bucket.checksum)}; {sums}\n", other.stderr
    staging.file.truncate(100)
    with pytest.raises(ValueError, match="greater than file size"):
        bucket.open(CPU)


def test_any_change_of_the_bytes_changes_the_checksum():
    chance, size = random.Random(0), SUMMED * 4 * 3 + 16 * 7
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    words = data.view(torch.int32)
    before = checksum(words)
    for _ in range(50):
        changed = data.clone()
        changed[chance.randrange(size)] ^= 1 << chance.randrange(8)
        assert checksum(changed.view(torch.int32)) != before
    for block in (1, 64, SUMMED):  # numbers or rows that changed their places
        for _ in range(10):
            first, second = (chance.randrange(len(words) // block) * block for _ in range(2))
            swapped = words.clone()
            swapped[first : first + block] = words[second : second + block]
            swapped[second : second + block] = words[first : first + block]
            assert (checksum(swapped) == before) == torch.equal(swapped, words)
    assert checksum(torch.zeros(16, dtype=torch.uint8)) != checksum(
        torch.zeros(32, dtype=torch.uint8)
    )


def test_places_of_all_ranks_are_one_bucket():
    weights, values = some()
    one, other = (next(pack(weights, values, 10**6, Staging(10**4, CPU))) for _ in range(2))
    elsewhere = Bucket(other.weights, other.checksum, {"another node": other.files[node_key()]})
    both = merged([one, Bucket(one.weights), elsewhere])
    assert both.files == {**one.files, **elsewhere.files} and both.checksum == one.checksum
    with pytest.raises(RuntimeError, match="gathered different weights"):
        merged([one, Bucket(one.weights, (1, 2, 3, 4), elsewhere.files)])
    with pytest.raises(RuntimeError, match="no learner rank left weights for node .*hybrid_engine"):
        elsewhere.open(CPU)


def test_a_weight_larger_than_a_bucket_is_refused():
    weights = [
        Weight(("head",), (1024, 1025), torch.float32),
        Weight(("norm",), (4,), torch.float32),
    ]
    with pytest.raises(
        InputError,
        match=r"megabytes=4: the weight head has 4 MiB, .*; set at "
        r"least 5",
    ):
        staged_size(weights, 4 * 2**20)
    assert staged_size(weights, 5 * 2**20) == 1024 * 1025 * 4 + ALIGNMENT


def test_tied_names_are_one_weight():
    model = tiny_model(tie_word_embeddings=True)
    weights = list(held_weights(model.state_dict().items()).weights)
    tied = next(weight for weight in weights if len(weight.names) > 1)
    assert set(tied.names) == {"model.embed_tokens.weight", "lm_head.weight"}
    check_weights(model, weights)
    others = [weight for weight in weights if weight != tied]
    check_weights(model, [*others, Weight(tied.names[:1], tied.shape, tied.dtype)])
    with pytest.raises(ValueError, match="sent as several weights"):
        check_weights(
            model, [*others, *(Weight((name,), tied.shape, tied.dtype) for name in tied.names)]
        )
    with pytest.raises(ValueError, match=r"embed_tokens.weight = lm_head.weight: missing"):
        check_weights(model, others)
