"""What the driver asks of the machines that hold the models, and the in-process answer.

The trainer knows the :class:`Workers` protocol only. :class:`LocalWorkers` keeps policy, reference,
critic and engine in the driver's process, for tests, debugging and small runs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from core.batching import optimizer_steps
from core.engines import RolloutEngine, make_engine
from core.export import export_hf
from core.learner import Actor, Critic, MicroBatchSize, Policy
from core.losses import aggregation
from core.models import load_critic, load_policy
from core.provenance import ModelFingerprint
from core.run_state import load_tensors, save_tensors
from core.types import TrainBatch

if TYPE_CHECKING:
    from core.config.schema import Config

log = logging.getLogger(__name__)


class Workers(Protocol):
    """The remote phases of a step. Batches travel whole; how they are split is the workers' business."""

    engine: RolloutEngine
    full_precision: bool  # no bf16 anywhere: engine and learner then agree to rounding

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

    def close(self) -> None: ...


class WeightSyncError(RuntimeError):
    """The engine does not compute with the learner's weights."""


class LocalWorkers:
    """One learner and one engine, in this process."""

    def __init__(self, config: Config, tokenizer: Any, device: torch.device, *, needs_ref: bool, needs_critic: bool):
        self.config = config
        self.tokenizer = tokenizer
        rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
        passes = {"temperature": rollout.temperature or 1.0, "compute_dtype": _compute_dtype(actor.fsdp_config.dtype)}
        policy = load_policy(config.actor_rollout_ref.model).to(device)
        self.actor = Actor(policy, actor, **passes)
        self.ref = Policy(copy.deepcopy(policy).requires_grad_(False), **passes) if needs_ref else None
        self.critic = None
        if needs_critic:
            critic = load_critic(config.critic.model, seed=config.trainer.seed).to(device)
            dtype = _compute_dtype(config.critic.model.fsdp_config.dtype)
            self.critic = Critic(critic, config.critic, compute_dtype=dtype)
        self.engine = make_engine(config, copy.deepcopy(policy).requires_grad_(False), tokenizer)

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        return self.actor.log_probs(batch, _size(self.config.actor_rollout_ref.rollout))

    def compute_ref_log_prob(self, batch: TrainBatch) -> Tensor:
        return self.ref.log_probs(batch, _size(self.config.actor_rollout_ref.ref))[0]

    def compute_values(self, batch: TrainBatch) -> Tensor:
        return self.critic.values(batch)

    def update_actor(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        actor, length = self.config.actor_rollout_ref.actor, self.config.data.max_response_length
        return self.actor.update(_steps(batch, actor, length, actor.policy_loss.loss_mode), lr_multiplier)

    def update_critic(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        steps = _steps(batch, self.config.critic, self.config.data.max_response_length)
        return self.critic.update(steps, lr_multiplier)

    def sync_weights(self, version: int) -> dict[str, float]:
        self.engine.update_weights(self.actor.module.state_dict().items(), version)
        return {"rollout_corr/probe_diff": self.probe()}

    @torch.no_grad()
    def probe(self) -> float:
        """Largest difference between engine and learner log-probs on a fixed text, or WeightSyncError."""
        ids = probe_ids(self.actor.module.config.vocab_size)
        with self.actor.precision():
            logits = self.actor.module(input_ids=torch.tensor([ids], device=self.actor.device), use_cache=False).logits
        log_probs = logits[0, :-1].float().log_softmax(-1).cpu()
        ours = log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
        return compare_probe(ours, self.engine.probe(ids), bf16=self.actor.compute_dtype is not None)

    @property
    def full_precision(self) -> bool:
        return self.actor.compute_dtype is None

    def fingerprints(self) -> dict[str, ModelFingerprint]:
        models = {"actor": self.actor, **({"critic": self.critic} if self.critic else {})}
        return {name: ModelFingerprint.of(part.module) for name, part in models.items()}

    def save(self, folder: Path) -> None:
        export_hf(self.actor.module, self.tokenizer, folder / "actor")
        save_tensors(folder / "actor" / "optimizer.pt", self.actor.stepper.optimizer.state_dict())
        if self.critic is not None:
            export_hf(self.critic.module, self.tokenizer, folder / "critic")
            save_tensors(folder / "critic" / "optimizer.pt", self.critic.stepper.optimizer.state_dict())

    def load(self, folder: Path) -> None:
        from safetensors.torch import load_model

        for name, part in (("actor", self.actor), ("critic", self.critic)):
            if part is not None:
                load_model(part.module, folder / name / "model.safetensors", device=str(part.device))
                part.stepper.optimizer.load_state_dict(load_tensors(folder / name / "optimizer.pt"))

    def close(self) -> None:
        self.engine.close()


def probe_ids(vocab_size: int, length: int = 24) -> tuple[int, ...]:
    """A fixed text of random ids: touches the embedding, every layer and the head."""
    return tuple(int(i) for i in np.random.default_rng(0).integers(0, vocab_size, length))


def compare_probe(learner: np.ndarray, engine: np.ndarray, *, bf16: bool) -> float:
    """Largest difference of the two; raises WeightSyncError above the bound of the precision."""
    difference = float(np.abs(learner - engine).max())
    bound = 0.25 if bf16 else 1e-3
    if not difference <= bound:
        raise WeightSyncError(
            f"after the weight sync the engine's log-probs differ from the learner's by {difference:.3g} "
            f"(bound {bound:g}): some of its weights are stale"
        )
    return difference


def _size(part: Any) -> MicroBatchSize:
    if part.log_prob_use_dynamic_bsz:
        return MicroBatchSize(max_tokens=part.log_prob_max_token_len_per_gpu)
    return MicroBatchSize(max_rows=part.log_prob_micro_batch_size_per_gpu)


def _steps(batch: TrainBatch, part: Any, response_length: int, loss_mode: str = "") -> Iterator[TrainBatch]:
    return optimizer_steps(
        batch,
        prompts=part.ppo_mini_batch_size,
        epochs=part.ppo_epochs,
        agg_mode=aggregation(loss_mode, part.loss_agg_mode),
        scale_factor=getattr(part, "loss_scale_factor", None) or response_length,
        shuffle_seed=part.data_loader_seed if part.shuffle else None,
    )


def _compute_dtype(name: str) -> torch.dtype | None:
    """The autocast dtype, or None for none: masters and reductions stay float32."""
    return {"fp32": None, "float32": None, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}[name]
