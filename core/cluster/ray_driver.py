"""The loop of a run as a Ray actor, and how a shell finds or starts it (:mod:`core.cluster.detached_driver`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from core.cluster.detached_driver import WAIT_S, DriverProcess, News
from core.cluster.ray_placement import DRIVER_CPUS, device_of, node_for_driver
from core.cluster.ray_pools import actor_class, check_code, connect
from core.cluster.ray_watch import ASIDE, GRACE_S
from core.config.paths import run_folder
from core.errors import InputError, WorkersLost

if TYPE_CHECKING:
    from core.config.schema import Config

DRIVER = actor_class(DriverProcess, 4)
NAMESPACE = "rlrepro"


class RayDriver:
    """A run's loop in an actor: :class:`core.cluster.detached_driver.Driver`."""

    def __init__(self, actor: Any):
        self.actor = actor

    def call(self, method: str, *args: Any) -> Any:
        try:
            return ray.get(getattr(self.actor, method).options(**ASIDE).remote(*args))
        except RayActorError as error:
            raise WorkersLost(f"the process of the run's loop died: {' '.join(str(error).split())[:600]}") from error

    def settings(self) -> dict[str, Any]:
        return self.call("settings")

    def read(self, seen: int) -> News:
        return self.call("read", seen, WAIT_S)

    def interrupt(self) -> None:
        self.call("interrupt")

    def kill(self) -> None:
        """Kill the process and wait until it is gone: the shell may end the next moment, and its request with it."""
        ray.kill(self.actor)
        ray.wait([self.actor.settings.options(**ASIDE).remote()], timeout=GRACE_S)


def place_driver(trainer: str, config: Config, restarts: int) -> tuple[RayDriver, bool]:
    """Return the loop's actor of this run folder and whether it existed. It takes no GPU and outlives the shell.

    A new one is on a node that has room for learner ranks, and rank 0 will be there too: the loop holds whole batches,
    which a small head node has no memory for. Raises InputError where the cluster has no such node.
    """
    device = torch.device(config.trainer.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not ray.is_initialized():
        connect(config, device)
    name = f"driver of {run_folder(config).absolute()}"
    try:
        return RayDriver(ray.get_actor(name, namespace=NAMESPACE)), True
    except ValueError:  # there is none
        options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": DRIVER_CPUS, "num_gpus": 0}
    # Soft: where the node dies meanwhile, the loop starts on another and reports what is missing.
    beside = NodeAffinitySchedulingStrategy(node_for_driver(config, device_of(config, device)), soft=True)
    driver = RayDriver(DRIVER.options(scheduling_strategy=beside, **options).remote())
    try:
        check_code({"the process of the run's loop": driver.actor}, lambda calls: ray.get([*calls.values()]))
    except InputError:
        driver.kill()
        raise
    driver.call("start", trainer, config, restarts)
    return driver, False
