"""The phases of a step: the protocol, and its form in this process for tests and small runs.

:mod:`core.cluster.ray_workers` has the same phases over the processes of a cluster.
"""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from core.config.schema import Config
from core.data.vocabulary import known_ids
from core.engines.engine import RolloutEngine, make_engine
from core.learner.lora import merged_weights
from core.learner.models import load_policy
from core.learner.passes import compare_probe, compare_weights, probe_ids, probe_log_probs
from core.learner.saving import OPTIMIZER, load_model, load_optimizer, save_model, save_optimizer
from core.learner.step_models import Models
from core.rewards.grading import RewardModelCall
from core.types import TrainBatch


class Workers(Protocol):
    """What computes the phases of a step: in this process, or over Ray.

    Batches arrive whole, and mini-batches as the trainer cut them. The workers split them over
    processes and into micro-batches.
    """

    engine: Any  # what answers; None in LocalWorkers of a run that answers nothing
    reward_model: RewardModelCall | None
    ranks: int  # learner processes
    threads: int  # of torch in each learner process
    generates_while_learning: bool  # whether the engine can work while the learner updates

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        """Return log-probs and entropies of the policy tokens, [N] each."""

    def compute_ref_log_prob(self, batch: TrainBatch, role: str = "ref") -> Tensor:
        """Return the log-probs of a frozen model, [N]."""

    def compute_values(self, batch: TrainBatch) -> Tensor:
        """Return the critic's values, [N]."""

    def update_actor(self, steps: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        """Take an optimizer step of the policy for each mini-batch. Return metrics."""

    def update_critic(self, steps: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        """Take an optimizer step of the critic for each mini-batch. Return metrics."""

    def sync_weights(self, version: int) -> dict[str, float]:
        """Copy the policy's weights to the engine and check them. Return metrics."""

    def save(self, folder: Path) -> Mapping[str, str]:
        """Write the trained models into ``folder``, each a Hugging Face folder and its optimizer.

        Returns file -> SHA-256 of those files that the writers hashed and put on disk themselves.
        """

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote."""

    def close(self) -> None:
        """End the engine and the processes."""


class LocalWorkers:
    """The models and one engine in this process. The engine sleeps while the learner works."""

    ranks = 1
    generates_while_learning = False

    def __init__(self, config: Config, tokenizer: Any, device: torch.device, **needs: Any):
        self.config = config
        self.tokenizer = tokenizer
        self.threads = torch.get_num_threads()
        self.models = Models(config, device, known_token_ids=known_ids(tokenizer), **needs)
        self.engine: RolloutEngine | None = None
        self.reward_model: RewardModelCall | None = None
        module = self.models.actor.module
        self.one_copy = config.one_copy and module.dtype == torch.float32

        def make_policy() -> nn.Module:
            if self.one_copy:
                return on_same_weights(module)
            return load_policy(config.actor_rollout_ref.model).to(device)

        if config.needs_engine:
            self.engine = make_engine(config, make_policy, tokenizer, device)
        if config.reward_model.loads_model:
            from core.rewards.reward_model import RewardModel

            day = config.data.chat_template_date
            self.reward_model = RewardModel(config.reward_model, device, day).score

    def _free_device(self) -> None:
        """Put the engine to sleep until the next sync."""
        if self.engine is not None:
            self.engine.sleep()

    def compute_log_probs(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        self._free_device()
        return self.models.compute_log_probs(batch)

    def compute_ref_log_prob(self, batch: TrainBatch, role: str = "ref") -> Tensor:
        self._free_device()
        return self.models.compute_ref_log_prob(batch, role)

    def compute_values(self, batch: TrainBatch) -> Tensor:
        self._free_device()
        return self.models.compute_values(batch)

    def update_actor(self, steps: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        self._free_device()
        return self.models.update_actor(steps, lr_multiplier)

    def update_critic(self, steps: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        self._free_device()
        return self.models.update_critic(steps, lr_multiplier)

    def sync_weights(self, version: int) -> dict[str, float]:
        """Hand the weights to the engine, in memory, and check by comparing them and a probe.

        With one copy of the weights there is nothing to hand over. Raises UnhealthyRun for weights
        out of range.
        """
        policy = self.models.actor
        expected = probe_log_probs(policy)
        if self.one_copy:
            self.engine.policy_version = version
            return {}
        weights = dict(merged_weights(policy.module))
        self.engine.update_weights(weights.items(), version)
        compare_weights(weights, getattr(self.engine, "weights", {}))
        vocab_size = policy.module.config.get_text_config().vocab_size
        log_probs = self.engine.probe(probe_ids(vocab_size))
        diff = compare_probe(expected, log_probs, bf16=not self.config.full_precision)
        return {"rollout_corr/probe_diff": diff}

    def save(self, folder: Path) -> dict[str, str]:
        for name, part in self.models.trained.items():
            save_model(part.module, self.tokenizer, folder / name)
            save_optimizer(part, folder / name / OPTIMIZER)
        return {}

    def load(self, folder: Path) -> None:
        for name, part in self.models.trained.items():
            load_model(part.module, folder / name)
            load_optimizer(part, folder / name)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def on_same_weights(module: nn.Module) -> nn.Module:
    """Return a copy of a model on the model's memory, so that training one changes both."""
    shared = {
        id(weight): nn.Parameter(weight.detach(), requires_grad=False)
        for weight in module.parameters()
    }
    return copy.deepcopy(module, shared)
