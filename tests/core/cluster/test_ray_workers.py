"""Over Ray: two ranks train as one process, the engine actor keeps the engine contract, and no loss
goes unnoticed."""

import asyncio
import os
import signal
import time

import pytest
import ray
import torch

from core.checkpoint.store import CheckpointStore
from core.cluster import node_report
from core.cluster.ray_engine import RayEngine
from core.cluster.ray_pools import ENGINE, ROOT, RayProcesses, connect
from core.cluster.ray_processes import FOLDER, EngineProcess, LearnerProcess
from core.cluster.ray_watch import Watch
from core.cluster.ray_workers import RayWorkers
from core.cluster.workers import LocalWorkers
from core.engines.hf import HFEngine
from core.engines.weight_buckets import Staging, Weight, pack
from core.errors import InputError, NoRoom, OutOfMemory, WorkersLost
from tests.core.engine_contract import Counts, ModelEngineContract, ask, ids, sample_all
from tests.core.ray_cluster import cluster_config, local_ray, mixed_batch, write_model
from tests.optimizer_steps import update_actor, update_critic
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.xdist_group("ray")  # one Ray, however many test processes
CPU = torch.device("cpu")
FP64 = torch.float64


@pytest.fixture(scope="module")
def cluster():
    with local_ray(8):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


def side_by_side(config):
    """The ranks of a cluster and the in-process backend, both with float64 masters."""
    needs = {"needs_ref": True, "needs_critic": True, "master_dtype": FP64}
    return tuple(
        backend(config, tiny_tokenizer(), CPU, **needs) for backend in (RayWorkers, LocalWorkers)
    )


@pytest.fixture(scope="module")
def pair(model, cluster):
    """Two ranks and the in-process backend after the same three updates."""
    batch, (ranks, alone) = mixed_batch(), side_by_side(cluster_config(model))
    metrics = []
    for _ in range(3):
        metrics.append(
            [
                {
                    **update_critic(one, batch),
                    **update_actor(one, batch),
                }
                for one in (ranks, alone)
            ]
        )
    yield ranks, alone, metrics
    ranks.close()


def call(actor, function, *arguments):
    return ray.get(actor.__ray_call__.remote(function, *arguments))


# -- training


@pytest.mark.processes
def test_two_ranks_report_and_compute_what_one_process_does(pair):
    ranks, alone, metrics = pair
    for found, expected in metrics:
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
    batch = mixed_batch(groups=5, n=1, seed=3)  # rows that two ranks share unevenly
    for found, expected in zip(
        ranks.compute_log_probs(batch), alone.compute_log_probs(batch), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ranks.compute_ref_log_prob(batch), alone.compute_ref_log_prob(batch))
    torch.testing.assert_close(
        ranks.compute_values(batch), alone.compute_values(batch), rtol=1e-6, atol=1e-6
    )
    assert not torch.equal(ranks.compute_log_probs(batch)[0], ranks.compute_ref_log_prob(batch))


@pytest.mark.processes
def test_without_old_log_probs_the_update_measures_the_same(model, pair):
    """The metrics of rows that nothing trains on are of all ranks too."""
    ranks, alone, _ = pair
    only_pg = {
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.entropy_coeff": 0.0,
    }
    config = cluster_config(model, *(f"{key}={value}" for key, value in only_pg.items()))
    batch = mixed_batch().adding(old_log_probs=None)
    for one in (ranks, alone):
        one.config = config
    alone.models.actor.config = config.actor_rollout_ref.actor
    for actor in ranks.learners:
        call(
            actor,
            lambda self, part: setattr(self.learner.models.actor, "config", part),
            config.actor_rollout_ref.actor,
        )
    found, expected = (
        update_actor(ranks, batch),
        update_actor(alone, batch),
    )
    assert "rollout_corr/logp_diff_max" in expected and "actor/entropy" in expected
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.processes
def test_a_sync_reaches_the_engine_and_one_that_does_not_is_noticed(pair, monkeypatch):
    ranks, alone, _ = pair
    assert ranks.sync_weights(4)["rollout_corr/probe_diff"] < 1e-5
    assert ranks.engine.policy_version == 4
    ranks.sync_weights(4)  # engines that were put to sleep are woken
    alone.sync_weights(4)
    same_answers(ranks, alone, 16)
    update_actor(ranks, mixed_batch())
    monkeypatch.setattr(ranks, "_transfer", lambda version: None)
    with pytest.raises(WorkersLost, match="stale"):
        ranks.sync_weights(5)


@pytest.mark.processes
def test_a_checkpoint_brings_the_ranks_back(pair, tmp_path):
    ranks, _, _ = pair
    batch = mixed_batch(groups=4)
    before = ranks.compute_log_probs(batch)[0]
    ranks.save(tmp_path)
    after = [update_actor(ranks, batch)["actor/grad_norm"] for _ in range(2)]
    ranks.load(tmp_path)
    torch.testing.assert_close(ranks.compute_log_probs(batch)[0], before, rtol=1e-12, atol=1e-12)
    assert [update_actor(ranks, batch)["actor/grad_norm"] for _ in range(2)] == pytest.approx(
        after, rel=1e-12
    )


