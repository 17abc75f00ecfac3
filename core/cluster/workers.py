"""What the driver requires of the processes that hold the models, and the backend that has them in the driver's own.

The trainer knows the :class:`Workers` protocol alone. :class:`LocalWorkers` is for tests, debugging and small runs;
``ray_workers`` has the models in the processes of a cluster.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from core.algorithm import checks
from core.checkpoint.provenance import ModelFingerprint
from core.checkpoint.run_state import save_tensors
from core.cluster.learner_rank import Learner
from core.data.vocabulary import known_ids
from core.engines import NoEngine, RolloutEngine, make_engine
from core.learner.batching import mini_batching
from core.learner.lora import merged_weights
from core.learner.model_checks import compare_probe, compare_weights, probe_ids, probe_log_probs
from core.learner.models import compute_dtype, load_policy
from core.learner.saving import load_model, load_optimizer, save_model
from core.learner.traced_tokens import TracedRows
from core.rewards.grading import RewardModelCall
from core.tracking.health import Repeats
from core.tracking.metrics import Profile
from core.types import TrainBatch

if TYPE_CHECKING:
    from core.config.schema import Config


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

    def update_critic(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        """Take the critic's optimizer steps; return ``critic/...`` metrics."""

    def traced(self, rows: Collection[int] | None) -> TracedRows:
        """Return what the last policy update computed of the tokens of these rows, where it carried ``trace_row``.

        Rows are indices into the step's batch. None: only the row whose log-prob differs most from the engine's.
        """

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


class LocalWorkers(Learner):
    """One learner and one engine in this process: :class:`Workers`. The engine sleeps while the learner works."""

    ranks = 1
    overlaps = False

    def __init__(self, config: Config, tokenizer: Any, device: torch.device, **learner: Any):
        self.engine: RolloutEngine = NoEngine()
        super().__init__(config, device, known=known_ids(tokenizer), **learner)
        self.tokenizer = tokenizer
        self.reward_model = None
        if config.needs_engine:
            model = config.actor_rollout_ref.model
            self.engine = make_engine(config, lambda: load_policy(model).to(device), tokenizer, device)
        if config.reward_model.loads_model:
            from core.rewards.reward_model import RewardModel

            self.reward_model = RewardModel(config.reward_model, device).score
        actor, length = config.actor_rollout_ref.actor, config.data.max_response_length
        self.actor_mini_batches = mini_batching(actor, length, actor.policy_loss.loss_mode)
        self.critic_mini_batches = mini_batching(config.critic, length)
        self.profile: Profile | None = None
        self.probing = {"bf16": not self.full_precision, "is_news": Repeats().is_news}

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @property
    def full_precision(self) -> bool:
        return self.actor.compute_dtype is None and compute_dtype(self.config.actor_rollout_ref.rollout.dtype) is None

    def at_work(self, name: str, *, updates: bool = False) -> AbstractContextManager[None]:
        self.engine.sleep()
        return super().at_work(name, updates=updates)

    def update_actor(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        return super().update_actor(self.actor_mini_batches(batch), lr_multiplier)

    def update_critic(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        return super().update_critic(self.critic_mini_batches(batch), lr_multiplier)

    def sync_weights(self, version: int) -> dict[str, float]:
        sent = checks.SentWeights(merged_weights(self.actor.module), getattr(self.engine, "weights_dtype", None))
        proofs: Iterable[Any] = self.engine.update_weights(sent, version) or ()  # an engine of a test's own has none
        for proof in proofs:
            compare_weights(sent.sums, proof.sums)
        expected = probe_log_probs(self.actor)
        log_probs = self.engine.probe(probe_ids(self.actor.module.config.get_text_config().vocab_size))
        return {"rollout_corr/probe_diff": compare_probe(expected, log_probs, **self.probing)}

    def save(self, folder: Path) -> dict[str, str]:
        for name, part in self.trained.items():
            save_model(part.module, self.tokenizer, folder / name)
            save_tensors(folder / name / "optimizer.pt", part.stepper.optimizer.state_dict())
        return {}

    def load(self, folder: Path) -> None:
        for name, part in self.trained.items():
            load_model(part.module, folder / name)
            load_optimizer(part, folder / name)

    def start_profile(self) -> None:
        self.profile = Profile()
        self.profile.start()

    def stop_profile(self, folder: Path, name: str) -> None:
        self.profile.stop(folder / f"{name}.json")

    def close(self) -> None:
        self.engine.close()
