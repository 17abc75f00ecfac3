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
from core.types import Dropped, KeptSets, Prompt, ScoredGroup, Segment, Stop, Trajectory
from reward_scores.score import Score, ScoreStatus

DRIVER = "driver.pt"
# Of carried groups
CLASSES = [ScoredGroup, Dropped, Trajectory, KeptSets, Segment, Stop, Score, ScoreStatus]
# What numpy pickles
ARRAYS = [bytes, np.ndarray, np.dtype, np.zeros(0).__reduce__()[0], np.float32(0).__reduce__()[0]]
NUMBERS = ("int32", "int64", "uint32", "float32", "float64", "bool")
DTYPES = [type(np.dtype(name)) for name in NUMBERS]


def save_tensors(path: Path, state: Any) -> None:
    """Write nested dicts, lists and tuples of tensors and plain scalars.

    Raises OSError for a full disk, which torch reports as an error of its own zip writer.
    """
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            reason = error.__context__
            if isinstance(reason, OSError):
                raise OSError(reason.errno, reason.strerror, str(path)) from error
            raise


def load_tensors(path: Path) -> Any:
    """Return what :func:`save_tensors` wrote, on the CPU."""
    import torch

    with torch.serialization.safe_globals([*CLASSES, *ARRAYS, *DTYPES]):
        return torch.load(path, map_location="cpu", weights_only=True)


def seed_generators(seed: int) -> None:
    """Seed all global generators. Nothing here draws from some; a user's reward function may."""
    import torch

    random.seed(seed)
    np.random.seed(derive_seed("numpy", seed) % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's global generators, on every device."""
    import torch

    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what :func:`rng_state` returned, at last: loading a model draws numbers."""
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

    ``carried`` maps the ordinals from ``next_ordinal`` on that were already scored. ``values`` are
    the rest.
    """

    step: int
    next_ordinal: int
    carried: Mapping[int, ScoredGroup | Dropped] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write ``driver.pt`` without prompts: the run draws them again by their ordinals.

        Raises InputError, now and not at the resume, where a user's function left a value that
        cannot be read back.
        """
        carried = self._with_prompts(lambda ordinal: None)
        state = {**vars(self), "carried": carried, "values": dict(self.values)}
        save_tensors(folder / DRIVER, state)
        try:
            load_tensors(folder / DRIVER)
        except pickle.UnpicklingError as error:
            rule = f"a score or counter holds what cannot be stored ({error})"
            raise InputError(f"{DRIVER}: {rule}") from error

    @classmethod
    def load(cls, folder: Path, prompt_of: Callable[[int], Prompt]) -> DriverState:
        """Read ``driver.pt``. ``prompt_of`` returns the prompt of an ordinal."""
        state = cls(**load_tensors(folder / DRIVER))
        return dataclasses.replace(state, carried=state._with_prompts(prompt_of))

    def _with_prompts(
        self, prompt_of: Callable[[int], Prompt | None]
    ) -> dict[int, ScoredGroup | Dropped]:
        carried = dict(self.carried)
        for ordinal, group in carried.items():
            if isinstance(group, ScoredGroup):
                carried[ordinal] = dataclasses.replace(group, prompt=prompt_of(ordinal))
        return carried
