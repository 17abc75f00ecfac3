"""What the driver asks of the machines that hold the models, and the in-process answer.

The trainer knows the :class:`Workers` protocol only. :class:`LocalWorkers` keeps policy, reference,
critic and engine in the driver's process, for tests, debugging and small runs.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from core.batching import optimizer_steps
from core.config.schema import FULL_PRECISION
from core.engines import RolloutEngine, make_engine
from core.export import export_hf, load_weights
from core.learner import Actor, BasePolicy, Critic, MicroBatchSize, Policy
from core.lora import (
    add_adapters,
    fingerprint,
    has_adapters,
    load_adapters,
    merged_weights,
    save_adapters,
    trained_weights,
)
from core.losses import aggregation
from core.models import load_critic, load_policy
from core.packing import Layout
from core.profiling import Profile
from core.provenance import ModelFingerprint
from core.reward_model import RewardModel
from core.rewards.model import Judge
from core.run_state import load_tensors, save_tensors
from core.types import TrainBatch

if TYPE_CHECKING:
    from core.config.schema import ActorConfig, Config, CriticConfig, RefConfig, RolloutConfig

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


class WeightSyncError(RuntimeError):
    """The engine does not compute with the learner's weights."""


class ClusterError(ValueError):
    """The cluster cannot hold the run; the message says what to change."""


def ray_backend(name: str = "ray_workers") -> ModuleType:
    """A module of ``trainer.backend=ray``. Raises ClusterError where ray is not installed."""
    try:
        return importlib.import_module(f"core.{name}")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ClusterError("trainer.backend=ray: ray is not installed; pip install 'ray>=2.60'") from error


