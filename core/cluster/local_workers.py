"""The phases of a step in this process: one learner and one engine, for tests, debugging and small runs."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.algorithm import checks
from core.checkpoint.provenance import ModelFingerprint
from core.checkpoint.run_state import save_tensors
from core.config import registry
from core.data.vocabulary import known_ids
from core.engines import NoEngine, RolloutEngine, make_engine
from core.learner.batching import mini_batching
from core.learner.learner import Actor, Critic
from core.learner.lora import add_adapters, merged_weights
from core.learner.model_checks import compare_probe, compare_weights, logprob_noise, probe_ids, probe_log_probs
from core.learner.models import compute_dtype, freeze_parts, load_critic, load_policy
from core.learner.passes import BasePolicy, Policy, pass_size
from core.learner.saving import fingerprints, load_model, load_optimizer, save_model
from core.learner.traced_tokens import TracedRows
from core.tracking.health import Repeats
from core.tracking.profiling import Profile
from core.types import TrainBatch

if TYPE_CHECKING:
    from core.config.schema import Config


class LocalWorkers:
    """One learner and one engine in this process: :class:`core.cluster.workers.Workers`."""

    ranks = 1
    overlaps = False

    def __init__(self, config: Config, tokenizer: Any, device: torch.device, *, needs_ref: bool, needs_critic: bool):
        self.config = config
        self.tokenizer = tokenizer
        rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
        model = config.actor_rollout_ref.model
        options = {
            "temperature": rollout.temperature or 1.0,
            "compute_dtype": compute_dtype(actor.fsdp_config.dtype),
            "compiled": actor.use_torch_compile,
            "known": known_ids(tokenizer),
        }
        policy = load_policy(model).to(device)
        self.engine: RolloutEngine = NoEngine()
        if config.needs_engine:
            self.engine = make_engine(config, lambda: copy.deepcopy(policy).requires_grad_(False), tokenizer, device)
        self.ref = self.critic = None
        if needs_ref and not model.lora_rank:
            self.ref = Policy(copy.deepcopy(policy).requires_grad_(False), **options)
        bypass = config.algorithm.rollout_correction.bypass_mode
        freeze_parts(policy, config)
        self.actor = Actor(add_adapters(policy, model, config.trainer.seed), actor, bypass=bypass, **options)
        if needs_ref and model.lora_rank:
            self.ref = BasePolicy(policy, **options)
        if needs_critic:
            critic = load_critic(config.critic.model, seed=config.trainer.seed).to(device)
            critic = add_adapters(critic, config.critic.model, config.trainer.seed)
            dtype = compute_dtype(config.critic.model.fsdp_config.dtype)
            compiled = config.critic.use_torch_compile
            self.critic = Critic(critic, config.critic, compute_dtype=dtype, compiled=compiled)
        self.trained = {"actor": self.actor, **({"critic": self.critic} if self.critic else {})}
        self.reward_model = None
        if config.reward_model.loads_model:
            from core.rewards.reward_model import RewardModel

            self.reward_model = RewardModel(config.reward_model, device).score
        length = config.data.max_response_length
        self.actor_mini_batches = mini_batching(actor, length, actor.policy_loss.loss_mode)
        self.critic_mini_batches = mini_batching(config.critic, length)
        self.profile: Profile | None = None
        self.probing = {"bf16": not self.full_precision, "is_news": Repeats().is_news}

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        self.engine.sleep()
        squares = registry.estimator(self.config.algorithm.adv_estimator).squares
        return self.actor.log_probs(batch, pass_size(self.config.actor_rollout_ref.rollout), squares=squares)

    def compute_ref_log_prob(self, batch: TrainBatch) -> Tensor:
        self.engine.sleep()
        return self.ref.log_probs(batch, pass_size(self.config.actor_rollout_ref.ref))[0]

    def compute_values(self, batch: TrainBatch) -> Tensor:
        self.engine.sleep()
        return self.critic.values(batch)

    def update_actor(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        self.engine.sleep()
        return self.actor.update(self.actor_mini_batches(batch), lr_multiplier)

    def traced(self, rows: Collection[int] | None) -> TracedRows:
        return self.actor.traced.of(rows)

    def update_critic(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        self.engine.sleep()
        return self.critic.update(self.critic_mini_batches(batch), lr_multiplier)

    def sync_weights(self, version: int) -> dict[str, float]:
        sent = checks.SentWeights(merged_weights(self.actor.module), getattr(self.engine, "weights_dtype", None))
        proofs = self.engine.update_weights(sent, version) or ()  # an engine of a test's own has none
        for proof in proofs:
            compare_weights(sent.sums, proof.sums)
        expected = probe_log_probs(self.actor)
        log_probs = self.engine.probe(probe_ids(self.actor.module.config.get_text_config().vocab_size))
        return {"rollout_corr/probe_diff": compare_probe(expected, log_probs, **self.probing)}

    def logprob_noise(self, token_ids: Sequence[int]) -> float:
        self.engine.sleep()
        return logprob_noise(self.actor, token_ids)

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @property
    def full_precision(self) -> bool:
        engine = compute_dtype(self.config.actor_rollout_ref.rollout.dtype)
        return self.actor.compute_dtype is None and engine is None

    def fingerprints(self) -> dict[str, ModelFingerprint]:
        return fingerprints({name: part.module for name, part in self.trained.items()}, self.config)

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
