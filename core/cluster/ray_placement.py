"""On which nodes the processes of a run are: pools of nodes as placement groups.

A pool has a placement group for each of its nodes, with a bundle for each process. Nothing here starts a process; what
runs in the bundles is decided by :mod:`core.cluster.ray_pools`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from core.errors import InputError

if TYPE_CHECKING:
    from core.config.schema import Config

START_S = 300.0  # for the cluster to have room
WAIT_S = 0.5


def device_of(config: Config, own: torch.device) -> torch.device:
    """Return what the run computes on; ``own`` is the device of this machine, which need not have the cluster's."""
    if config.trainer.device is None and ray.cluster_resources().get("GPU"):
        return torch.device("cuda")
    return own


def bundle(device: torch.device, gpus: int = 1) -> dict[str, float]:
    return {"CPU": 1.0, **({"GPU": float(gpus)} if device.type == "cuda" else {})}


def make_pool(nodes: int, bundles: Sequence[dict[str, float]], *, first_on: str | None = None) -> list[Any]:
    """Request ``nodes`` placement groups of these bundles, each on one node.

    The first is on the node ``first_on`` if there is room. Ray's argument for that is private, but its public one
    (``bundle_label_selector``) would let a run wait for this node where others are free.
    """
    targets = [first_on, *[None] * (nodes - 1)]
    return [placement_group(list(bundles), strategy="STRICT_PACK", _soft_target_node_id=node) for node in targets]


def wait_for_room(config: Config, device: torch.device, groups: Sequence[Any], more: str = "") -> None:
    """Wait until all placement groups are there. Raises InputError; ``more`` is what they need beside the ranks."""
    trainer, waiting = config.trainer, list(groups)
    deadline = time.monotonic() + min(START_S, trainer.phase_timeout_s)
    while waiting and time.monotonic() < deadline:  # in short waits, because a Ctrl-C is answered between them only
        if waiting[0].wait(WAIT_S):
            waiting.pop(0)
    if not waiting:
        return
    raise InputError(
        f"trainer.nnodes={trainer.nnodes} trainer.n_gpus_per_node={trainer.n_gpus_per_node}: no room for that many "
        f"bundles of {bundle(device)} on that many nodes{more}; the cluster has "
        f"{ray.cluster_resources()} in all and {ray.available_resources()} left. Ask for less, or wait for "
        "other runs to end"
    )


def own_node() -> str:
    """Return the id of the node that this process is on."""
    return ray.get_runtime_context().get_node_id()


def node_of(group: Any) -> str:
    """Return the id of the node that a placement group is on."""
    (node,) = set(placement_group_table(group)["bundles_to_node_id"].values())
    return node


def parts_of(groups: Sequence[Any], processes: int) -> list[int]:
    """Return, for each group of ``processes`` processes, how many of all groups' are on its node."""
    nodes = [node_of(group) for group in groups]
    return [processes * nodes.count(node) for node in nodes]


def reserve(config: Config, device: torch.device, engine_gpus: int, *, learners: bool) -> tuple[list[Any], ...]:
    """Return the placement groups of the ranks, and of the own pools of engines and reward model, once all have room.

    A group is a node. The first group of the ranks is on the node of this process if it can be. Raises InputError.
    """
    trainer, part, more = config.trainer, config.actor_rollout_ref, ""
    rollout, per_node, several = part.rollout, trainer.n_gpus_per_node, bundle(device, engine_gpus)
    groups: list[Any] = []
    engine_groups: list[Any] = []
    if not learners:
        engine_groups = make_pool(trainer.nnodes, [several] * (per_node // engine_gpus))
    else:
        groups = make_pool(trainer.nnodes, [bundle(device)] * per_node, first_on=own_node())
    if learners and not part.hybrid_engine:
        engine_groups = make_pool(rollout.nnodes, [several] * (rollout.n_gpus_per_node // engine_gpus))
        more = f" and of rollout.nnodes={rollout.nnodes} rollout.n_gpus_per_node={rollout.n_gpus_per_node}"
    reward, reward_groups = config.reward_model, []
    if reward.loads_model and reward.enable_resource_pool:
        reward_groups = make_pool(reward.nnodes, [bundle(device)] * reward.n_gpus_per_node)
        more += f" and of reward_model.nnodes={reward.nnodes} reward_model.n_gpus_per_node={reward.n_gpus_per_node}"
    try:
        wait_for_room(config, device, groups + engine_groups + reward_groups, more)
    except BaseException:
        for group in groups + engine_groups + reward_groups:
            remove_placement_group(group)
        raise
    here = own_node()  # after a restart it may be free too late for the first group, and another one comes to it
    return sorted(groups, key=lambda group: node_of(group) != here), engine_groups, reward_groups
