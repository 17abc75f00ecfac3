"""SGLang's real server behind the contract of every engine, but for the promises that it does not make."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch

from core.cluster.local_workers import LocalWorkers
from core.engines.sglang import SGLangEngine
from core.engines.weight_buckets import Bucket
from core.errors import InputError
from core.learner.model_checks import WeightSyncError
from tests.core.engine_contract import HELLO, ModelEngineContract, ask, ids, sample_all
from tests.core.engines.sglang_fixture import attached, needs_sglang, serving
from tests.core.ray_cluster import cluster_config, write_model
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), needs_sglang]  # a busy machine starts a server in minutes
SHAPE = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.14)
ROLLOUT, CPU = "actor_rollout_ref.rollout", torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder, **SHAPE) as one:
        yield one


def on(server, model):
    """A run in one process whose engine is on a server that runs already."""
    local = (f"{ROLLOUT}.name=sglang", "trainer.backend=local", f"+{ROLLOUT}.engine_kwargs.sglang.url={server.url}")
    return cluster_config(model, *local, "actor_rollout_ref.actor.use_kl_loss=False", "trainer.phase_timeout_s=120")


@pytest.fixture
def engine(server):
    one = attached(server, **SHAPE)
    one.update_weights(tiny_model(**SHAPE).state_dict().items(), 0)
    yield one
    one.close()


class TestSGLang(ModelEngineContract):
    """One server for all of the tests; each has an engine, and so an update group, of its own."""

    model_options = SHAPE
    seeded = top_p_within_top_k = False
    draws, long = 1200, 200  # a server does not wait for its client

    @pytest.fixture(scope="class", autouse=True)
    def shared(self, server):
        type(self).server = server

    def make(self) -> SGLangEngine:
        engine = attached(self.server, **SHAPE)
        engine.update_weights(self.model().state_dict().items(), 0)
        return engine

    # What no seed can promise
    test_two_settings_share_a_seed = test_a_replay_is_the_same_to_the_bit = None
    # What is counted inside an engine of this process; the tests below look from outside
    test_samples_of_a_prompt_share_its_prefill = test_no_row_waits_for_the_longest = None
    test_aborted_rows_are_not_computed_on = None


def test_a_seed_decides_nothing(engine):
    """Were this to fail, the table of engines could promise more."""
    same = [ids(one) for one in sample_all(engine, [ask(seed=5, ignore_eos=True) for _ in range(6)])]
    assert len(set(map(tuple, same))) > 1


def test_a_later_sample_finds_its_prompt_until_the_weights_change(engine):
    body = {"input_ids": list(range(40, 90)), "sampling_params": {"max_new_tokens": 1}, "stream": False}
    first, second = (engine.server.post("/generate", body)["meta_info"]["cached_tokens"] for _ in range(2))
    assert (first, second) == (0, 49)
    engine.update_weights(tiny_model(**SHAPE).state_dict().items(), 1)
    assert engine.server.post("/generate", body)["meta_info"]["cached_tokens"] == 0


def test_an_aborted_request_is_not_computed_on(engine):
    """That the engine sends the abortion is tested with a scripted server; here it ends a response."""
    body = {"rid": "doomed", "input_ids": list(HELLO), "sampling_params": {"max_new_tokens": 240, "ignore_eos": True}}
    reply = engine.server.send("/generate", {**body, "stream": False})
    while not reply.done():  # one that arrives before its request ends nothing
        engine.server.post("/abort_request", {"rid": "doomed"})
        time.sleep(0.02)
    ended = reply.result()["meta_info"]
    assert ended["finish_reason"]["type"] == "abort" and ended["completion_tokens"] < 240


def test_the_proof_is_of_the_weights_that_are_served(engine):
    def update(seed: int, version: int) -> tuple[int, ...]:
        (proof,) = engine.update_weights(tiny_model(seed=seed, **SHAPE).state_dict().items(), version)
        return proof.weights

    one, other, again = update(1, 1), update(2, 2), update(1, 3)
    assert one == again != other


def test_weights_of_another_run_are_noticed(engine, server):
    other = attached(server, **SHAPE)
    other.update_weights(tiny_model(seed=1, **SHAPE).state_dict().items(), 0)
    other.close()
    with pytest.raises(RuntimeError, match="another process updates them"):
        sample_all(engine, [ask()])


@pytest.fixture
def workers(server, folder):
    """Learner and engine of a run in one process."""
    one = LocalWorkers(on(server, folder), tiny_tokenizer(), CPU, needs_ref=False, needs_critic=False)
    yield one
    one.close()


@torch.no_grad()
def train(workers, seed):
    """Every weight moves."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in workers.actor.module.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def test_every_sync_of_a_run_brings_every_weight(workers):
    for version in (1, 2):
        train(workers, version)
        assert workers.sync_weights(version)["rollout_corr/probe_diff"] < 1e-4
        (found,) = sample_all(workers.engine, [ask(max_tokens=4)])
        assert found.policy_version == version


def test_any_stale_weight_is_noticed(workers, monkeypatch):
    """One weight of each sync is left out, in turn."""
    load, unnoticed = workers.engine.load, []
    for number, left_out in enumerate(workers.actor.module.state_dict()):
        train(workers, number)

        def without(bucket, left_out=left_out):
            pairs = zip(bucket.weights, bucket.tensors, strict=True)
            kept = [(weight, value) for weight, value in pairs if left_out not in weight.names]
            assert len(kept) == len(bucket.weights) - 1
            load(Bucket(tuple(weight for weight, _ in kept), tensors=tuple(value for _, value in kept)))

        with monkeypatch.context() as patch, suppress(WeightSyncError):
            patch.setattr(workers.engine, "load", without)
            workers.sync_weights(number)
            unnoticed.append(left_out)
        assert workers.sync_weights(number)["rollout_corr/probe_diff"] < 1e-3, left_out
    assert unnoticed == []


def test_a_server_of_another_model_is_refused(server, tmp_path):
    other = write_model(tmp_path)
    with pytest.raises(InputError, match=f"the server has model_path .*, not {other}; start one for this run's model"):
        LocalWorkers(on(server, other), tiny_tokenizer(), CPU, needs_ref=False, needs_critic=False)
