"""vLLM on several processes. A file of its own: closing an engine takes the state of those beside
it in the process."""

from __future__ import annotations

import importlib.util
from collections import defaultdict

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make setup says why", allow_module_level=True)

from core.engines import vllm
from core.engines.vllm import VLLMEngine
from core.engines.weight_buckets import Staging, Weight, pack, staged_size
from tests.core.engine_contract import ask, ids, sample_all
from tests.core.engines.test_vllm_engine import BLOCK, SHAPE, skeleton
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(vllm.DEVICE != "cpu", reason="this vLLM is not the CPU build")


def send(engine, policy, version):
    """Update the engine as a cluster does, by buckets in memory that its processes open, and return
    the proofs."""
    names_of = defaultdict(list)  # tied weights have several
    for name, tensor in engine.model.state_dict(keep_vars=True).items():
        names_of[id(tensor)].append(name)
    names = [tuple(names) for names in names_of.values() if names[0] in policy]
    weights = [Weight(each, tuple(policy[each[0]].shape), torch.float32) for each in names]
    limit = max(max(weight.room for weight in weights), sum(weight.room for weight in weights) // 5)
    staging = Staging(staged_size(weights, limit), torch.device("cpu"))
    engine.begin_update(weights)
    sent = []
    for bucket in pack(weights, (policy[each[0]] for each in names), limit, staging):
        engine.load(bucket)
        sent.append(bucket.checksum)
    proofs = engine.end_update(version)
    assert len(sent) >= 4 and {proof.received for proof in proofs} == {tuple(sent)}
    return proofs


@pytest.mark.processes
def test_two_processes_share_one_engine(tmp_path):
    """Each holds a part of every layer: the same log-probs and answers as one process, and no part
    stays stale."""
    options = {**SHAPE, "initializer_range": 0.14}
    tiny_config(**options).save_pretrained(tmp_path)
    requests = [ask(tuple(range(40 + i, 80 + i)), seed=i, max_tokens=8) for i in range(6)]
    policies = [dict(tiny_model(**options, seed=seed).state_dict()) for seed in (0, 1)]
    found = {}
    for processes in (1, 2):
        engine = VLLMEngine(
            *(tiny_tokenizer(), skeleton(**options)),
            **dict(
                model=str(tmp_path),
                dtype="float32",
                enforce_eager=True,
                block_size=BLOCK,
                max_model_len=256,
            ),
            **dict(
                max_num_batched_tokens=256,
                kv_cache_memory_bytes=16 << 20,
                tensor_parallel_size=processes,
            ),
        )
        try:
            proofs = {}
            for version, policy in enumerate([*policies, policies[0]]):
                proofs[version] = send(engine, policy, version)
                if version == len(policies):
                    break
                answers = sample_all(engine, requests)
                found[processes, version] = (
                    engine.probe(tuple(range(40, 80))),
                    list(map(ids, answers)),
                )
            assert all(len(found) == processes for found in proofs.values())
            assert proofs[0] == proofs[2] != proofs[1]
            # Each process holds a part of its own
            assert len({str(one.weights) for one in proofs[0]}) == processes
        finally:
            engine.close()
    for version in (0, 1):
        np.testing.assert_allclose(found[1, version][0], found[2, version][0], atol=1e-5)
        assert found[1, version][1] == found[2, version][1]
    assert found[1, 0][1] != found[1, 1][1]
