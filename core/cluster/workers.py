"""The phases of a step in this process: one learner and one engine, for tests, debugging and small runs.

``ray_workers`` has the same phases over the processes of a cluster; the trainer does not know which it has. Batches
arrive whole: splitting them is the workers' business.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from core.cluster.learner_rank import Learner
from core.data.vocabulary import known_ids
from core.engines import NoEngine, RolloutEngine, make_engine
from core.engines.weight_buckets import checksum
from core.learner.batching import mini_batching
from core.learner.lora import merged_weights
from core.learner.models import load_policy
from core.learner.passes import compare_probe, compare_weights, probe_ids, probe_log_probs
from core.learner.saving import OPTIMIZER, load_model, load_optimizer, save_model, save_optimizer
from core.rewards.grading import RewardModelCall
from core.types import TrainBatch

if TYPE_CHECKING:
    from core.config.schema import Config


def ray_backend(name: str = "ray_workers") -> ModuleType:
    """Return a module of ``trainer.backend=ray``: ray is imported only where that backend runs."""
    return importlib.import_module(f"core.cluster.{name}")


def on_same_weights(module: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters are the model's own memory, so that what trains them changes both."""
    shared = {id(one): nn.Parameter(one.detach(), requires_grad=False) for one in module.parameters()}
    return copy.deepcopy(module, shared)


class LocalWorkers(Learner):
    """One learner and one engine in this process. The engine sleeps while the learner works."""

    ranks = 1  # learner processes
    overlaps = False  # whether the engine can work while the learner does

    def __init__(self, config: Config, tokenizer: Any, device: torch.device, **learner: Any):
        self.engine: RolloutEngine = NoEngine()
        super().__init__(config, device, known=known_ids(tokenizer), **learner)
        self.tokenizer = tokenizer
        self.reward_model: RewardModelCall | None = None
        self.one_copy = config.one_copy and self.actor.module.dtype == torch.float32
        if config.needs_engine:
            model, module = config.actor_rollout_ref.model, self.actor.module
            policy = (lambda: on_same_weights(module)) if self.one_copy else lambda: load_policy(model).to(device)
            self.engine = make_engine(config, policy, tokenizer, device)
        if config.reward_model.loads_model:
            from core.rewards.reward_model import RewardModel

            self.reward_model = RewardModel(config.reward_model, device).score
        actor, length = config.actor_rollout_ref.actor, config.data.max_response_length
        self.actor_mini_batches = mini_batching(actor, length, actor.policy_loss.loss_mode)
        self.critic_mini_batches = mini_batching(config.critic, length)

    @property
    def threads(self) -> int:
        """Return the number of torch's threads in each learner process."""
        return torch.get_num_threads()

    def at_work(self, name: str, *, updates: bool = False) -> AbstractContextManager[None]:
        self.engine.sleep()
        return super().at_work(name, updates=updates)

    def update_actor(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        return super().update_actor(self.actor_mini_batches(batch), lr_multiplier)

    def update_critic(self, batch: TrainBatch, lr_multiplier: float) -> dict[str, float]:
        return super().update_critic(self.critic_mini_batches(batch), lr_multiplier)

    def sync_weights(self, version: int) -> dict[str, float]:
        """Hand the learner's weights to the engine, in memory, and prove by checksums and a probe that they arrived.

        With one copy of the weights there is nothing to hand over.
        """
        if self.one_copy:
            self.engine.policy_version = version
            return {}
        sent, dtype = {}, getattr(self.engine, "weights_dtype", None)  # of one that has the learner's names

        def sending() -> Iterator[tuple[str, Tensor]]:
            for name, value in merged_weights(self.actor.module):
                if dtype is not None:
                    sent[name] = checksum(value.to(dtype) if value.is_floating_point() else value)
                yield name, value

        proofs = self.engine.update_weights(sending(), version)
        if dtype is not None:
            compare_weights(sent, proofs[0].weights)
        expected = probe_log_probs(self.actor)
        log_probs = self.engine.probe(probe_ids(self.actor.module.config.get_text_config().vocab_size))
        return {"rollout_corr/probe_diff": compare_probe(expected, log_probs, bf16=not self.config.full_precision)}

    def save(self, folder: Path) -> dict[str, str]:
        """Write ``actor/`` (a Hugging Face folder and the optimizer) and ``critic/`` into ``folder``.

        Returns file -> SHA-256 of what the writers hashed and put on disk themselves; the others are the caller's.
        """
        for name, part in self.trained.items():
            save_model(part.module, self.tokenizer, folder / name)
            save_optimizer(part, folder / name / OPTIMIZER)
        return {}

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote."""
        for name, part in self.trained.items():
            load_model(part.module, folder / name)
            load_optimizer(part, folder / name)

    def close(self) -> None:
        self.engine.close()
