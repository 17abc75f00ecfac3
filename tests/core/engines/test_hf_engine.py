"""The hf engine: the shared contract, and what is its alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from core.cluster.workers import LocalWorkers
from core.engines.engine import SampleRequest, make_engine
from core.engines.hf import HFEngine
from core.errors import InputError
from core.learner.passes import WeightSyncError
from tests.core.engine_contract import (
    PROMPTS,
    Counts,
    ModelEngineContract,
    ask,
    ids,
    run,
    sample_all,
)
from tests.core.ray_cluster import cluster_config, write_model
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer


class TestHF(ModelEngineContract):
    def make(self) -> HFEngine:
        return HFEngine(self.model(), tiny_tokenizer())

    def counts(self, engine: HFEngine) -> Counts:
        return Counts(engine.prefill_tokens, engine.row_steps)


MODELS = {
    "qwen2": tiny_model,
    "gpt2": lambda: tiny_model("gpt2"),
    "a head of keys each": lambda: tiny_model(num_key_value_heads=4),
    "tied": lambda: tiny_model(tie_word_embeddings=True),
    "wide heads": lambda: tiny_model("llama", head_dim=24),
}


def full_logprobs(model, request: SampleRequest, response: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([[*request.prompt_ids, *response]]), use_cache=False).logits[0]
    logprobs = (
        logits[len(request.prompt_ids) - 1 : -1] / request.sampling.temperature
    ).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(response)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_agrees_with_its_full_forward_pass(name):
    """Prompts of many lengths, shared and not, rows that end early, and some that join late."""
    model = MODELS[name]()
    engine = HFEngine(model, tiny_tokenizer())
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(4, 100, length).tolist()) for length in (1, 2, 3, 7, 8, 20)]
    requests = [
        ask(prompts[i % 6], seed=i, max_tokens=1 + i * 7 % 29, ignore_eos=True) for i in range(24)
    ]

    async def staggered():
        first = [asyncio.ensure_future(engine.sample(request)) for request in requests[:16]]
        await first[1]  # 8 tokens: the rest joins while these decode
        return await asyncio.gather(*first, *map(engine.sample, requests[16:]))

    for request, trajectory in zip(requests, run(staggered()), strict=True):
        expected = full_logprobs(model, request, ids(trajectory))
        np.testing.assert_allclose(trajectory.logprobs, expected, atol=1e-5)
    probed = engine.probe((5, 6, 7, 8))
    np.testing.assert_allclose(probed, full_logprobs(model, ask((5,)), [6, 7, 8]), atol=1e-5)
    assert engine.probe((4,)).shape == (0,)


def test_a_model_that_would_decode_wrongly_is_refused():
    """One without keys and values, one whose layers forget old tokens, one whose scores may be
    soft-capped."""
    from transformers import MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(
        MambaConfig(vocab_size=100, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    shape = {
        key: value for key, value in tiny_config("llama").to_dict().items() if key != "model_type"
    }
    sliding = MistralForCausalLM(MistralConfig(**{**shape, "sliding_window": 6}))
    eager = tiny_model()
    eager.set_attn_implementation("eager")
    for model in (mamba, sliding, eager):
        with pytest.raises(InputError, match=f"rollout.name=hf: cannot run {type(model).__name__}"):
            HFEngine(model, tiny_tokenizer())


def test_dropout_is_off():
    still, dropping = (
        tiny_model("gpt2"),
        tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5),
    )
    probes = [
        HFEngine(model.train(), tiny_tokenizer()).probe((4, 5, 6)) for model in (still, dropping)
    ]
    np.testing.assert_array_equal(*probes)


def test_bf16_keeps_the_rotary_frequencies():
    engine = HFEngine(tiny_model(), tiny_tokenizer(), dtype=torch.bfloat16)
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    assert engine.model.model.rotary_emb.inv_freq.dtype == torch.float32
    requests = [ask(PROMPTS[i % 5], seed=i, max_tokens=20, ignore_eos=True) for i in range(10)]
    for request, trajectory in zip(requests, sample_all(engine, requests), strict=True):
        difference = np.abs(
            trajectory.logprobs - full_logprobs(tiny_model(), request, ids(trajectory))
        )
        assert 0 < difference.mean() < 0.05


def test_tied_weights_may_come_under_one_name_or_both():
    engine = HFEngine(tiny_model(tie_word_embeddings=True), tiny_tokenizer())
    new = tiny_model(seed=1, tie_word_embeddings=True).state_dict()
    expected = full_logprobs(tiny_model(seed=1, tie_word_embeddings=True), ask((4,)), [5, 6])
    for version, left_out in enumerate(
        (None, "lm_head.weight", "model.embed_tokens.weight"), start=1
    ):
        engine.update_weights(tiny_model(tie_word_embeddings=True).state_dict().items(), 0)
        engine.update_weights(((n, t) for n, t in new.items() if n != left_out), version)
        np.testing.assert_allclose(engine.probe((4, 5, 6)), expected, atol=1e-6)
        assert engine.policy_version == version
    with pytest.raises(ValueError, match="weights do not fit, none was changed"):
        engine.update_weights([("nonsense", torch.zeros(1))], 1)
    np.testing.assert_allclose(engine.probe((4, 5, 6)), expected, atol=1e-6)


def test_any_stale_weight_is_noticed(tmp_path, monkeypatch):
    """Each in its turn, moved by less than a probe could tell."""
    config = cluster_config(
        write_model(tmp_path), "trainer.backend=local", "actor_rollout_ref.actor.use_kl_loss=False"
    )
    # In float32 there is one copy
    options = {"needs_ref": False, "needs_critic": False, "master_dtype": torch.float64}
    workers = LocalWorkers(config, tiny_tokenizer(), torch.device("cpu"), **options)
    copy_weights, names = workers.engine._copy, list(workers.models.actor.module.state_dict())
    for version, left_out in enumerate(names):
        with torch.no_grad():
            for parameter in workers.models.actor.module.parameters():
                parameter.add_(1e-6)

        def without(weights, values, left_out=left_out):
            kept = [
                pair for pair in zip(weights, values, strict=True) if left_out not in pair[0].names
            ]
            copy_weights(*zip(*kept, strict=True))

        with (
            monkeypatch.context() as patch,
            pytest.raises(WeightSyncError, match=f"1 of .*{left_out}"),
        ):
            patch.setattr(workers.engine, "_copy", without)
            workers.sync_weights(version)
        workers.sync_weights(version)


def test_what_fails_fails_every_request_and_leaves_no_trace(monkeypatch):
    """Weights that are not finite, and an error of the model."""
    engine = HFEngine(tiny_model(), tiny_tokenizer(), max_batch_rows=2)
    requests = [ask(seed=i, max_tokens=30, temperature=i % 2) for i in range(5)]
    good = sample_all(engine, requests)

    def errors():
        async def all_of_them():
            return await asyncio.gather(*map(engine.sample, requests), return_exceptions=True)

        return {type(one) for one in run(all_of_them())}

    def broken(*args, **kwargs):
        raise MemoryError("no room")

    weights = tiny_model().state_dict()
    engine.update_weights(
        ((name, torch.full_like(tensor, torch.nan)) for name, tensor in weights.items()), 1
    )
    assert errors() == {FloatingPointError}
    engine.update_weights(weights.items(), 2)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", broken)
        assert errors() == {MemoryError}
    assert [ids(t) for t in sample_all(engine, requests)] == [ids(t) for t in good]
    with pytest.raises(ValueError, match="100 tokens"):
        sample_all(engine, [ask((4, 100))])


def test_a_fault_that_nobody_awaits_does_not_end_in_silence():
    engine = HFEngine(tiny_model(), tiny_tokenizer())

    async def broken():
        raise RuntimeError("the grader is gone")

    async def aborted_before_the_fault():
        request = asyncio.create_task(engine.sample(ask(seed=0)))
        await asyncio.sleep(0)
        engine.before_step, decoding = broken, engine._task
        request.cancel()
        await decoding

    with pytest.raises(RuntimeError, match="the grader is gone"):
        run(aborted_before_the_fault())


PER_TOKEN = 2 * 2 * 2 * 8 * 4  # of the tiny model: layers, keys and values, heads, dim, bytes


@pytest.mark.parametrize("seed", range(2))
def test_arrivals_and_aborts_at_random_change_no_response(seed):
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(4, 100, length).tolist()) for length in rng.integers(1, 12, 6)]
    requests = [
        ask(prompts[rng.integers(6)], seed=i, max_tokens=int(rng.integers(1, 40)))
        for i in range(40)
    ]
    rows = int(rng.integers(2, 20))
    engine = HFEngine(
        tiny_model(),
        tiny_tokenizer(),
        max_batch_rows=rows,
        max_prefill_tokens=int(rng.integers(1, 30)),
    )
    doomed = set(rng.choice(40, 8, replace=False).tolist())
    chains = np.array_split(np.arange(40), 10)
    seen, step = [], engine._advance
    engine._advance = lambda: seen.append(len(engine.rows)) or step()

    async def chain(members):
        results = []
        for i in members.tolist():
            task = asyncio.ensure_future(engine.sample(requests[i]))
            if i in doomed:
                for _ in range(int(rng.integers(30))):
                    await asyncio.sleep(0)
                task.cancel()
            results.append((i, (await asyncio.gather(task, return_exceptions=True))[0]))
        return results

    async def everything():
        return [pair for results in await asyncio.gather(*map(chain, chains)) for pair in results]

    undisturbed = sample_all(HFEngine(tiny_model(), tiny_tokenizer()), requests)
    for i, result in run(everything()):
        if isinstance(result, asyncio.CancelledError):
            assert i in doomed
            continue
        assert (ids(result), result.stop) == (ids(undisturbed[i]), undisturbed[i].stop)
        np.testing.assert_allclose(result.logprobs, undisturbed[i].logprobs, atol=1e-5)
    assert max(seen) == min(rows, len(chains))
    assert (engine.cache.places, engine.cache.columns) == (0, 0)  # nothing is held while idle


def test_the_cache_stays_within_its_bytes():
    def engine_of(tokens: int) -> HFEngine:
        return HFEngine(tiny_model(), tiny_tokenizer(), cache_gib=tokens * PER_TOKEN / 2**30)

    engine, held = engine_of(2000), []
    reserve = engine.cache.reserve

    def watched(*args):
        reserve(*args)
        held.append(sum(t.nbytes for layer in engine.cache.stores for t in layer))

    engine.cache.reserve = watched
    requests = [
        ask(PROMPTS[i % 5] * 3, seed=i, max_tokens=[150, 20, 70][i % 3], ignore_eos=True)
        for i in range(30)
    ]
    assert [len(ids(t)) for t in sample_all(engine, requests)] == [150, 20, 70] * 10
    assert 0.5 * 2000 * PER_TOKEN < max(held) <= 2000 * PER_TOKEN
    with pytest.raises(ValueError, match="cache_gib"):
        sample_all(engine_of(100), [ask(max_tokens=120)])


def test_make_engine_follows_the_configuration():
    options = dict(
        engine_kwargs={"hf": {"cache_gib": 0.5}}, max_num_seqs=9, max_num_batched_tokens=512
    )
    part = SimpleNamespace(rollout=SimpleNamespace(name="hf", dtype="bfloat16", **options))
    config = SimpleNamespace(actor_rollout_ref=part)
    engine = make_engine(config, tiny_model, tiny_tokenizer(), torch.device("cpu"))
    assert (engine.max_rows, engine.max_prefill_tokens, engine.model.dtype) == (
        9,
        512,
        torch.bfloat16,
    )
    assert engine.cache_tokens == 0.5 * 2**30 / (PER_TOKEN / 2)
