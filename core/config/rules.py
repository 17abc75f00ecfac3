"""All rules of a configuration, and what they read: the resolved configuration under short names.

A rule is a function of a :class:`View`: ``c.actor.clip_ratio``, ``c.data_ranks``. Those of core's sections come first,
then the recipe's own. Whether a key has an effect is said by the conditions of its field and of the sections around.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from core.config import convert, defaults, recipes, registry, rulebook
from core.config.paths import is_local
from core.config.problem import Problem
from core.config.rulebook import RefusedValue, RuleBook
from core.config.schema import Config
from core.config.section import Section, hints, is_section, mark
from core.config.sections import actor, algorithm, correction, critic, data, model, reward, rollout, sizes, trainer
from core.files import is_url

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

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
    "judge": "reward_model.judge",
    "custom": "custom_reward_function",
    "algorithm": "algorithm",
    "kl": "algorithm.kl_ctrl",
    "correction": "algorithm.rollout_correction",
    "trainer": "trainer",
    "ray": "ray_kwargs",
    "profiler": "global_profiler",
}


class Watched:
    """A section whose refused values cannot be read, so that no rule judges the default that stands for one."""

    def __init__(self, section: Any, prefix: str, refused: set[str]):
        self._section, self._prefix, self._refused = section, prefix, refused

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._section, name)
        if isinstance(value, Section):
            return Watched(value, f"{self._prefix}{name}.", self._refused)
        if self._prefix + name in self._refused:
            raise RefusedValue(self._prefix + name)
        return value


class View:
    """``view.actor.clip_ratio``; ``given`` are the keys that an override set, ``hooks`` what the recipe overrides."""

    def __init__(self, config: Config, given: Collection[str] = (), hooks: Collection[str] = (), recipe: str = ""):
        self.given, self.hooks, self.recipe = frozenset(given), frozenset(hooks), recipe
        self.config, self._refused = config, set[str]()
        own = ((name, name) for name, hint in hints(type(config)).items() if is_section(hint))  # a recipe's sections
        sections = dict([*own, *SHORT.items()])
        self.sections = sorted(sections)  # the names under which rules read them
        for name, key in sections.items():
            setattr(self, name, Watched(convert.get(config, key), f"{key}.", self._refused))

    @contextmanager
    def refusing(self, keys: Collection[str]) -> Iterator[None]:
        """Within the block, reading one of these keys raises RefusedValue."""
        self._refused.update(keys)
        try:
            yield
        finally:
            self._refused.clear()

    def at(self, own: Section, name: str, key: str, rest: str) -> View:
        """Return this view for the conditions of a field: of ``own``, in which it has a ``name``.

        ``key`` is the whole key that is asked about, ``rest`` what of it lies inside the field.
        """
        self.own, self.name, self.key, self.rest = own, name, key, rest
        return self

    def gives(self, key: str) -> bool:
        """Return whether an override set the key, or one inside it."""
        return any(prefix == key or prefix.startswith(f"{key}.") for prefix in self.given)

    # --- entries of the tables ---

    @property
    def estimator(self) -> registry.EstimatorEntry:
        """The chosen estimator's entry."""
        return registry.estimator(self.algorithm.adv_estimator)

    @property
    def loss(self) -> registry.LossEntry:
        """The chosen policy loss's entry."""
        return registry.policy_loss(self.actor.policy_loss.loss_mode)

    @property
    def engine(self) -> registry.EngineEntry:
        """The chosen engine's entry."""
        return registry.ENGINES[self.rollout.name]

    @property
    def needs_ref(self) -> bool:
        """Whether the objective holds a KL to the reference policy."""
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss

    @property
    def corrects(self) -> bool:
        """Whether samples of another distribution than the learner's are weighed for it."""
        return self.correction.weighs or (self.correction.bypass_mode and self.loss.has_ratio)

    @property
    def follows_rounding(self) -> bool:
        """Whether the bound between engine and learner is measured when the run starts."""
        return defaults.follows_rounding(self.config)

    # --- sizes ---

    @property
    def cluster(self) -> bool:
        """Whether the number of ranks is given: by the backend, or by the keys that count GPUs."""
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
        """Ranks that get different sequences: those that share a sequence, or a layer, get the same."""
        return max(self.ranks // (self.actor.ulysses_sequence_parallel_size * self.actor.layer_ranks), 1)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence there can be."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def open_length(self) -> bool:
        """Whether the number of training steps is known only as the run goes: filtering decides how many prompts."""
        return self.config.drops_groups and self.trainer.total_training_steps is None

    # --- names ---

    def is_url(self, path: str | None) -> bool:
        """Return whether a path is a URL. None is none."""
        return path is not None and is_url(path)

    def no_model(self, path: str | None) -> bool:
        """Return whether the text is neither a hub id nor the path of a folder nor a URL."""
        known = path is None or is_local(path) or is_url(path)
        return not known and HUB_ID.fullmatch(path) is None


# In the order of reports
_SECTIONS = (data, model, actor, critic, sizes, rollout, algorithm, correction, reward, trainer)


def books(recipe: str) -> list[RuleBook]:
    """Return the books of a recipe's rules, in the order of reports."""
    own = recipes.rules_of(recipe)
    return [*(section.rules for section in _SECTIONS), *([own] if own else [])]


def problems(view: View, bad: Collection[str] = ()) -> list[Problem]:
    """Return what is broken. ``bad`` are keys that were refused already and now hold their default."""
    return rulebook.problems(books(view.recipe), view, bad)


def warnings(view: View) -> list[str]:
    """Return what can be run and is probably not meant, a line each."""
    return rulebook.warnings(books(view.recipe), view)


def reasons(view: View, keys: Iterable[str]) -> dict[str, str]:
    """Return key -> why it has no effect, for those of ``keys`` that have none. The first reason that fits is given."""
    unmet = {key: reason for key in keys if (reason := _unmet(view, key))}
    rest = [key for key in keys if key not in unmet]
    return unmet | rulebook.reasons(books(view.recipe), view, rest)


def _unmet(view: View, key: str) -> str | None:
    """Return why the conditions of a key, or of a section around it, do not hold; None where they do."""
    own, names = view.config, key.split(".")
    for depth, name in enumerate(names):
        if name not in type(own).model_fields:
            return None
        at = view.at(own, name, key, ".".join(names[depth + 1 :]))
        for holds, reason in mark(type(own), name, "used_if") or ():
            if not holds(at):
                return reason if isinstance(reason, str) else reason(at)
        value = getattr(own, name)
        if not isinstance(value, Section):
            return None
        own = value
    return None
