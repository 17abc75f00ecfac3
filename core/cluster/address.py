"""Which Ray cluster a run connects to, and what to do where a run on several nodes names none. Nothing imports ray."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from core.config.problem import Problem

if TYPE_CHECKING:
    from core.config.schema import Config

RULE = "needs a Ray cluster, and neither RAY_ADDRESS nor ray_kwargs.ray_init.address names one"
FIX = (
    "type `ray start --head --port=6379` on the first node (the head node), `ray start --address=HEAD_IP:6379` on each "
    "of the others, then this command on any of them with RAY_ADDRESS=HEAD_IP:6379 in front"
)


def cluster_address(config: Config) -> str | None:
    """Return the address of a cluster that exists. None: the run starts a Ray of its own on this machine."""
    address = config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def address_problem(config: Config) -> Problem | None:
    """Return the problem of a run on several nodes that names no cluster, None for any other run.

    With ``trainer.device=cpu`` a local Ray stands for any number of nodes, because its CPUs are only tickets.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if trainer.backend != "ray" or trainer.device == "cpu" or cluster_address(config) is not None:
        return None
    nodes = {"trainer.nnodes": trainer.nnodes}
    if not config.actor_rollout_ref.hybrid_engine:
        nodes["actor_rollout_ref.rollout.nnodes"] = rollout.nnodes or 1
    return next((Problem(key, count, RULE, FIX) for key, count in nodes.items() if count > 1), None)
