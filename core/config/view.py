"""What the rules look at: the resolved configuration under short names, and what it was made of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import is_dataclass
from typing import Any

from core.config import convert, tables
from core.config.schema import Config

SHORT = {
    "data": "data",
    "actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "rollout": "actor_rollout_ref.rollout",
    "val": "actor_rollout_ref.rollout.val_kwargs",
    "model": "actor_rollout_ref.model",
    "policy": "actor_rollout_ref",
    "critic": "critic",
    "critic_model": "critic.model",
    "reward": "reward_model",
    "buffer": "reward_model.overlong_buffer",
    "custom": "custom_reward_function",
    "algorithm": "algorithm",
    "kl": "algorithm.kl_ctrl",
    "filters": "algorithm.filter_groups",
    "correction": "algorithm.rollout_correction",
    "trainer": "trainer",
    "profiler": "global_profiler",
}


class Section:
    """A section that notes which keys were read, so that a rule about a key of the wrong type can be passed over."""

    def __init__(self, section: Any, prefix: str, seen: set[str]):
        self._section, self._prefix, self._seen = section, prefix, seen

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._section, name)
        if is_dataclass(value):
            return Section(value, f"{self._prefix}{name}.", self._seen)
        self._seen.add(self._prefix + name)
        return value


class View:
    """``view.actor.clip_ratio``; ``given`` are the keys that an override set, ``hooks`` what the recipe overrides."""

    def __init__(self, config: Config, given: Collection[str] = (), hooks: Collection[str] = (), recipe: str = ""):
        self.given, self.hooks, self.recipe = frozenset(given), frozenset(hooks), recipe
        self.config, self.seen = config, set[str]()
        for name, key in SHORT.items():
            setattr(self, name, Section(convert.get(config, key), f"{key}.", self.seen))

    def __getitem__(self, name: str) -> Any:  # for str.format_map
        return getattr(self, name)

    @property
    def cluster(self) -> bool:
        """Whether the number of ranks was said: by the backend, or by the keys that count GPUs."""
        return self.trainer.backend == "ray" or bool({"trainer.nnodes", "trainer.n_gpus_per_node"} & self.given)

    @property
    def ranks(self) -> int:
        """Learner ranks. The local backend has one, but a command line written for a cluster is checked as such."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node if self.cluster else 1

    @property
    def engine_gpus(self) -> int:
        """GPUs of a node that engines compute on: those of the ranks, or of a pool of their own."""
        return self.trainer.n_gpus_per_node if self.policy.hybrid_engine else self.rollout.n_gpus_per_node

    @property
    def data_ranks(self) -> int:
        """Ranks that get different rows: those of a sequence-parallel group share theirs."""
        return max(self.ranks // self.actor.ulysses_sequence_parallel_size, 1)

    @property
    def needs_ref(self) -> bool:
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss

    @property
    def corrects(self) -> bool:
        """Whether samples of another distribution than the learner's are weighed for it."""
        return self.correction.rollout_is is not None or (self.correction.bypass_mode and self.loss.has_ratio)

    @property
    def estimator(self) -> tables.EstimatorEntry:
        return tables.estimator(self.algorithm.adv_estimator)

    @property
    def loss(self) -> tables.LossEntry:
        return tables.policy_loss(self.actor.policy_loss.loss_mode)

    @property
    def engine(self) -> tables.EngineEntry:
        return tables.ENGINES[self.rollout.name]

    @property
    def manager(self) -> tables.ManagerEntry:
        return tables.reward_manager(self.reward)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence there can be."""
        return self.data.max_prompt_length + self.data.max_response_length
