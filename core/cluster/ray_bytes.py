"""Bytes that cross Ray, by phase: what a call's arguments and its reply take pickled.

Off by default. Inside of :func:`counting` every call pickles its arguments once more, so a step takes longer. Counted
is what the driver sends and receives, and what an object that one actor hands to others takes in each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import ray
from ray import cloudpickle
from ray.experimental import get_object_locations


class Traffic:
    """Bytes that were sent to actors and received from them, by phase."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def send(self, phase: str, *arguments: Any) -> None:
        """Count the arguments of a call. An object reference counts as the object, which must be ready."""
        self.sent[phase] += sum(map(size_of, arguments))

    def receive(self, phase: str, reply: Any) -> None:
        self.received[phase] += size_of(reply)


def size_of(value: Any) -> int:
    """Return the bytes of a value on its way to another process."""
    if isinstance(value, ray.ObjectRef):
        return get_object_locations([value])[value]["object_size"] or 0
    return len(cloudpickle.dumps(value, protocol=5))


class CountedCalls(Protocol):
    """What is counted: :class:`core.cluster.ray_watch.Watch`."""

    traffic: Traffic | None


@contextmanager
def counting(watch: CountedCalls) -> Iterator[Traffic]:
    """Count the calls of ``watch`` while the block runs."""
    watch.traffic = Traffic()
    try:
        yield watch.traffic
    finally:
        watch.traffic = None