class LocalWorkers:
    """One learner and one engine, in this process."""

    ranks = 1
    overlaps = False

    def __init__(self, config: Config, tokenizer: Any, device: torch.device, *, needs_ref: bool, needs_critic: bool):
        self.config = config
        self.tokenizer = tokenizer
        rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
        model = config.actor_rollout_ref.model
        passes = {
            "temperature": rollout.temperature or 1.0,
            "compute_dtype": compute_dtype(actor.fsdp_config.dtype),
            "layout": Layout(packed=model.use_remove_padding),
        }
        policy = load_policy(model).to(device)
        self.engine = make_engine(config, lambda: copy.deepcopy(policy).requires_grad_(False), tokenizer, device)
        self.ref = self.critic = None
        if needs_ref and not model.lora_rank:
            self.ref = Policy(copy.deepcopy(policy).requires_grad_(False), **passes)
        bypass = config.algorithm.rollout_correction.bypass_mode
        self.actor = Actor(add_adapters(policy, model, config.trainer.seed), actor, bypass=bypass, **passes)
        if needs_ref and model.lora_rank:
            self.ref = BasePolicy(policy, **passes)
        if needs_critic:
            critic = load_critic(config.critic.model, seed=config.trainer.seed).to(device)
            critic = add_adapters(critic, config.critic.model, config.trainer.seed)
            dtype = compute_dtype(config.critic.model.fsdp_config.dtype)
            layout = Layout(packed=config.critic.model.use_remove_padding)
            self.critic = Critic(critic, config.critic, compute_dtype=dtype, layout=layout)
        self.judge = RewardModel(config.reward_model, device).judge if config.reward_model.enable else None

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        self.engine.sleep()
        return self.actor.log_probs(batch, pass_size(self.config.actor_rollout_ref.rollout))

    def compute_ref_log_prob(self, batch: TrainBatch) -> Tensor:
        self.engine.sleep()
        return self.ref.log_probs(batch, pass_size(self.config.actor_rollout_ref.ref))[0]

    def compute_values(self, batch: TrainBatch) -> Tensor:
        self.engine.sleep()
        return self.critic.values(batch)

    def update_actor(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        self.engine.sleep()
        actor, length = self.config.actor_rollout_ref.actor, self.config.data.max_response_length
        return self.actor.update(steps_of(batch, actor, length, actor.policy_loss.loss_mode), lr_multiplier)

    def update_critic(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        self.engine.sleep()
        steps = steps_of(batch, self.config.critic, self.config.data.max_response_length)
        return self.critic.update(steps, lr_multiplier)

    def sync_weights(self, version: int) -> dict[str, float]:
        self.engine.update_weights(merged_weights(self.actor.module), version)
        return {"rollout_corr/probe_diff": self.probe()}

    def probe(self) -> float:
        """Largest difference between engine and learner log-probs on a fixed text, or WeightSyncError."""
        ids = probe_ids(self.actor.module.config.vocab_size)
        return compare_probe(probe_log_probs(self.actor), self.engine.probe(ids), bf16=not self.full_precision)

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @property
    def full_precision(self) -> bool:
        engine = compute_dtype(self.config.actor_rollout_ref.rollout.dtype)
        return self.actor.compute_dtype is None and engine is None

    def fingerprints(self) -> dict[str, ModelFingerprint]:
        models = {"actor": self.actor, **({"critic": self.critic} if self.critic else {})}
        return {name: fingerprint(part.module) for name, part in models.items()}

    def save(self, folder: Path) -> None:
        for name, part in (("actor", self.actor), ("critic", self.critic)):
            if part is not None:
                save_model(part.module, self.tokenizer, folder / name)
                save_tensors(folder / name / "optimizer.pt", part.stepper.optimizer.state_dict())

    def load(self, folder: Path) -> None:
        for name, part in (("actor", self.actor), ("critic", self.critic)):
            if part is not None:
                load_model(part.module, folder / name)
                load_optimizer(part, folder / name)

    def start_profile(self) -> None:
        self.profile = Profile(self.config.global_profiler.tool)
        self.profile.start()

    def stop_profile(self, folder: Path, name: str) -> None:
        self.profile.stop(folder / f"{name}.json")

    def close(self) -> None:
        self.engine.close()


def save_model(module: nn.Module, tokenizer: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """A Hugging Face folder; of a model with adapters what is trained alone, in peft's format. ``weights`` stand in
    for the module's own, where those are elsewhere."""
    if not has_adapters(module):
        export_hf(module, tokenizer, folder, state_dict=weights)
        return
    save_adapters(module, weights or trained_weights(module), folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@torch.no_grad()
def load_model(module: nn.Module, folder: Path) -> None:
    """What :func:`save_model` wrote."""
    if not has_adapters(module):
        load_weights(module, folder)
        return
    trained = trained_weights(module)
    for name, value in load_adapters(list(trained), folder).items():
        trained[name].copy_(value)


def load_optimizer(part: Actor | Critic, folder: Path) -> None:
    """The optimizer of a checkpoint's ``actor/`` or ``critic/``, whole or in the parts that several ranks wrote."""
    if (folder / "optimizer.pt").exists():
        part.stepper.optimizer.load_state_dict(load_tensors(folder / "optimizer.pt"))
        return
    from core import fsdp

    fsdp.load_optimizer(part.module, part.stepper.optimizer, folder / fsdp.OPTIMIZER)


def planned_fingerprints(config: Config, *, critic: bool) -> dict[str, ModelFingerprint]:
    """Architecture and shapes of the models that ``config`` asks for, before any weight is read."""
    part, seed = config.actor_rollout_ref, config.trainer.seed
    made = {"actor": add_adapters(load_policy(part.model, on_meta=True), part.model, seed)}
    if critic:
        made["critic"] = add_adapters(load_critic(config.critic.model, seed, on_meta=True), config.critic.model, seed)
    return {name: fingerprint(module, fetched=False) for name, module in made.items()}


def probe_ids(vocab_size: int, length: int = 24) -> tuple[int, ...]:
    """A fixed text of random ids: touches the embedding, every layer and the head."""
    return tuple(int(i) for i in np.random.default_rng(0).integers(0, vocab_size, length))


@torch.no_grad()
def probe_log_probs(policy: Policy) -> np.ndarray:
    """The learner's log-probs of the fixed text, [n - 1] float32: what :meth:`RolloutEngine.probe` must give."""
    ids = probe_ids(policy.module.config.vocab_size)
    with policy.precision():
        logits = policy.module(input_ids=torch.tensor([ids], device=policy.device), use_cache=False).logits
    log_probs = logits[0, :-1].float().log_softmax(-1).cpu()
    return log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def compare_probe(learner: np.ndarray, engine: np.ndarray, *, bf16: bool) -> float:
    """Largest difference of the two; raises WeightSyncError above the bound of the precision.

    Rounding grows with the number that is rounded: the tokens are random ones, whose log-probs may be -50.
    """
    difference = np.abs(learner - engine)
    bound = 0.25 + np.abs(learner) / 64 if bf16 else 1e-3 + np.abs(learner) * 1e-5
    if not bool((difference <= bound).all()):
        worst = int(np.argmax(np.nan_to_num(difference / bound, nan=np.inf)))
        raise WeightSyncError(
            f"after the weight sync the engine's log-prob of a token is {engine[worst]:.4g}, the learner's "
            f"{learner[worst]:.4g} (bound of the difference {bound[worst]:.3g}): some of its weights are stale"
        )
    return float(difference.max())


def pass_size(part: RolloutConfig | RefConfig) -> MicroBatchSize:
    """Of the passes that take log-probs; ``part`` is the section rollout or ref."""
    size = part.log_prob_use_dynamic_bsz, part.log_prob_max_token_len_per_gpu, part.log_prob_micro_batch_size_per_gpu
    return MicroBatchSize.of(*size)


def steps_of(
    batch: TrainBatch, part: ActorConfig | CriticConfig, response_length: int, loss_mode: str = ""
) -> Iterator[TrainBatch]:
    """The optimizer steps that the configuration makes of a batch."""
    return optimizer_steps(
        batch,
        prompts=part.ppo_mini_batch_size,
        epochs=part.ppo_epochs,
        agg_mode=aggregation(loss_mode, part.loss_agg_mode),
        scale_factor=part.loss_scale_factor or response_length,
        shuffle_seed=part.data_loader_seed if part.shuffle else None,
    )


def compute_dtype(name: str) -> torch.dtype | None:
    """The autocast dtype, or None for none: masters and reductions stay float32."""
    return None if name in FULL_PRECISION else torch.bfloat16
