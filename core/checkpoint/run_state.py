"""Files of a checkpoint besides weights: optimizer states, RNG states, and the state of the driver.

All go through ``torch.save`` and come back with ``weights_only=True``, equal to the bit.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from core.data.draw_order import derive_seed
from core.errors import InputError
from core.types import Dropped, Prompt, ScoredGroup, Segment, Stop, Trajectory
from reward_scores.score import Score, ScoreStatus

DRIVER = "driver.pt"
CLASSES = [ScoredGroup, Dropped, Trajectory, Segment, Stop, Score, ScoreStatus]  # of carried groups
# What numpy pickles
ARRAYS = [bytes, np.ndarray, np.dtype, np.zeros(0).__reduce__()[0], np.float32(0).__reduce__()[0]]
DTYPES = [
    type(np.dtype(name)) for name in ("int32", "int64", "uint32", "float32", "float64", "bool")
]


def save_tensors(path: Path, state: Any) -> None:
    """Write nested dicts, lists and tuples of tensors and plain scalars, such as an optimizer's
    ``state_dict``.

    Raises OSError for a full disk, which torch reports as an error of its own zip writer.
    """
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise OSError(
                    error.__context__.errno, error.__context__.strerror, str(path)
                ) from error
            raise


def load_tensors(path: Path) -> Any:
    """Return what :func:`save_tensors` wrote, on the CPU."""
    import torch

    with torch.serialization.safe_globals([*CLASSES, *ARRAYS, *DTYPES]):
        return torch.load(path, map_location="cpu", weights_only=True)


def seed_generators(seed: int) -> None:
    """Seed all global generators, also those that nothing here draws from: a user's reward function
    may."""
    import torch

    random.seed(seed)
    np.random.seed(derive_seed("numpy", seed) % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the states of the global generators: Python's, numpy's, torch's on the CPU and on
    every CUDA device."""
    import torch

    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what :func:`rng_state` returned. To be called last: loading a model draws
    numbers."""
    import torch

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, device)


@dataclass(frozen=True)
class DriverState:
    """State of the driver, enough to go on after ``step`` complete steps.

    ``carried`` maps the ordinals from ``next_ordinal`` on that were already scored; ``values`` are
    the rest.
    """

    step: int
    next_ordinal: int
    carried: Mapping[int, ScoredGroup | Dropped] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write ``driver.pt``, prompts left out: the run draws them again by their ordinals.

        Raises InputError, now and not at the resume, where a user's function left a value that
        cannot be read back.
        """
        carried = {
            ordinal: dataclasses.replace(one, prompt=None) if isinstance(one, ScoredGroup) else one
            for ordinal, one in self.carried.items()
        }
        save_tensors(
            folder / DRIVER, {**vars(self), "carried": carried, "values": dict(self.values)}
        )
        try:
            load_tensors(folder / DRIVER)
        except pickle.UnpicklingError as error:
            raise InputError(
                f"{DRIVER}: a score or counter holds what cannot be stored ({error})"
            ) from error

    @classmethod
    def load(cls, folder: Path, prompt_of: Callable[[int], Prompt] | None = None) -> DriverState:
        """Read ``driver.pt``. ``prompt_of`` returns the prompt of an ordinal, which the run's seed
        decides."""
        state = cls(**load_tensors(folder / DRIVER))
        for ordinal, one in state.carried.items():
            if isinstance(one, ScoredGroup):
                state.carried[ordinal] = dataclasses.replace(one, prompt=prompt_of(ordinal))
        return state
