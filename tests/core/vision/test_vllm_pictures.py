"""vLLM reads the learner's own pixels: equal log-probs, before and after new weights, of each kind
of model."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from core.engines.engine import SampleRequest, SamplingParams
from core.learner.batching import MicroBatchSize, make_batch
from core.learner.models import load_policy, load_tokenizer
from core.learner.passes import Policy
from core.types import ScoredGroup
from reward_scores.score import Score
from tests.core.vision.test_vision import prompts
from tests.pictures import KINDS, model_config, save_vision_model, vision_model

vllm = pytest.importorskip(
    "core.engines.vllm", reason="vLLM is not installed: make setup says why", exc_type=ImportError
)
pytestmark = [
    pytest.mark.skipif(vllm.DEVICE != "cpu", reason="this vLLM is not the CPU build"),
    pytest.mark.processes,
]
N = 3  # answers a prompt


@pytest.fixture(
    scope="module",
    params=[KINDS[1], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[::2])],
)
def engine(request, tmp_path_factory):
    folder = save_vision_model(tmp_path_factory.mktemp(request.param), request.param)
    model = model_config(folder)
    options = dict(model=str(folder), dtype="float32", enforce_eager=True)
    options |= dict(max_model_len=256, max_num_seqs=16, max_num_batched_tokens=512)
    made = vllm.VLLMEngine(load_tokenizer(model), load_policy(model, on_meta=True), **options)
    made.kind = request.param
    yield made
    made.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_engine_and_learner_have_equal_log_probs_also_of_pictures_seen_before_new_weights(
    engine, seed
):
    model, asked = vision_model(engine.kind, seed), prompts(engine.kind)
    engine.update_weights(model.state_dict().items(), seed)

    async def sample():
        def one(prompt, i):
            params = SamplingParams(max_tokens=6 + 2 * prompt.ordinal + i, ignore_eos=True)
            return engine.sample(SampleRequest(prompt.token_ids, params, i, media=prompt.media))

        return await asyncio.gather(*[one(prompt, i) for prompt in asked for i in range(N)])

    found = asyncio.run(sample())
    assert all(tuple(found[N * i].prompt_ids) == prompt.token_ids for i, prompt in enumerate(asked))
    groups = [
        ScoredGroup(p, tuple(found[N * i :][:N]), (Score(0.0),) * N) for i, p in enumerate(asked)
    ]
    batch = make_batch(groups, 0)
    log_prob, _ = Policy(copy.deepcopy(model), temperature=1.0).log_probs(
        batch, MicroBatchSize(max_sequences=16)
    )
    mask = batch.response_mask
    torch.testing.assert_close(batch.rollout_log_probs[mask], log_prob[mask], atol=1e-5, rtol=0)