def same_answers(ranks, alone, count):
    """Every weight reached the engine: the same tokens as of the in-process backend, once both are
    synced."""
    requests = [ask((50 + i // 4, 60), seed=i, max_tokens=9) for i in range(count)]
    for found, expected in zip(
        sample_all(ranks.engine, requests), sample_all(alone.engine, requests), strict=True
    ):
        assert ids(found) == ids(expected) and found.policy_version == expected.policy_version


@pytest.mark.slow  # four more processes
def test_ranks_that_share_layers_do_what_one_process_does(model, cluster, tmp_path):
    """Their groups get shares of a batch, whole weights reach the engine, and a checkpoint brings
    them back."""
    size = "tensor_model_parallel_size=2"
    config = cluster_config(model, f"actor_rollout_ref.actor.{size}", f"critic.{size}", ranks=4)
    batch, (ranks, alone) = mixed_batch(), side_by_side(config)
    try:
        found, expected = (
            {
                **update_critic(one, batch),
                **update_actor(one, batch),
            }
            for one in (ranks, alone)
        )
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert ranks.sync_weights(1)["rollout_corr/probe_diff"] < 1e-5
        alone.sync_weights(1)
        same_answers(ranks, alone, 8)
        ranks.save(tmp_path)
        update_actor(ranks, batch)
        ranks.load(tmp_path)
        one, other = (workers.compute_log_probs(batch)[0] for workers in (ranks, alone))
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        one, other = (workers.compute_ref_log_prob(batch) for workers in (ranks, alone))
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    finally:
        ranks.close()


# -- the engine


class FedEngine(RayEngine):
    """Engines that get the weights of this process, where a run has them from the learner ranks."""

    def update_weights(self, named_tensors, version: int) -> None:
        held = list(named_tensors)
        weights = [Weight((name,), tuple(value.shape), value.dtype) for name, value in held]
        size = sum(weight.room for weight in weights)
        self.begin_update(weights)  # refused while requests are in flight, whatever is sent
        values = (value for _, value in held)
        # Held until the engines have read its file, as a learner rank holds its own
        staging = Staging(size, CPU)
        (bucket,) = pack(weights, values, size, staging)
        self.load(bucket)
        self.end_update(version)

    def probe(self, token_ids):
        return self.probes(token_ids)[0]


@pytest.mark.slow  # the contract of engines once more, over Ray: minutes
class TestRayEngine(ModelEngineContract):
    """The contract of every engine, over the wire: one actor for all of them, with a fresh engine
    each."""

    @pytest.fixture(scope="class", autouse=True)
    def actor(self, model, cluster):
        type(self).shared = ENGINE.options(num_cpus=0).remote(cluster_config(model), CPU, 1)
        ray.get(self.shared.start.remote())
        yield
        ray.kill(self.shared)

    def make(self) -> FedEngine:
        def fresh(process: EngineProcess, model, tokenizer) -> None:
            process.engine.close()
            process.engine = HFEngine(model, tokenizer)

        call(self.shared, fresh, self.model(), tiny_tokenizer())
        watch = Watch(60.0)
        watch.add("engine 0", self.shared)
        return FedEngine(watch, ["engine 0"])

    def test_aborted_rows_are_not_computed_on(self, engine):
        """An abort travels while the engine decodes on: far fewer rows than without it, but not a
        number to the row."""
        before = self.counts(engine).row_steps

        async def abort_soon() -> None:
            doomed = [
                asyncio.ensure_future(engine.sample(ask(seed=i, max_tokens=240, ignore_eos=True)))
                for i in range(40)
            ]
            await engine.sample(ask(seed=99, max_tokens=3, ignore_eos=True))
            for task in doomed:
                task.cancel()
            await asyncio.gather(*doomed, return_exceptions=True)
            await engine.sample(ask(seed=98, max_tokens=150, ignore_eos=True))

        asyncio.run(abort_soon())
        assert self.counts(engine).row_steps - before <= 40 * 240 / 2

    def counts(self, engine: RayEngine) -> Counts:
        return Counts(
            *call(
                self.shared,
                lambda process: (process.engine.prefill_tokens, process.engine.row_steps),
            )
        )


# -- what goes wrong


@pytest.fixture
def small(model, cluster):
    config = cluster_config(model, "actor_rollout_ref.actor.use_kl_loss=False")
    one = RayWorkers(config, tiny_tokenizer(), CPU, needs_ref=False, needs_critic=False)
    yield one
    one.close()


def pid_of(actor):
    return call(actor, lambda self: os.getpid())


@pytest.mark.processes
def test_a_hang_names_phase_and_rank_and_a_full_or_dead_learner_its_rank(small):
    def fill_up(self):
        def fail(*_):
            raise MemoryError

        self.learner.models.update_actor = fail

    def hang_once(self):
        compute = self.learner.models.compute_log_probs

        def sleep_through_the_phase(batch):
            time.sleep(30)
            self.learner.models.compute_log_probs = compute
            return compute(batch)

        self.learner.models.compute_log_probs = sleep_through_the_phase

    call(small.learners[1], hang_once)
    small.watch.timeout_s = 6
    with pytest.raises(WorkersLost) as caught:
        small.compute_log_probs(mixed_batch())
    first, *stacks = str(caught.value).splitlines()
    pid = pid_of(small.learners[1])  # answered once it wakes
    assert f"learner rank 1 (node {small.nodes[0]['address']}, pid {pid})" in first
    assert "did not finish phase old_log_prob within trainer.phase_timeout_s=6" in first
    if node_report.py_spy():
        assert any("sleep_through_the_phase (" in line for line in stacks), stacks
    small.watch.timeout_s = 100
    small.compute_log_probs(mixed_batch())  # it was slow, not lost
    call(small.learners[1], fill_up)
    with pytest.raises(OutOfMemory, match="phase update_actor on learner rank 1 .node "):
        update_actor(small, mixed_batch())
    os.kill(pid_of(small.learners[1]), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(
        WorkersLost, match="learner rank 1 died in phase update_actor .node .*, pid "
    ):
        update_actor(small, mixed_batch())
    assert time.monotonic() - start < 20


@pytest.mark.processes
@pytest.mark.parametrize("victim", ["engine 0", "learner rank 0"])
def test_a_death_while_samples_are_written_ends_them(small, victim):
    pid = pid_of(small.watch.actors[victim])

    async def kill_under() -> None:
        tasks = [
            asyncio.ensure_future(small.engine.sample(ask(seed=i, max_tokens=240)))
            for i in range(64)
        ]
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*tasks)

    # An engine that hangs on keeps the samples from ending before the death is known
    if victim != "engine 0":
        small.watch.actors["engine 0"].__ray_call__.remote(lambda self: time.sleep(5))
    start = time.monotonic()
    with pytest.raises(WorkersLost, match=f"{victim} died in phase generate"):
        asyncio.run(kill_under())
    assert time.monotonic() - start < 20


@pytest.mark.processes
def test_a_hanging_engine_is_named(pair, monkeypatch):
    def plant(process):
        async def sleep_through_the_phase(request):
            time.sleep(6)

        process.engine.sample = sleep_through_the_phase

    monkeypatch.setattr(pair[0].watch, "timeout_s", 2)
    engine = pair[0].watch.actors["engine 0"]
    call(engine, plant)
    with pytest.raises(WorkersLost, match="^engine 0 .node .* did not finish phase generate"):
        sample_all(pair[0].engine, [ask(seed=1)])
    call(engine, lambda process: process.engine.__dict__.pop("sample", None))


@pytest.mark.processes
def test_a_cluster_without_room_says_so(model, cluster):
    config = cluster_config(
        model,
        "trainer.wait_for_nodes_s=1",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        ranks=16,
    )
    with pytest.raises(
        NoRoom, match="n_gpus_per_node=16: 0 of 1 nodes have room; free CPUs by node: .* of 8"
    ):
        RayWorkers(config, tiny_tokenizer(), CPU, needs_ref=False, needs_critic=False)


def test_ray_init_gets_what_the_configuration_says(model, monkeypatch):
    seen = []
    monkeypatch.setattr(ray, "init", lambda **options: seen.append(options))
    monkeypatch.setattr("core.cluster.ray_pools.start_problems", lambda _: [])  # no head answers
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/mine")

    def given(*overrides):
        connect(
            cluster_config(model, *(f"+ray_kwargs.ray_init.{override}" for override in overrides)),
            CPU,
        )
        return seen[-1]

    local = given("log_to_driver=False")
    assert local["address"] == "local" and local["num_cpus"] >= 2 and "runtime_env" not in local
    there = given("address=10.0.0.1:6379", "num_cpus=3", "runtime_env.env_vars.X=1")
    assert (there["address"], there["num_cpus"]) == ("10.0.0.1:6379", 3)
    variables = {"PYTHONPATH": f"{ROOT}:/mine", FOLDER: os.getcwd(), "X": "1"}
    assert there["runtime_env"]["env_vars"] == variables
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert FOLDER in given("log_to_driver=False")["runtime_env"]["env_vars"]


@pytest.mark.processes
def test_a_process_without_the_run_folder_is_named_before_a_model_loads(
    model, cluster, tmp_path, monkeypatch
):
    processes, blind = object.__new__(RayProcesses), False

    def look(phase, method, calls):
        places = [LearnerProcess(1).facts(path) for (path,) in calls.values()]
        return [
            place._replace(address="10.0.0.9", sees_path=place.sees_path and not blind)
            for place in places
        ]

    processes.config = cluster_config(model, f"trainer.default_local_dir={tmp_path}")
    processes.watch = Watch(1.0)
    monkeypatch.setattr(processes.watch, "call", look)
    CheckpointStore(tmp_path).claim()
    assert processes._report(["learner rank 0"])[0].sees_path
    blind = True
    with pytest.raises(
        InputError, match=f"trainer.default_local_dir={tmp_path}: learner rank 0 .node 10.0.0.9"
    ):
        processes._report(["learner rank 0"])
