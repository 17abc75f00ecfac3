"""What the driver requires of the processes that hold the models.

The trainer knows the :class:`Workers` protocol alone. ``local_workers`` has the models in the driver's process,
``ray_workers`` has them in the processes of a cluster.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

from torch import Tensor

from core.checkpoint.provenance import ModelFingerprint
from core.engines import RolloutEngine
from core.learner.traced_tokens import TracedRows
from core.rewards.grading import RewardModelCall
from core.types import TrainBatch


class Workers(Protocol):
    """The phases of a step that need a model. Batches arrive whole; splitting them is the workers' business.

    What a phase computes for each token is flat, as a batch stores it: [N], 0 at tokens that the policy did not write.
    """

    engine: RolloutEngine
    reward_model: RewardModelCall | None  # where the run loads one
    full_precision: bool  # no bf16 anywhere: engine and learner then agree to rounding
    ranks: int  # learner processes
    threads: int  # of torch in each of them
    overlaps: bool  # whether the engine can work while the learner does

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        """Return log-probs and entropies of the policy tokens at the rollout temperature, [N] each.

        For an estimator that reads them (``squares`` in its entry) the sums of squared probabilities come third.
        """

    def compute_ref_log_prob(self, batch: TrainBatch) -> Tensor:
        """Return the reference policy's log-probs, [N]."""

    def compute_values(self, batch: TrainBatch) -> Tensor:
        """Return the critic's values, [N]."""

    def update_actor(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        """Take all optimizer steps that the configuration makes of the batch; return ``actor/...`` metrics."""

    def traced(self, rows: Collection[int] | None) -> TracedRows:
        """Return what the last policy update computed of the tokens of these rows, where it carried ``trace_row``.

        Rows are indices into the step's batch. None: only the row whose log-prob differs most from the engine's.
        """

    def update_critic(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        """Take the critic's optimizer steps; return ``critic/...`` metrics."""

    def sync_weights(self, version: int) -> dict[str, float]:
        """Hand the learner's weights to the engine, in memory, and prove by a probe that they arrived."""

    def logprob_noise(self, token_ids: Sequence[int]) -> float:
        """Return how far two of the policy's passes over a text lie apart that differ by rounding, in nats a token."""

    def fingerprints(self) -> dict[str, ModelFingerprint]:
        """Return architecture, shapes and base of each model: what a checkpoint must agree on to be loaded."""

    def save(self, folder: Path) -> Mapping[str, str]:
        """Write ``actor/`` (a Hugging Face folder and the optimizer) and ``critic/`` into ``folder``.

        Returns file -> SHA-256 of what the writers hashed and put on disk themselves; the others are the caller's.
        """

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote."""

    def start_profile(self) -> None:
        """Begin a profile in every process that holds a model."""

    def stop_profile(self, folder: Path, name: str) -> None:
        """End the profile; its traces are ``folder/name[_<process>].json``."""

    def close(self) -> None: ...


def ray_backend(name: str = "ray_workers") -> ModuleType:
    """Return a module of ``trainer.backend=ray``: ray is imported only where that backend runs."""
    return importlib.import_module(f"core.cluster.{name}")
