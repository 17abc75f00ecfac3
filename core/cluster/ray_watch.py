"""Wait for Ray actors: every call has a deadline, and an actor that dies ends the wait at once.

Errors name the process: its role and rank, the address of its node and its process id there.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from core.cluster import node_report
from core.config.schema import FIRST_PHASE_S
from core.errors import LISTED, InputError, WorkersLost, listed, one_line, out_of_memory

log = logging.getLogger(__name__)
ray.cloudpickle.register_pickle_by_value(node_report)

LOOK_S = 30.0  # how often a phase that goes on is logged
GRACE_S = 5.0  # until a death is known after the error that it caused elsewhere, and for closing
# The deadline of a phase, unless trainer.phase_timeout_s is set: TIMES the longest that it took
TIMES = 10
LEAST_S = 600.0
AT_A_START = ("start", "load")  # phases of one start, whose calls have nothing in common
STACKS_S = 30.0  # for the stacks of the processes that hang


class Place(NamedTuple):
    """Where a process is, and what it has there."""

    node_id: str
    address: str
    pid: int
    threads: int = 1
    gpus: tuple[int | str, ...] = ()
    sees_path: bool = True  # whether a path that the driver asked for exists there

    def __str__(self) -> str:
        return f"node {self.address}, pid {self.pid}"


class Watch:
    """Waits for remote calls, at most as long as a phase may take and while all actors are alive.

    ``timeout_s`` is the deadline of every phase. None: ten times the longest that the phase took.
    """

    def __init__(self, timeout_s: float | None):
        self.timeout_s = timeout_s
        self.actors: dict[str, Any] = {}
        self.places: dict[str, Place] = {}  # of the actors that have reported
        self.liveness: dict[ray.ObjectRef, str] = {}  # call that ends with an actor -> its name
        self.longest: dict[str, float] = {}  # phase -> seconds

    def add(self, name: str, actor: Any) -> None:
        self.actors[name] = actor
        self.liveness[actor.liveness.options(concurrency_group="aside").remote()] = name

    def limit(self, phase: str) -> float:
        """Return the seconds that a call of the phase may take."""
        if self.timeout_s is not None:
            return self.timeout_s
        if phase in AT_A_START or phase not in self.longest:
            return float(FIRST_PHASE_S)
        return max(LEAST_S, TIMES * self.longest[phase])

    def took(self, phase: str, seconds: float) -> None:
        """Remember how long a call of the phase took."""
        self.longest[phase] = max(seconds, self.longest.get(phase, 0.0))

    def named(self, name: str) -> str:
        """Return an actor's name with its place, where that is known."""
        return f"{name} ({self.places[name]})" if name in self.places else name

    def call(self, phase: str, method: str, arguments: Mapping[str, tuple]) -> list[Any]:
        """Call a method of the actors with these names and wait for the results."""
        calls = {}
        for name, values in arguments.items():
            calls[name] = getattr(self.actors[name], method).remote(*values)
        return self.wait(phase, calls)

    def wait(self, phase: str, calls: Mapping[str, ray.ObjectRef]) -> list[Any]:
        """Return the results in the order of ``calls``, which are by the actors' names.

        Raises WorkersLost where any actor died or the deadline passed, else what an actor raised.
        """
        start = time.monotonic()
        limit = self.limit(phase)
        results = dict.fromkeys(calls)
        pending = {ref: name for name, ref in calls.items()}
        while pending:
            passed = time.monotonic() - start
            if passed >= limit:
                raise self.timeout(phase, pending.values())
            ready, _ = ray.wait([*pending, *self.liveness], timeout=min(limit - passed, LOOK_S))
            if not ready:
                seconds = time.monotonic() - start
                log.info("%s: waiting for %s, %.0f s", phase, listed(pending.values()), seconds)
            for ref in ready:
                if ref in self.liveness:
                    raise self.lost(phase)
                name = pending.pop(ref)
                try:
                    results[name] = ray.get(ref)
                except RayError as error:
                    raise self.cause(phase, error, name) from error
        self.took(phase, time.monotonic() - start)
        return list(results.values())

    def lost(self, phase: str, within_s: float = 0.0) -> WorkersLost | None:
        """Return what to raise if an actor died, or does within ``within_s`` seconds."""
        dead, _ = ray.wait([*self.liveness], timeout=within_s)
        if not dead:
            return None
        name = self.liveness[dead[0]]
        try:
            reason = ray.get(dead[0])
        except RayError as error:
            reason = error
        where = f" ({self.places[name]})" if name in self.places else ""
        text = one_line(" ".join(str(reason).split()))[:600]
        return WorkersLost(f"{name} died in phase {phase}{where}: {text}")

    def cause(self, phase: str, error: RayError, name: str) -> BaseException:
        """Return what to raise for an error of the call of an actor: a death, or its own error.

        Ranks fail when one of them dies, so a death may be behind another actor's error.
        """
        raised = error.cause if isinstance(error, RayTaskError) else error
        if full := out_of_memory(raised, phase, f"on {self.named(name)}"):
            return full
        broken = isinstance(raised, RuntimeError | RayError)  # what a broken connection raises
        return self.lost(phase, GRACE_S if broken else 0.0) or self.located(raised, name)

    def located(self, error: BaseException, name: str) -> BaseException:
        """Return an actor's error with the actor's name and place in it."""
        if isinstance(error, InputError):
            lines = [line for problem in error.problems for line in problem.splitlines()]
            return type(error)([f"{line} (on {self.named(name)})" for line in lines])
        error.add_note(f"on {self.named(name)}")
        return error

    def timeout(self, phase: str, names: Iterable[str]) -> WorkersLost:
        """Return the error of a hang, with the stacks of processes that did not end the phase.

        Ranks wait for one another. The ranks with the rarest innermost frame come first, because
        the others may be waiting for them.
        """
        names = list(names)
        stacks = self.stacks(names)
        frames = {name: innermost(stacks[name]) for name in stacks}
        how_many = Counter(frames.values())
        names.sort(key=lambda name: how_many[frames[name]] if name in frames else 0)
        late = f"{listed(map(self.named, names))} did not finish phase {phase}"
        key = f"trainer.phase_timeout_s={self.timeout_s or 'null'}"
        lines = [f"{late} within {key}, here {self.limit(phase):g} s"]
        for name in names[:LISTED]:
            if name in stacks:
                lines.append(f"stack of {self.named(name)}:\n{stacks[name]}")
        return WorkersLost("\n".join(lines))

    def stacks(self, names: Iterable[str]) -> dict[str, str]:
        """Return name -> stack of the process, of those whose node replies in time."""
        names_of: dict[str, dict[int, str]] = defaultdict(dict)  # node -> pid -> name
        for name in names:
            if name in self.places:
                names_of[self.places[name].node_id][self.places[name].pid] = name
        calls = {
            on_node(node_report.stacks, node).remote([*processes], STACKS_S / 3): processes
            for node, processes in names_of.items()
        }
        ready, _ = (
            ray.wait([*calls], num_returns=len(calls), timeout=STACKS_S) if calls else ([], [])
        )
        stacks: dict[str, str] = {}
        for ref in ready:
            try:
                stacks |= {calls[ref][pid]: text for pid, text in ray.get(ref).items()}
            except RayError as error:  # the node is gone, for example; the hang is what matters
                log.warning("no stacks: %s", one_line(" ".join(str(error).split())[:200]))
        return stacks


def on_node(function: Any, node_id: str) -> Any:
    """Return a remote function that runs on this node alone, whatever else runs there."""
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=place)(function)


def innermost(stack: str) -> str:
    """Return the first frame of a stack as py-spy prints it."""
    return next((line.strip() for line in stack.splitlines()[1:]), stack)
