"""What the driver asks of the machines that hold the models, and the in-process answer.

The trainer knows the :class:`Workers` protocol only. :class:`LocalWorkers` keeps policy, reference,
critic and engine in the driver's process, for tests, debugging and small runs.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from core.checkpoint.provenance import ModelFingerprint
from core.engines import RolloutEngine
from core.errors import InputError
from core.rewards.model import Judge
from core.types import TrainBatch

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)


class Workers(Protocol):
    """The remote phases of a step. Batches travel whole; how they are split is the workers' business."""

    engine: RolloutEngine
    judge: Judge | None  # the reward model, where reward_model.enable asks for one
    full_precision: bool  # no bf16 anywhere: engine and learner then agree to rounding
    ranks: int  # learner processes
    threads: int  # of torch in each of them
    overlaps: bool  # whether the engine can work while the learner does

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """The learner's log-probs and entropies of the policy tokens at the rollout temperature, [B, T] each."""

    def compute_ref_log_prob(self, batch: TrainBatch) -> Tensor:
        """The reference policy's log-probs, [B, T]."""

    def compute_values(self, batch: TrainBatch) -> Tensor:
        """The critic's values, [B, T]."""

    def update_actor(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        """All optimizer steps that the configuration makes of the batch; returns ``actor/...`` metrics."""

    def update_critic(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        """Likewise for the critic."""

    def sync_weights(self, version: int) -> dict[str, float]:
        """Hands the learner's weights to the engine, in memory, and proves by a probe that they arrived."""

    def fingerprints(self) -> dict[str, ModelFingerprint]:
        """Architecture and shapes of each model: what a checkpoint must agree on to be loaded."""

    def save(self, folder: Path) -> None:
        """Writes ``actor/`` (a Hugging Face folder and the optimizer) and ``critic/`` into ``folder``."""

    def load(self, folder: Path) -> None:
        """Reads what :meth:`save` wrote."""

    def start_profile(self) -> None:
        """Begins a profile (``global_profiler.tool``) in every process that holds a model."""

    def stop_profile(self, folder: Path, name: str) -> None:
        """Ends it; torch's traces are ``folder/name[_<process>].json``."""

    def close(self) -> None: ...


def ray_backend(name: str = "ray_workers") -> ModuleType:
    """A module of ``trainer.backend=ray``. Raises InputError where ray is not installed."""
    try:
        return importlib.import_module(f"core.cluster.{name}")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise InputError("trainer.backend=ray: ray is not installed; pip install 'ray>=2.60'") from error
