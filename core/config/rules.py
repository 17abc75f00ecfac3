"""Rules between keys, and whether a key has an effect: what they read, and who calls them.

A rule is a generator over a :class:`View`: it yields key, rule and fix. Those of ``PROBLEMS`` refuse a run, those of
``WARNINGS`` are of what can run and is probably not meant. Core's are in ``rules_training``, a
recipe's in its ``config_rules.py``. Bounds on a single key are its type's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from core.config import convert, recipes, registry, rules_training
from core.config.schema import Config
from core.config.section import Problem, Section, mark

SHORT = {
    **{name: f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model")},
    **{"policy": "actor_rollout_ref", "val": "actor_rollout_ref.rollout.val_kwargs", "kl": "algorithm.kl_ctrl"},
    **{"reward": "reward_model", "judge": "reward_model.judge", "custom": "custom_reward_function"},
    **{"correction": "algorithm.rollout_correction", "ray": "ray_kwargs"},
}


class RefusedValue(Exception):
    """A rule reads a key whose own value was refused: what depends on it is judged once it is mended."""


class Watched:
    """A section whose refused values cannot be read, so that no rule judges the default that stands for one."""

    def __init__(self, section: Any, prefix: str, refused: Collection[str]):
        self._section, self._prefix, self._refused = section, prefix, refused

    def __getattr__(self, name: str) -> Any:
        value, key = getattr(self._section, name), self._prefix + name
        if key in self._refused:
            raise RefusedValue(key)
        return Watched(value, f"{key}.", self._refused) if isinstance(value, Section) else value


class View:
    """What rules read: sections under short names (``c.actor.clip_ratio``), facts, and what of it was ``given``."""

    def __init__(self, config: Config, given: Collection[str] = (), recipe: str = "", refused: Collection[str] = ()):
        self.config, self.given, self.recipe, self._refused = config, frozenset(given), recipe, refused

    def __getattr__(self, name: str) -> Any:
        path = SHORT.get(name, name).split(".")
        return functools.reduce(getattr, path, Watched(self.config, "", self._refused))

    def gives(self, key: str) -> bool:
        """Return whether an override set the key, or one inside it."""
        return any(given == key or given.startswith(f"{key}.") for given in self.given)

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
    def cluster(self) -> bool:
        """Whether ranks and engines are on the GPUs of nodes."""
        return self.trainer.backend == "ray"

    @property
    def ranks(self) -> int:
        """Learner ranks; the local backend has one."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node if self.cluster else 1

    @property
    def data_ranks(self) -> int:
        """Ranks that get different sequences: those that share a sequence, or a layer, get the same."""
        return max(self.ranks // self.actor.together, 1)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence there can be."""
        return self.data.max_prompt_length + self.data.max_response_length


def _broken(which: str, view: View) -> Iterator[Problem]:
    modules = filter(None, (rules_training, recipes.module_of(view.recipe, "config_rules")))
    for rule in (rule for module in modules for rule in getattr(module, which, ())):
        try:
            for key, text, fix in rule(view):
                yield Problem(key, convert.get(view.config, key), text, fix)
        except RefusedValue:
            continue


def problems(view: View) -> list[Problem]:
    """Return what is broken."""
    return list(_broken("PROBLEMS", view))


def warnings(view: View) -> list[str]:
    """Return what can be run and is probably not meant, a line each."""
    return [str(one) for one in _broken("WARNINGS", view)]


# --- keys without effect ---

FACTS = {  # of a View that conditions of fields name -> what is said where it does not hold
    "generates": "no step of this recipe samples answers",
    "needs_engine": "nothing is answered in this run, and there is no engine",
    "never": "the reward model scores while answers are generated, does not train, and stays where it is",
}


def reasons(view: View, keys: Iterable[str]) -> dict[str, str]:
    """Return key -> why it has no effect, for those of ``keys`` that have none."""
    return {key: reason for key in keys if (reason := unmet(view, key))}


def unmet(view: View, key: str) -> str:
    """Return why a key, or a section around it, has no effect; nothing where it has.

    A condition of a field (``used_if``) is joined of keys by ``&`` and, within, ``|``: ``key`` (it is set),
    ``key=value``, ``key!=value``, ``.key`` in the field's own section, or a name of :data:`FACTS`.
    """
    own, parts = view.config, key.split(".")
    for depth, name in enumerate(parts):
        if name not in type(own).model_fields:
            return ""
        for condition in filter(None, (mark(type(own), name, "used_if") or "").split(" & ")):
            section = ".".join(parts[:depth])
            choices = [f"{section}{one}" if one[0] == "." else one for one in condition.split(" | ")]
            if not any(_holds(view, one) for one in choices):
                return FACTS.get(condition) or f"needs {' or '.join(choices)}"
        own = getattr(own, name)
        if not isinstance(own, Section):
            break
    return _unread(view, key)


def _holds(view: View, condition: str) -> bool:
    key, operator, value = re.fullmatch(r"([\w.]+)(!?=)?(.*)", condition).groups()
    if key in FACTS:
        return key != "never" and getattr(view, key)
    found = convert.get(view.config, key)
    return bool(found) if not operator else (str(found) == value) == (operator == "=")


def _unread(view: View, key: str) -> str:
    """Return why the chosen estimator, loss or engine does not read a key; nothing where it does."""
    chosen = (
        ("algorithm", "algorithm.adv_estimator", registry.ESTIMATORS, view.estimator),
        ("actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss.loss_mode", registry.POLICY_LOSSES, view.loss),
        ("actor_rollout_ref.rollout", "actor_rollout_ref.rollout.name", registry.ENGINES, view.engine),
    )
    for section, choice, table, entry in chosen:
        name = key.removeprefix(f"{section}.")
        if name not in entry.reads and (readers := registry.readers(table, name)):
            return f"{choice}={convert.get(view.config, choice)} does not read it, only {readers}"
    within = key.partition("actor_rollout_ref.rollout.engine_kwargs.")[2].partition(".")[0]
    bounds = ("actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high")
    if within not in ("", view.rollout.name):
        return f"the engine is {view.rollout.name}"
    if key == "actor_rollout_ref.actor.clip_ratio" and all(map(view.gives, bounds)):
        return "clip_ratio_low and clip_ratio_high are both given"
    if key == "actor_rollout_ref.actor.loss_agg_mode" and view.loss.aggregation:
        return f"{view.actor.policy_loss.loss_mode} is defined with {view.loss.aggregation}"
    if key == "algorithm.rollout_correction.bypass_mode" and view.correction.bypass_mode and not view.loss.has_ratio:
        return f"{view.actor.policy_loss.loss_mode} has no ratio"
    return ""
