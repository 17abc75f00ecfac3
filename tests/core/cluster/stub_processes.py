"""Light stand-ins for the processes of a run: they load nothing, and report where they are and what
they were called.

No torch here: a test starts dozens of them. What reserves, places and calls them is the code of a
real run.
"""

from __future__ import annotations

import threading
import time
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import ray

# Stands for torch.device, which every process would import torch to receive
Device = namedtuple("Device", "type")


class StubProcess:
    def __init__(self, cores, parts=1):
        self.cores, self.parts = cores, parts
        self.events: dict[str, float] = {}

    def note(self, event: str) -> None:
        assert event not in self.events, f"{event} a second time"
        self.events[event] = time.monotonic()  # one clock for all processes of a machine

    def liveness(self) -> None:
        threading.Event().wait()

    def facts(self, path):
        return SimpleNamespace(
            threads=7,
            gpus=ray.get_gpu_ids(),
            sees_path=True,
            pid=1,
            node_id=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
        )

    def report(self) -> dict[str, Any]:
        """Everything that a test asks for."""
        own = {name: value for name, value in vars(self).items() if name != "store"}
        return {
            **own,
            "node": ray.get_runtime_context().get_node_id(),
            "ray_gpus": ray.get_gpu_ids(),
        }


class StubLearner(StubProcess):
    def host(self):
        return ray.util.get_node_ip_address(), 1

    def join(self, rank, address, config, device, **learner):
        self.rank = rank
        self.note("join")


class StubEngine(StubProcess):
    def __init__(self, config, device, cores, parts=1, gpus=()):
        super().__init__(cores, parts)
        self.own_gpus = list(gpus)

    def start(self, reads_weights=False):
        self.reads_weights = reads_weights
        time.sleep(0.3)  # long enough for a learner that does not wait to be first
        self.note("start")

    def call(self, method, *args):
        if method != "close":
            self.note(method)


def put_stubs(ray_pools) -> None:
    """Let :mod:`core.cluster.ray_pools` start these."""
    ray_pools.LEARNER = ray_pools.actor_class(StubLearner)
    ray_pools.ENGINE = ray_pools.actor_class(StubEngine)


def layout(processes) -> dict[str, Any]:
    """Return what the processes of a run report."""
    named = processes.watch.call("load", "report", dict.fromkeys(processes.watch.actors, ()))
    found = dict(zip(processes.watch.actors, named, strict=True))
    return {
        "threads": processes.threads,
        "learners": [one for name, one in found.items() if name.startswith("learner")],
        "engines": [one for name, one in found.items() if name.startswith("engine")],
    }
