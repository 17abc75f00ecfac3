"""Files of a checkpoint besides weights: optimizer states, RNG states, and the state of the driver.

All go through ``torch.save`` and come back with ``weights_only=True``, equal to the bit.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from core.data.draw_order import derive_seed
from core.errors import InputError
from core.types import Dropped, Prompt, ScoredGroup, Segment, Stop, Trajectory
from reward_scores.score import Score, ScoreStatus

DRIVER = "driver.pt"
CLASS = "class of core"  # key of a dict that stands for an object of one of CLASSES
CLASSES = {one.__name__: one for one in (ScoredGroup, Dropped, Trajectory, Segment, Stop, Score, ScoreStatus)}


def save_tensors(path: Path, state: Any) -> None:
    """Write nested dicts, lists and tuples of tensors and plain scalars, such as an optimizer's ``state_dict``.

    Raises InputError, now and not at the resume, for what could not be read back with ``weights_only=True``, and
    OSError for a full disk, which torch reports as an error of its own zip writer.
    """
    import torch

    _check_loadable(state, path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise OSError(error.__context__.errno, error.__context__.strerror, str(path)) from error
            raise


def load_tensors(path: Path) -> Any:
    """Return what :func:`save_tensors` wrote, on the CPU."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def _check_loadable(value: Any, where: str) -> None:
    import torch

    if type(value) in (dict, list, tuple):
        for key, item in value.items() if type(value) is dict else enumerate(value):
            if type(key) not in (int, str):
                raise InputError(f"{where}: key {key!r} is a {type(key).__name__}; only int and str can be stored")
            _check_loadable(item, f"{where}[{key!r}]")
    elif not isinstance(value, torch.Tensor) and type(value) not in (bool, int, float, str, type(None)):
        kinds = "only tensors, numbers, strings, None and dicts, lists and tuples of them can be stored"
        raise InputError(f"{where} is a {type(value).__module__}.{type(value).__name__}: {kinds}")


def seed_generators(seed: int) -> None:
    """Seed all global generators, also those that nothing here draws from: a user's reward function may."""
    import torch

    random.seed(seed)
    np.random.seed(derive_seed("numpy", seed) % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the states of the global generators: Python's, numpy's, torch's on the CPU and on every CUDA device."""
    import torch

    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what :func:`rng_state` returned. To be called last: loading a model draws numbers."""
    import torch

    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, device)


@dataclass(frozen=True)
class DriverState:
    """State of the driver, enough to go on after ``step`` complete steps.

    ``carried`` maps the ordinals from ``next_ordinal`` on that were already scored to their group, or to a
    ``Dropped``. ``values`` are numbers, texts and tensors: the KL controller's state, the keep rate, counters.
    """

    step: int
    next_ordinal: int
    carried: Mapping[int, ScoredGroup | Dropped] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write ``driver.pt``. Raises InputError where a value is of a type that cannot be stored; names it."""
        fields = {"step": self.step, "next_ordinal": self.next_ordinal, "values": dict(self.values)}
        save_tensors(folder / DRIVER, {**fields, "carried": _plain(dict(self.carried))})

    @classmethod
    def load(cls, folder: Path, prompt_of: Callable[[int], Prompt] | None = None) -> DriverState:
        """Read ``driver.pt``. ``prompt_of`` returns the prompt of an ordinal, which the run's seed decides."""
        fields = load_tensors(folder / DRIVER)
        carried = {ordinal: _object(one) for ordinal, one in fields["carried"].items()}
        for ordinal, one in carried.items():
            if isinstance(one, ScoredGroup):
                carried[ordinal] = dataclasses.replace(one, prompt=prompt_of(ordinal))
        return cls(fields["step"], fields["next_ordinal"], carried, fields["values"])


def _plain(value: Any) -> Any:
    """Return groups as dicts, tuples and tensors. Prompts are left out: the run draws them again by their ordinals."""
    import torch

    if isinstance(value, Prompt):
        return None
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):  # a user's function may return numpy's numbers
        return value.item()
    if isinstance(value, Enum):
        return {CLASS: type(value).__name__, "value": value.value}
    if dataclasses.is_dataclass(value):
        fields = {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return {CLASS: type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _object(value: Any) -> Any:
    """Return what :func:`_plain` made plain."""
    if isinstance(value, dict):
        values = {key: _object(item) for key, item in value.items()}
        return CLASSES[values.pop(CLASS)](**values) if CLASS in values else values
    if isinstance(value, tuple):
        return tuple(map(_object, value))
    return value.numpy() if hasattr(value, "numpy") else value
