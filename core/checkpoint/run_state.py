"""Files of a checkpoint besides weights: optimizer states, RNG states, and the state of the driver.

Tensors go through ``torch.save`` and come back with ``weights_only=True``. The driver's state goes into
``driver.json``, its arrays into ``driver.npz``; it comes back equal to the bit and of the same types. Nothing is
pickled. torch is imported on first use only.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from core.config import code_by_path, registry
from core.data.sampler import derive_seed
from core.errors import InputError
from core.types import Dropped, Prompt, ScoredGroup, Segment, Stop, Trajectory
from reward_scores.score import Score, ScoreStatus

# ---------------------------------------------------------------- tensors


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

    if isinstance(value, torch.Tensor) or value is None or type(value) in (bool, int, float, str):
        return
    if type(value) not in (dict, list, tuple):
        raise InputError(
            f"{where} is a {type(value).__module__}.{type(value).__name__}: only tensors, numbers, strings, None and "
            "dicts, lists and tuples of them can be stored"
        )
    for key, item in value.items() if type(value) is dict else enumerate(value):
        if type(key) not in (int, str):
            raise InputError(f"{where}: key {key!r} is a {type(key).__name__}; only int and str can be stored")
        _check_loadable(item, f"{where}[{key!r}]")


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


# ---------------------------------------------------------------- the driver


@dataclass(frozen=True)
class DriverState:
    """State of the driver, enough to go on after ``step`` complete steps.

    ``carried`` maps the ordinals from ``next_ordinal`` on that were already scored to their group, or to a
    ``Dropped``. ``values`` is whatever else is JSON: the KL controller's state, keep rate, counters.
    """

    step: int
    next_ordinal: int
    carried: Mapping[int, ScoredGroup | Dropped] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write ``driver.json`` and ``driver.npz``.

        Raises:
            InputError: a value is of a type that cannot be stored; names it.
        """
        encoder = StateEncoder()
        fields = {
            "step": self.step,
            "next_ordinal": self.next_ordinal,
            "carried": encoder.encode(dict(self.carried), "carried"),
            "values": encoder.encode(dict(self.values), "values"),
        }
        (folder / "driver.json").write_text(json.dumps(fields), encoding="ascii")
        with open(folder / "driver.npz", "wb") as file:
            np.savez(file, allow_pickle=False, **encoder.buffers())

    @classmethod
    def load(cls, folder: Path) -> DriverState:
        fields = json.loads((folder / "driver.json").read_text(encoding="ascii"))
        with np.load(folder / "driver.npz", allow_pickle=False) as arrays:
            buffers = {name: arrays[name] for name in arrays.files}
        carried, values = decode(fields["carried"], buffers), decode(fields["values"], buffers)
        return cls(fields["step"], fields["next_ordinal"], carried, values)


TAG = "is"  # {"is": type name, "of": content}: anything that JSON has no type for

CARRIED = (Prompt, Segment, Trajectory, Score, ScoredGroup, Dropped)
_DATACLASSES = {cls.__name__: cls for cls in CARRIED}
_ENUMS = {cls.__name__: cls for cls in (Stop, ScoreStatus)}
# What an example may hold beyond JSON: type name -> (type, to text, from text)
_AS_TEXT = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
}


def _dataclass(name: str) -> type | None:
    """Return the dataclass of this name that a checkpoint may hold, one of an extension's included."""
    path = registry.CARRIED.get(name)
    return code_by_path.load_object(path) if path else _DATACLASSES.get(name)


class StateEncoder:
    """An encoder of values as JSON; the arrays among them are strung together, one buffer a dtype."""

    def __init__(self) -> None:
        self.arrays: dict[str, list[np.ndarray]] = {}
        self._used: dict[str, int] = {}

    def encode(self, value: Any, where: str) -> Any:
        """Return the value as JSON has it; ``where`` names it in errors. Raises InputError for a type it lacks."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if not isinstance(value, Mapping):
            return {TAG: kind.__name__, "of": self._content(value, kind, where)}
        if all(type(key) is str for key in value) and TAG not in value:
            return {key: self.encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [[self.encode(key, where), self.encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {TAG: "dict", "of": pairs}

    def buffers(self) -> dict[str, np.ndarray]:
        """Return the arrays of what was encoded, one a dtype."""
        return {name: np.concatenate(parts) for name, parts in self.arrays.items()}

    def _content(self, value: Any, kind: type, where: str) -> Any:
        name = kind.__name__
        if kind is tuple:
            return [self.encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if _dataclass(name) is kind:
            items = [(item.name, getattr(value, item.name)) for item in dataclasses.fields(value)]
            return {key: self.encode(item, f"{where}.{key}") for key, item in items}
        if _ENUMS.get(name) is kind:
            return value.value
        if name in _AS_TEXT and _AS_TEXT[name][0] is kind:
            return _AS_TEXT[name][1](value)
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            array = np.asarray(value)
            buffer = array.dtype.str.replace("<", "").replace("|", "")
            start = self._used.get(buffer, 0)
            self.arrays.setdefault(buffer, []).append(array.reshape(-1))
            self._used[buffer] = start + array.size
            return [array.dtype.str, list(array.shape), start]
        raise InputError(f"{where} is a {kind.__module__}.{name}, which a checkpoint cannot store")


def decode(value: Any, buffers: Mapping[str, np.ndarray]) -> Any:
    """Return the value that an :class:`StateEncoder` encoded; ``buffers`` are its arrays, one a dtype."""
    if type(value) is list:
        return [decode(item, buffers) for item in value]
    if type(value) is not dict:
        return value
    if TAG not in value:
        return {key: decode(item, buffers) for key, item in value.items()}
    name, content = value[TAG], value["of"]
    if name == "dict":
        return {decode(key, buffers): decode(item, buffers) for key, item in content}
    if name == "tuple":
        return tuple(decode(item, buffers) for item in content)
    if (kind := _dataclass(name)) is not None:
        return kind(**{key: decode(item, buffers) for key, item in content.items()})
    if name in _ENUMS:
        return _ENUMS[name](content)
    if name in _AS_TEXT:
        return _AS_TEXT[name][2](content)
    dtype, shape, start = content
    flat = buffers[dtype.replace("<", "").replace("|", "")][start : start + int(np.prod(shape))]
    return flat.reshape(shape).astype(dtype) if name == "ndarray" else np.dtype(dtype).type(flat[0])
