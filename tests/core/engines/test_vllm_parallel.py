"""vLLM on several processes. A file of its own: closing an engine takes the state of those beside it in the process."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make setup says why", allow_module_level=True)

from core.engines import vllm
from core.engines.vllm import VLLMEngine
from tests.core.engine_contract import ask, ids, sample_all
from tests.core.engines.test_vllm_engine import BLOCK, SHAPE, skeleton
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(vllm.DEVICE != "cpu", reason="this vLLM is not the CPU build")


def test_two_processes_share_one_engine(tmp_path):
    """Each holds a part of every layer: the same log-probs and answers as one process, and no part stays stale."""
    options = {**SHAPE, "initializer_range": 0.14}
    tiny_config(**options).save_pretrained(tmp_path)
    requests = [ask(tuple(range(40 + i, 80 + i)), seed=i, max_tokens=8) for i in range(6)]
    policies = [dict(tiny_model(**options, seed=seed).state_dict()) for seed in (0, 1)]
    found = {}
    for processes in (1, 2):
        engine = VLLMEngine(
            *(tiny_tokenizer(), skeleton(**options)),
            **dict(model=str(tmp_path), dtype="float32", enforce_eager=True, block_size=BLOCK, max_model_len=256),
            **dict(max_num_batched_tokens=256, kv_cache_memory_bytes=16 << 20, tensor_parallel_size=processes),
        )
        try:
            for version, policy in enumerate(policies):
                engine.update_weights(policy.items(), version)
                answers = sample_all(engine, requests)
                found[processes, version] = engine.probe(tuple(range(40, 80))), list(map(ids, answers))
        finally:
            engine.close()
    for version in (0, 1):
        np.testing.assert_allclose(found[1, version][0], found[2, version][0], atol=1e-5)
        assert found[1, version][1] == found[2, version][1]
    assert found[1, 0][1] != found[1, 1][1]
