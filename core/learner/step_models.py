"""Policy, critic and frozen models such as the reference, for the phases of a step.

:mod:`core.learner.learner` has the updates of the policy and the critic.
"""

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from core.config.schema import Config
from core.config.training_keys import FSDPConfig, ModelConfig, Sharing
from core.learner.learner import Actor, Critic
from core.learner.lora import add_adapters
from core.learner.models import compute_dtype, load_critic, load_policy
from core.learner.passes import BasePolicy, Policy
from core.types import TrainBatch


def fsdp_config(config: Config, name: str) -> FSDPConfig:
    """Return the section that decides dtype, sharding and offloading of a model."""
    roles = config.actor_rollout_ref
    if name == "critic":
        return config.critic.model.fsdp_config
    if name in config.frozen_models:
        return roles.ref.fsdp_config.replace(dtype=config.frozen_models[name].dtype)
    # With adapters the reference is the policy without them
    is_policy = name == "actor" or roles.model.lora_rank
    return roles.actor.fsdp_config if is_policy else roles.ref.fsdp_config


class Placement(Protocol):
    """Where models are and how their passes are computed.

    :class:`WholeModels` keeps them in this process, and
    :class:`core.cluster.learner_rank.ShardedModels` shards them over ranks.
    """

    def place(self, name: str, load: Callable[[bool], nn.Module], sharing: Sharing) -> nn.Module:
        """Return a model with its weights. ``load(on_meta)`` makes it with or without them."""

    def computing(self, name: str, sharing: Sharing) -> dict[str, Any]:
        """Return the options of :class:`LearnerModel`: how the passes of a model are computed."""

    def at_work(self, name: str, part: Any, *, updates: bool) -> AbstractContextManager[None]:
        """Return a context in which a model can compute, and its optimizer if it ``updates``."""


@dataclass
class WholeModels:
    """Models that are whole in this process."""

    config: Config
    device: torch.device

    def place(self, name: str, load: Callable[[bool], nn.Module], sharing: Sharing) -> nn.Module:
        return load(False).to(self.device)

    def computing(self, name: str, sharing: Sharing) -> dict[str, Any]:
        section = fsdp_config(self.config, name)
        return {"compute_dtype": compute_dtype(section.dtype)}

    def at_work(self, name: str, part: Any, *, updates: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class Models:
    """Policy, critic and frozen models, for the phases of a step.

    ``placement`` decides where they are, by default whole in this process. ``known_token_ids``
    marks the ids that the tokenizer has (:func:`core.data.vocabulary.known_ids`). ``master_dtype``
    is float32 except in tests.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        *,
        needs_ref: bool,
        needs_critic: bool,
        known_token_ids: np.ndarray | None = None,
        master_dtype: torch.dtype = torch.float32,
        placement: Placement | None = None,
    ):
        self.config = config
        self.master_dtype = master_dtype
        self.placement: Placement = placement or WholeModels(config, device)
        place = self.placement.place
        computing = self.placement.computing
        roles = config.actor_rollout_ref
        policy = place("actor", self.new_policy, roles.actor)
        self.actor = Actor(
            policy,
            roles.actor,
            bypass=config.algorithm.rollout_correction.bypass_mode,
            # Greedy decoding has temperature 0; its log-probs are those at 1, as in the engines
            temperature=roles.rollout.temperature or 1.0,
            known_token_ids=known_token_ids,
            **computing("actor", roles.actor),
        )
        self.trained: dict[str, Actor | Critic] = {"actor": self.actor}
        self.frozen: dict[str, Policy] = {}
        if needs_ref:
            self.frozen["ref"] = self.make_reference(policy, known_token_ids)
        for role, frozen_config in config.frozen_models.items():

            def load(on_meta: bool, model: ModelConfig = frozen_config.model) -> nn.Module:
                return load_policy(model, master_dtype, on_meta=on_meta)

            self.frozen[role] = Policy(
                place(role, load, roles.ref).requires_grad_(False),
                temperature=frozen_config.temperature,
                known_token_ids=known_token_ids,
                **computing(role, roles.ref),
            )
        self.critic: Critic | None = None
        if needs_critic:
            module = place("critic", self.new_critic, config.critic)
            self.critic = Critic(module, config.critic, **computing("critic", config.critic))
            self.trained["critic"] = self.critic

    def make_reference(self, policy: nn.Module, known_token_ids: np.ndarray | None) -> Policy:
        """Return the reference policy, which shares the policy's base if adapters train."""
        roles = self.config.actor_rollout_ref
        options = {
            "temperature": self.actor.temperature,
            "known_token_ids": known_token_ids,
            **self.placement.computing("ref", roles.ref),
        }
        if roles.model.lora_rank:
            return BasePolicy(policy, **options)
        module = self.placement.place("ref", self.new_policy, roles.ref).requires_grad_(False)
        return Policy(module, **options)

    def new_policy(self, on_meta: bool) -> nn.Module:
        """Load the policy with its initial weights, or without weights on the meta device."""
        model = self.config.actor_rollout_ref.model
        module = load_policy(model, self.master_dtype, on_meta=on_meta)
        frozen: list[str] = []
        if self.config.actor_rollout_ref.actor.freeze_vision_tower:
            from core.vision.learner_pictures import freeze_vision_tower

            frozen = freeze_vision_tower(module)
        return add_adapters(module, model, self.config.trainer.seed, frozen)

    def new_critic(self, on_meta: bool) -> nn.Module:
        """Load the critic with its initial weights, or without weights on the meta device."""
        model = self.config.critic.model
        seed = self.config.trainer.seed
        module = load_critic(model, seed, self.master_dtype, on_meta=on_meta)
        return add_adapters(module, model, seed)

    # -- phases ----------------------------------------------------------------------------------

    def at_work(self, name: str, *, updates: bool = False) -> AbstractContextManager[None]:
        """Return a context in which a model can compute, and its optimizer if it ``updates``."""
        part = (self.trained | self.frozen)[name]
        return self.placement.at_work(name, part, updates=updates)

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy of each policy token at the rollout temperature, [N] each."""
        with self.at_work("actor"):
            return self.actor.log_probs(batch, self.actor.micro_batch_size)

    def compute_ref_log_prob(self, batch: TrainBatch, role: str = "ref") -> Tensor:
        """Return the log-probs of the reference policy, or of a recipe's frozen model, [N]."""
        with self.at_work(role):
            # Frozen models have no micro-batch size of their own: they use the actor's
            log_prob_N, _ = self.frozen[role].log_probs(batch, self.actor.micro_batch_size)
        return log_prob_N

    def compute_values(self, batch: TrainBatch) -> Tensor:
        """Return the critic's values, [N]."""
        with self.at_work("critic"):
            return self.critic.values(batch)

    def update_actor(
        self, mini_batches: Iterable[TrainBatch], lr_multiplier: float
    ) -> dict[str, float]:
        """Take an optimizer step of the policy for each mini-batch. Return metrics."""
        with self.at_work("actor", updates=True):
            return self.actor.update(mini_batches, lr_multiplier)

    def update_critic(
        self, mini_batches: Iterable[TrainBatch], lr_multiplier: float
    ) -> dict[str, float]:
        """Take an optimizer step of the critic for each mini-batch. Return metrics."""
        with self.at_work("critic", updates=True):
            return self.critic.update(mini_batches, lr_multiplier)
