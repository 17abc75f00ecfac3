"""SGLang's real server behind the contract of every engine, but for the promises that it does not
make."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from core.cluster.workers import LocalWorkers
from core.engines import sglang
from core.engines.sglang import SGLangEngine, SGLangServer
from core.engines.weight_buckets import Bucket
from core.errors import WorkersLost
from core.learner.passes import WeightSyncError
from tests.core.engine_contract import ModelEngineContract
from tests.core.ray_cluster import cluster_config
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

PYTHON = Path(__file__).parents[3] / ".venv-sglang/bin/python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # a busy machine starts a server in minutes
    pytest.mark.skipif(
        not PYTHON.exists(), reason="bash environment/sglang.sh makes SGLang's environment"
    ),
]
SHAPE = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.14)
CPU, POSITIONS, PORT = torch.device("cpu"), 256, 30519


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model(**SHAPE).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine_of_all(model):
    """An engine on a server of a tiny model with random weights: starting one takes a minute."""
    line = [
        PYTHON,
        "-m",
        "sglang.launch_server",
        "--model-path",
        model,
        "--load-format",
        "dummy",
        "--dtype",
        "float32",
    ]
    line += [
        "--port",
        PORT,
        "--skip-tokenizer-init",
        "--skip-server-warmup",
        "--incremental-streaming-output",
    ]
    line += [
        "--context-length",
        POSITIONS + 8,
        "--sampling-mask-max-tokens",
        VOCAB_SIZE,
        "--max-total-tokens",
        20_000,
    ]
    line += [
        "--device",
        "cpu",
        "--attention-backend",
        "torch_native",
        "--sampling-backend",
        "pytorch",
    ]
    alone = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    line = [
        *map(str, line),
        "--disable-overlap-schedule",
        "--sleep-on-idle",
        "--log-level",
        "warning",
    ]
    process = subprocess.Popen(
        line, env={**os.environ, "PYTHONPATH": "", **alone}, start_new_session=True
    )
    server = SGLangServer(f"http://127.0.0.1:{PORT}", 120.0)
    while process.poll() is None:
        with suppress(WorkersLost, RuntimeError):
            server.call("/health")
            break
        time.sleep(0.5)
    with torch.device("meta"):
        skeleton = tiny_model(**SHAPE)
    engine = SGLangEngine(
        tiny_tokenizer(), skeleton, server, device=CPU, max_length=POSITIONS, max_rows=200
    )
    engine._free = lambda: None  # close() is to be undone
    yield engine
    server.close()
    os.killpg(process.pid, 9)
    process.wait()


@pytest.fixture
def engine(engine_of_all):
    engine_of_all._closed = False
    engine_of_all.update_weights(tiny_model(**SHAPE).state_dict().items(), 0)
    return engine_of_all


class TestSGLang(ModelEngineContract):
    model_options = SHAPE
    seeded = top_p_within_top_k = keeps_sets = False
    draws, long = 1200, 200  # a server does not wait for its client

    @pytest.fixture(scope="class", autouse=True)
    def shared(self, engine_of_all):
        type(self).engine_of_all = engine_of_all

    def make(self) -> SGLangEngine:
        self.engine_of_all._closed = False
        self.engine_of_all.update_weights(self.model().state_dict().items(), 0)
        return self.engine_of_all

    # What no seed can promise
    test_two_settings_share_a_seed = test_a_replay_is_the_same_to_the_bit = None
    # What is counted inside an engine of this process; the tests below look from outside
    test_samples_of_a_prompt_share_its_prefill = test_no_row_waits_for_the_longest = None
    test_aborted_rows_are_not_computed_on = None


def test_any_stale_weight_of_a_run_is_noticed(engine, model, monkeypatch):
    """A sync brings every weight, and one that is left out is noticed: each in its turn."""
    monkeypatch.setattr(sglang, "make", lambda *_: engine)  # the server that runs already
    local = (
        "actor_rollout_ref.rollout.name=sglang",
        "trainer.backend=local",
        "trainer.phase_timeout_s=120",
    )
    config = cluster_config(model, *local, "actor_rollout_ref.actor.use_kl_loss=False")
    workers = LocalWorkers(config, tiny_tokenizer(), CPU, needs_ref=False, needs_critic=False)
    load, unnoticed = engine.load, []
    for number, left_out in enumerate(workers.models.actor.module.state_dict()):
        with torch.no_grad():
            for parameter in workers.models.actor.module.parameters():
                parameter.mul_(1.01 + number / 100)

        def without(bucket, left_out=left_out):
            pairs = zip(bucket.weights, bucket.tensors, strict=True)
            kept = [(weight, value) for weight, value in pairs if left_out not in weight.names]
            assert len(kept) == len(bucket.weights) - 1
            load(
                Bucket(
                    tuple(weight for weight, _ in kept), tensors=tuple(value for _, value in kept)
                )
            )

        with monkeypatch.context() as patch, suppress(WeightSyncError):
            patch.setattr(engine, "load", without)
            workers.sync_weights(number)
            unnoticed.append(left_out)
        assert workers.sync_weights(number)["rollout_corr/probe_diff"] < 1e-3, left_out
        assert engine.policy_version == number
    assert unnoticed == []
