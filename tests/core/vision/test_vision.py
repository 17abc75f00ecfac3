"""Engine and learner read pictures alike: shared prompts, padded and packed, each kind of model."""

from __future__ import annotations

import asyncio
import copy
import pickle

import numpy as np
import pytest
import torch

from core.engines.engine import SampleRequest, SamplingParams
from core.engines.hf import HFEngine
from core.learner.batching import MicroBatchSize, make_batch
from core.learner.passes import Policy
from core.types import Prompt, ScoredGroup, TrainBatch
from core.vision.learner_pictures import picture_inputs, run_with_pictures
from core.vision.pictures import patches
from reward_scores.score import Score
from tests.padded import batch_of_padded
from tests.pictures import KINDS, picture, pictures, vision_model, vision_tokenizer

TOKENIZER = vision_tokenizer()
SIZES = {"alone": MicroBatchSize(max_sequences=1), "together": MicroBatchSize(max_tokens=400)}


def prompt(ordinal: int, text: str, *each) -> Prompt:
    media = pictures(*each)
    ids = media.expand(TOKENIZER(media.mark(text))["input_ids"])
    return Prompt(ordinal, str(ordinal), tuple(ids), (), "x", "t", media=media or None)


def prompts(kind: str) -> list[Prompt]:
    """Equal ids with other pictures, two pictures of other sizes, and none."""
    one, other, tall = picture(1, kind), picture(2, kind), picture(3, kind, width=40, height=90)
    texts = ("what <image> is it?", "what <image> is it?", "<image> and <image>?", "no picture")
    return [prompt(i, texts[i], *p) for i, p in enumerate([(one,), (other,), (one, tall), ()])]


def sampled(model, asked: list[Prompt], n: int = 3) -> TrainBatch:
    """A batch of answers of different lengths, as an engine with a copy of the model wrote them."""
    engine = HFEngine(copy.deepcopy(model), TOKENIZER)

    async def sample():
        def one(p: Prompt, i: int):
            params = SamplingParams(max_tokens=6 + 2 * p.ordinal + i, ignore_eos=True)
            return engine.sample(
                SampleRequest(p.token_ids, params, 100 * p.ordinal + i, media=p.media)
            )

        return await asyncio.gather(*[one(p, i) for p in asked for i in range(n)])

    found = asyncio.run(sample())
    scores = (Score(0.0),) * n
    return make_batch(
        [ScoredGroup(p, tuple(found[n * i :][:n]), scores) for i, p in enumerate(asked)], 0
    )


@pytest.fixture(scope="module", params=KINDS)
def case(request):
    model = vision_model(request.param)
    return model, sampled(model, prompts(request.param))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_engine_and_learner_have_equal_log_probs(case, size):
    model, batch = case
    log_prob, _ = Policy(copy.deepcopy(model), temperature=1.0).log_probs(batch, size)
    mask = batch.response_mask
    torch.testing.assert_close(log_prob[mask], batch.rollout_log_probs[mask], atol=1e-5, rtol=0)
    # and the pictures matter
    blind = TrainBatch(batch.lengths).adding(**batch.stored)
    unseen, _ = Policy(copy.deepcopy(model), temperature=1.0).log_probs(blind, SIZES["alone"])
    seen = mask & (batch.group != 3).repeat_interleave(batch.lengths)
    assert (unseen - log_prob)[seen].abs().max() > 0.1
    torch.testing.assert_close(unseen[mask & ~seen], log_prob[mask & ~seen], atol=1e-5, rtol=0)


def test_gradients_do_not_depend_on_how_sequences_lie(case):
    model, batch = case

    def gradient(size: MicroBatchSize) -> torch.Tensor:
        policy = Policy(copy.deepcopy(model), temperature=1.0)
        for _, micro in policy.micro_batches_of_rank(size, batch):
            policy.token_stats(micro)[0].mul(micro.response_mask).sum().backward()
        parts = [
            value.grad.flatten() for value in policy.module.parameters() if value.grad is not None
        ]
        tower = [
            name
            for name, value in policy.module.named_parameters()
            if "visual" in name and value.grad is None
        ]
        assert not tower
        return torch.cat(parts)

    expected = gradient(SIZES["alone"])
    torch.testing.assert_close(
        gradient(SIZES["together"]), expected, atol=1e-5 * float(expected.norm()), rtol=0
    )


def test_the_body_gives_what_transformers_gives(case):
    model, _ = case
    kind = model.config.model_type
    asked = prompts(kind)[2]
    ids = torch.tensor([asked.token_ids])
    pixels = torch.from_numpy(np.concatenate([patches(one) for one in asked.media.pictures]))
    grid = torch.tensor([one.grid for one in asked.media.pictures])
    inputs = {
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == 101).int(),
    }
    with torch.no_grad():
        expected = model.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
        media = picture_inputs(model, ids, [asked.media])
        found = run_with_pictures(model, ids, media, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_placeholders_that_the_policy_wrote_are_ordinary_tokens():
    model, asked = vision_model(), prompt(0, "a<image>b", picture(1))
    ids = [*asked.token_ids, 101, 101, 5]
    batch = batch_of_padded(
        attention_mask=torch.ones(1, len(ids), dtype=torch.bool),
        input_ids=torch.tensor([ids]),
        response_mask=torch.arange(len(ids))[None] >= len(asked.token_ids),
        group=torch.zeros(1, dtype=torch.int64),
    )
    batch = TrainBatch(batch.lengths, 0, {0: asked.media}).adding(**batch.stored)
    policy = Policy(model, temperature=1.0)
    (log_prob, _) = policy.log_probs(batch, MicroBatchSize(max_sequences=1))
    assert float(log_prob[-3:].abs().min()) > 0 and torch.isfinite(log_prob).all()


def test_pictures_travel_once_a_prompt_and_only_where_they_are_read():
    model = vision_model()
    batch = sampled(model, prompts("qwen2_5_vl"), n=2)
    part = pickle.loads(pickle.dumps(batch.rows([0, 1]).only(("input_ids", "response_mask"))))
    assert part.media.keys() == {0} and part.media[0] == batch.media[0]
    sizes = [
        len(pickle.dumps(sampled(model, [prompt(0, "<image>", picture(1))], n=n))) for n in (1, 8)
    ]
    # Seven more answers, and not one more picture
    assert sizes[1] - sizes[0] < 7 * len(picture(1).data)
    assert batch.blank_row().media == {}
