"""Rules between keys, and whether a key has an effect: what they read, and who calls them.

A rule is a generator over a :class:`View`: it yields key, rule and fix. Those of ``PROBLEMS``
refuse a run, those of ``WARNINGS`` do not. Core's are in ``rules_training``, a recipe's in
``config_rules.py``; bounds are a key's type's.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from core.config import convert, recipes, registry, rules_training
from core.config.schema import Config
from core.config.section import Problem, Section, mark

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


class View:
    """What rules read: sections under short names (``c.actor.clip_ratio``), facts, and what of it
    was ``given``."""

    def __init__(self, config: Config, given: Collection[str] = (), recipe: str = ""):
        self.config, self.given, self.recipe = config, frozenset(given), recipe
        self.data, self.algorithm, self.trainer = config.data, config.algorithm, config.trainer
        self.policy, self.critic = config.actor_rollout_ref, config.critic
        self.reward, self.custom = config.reward_model, config.custom_reward_function
        self.actor, self.ref, self.rollout = self.policy.actor, self.policy.ref, self.policy.rollout
        self.model, self.val = self.policy.model, self.rollout.val_kwargs
        self.correction = config.algorithm.rollout_correction
        self.generates, self.needs_engine = config.generates, config.needs_engine
        self.plays_episodes, self.drops_groups = config.plays_episodes, config.drops_groups
        self.estimator = registry.estimator(config.algorithm.adv_estimator)
        self.loss = registry.policy_loss(self.actor.policy_loss.loss_mode)
        self.engine = registry.ENGINES[self.rollout.name]
        # The objective holds a KL to it
        self.needs_ref = config.algorithm.use_kl_in_reward or self.actor.use_kl_loss
        # Samples of another distribution than the learner's are weighed for it
        self.corrects = self.correction.weighs or (
            self.correction.bypass_mode and self.loss.has_ratio
        )
        self.cluster, self.ranks = config.trainer.backend == "ray", config.learner_ranks
        # Ranks that share a sequence, or a layer, get the same sequences
        self.data_ranks = max(self.ranks // self.actor.together, 1)
        self.longest = config.data.max_prompt_length + config.data.max_response_length


def broken(which: str, view: View) -> list[Problem]:
    """Return what the rules of core and of the recipe find: those of ``PROBLEMS``, or of
    ``WARNINGS``."""
    modules = filter(None, (rules_training, recipes.module_of(view.recipe, "config_rules")))
    found = (
        each for module in modules for rule in getattr(module, which, ()) for each in rule(view)
    )
    return [Problem(key, convert.get(view.config, key), text, fix) for key, text, fix in found]


# --- keys without effect ---

FACTS = {  # of a View that conditions of fields name -> what is said where it does not hold
    "generates": "no step of this recipe samples answers",
    "needs_engine": "nothing is answered in this run, and there is no engine",
    "plays_episodes": "the trainer of this recipe does not search",
}


def unmet(view: View, key: str) -> str:
    """Return why a key, or a section around it, has no effect; nothing where it has.

    A condition of a field (``used_if``) is joined of keys by ``&`` and, within, ``|``: ``key`` (it
    is set), ``key=value``, ``key!=value``, ``.key`` in the field's own section, or a name of
    :data:`FACTS`.
    """
    own, section = view.config, ""
    for name in key.split("."):
        if name not in type(own).model_fields:
            return ""
        for condition in filter(None, (mark(type(own), name, "used_if") or "").split(" & ")):
            choices = [
                f"{section}{one}" if one[0] == "." else one for one in condition.split(" | ")
            ]
            if not any(_holds(view, one) for one in choices):
                return FACTS.get(condition) or f"needs {' or '.join(choices)}"
        own, section = getattr(own, name), f"{section}.{name}".lstrip(".")
        if not isinstance(own, Section):
            break
    return _unread(view, key)


def _holds(view: View, condition: str) -> bool:
    if condition in FACTS:
        return getattr(view, condition)
    key, operator, value = re.fullmatch(r"([\w.]+)(!?=)?(.*)", condition).groups()
    found = convert.get(view.config, key)
    return bool(found) if not operator else (str(found) == value) == (operator == "=")


def _unread(view: View, key: str) -> str:
    """Return why the chosen estimator, loss or engine does not read a key; nothing where it
    does."""
    for section, choice, table, entry in (
        ("algorithm", "algorithm.adv_estimator", registry.ESTIMATORS, view.estimator),
        (ACTOR, f"{ACTOR}.policy_loss.loss_mode", registry.POLICY_LOSSES, view.loss),
        (ROLLOUT, f"{ROLLOUT}.name", registry.ENGINES, view.engine),
    ):
        name = key.removeprefix(f"{section}.")
        readers = [other for other, one in table.items() if name in one.reads]
        if readers and name not in entry.reads:
            return (
                f"{choice}={convert.get(view.config, choice)} does not read it, only "
                f"{', '.join(readers)}"
            )
    mode, own = (
        view.actor.policy_loss.loss_mode,
        key.partition(f"{ROLLOUT}.engine_kwargs.")[2].partition(".")[0],
    )
    special = {
        f"{ROLLOUT}.engine_kwargs.": own not in ("", view.rollout.name)
        and f"the engine is {view.rollout.name}",
        f"{ACTOR}.clip_ratio": view.given >= {f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"}
        and "clip_ratio_low and clip_ratio_high are both given",
        f"{ACTOR}.loss_agg_mode": view.loss.aggregation
        and f"{mode} is defined with {view.loss.aggregation}",
        "algorithm.rollout_correction.bypass_mode": not view.loss.has_ratio
        and f"{mode} has no ratio",
    }
    return special.get(f"{ROLLOUT}.engine_kwargs." if own else key) or ""
