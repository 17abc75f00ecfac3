"""Where the processes of a run on several nodes of 8 GPUs are, and in which order they load: stubs
on a simulated Ray.

The cluster has a small head node without GPUs and more nodes than a run needs, so that nothing is
right by chance.
"""

from __future__ import annotations

import os

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from core.cluster import ray_pools
from core.cluster.ray_pools import Pool, reserve
from core.cluster.ray_processes import LearnerProcess
from core.config.composition import compose
from core.errors import NoRoom
from tests.core.cluster.stub_processes import Device, layout, put_stubs

# Other Rays do not start after this one in the same process, so none of these tests is in make
# test.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
GPUS, TP = 8, 4
CUDA = Device("cuda")
LEAN = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
# No process that no test asked for
QUIET = {"prestart_worker_first_driver": False, "enable_worker_prestart": False}


@pytest.fixture(scope="module")
def cluster():
    """A head node without GPUs, to which the caller is connected, and four nodes with 8."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_worker_niceness", "0")
        # Not written down for all of this machine: a ray.init() elsewhere would connect to this
        # cluster.
        patch.setattr("ray._private.utils.write_ray_address", lambda *_: None)
        patch.setattr("ray._common.utils.reset_ray_address", lambda *_: None)
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, **LEAN, "_system_config": QUIET}
        )
        try:
            for _ in range(4):
                cluster.add_node(wait=False, num_cpus=GPUS + 2, num_gpus=GPUS)
            cluster.wait_for_nodes()
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    for name in ("LEARNER", "ENGINE"):
        monkeypatch.setattr(ray_pools, name, None)
    put_stubs(ray_pools)


def config(nodes: int, *overrides: str):
    settings = {
        "data.train_batch_size": 256,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-32B",
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": TP,
        "trainer.backend": "ray",
        "trainer.device": "cuda",
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": GPUS,
    }
    return compose("grpo", [*(f"{key}={value}" for key, value in settings.items()), *overrides])


def placed(nodes: int, *overrides: str) -> dict:
    processes = ray_pools.RayProcesses(config(nodes, *overrides), CUDA)
    try:
        return layout(processes)
    finally:
        processes.close()


def test_ranks_and_engines_of_two_nodes(cluster):
    """Ranks in blocks of eight, an engine on the GPUs of each four, engines asleep before any
    learner loads."""
    found = placed(2)
    learners, engines = found["learners"], found["engines"]
    assert [one["rank"] for one in learners] == list(range(2 * GPUS))
    blocks = [learners[first : first + GPUS] for first in range(0, len(learners), GPUS)]
    homes = [{one["node"] for one in block} for block in blocks]
    assert all(len(home) == 1 for home in homes) and len(set.union(*homes)) == 2
    for block in blocks:
        assert sorted(one["ray_gpus"][0] for one in block) == list(range(GPUS))
    assert len(engines) == len(learners) // TP
    for number, engine in enumerate(engines):
        four = learners[number * TP : (number + 1) * TP]
        assert engine["own_gpus"] == [one["ray_gpus"][0] for one in four]
        assert (
            engine["node"] == four[0]["node"]
            and engine["ray_gpus"] == []
            and engine["reads_weights"] is False
        )
    asleep = max(engine["events"]["sleep"] for engine in engines)
    assert max(engine["events"]["start"] for engine in engines) < min(
        one["events"]["sleep"] for one in engines
    )
    assert asleep < min(one["events"]["join"] for one in learners)
    assert {(one["cores"], one["parts"]) for one in [*learners, *engines]} == {(None, GPUS)}
    assert found["threads"] == 7


def test_engines_apart_have_nodes_and_gpus_of_their_own(cluster):
    pool = (
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.nnodes=2",
        "trainer.cpu_threads=6",
    )
    found = placed(1, *pool, f"actor_rollout_ref.rollout.n_gpus_per_node={GPUS}")
    learners, engines = found["learners"], found["engines"]
    assert len({one["node"] for one in learners}) == 1 and len(learners) == GPUS
    assert [len({one["node"] for one in engines[first : first + 2]}) for first in (0, 2)] == [1, 1]
    assert len({one["node"] for one in [*learners, *engines]}) == 3 and len(engines) == 4
    for first in (0, 2):
        assert sorted(engines[first]["ray_gpus"] + engines[first + 1]["ray_gpus"]) == list(
            range(GPUS)
        )
    assert all(engine["own_gpus"] == [] for engine in engines)
    assert not any("sleep" in engine["events"] for engine in engines)  # no learner needs their GPUs
    assert max(one["events"]["start"] for one in engines) < min(
        one["events"]["join"] for one in learners
    )
    # The key's threads, for each rank
    assert {(one["cores"], one["parts"]) for one in learners} == {(6, 1)}
    # And for the engines of a node together
    assert {(one["cores"], one["parts"]) for one in engines} == {(6, 2)}


def test_a_node_too_few_is_an_error_that_names_keys_and_room(cluster):
    with pytest.raises(
        NoRoom, match="trainer.nnodes=5 trainer.n_gpus_per_node=8: 4 of 5 nodes have room"
    ) as caught:
        ray_pools.RayProcesses(config(5, "trainer.wait_for_nodes_s=5"), CUDA)
    assert str(caught.value).count(" 0 of 8") == 4 and "nodes that have gone" not in str(
        caught.value
    )


def test_the_first_ranks_are_on_the_node_that_is_asked_for(cluster):
    """The last test of this cluster: what it reserves stays reserved."""
    for home in [node["NodeID"] for node in ray.nodes() if node["Resources"].get("GPU")]:
        pool = Pool("trainer", config(1).trainer, 1, True)
        reserve([pool], home, 20.0)
        assert {*placement_group_table(pool.groups[0])["bundles_to_node_id"].values()} == {home}


# -- without a cluster


EXAMPLES = [(None, 8, 12), (None, 200, 1), (None, 1, 96), (5, 1, 5), (5, 2, 2)]


@pytest.mark.parametrize(("cores", "parts", "threads"), EXAMPLES)
def test_a_process_counts_the_cores_of_its_own_node(monkeypatch, cores, parts, threads):
    counted = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("os.cpu_count", lambda: 96)
    monkeypatch.setattr("torch.set_num_threads", counted.append)
    process = LearnerProcess(cores, parts)
    assert (
        process.threads == threads
        and counted == [threads]
        and os.environ["OMP_NUM_THREADS"] == str(threads)
    )
