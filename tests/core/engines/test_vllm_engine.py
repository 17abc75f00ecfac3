"""vLLM, the CPU build in CI: the contract of every engine, and what is its alone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make setup says why", allow_module_level=True)

from core.cluster.workers import LocalWorkers
from core.config.composition import compose
from core.engines import vllm
from core.engines.engine import Generation, StopRule, make_engine
from core.engines.vllm import VLLMEngine, engine_arguments
from core.engines.weight_buckets import Bucket
from core.errors import InputError
from core.learner.passes import WeightSyncError
from core.types import Stop
from tests.core.engine_contract import Counts, ModelEngineContract, ask, ids, run, sample_all
from tests.core.ray_cluster import cluster_config, write_model
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.skipif(vllm.DEVICE != "cpu", reason="this vLLM is not the CPU build"),
    pytest.mark.processes,
]
CPU = torch.device("cpu")
BLOCK = 32  # tokens; of the CPU build's kernels, as is the width of a head
SHAPE = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
ROLLOUT = "actor_rollout_ref.rollout"
VLLM = (
    *("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.enforce_eager=True"),
    *("actor_rollout_ref.rollout.tensor_model_parallel_size=1", "trainer.backend=local"),
    *(
        "actor_rollout_ref.actor.use_kl_loss=False",
        f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes=16777216",
    ),
)


def advancing(output: SimpleNamespace) -> tuple[VLLMEngine, Generation]:
    """An engine without vLLM whose next step brings this output of a request with a stop string."""
    tokenizer = tiny_tokenizer()
    request = ask(stop=("x",))
    engine = VLLMEngine.__new__(VLLMEngine)
    generation = Generation(request, StopRule(request.sampling, frozenset(), tokenizer), 0)
    engine._by_name = {"0": generation}
    engine._guarded = lambda step: step()
    engine.llm = SimpleNamespace(step=lambda: [output], abort_request=lambda names: None)
    return engine, generation


def output_of(tokens: list[int], **facts: Any) -> SimpleNamespace:
    logprobs = SimpleNamespace(logprobs=[-1.0] * len(tokens))
    part = SimpleNamespace(token_ids=tokens, logprobs=logprobs, stop_reason=None, **facts)
    return SimpleNamespace(
        request_id="0", outputs=[part], finished=facts["finish_reason"] is not None
    )


def test_a_request_that_vllm_ends_by_itself_hangs_nothing_where_strings_may_end_it():
    engine, _ = advancing(output_of([], finish_reason="error"))
    with pytest.raises(RuntimeError, match="vLLM ended a response with error"):
        engine._advance()


def test_tokens_behind_a_stop_string_are_no_part_of_a_response():
    a, x, b = (tiny_tokenizer().convert_tokens_to_ids(each) for each in "axb")
    engine, generation = advancing(output_of([a, x, b], finish_reason=None))
    assert engine._advance() == [generation]
    assert (generation.ids, generation.stop) == ([a, x], Stop.STOP_STRING)


def skeleton(**options) -> torch.nn.Module:
    with torch.device("meta"):
        return tiny_model(**options)


class TestVLLM(ModelEngineContract):
    """One engine for all of the tests: starting one takes seconds. Each test finds it with fresh
    weights."""

    model_options = {**SHAPE, "initializer_range": 0.14}
    keeps_sets = vllm.DEVICE != "cpu"

    @pytest.fixture(scope="class", autouse=True)
    def shared(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("model")
        tiny_config(**self.model_options).save_pretrained(folder)
        engine = VLLMEngine(
            tiny_tokenizer(),
            skeleton(**self.model_options),
            model=str(folder),
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=256,
            # Raised to a whole sequence; less than many prompts together
            max_num_batched_tokens=64,
            max_num_seqs=200,
            kv_cache_memory_bytes=16 << 20,
        )
        type(self).engine_of_all, type(self).work = engine, watched(engine)
        engine._free = lambda: None  # close() is to be undone
        yield
        del engine._free
        engine._closed = False
        engine.close()
        assert engine.llm is None

    def make(self) -> VLLMEngine:
        engine = self.engine_of_all
        engine._closed = False
        engine.update_weights(self.model().state_dict().items(), 0)
        return engine

    test_samples_of_a_prompt_share_its_prefill = None  # whole blocks alone, which is vLLM's to do

    def counts(self, engine: VLLMEngine) -> Counts:
        return Counts(self.work["prefill"], self.work["rows"])


def watched(engine: VLLMEngine) -> dict[str, int]:
    """Counts the tokens that vLLM's scheduler sends through the model, before a request's first
    token and after."""
    scheduler, work = engine.llm.engine_core.engine_core.scheduler, {"prefill": 0, "rows": 0}
    schedule = scheduler.schedule

    def counting(*args, **kwargs):
        output = schedule(*args, **kwargs)
        for name, tokens in output.num_scheduled_tokens.items():
            work["rows" if scheduler.requests[name].num_output_tokens else "prefill"] += tokens
        return output

    scheduler.schedule = counting
    return work


def test_a_model_that_this_cpu_has_no_kernel_for_ends_with_the_key_that_avoids_it(tmp_path):
    shape = {**SHAPE, "num_attention_heads": 4}  # heads of 16
    tiny_config(**shape).save_pretrained(tmp_path)
    options = dict(
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        kv_cache_memory_bytes=4 << 20,
    )
    engine = VLLMEngine(tiny_tokenizer(), skeleton(**shape), model=str(tmp_path), **options)
    try:
        with pytest.raises(
            InputError,
            match=r"=vllm: .*head_dim=16.*; set "
            r"actor_rollout_ref.rollout.name=hf",
        ):
            engine.update_weights(tiny_model(**shape).state_dict().items(), 0)
            engine.probe((1, 2, 3))
    finally:
        engine.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True, **SHAPE)


@pytest.fixture(scope="module")
def workers(model):
    """Learner and engine of a model whose head is its embedding."""
    one = LocalWorkers(
        cluster_config(model, *VLLM), tiny_tokenizer(), CPU, needs_ref=False, needs_critic=False
    )
    yield one
    one.close()


@torch.no_grad()
def train(workers: LocalWorkers, seed: int = 0) -> None:
    """Every weight moves."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in workers.models.actor.module.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def test_every_sync_brings_every_weight_into_a_copy_of_the_engine_s(workers):
    for version in (1, 2):
        train(workers, version)
        assert workers.sync_weights(version)["rollout_corr/probe_diff"] < 1e-4
    for trajectory in sample_all(
        workers.engine, [ask((50 + i // 4, 60), seed=i, max_tokens=20) for i in range(16)]
    ):
        assert trajectory.policy_version == 2
        with torch.no_grad():
            logits = workers.models.actor.module(
                torch.tensor([[*trajectory.prompt_ids, *ids(trajectory)]])
            ).logits[0]
        expected = logits[len(trajectory.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(ids(trajectory))[:, None])[:, 0]
        np.testing.assert_allclose(trajectory.logprobs, expected.numpy(), atol=1e-4)
    before = workers.engine.probe((50, 60, 61, 62))
    train(workers, 3)
    np.testing.assert_array_equal(workers.engine.probe((50, 60, 61, 62)), before)


def leaving_out(bucket, names):
    """Return the bucket without these names; a tied weight keeps its others."""
    assert set(names) <= {name for weight in bucket.weights for name in weight.names}
    kept = []
    for weight, value in zip(bucket.weights, bucket.tensors, strict=True):
        if left := tuple(name for name in weight.names if name not in names):
            kept.append((dataclasses.replace(weight, names=left), value))
    return Bucket(tuple(weight for weight, _ in kept), tensors=tuple(value for _, value in kept))


def test_any_stale_weight_is_noticed(workers, monkeypatch):
    """One weight of each sync is left out, in turn; the head that is the embedding, under its own
    name alone too."""
    tied = ("model.embed_tokens.weight", "lm_head.weight")
    names = [(name,) for name in workers.models.actor.module.state_dict() if name not in tied]
    send, unnoticed = workers.engine.llm.collective_rpc, []
    for number, left_out in enumerate([*names, tied, tied[1:]]):
        train(workers, number)

        def without(method, args=(), left_out=left_out):
            return send(
                method, args=[leaving_out(args[0], left_out)] if method == "load_bucket" else args
            )

        with monkeypatch.context() as patch:
            patch.setattr(workers.engine.llm, "collective_rpc", without)
            with contextlib.suppress(WeightSyncError):
                workers.sync_weights(number)
                unnoticed.append(left_out)
        assert workers.sync_weights(number)["rollout_corr/probe_diff"] < 1e-3, left_out
    assert unnoticed == [] and len(names) > 20


def in_flight(engine, act, words):
    """Do something while a request is answered, which is refused with these words."""

    async def meanwhile():
        task = asyncio.ensure_future(engine.sample(ask(max_tokens=24, ignore_eos=True)))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match=f"{words} with 1 requests in flight"):
            act()
        await task

    run(meanwhile())


def test_sleep_lasts_until_the_next_weights(workers, monkeypatch):
    """The GPU's memory is vLLM's to free; here it is seen that it is asked to, when, and what may
    happen meanwhile."""
    engine, calls, update = workers.engine, [], ["begin_buckets", "load_bucket", "end_buckets"]
    send = engine.llm.collective_rpc
    monkeypatch.setattr(engine.llm, "sleep", lambda level: calls.append(f"sleep {level}"))
    monkeypatch.setattr(engine.llm, "wake_up", lambda tags: calls.append(f"wake {tags[0]}"))
    monkeypatch.setattr(
        engine.llm, "collective_rpc", lambda *a, **k: calls.append(a[0]) or send(*a, **k)
    )
    workers.sync_weights(1)
    engine.sleep()
    assert calls == update  # not made to sleep: it does not
    monkeypatch.setattr(engine, "sleeps", True)
    calls.clear()
    engine.sleep()
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        sample_all(engine, [ask()])
    workers.sync_weights(2)
    assert calls == ["sleep 2", "wake weights", *update, "wake kv_cache"]
    assert sample_all(engine, [ask()])[0].policy_version == 2
    in_flight(engine, engine.sleep, "sleep")
    in_flight(engine, lambda: engine.probe((4, 5)), "probe")


def test_the_configuration_reaches_vllm(model, monkeypatch):
    empty = skeleton(tie_word_embeddings=True, **SHAPE)
    config = cluster_config(
        *(
            model,
            *VLLM,
            "trainer.backend=ray",
            f"{ROLLOUT}.tensor_model_parallel_size=2",
            f"{ROLLOUT}.dtype=bfloat16",
        ),
        *(
            f"{ROLLOUT}.max_num_seqs=32",
            f"{ROLLOUT}.max_num_batched_tokens=512",
            f"{ROLLOUT}.enforce_eager=False",
        ),
        *(
            f"+{ROLLOUT}.engine_kwargs.vllm.block_size=64",
            f"+{ROLLOUT}.engine_kwargs.vllm.swap=null",
        ),
        *(
            f"{ROLLOUT}.enable_prefix_caching=False",
            "+actor_rollout_ref.model.override_config.rope_theta=5.0",
        ),
    )
    found = engine_arguments(config, empty)
    rope = {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}
    expected = {"model": str(model), "hf_overrides": rope, "dtype": "bfloat16", "block_size": 64}
    expected |= {
        "tensor_parallel_size": 2,
        "max_model_len": 64,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
    }
    expected |= {
        "enforce_eager": False,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
    }
    assert (
        expected.items() <= found.items() and "swap" not in found and not found["enable_sleep_mode"]
    )
    alone = cluster_config(
        model, *VLLM, "trainer.backend=ray", "actor_rollout_ref.hybrid_engine=False"
    )
    kept = cluster_config(model, *VLLM, f"{ROLLOUT}.free_cache_engine=False")
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "DEVICE", "cuda")
        sleeps = [
            engine_arguments(one, empty)["enable_sleep_mode"] for one in (config, alone, kept)
        ]
    assert sleeps == [True, False, False]
    with pytest.raises(
        InputError, match="computes on cpu, the run is on cuda: set trainer.device=cpu"
    ):
        make_engine(config, None, tiny_tokenizer(), torch.device("cuda"))


@pytest.mark.skipif(vllm.DEVICE != "cpu", reason="this vLLM returns sampling masks")
def test_kept_sets_are_refused_where_no_kernel_makes_sampling_masks():
    typed = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.kept_sets=True"]
    with pytest.raises(InputError, match=r"rollout\.kept_sets=True: vLLM returns no kept ids here"):
        vllm.make(compose("grpo", typed), None, None, torch.device("cpu"))
