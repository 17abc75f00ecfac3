"""What a key or a value that the schema lacks means here: the name of another version of verl.

``verl_names.yaml`` has the keys of other versions of verl, a recipe's ``config/verl_keys.yaml``
those of a tree of its own. What depends on the rest of a command line is a function, here or in a
recipe's ``verl_keys.py``. A key that has another name here is read, one that requests nothing, or
what is done anyway, is accepted and listed, any other is refused.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from core.config import convert, recipes
from core.config.schema import Config
from core.config.section import names_of
from core.config.training_keys import ACTOR, ULYSSES
from core.config.unknown_keys import nearest, nearest_name

FILE = Path(__file__).with_name("verl_names.yaml")
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Line:
    """A command line, as keys of other versions are read: they may depend on others of it."""

    recipe: str
    words: Mapping[str, Any] = field(default_factory=dict)  # every key, as it was typed -> value

    @functools.cached_property
    def schema(self) -> type[Config]:
        """Return the class of the recipe's configurations."""
        return recipes.schema_of(self.recipe)

    def value(self, key: str) -> Any:
        """Return what the line gives to a key of the schema, or the schema's default."""
        return self.words[key] if key in self.words else convert.get(self.schema(), key)


@dataclass(frozen=True)
class Interpretation:
    """What a key or value of another version means.

    It means settings here, or nothing for the reason ``unused``, or it is refused with rule and
    fix.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    unused: str = ""
    rule: str = ""
    fix: str = ""
    replaces: bool = False  # the settings take the place of the same keys of the line


# --- reading ---


def read(key: str, value: Any, line: Line) -> Interpretation | None:
    """Return what an override means whose key the schema lacks, or None."""
    names = table(line.recipe)
    forms = [key]  # the key, and its form in the tables for each section that holds it
    for section in convert.sections(line.schema):
        if key.startswith(f"{section}."):
            forms.append(f"*{key.removeprefix(section)}")
    for form in forms:
        if any(_same(value, nothing) for nothing in names["asks_nothing"].get(form, ())):
            return Interpretation(unused="ignored: already the behaviour")
    recipes_module = recipes.module_of(line.recipe, "verl_keys")
    conversions = CONVERSIONS | getattr(recipes_module, "CONVERSIONS", {})
    if key in conversions and (reading := conversions[key](key, value, line)):
        return reading
    for there, settings in names["means"].get(key, {}).items():
        if _same(value, there):
            return Interpretation(settings=settings)
    if target := _target(key, names["same"], line.schema):
        return Interpretation(settings={target: value})
    for form in forms:
        if form in names["no_effect"]:
            return Interpretation(unused=names["no_effect"][form])
    if convert.known(key) and not convert.known(key, line.schema):
        rule = f"has no meaning in {recipes.module_of(line.recipe).PAPER}"
        return Interpretation(rule=rule, fix="leave it out")
    known = convert.known(key, line.schema) or nearest(key, convert.all_keys(line.schema))
    for pattern, rule, fix in sorted(names["refused"], key=lambda entry: entry[0] != key):
        if key == pattern or not known and fnmatchcase(key, pattern):
            return Interpretation(rule=rule, fix=fix.replace("{key}", key))
    return None


def read_value(key: str, value: Any, line: Line) -> Interpretation | None:
    """Return what a value means that the schema refuses for a key of its own, or None."""
    names = table(line.recipe)
    values = value if isinstance(value, list | tuple) else [value]
    files = names["files"]
    if key == "trainer.logger" and any(str(logger) in files for logger in values):
        loggers = ["jsonl" if logger in files else logger for logger in values]
        return Interpretation(settings={key: list(dict.fromkeys(loggers))})
    for there, here in names["values"].get(key, {}).items():
        if _same(value, there):
            return Interpretation(settings={key: here})
    choices = names_of(convert.all_keys(line.schema).get(key))
    for name in values:
        if name not in choices and (near := nearest_name(str(name), choices)):
            return Interpretation(fix=f"the nearest name is {near}")
    hint = next((text for name, text in names["hints"].items() if fnmatchcase(key, name)), None)
    return Interpretation(fix=hint) if hint else None


@functools.cache
def table(recipe: str = "") -> dict[str, Any]:
    """Return the tables of a recipe's command lines: the common ones, and over them its own.

    ``verl_names.yaml`` describes each table. ``no_effect`` and ``asks_nothing`` are turned to key
    -> reason and key -> values, ``refused`` to (key or pattern, rule, fix), of which the first that
    fits counts.
    """
    files = (FILE, recipes.folder(recipe) / "verl_keys.yaml")
    tables = [convert.read_table(path) for path in files if path.exists()]
    joined: dict[str, Any] = {"no_effect": {}, "asks_nothing": {}, "refused": []}
    for name in ("same", "means", "values", "hints", "files"):
        joined[name] = {}
        for part in tables:
            joined[name] |= part.get(name, {})
    for part in tables:
        for why, keys in part.get("no_effect", {}).items():
            joined["no_effect"] |= dict.fromkeys(keys, why)
        for value, keys in part.get("asks_nothing", ()):
            for key in keys:
                joined["asks_nothing"].setdefault(key, []).append(value)
        for row in reversed(part.get("refused", ())):
            entries = [(key, row["rule"], row["fix"]) for key in row["keys"]]
            joined["refused"] = entries + joined["refused"]
    return joined


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _target(key: str, same: Mapping[str, str], schema: type[Config]) -> str | None:
    """Return the key here that another name stands for. ``a.*`` names every key below ``a``."""
    if key in same:
        return same[key]
    patterns = [name for name in same if name.endswith(".*") and key.startswith(name[:-1])]
    if not patterns:
        return None
    pattern = max(patterns, key=len)
    target = same[pattern][:-1] + key.removeprefix(pattern[:-1])
    return target if convert.known(target, schema) or recipes.owner_of(target) else None


# --- keys whose meaning depends on the rest of the line; None: the tables decide ---

Conversion = Callable[[str, Any, Line], Interpretation | None]


def whole_number(value: Any) -> bool:
    """Return whether a value counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def over_all_ranks(target: str) -> Conversion:
    """Return the conversion of a micro-batch over all ranks: verl divides it by the ranks."""

    def per_rank(key: str, value: Any, line: Line) -> Interpretation | None:
        shared = f"critic.{ULYSSES}" if key.startswith("critic") else f"{ACTOR}.{ULYSSES}"
        nodes = line.value("trainer.nnodes")
        gpus = line.value("trainer.n_gpus_per_node")
        together = line.value(shared)
        if not all(map(whole_number, (nodes, gpus, together, value))):
            return None
        ranks = max(nodes * gpus // together, 1)
        return Interpretation(settings={target: max(value // ranks, 1)})

    return per_rank


def sampled_validation(key: str, value: Any, line: Line) -> Interpretation:
    """Read a setting of validation that samples, as forks of verl have it."""
    name = "n" if key.endswith("n_val") else "temperature"
    settings = {f"{ROLLOUT}.val_kwargs.{name}": value}
    if isinstance(value, int | float) and value > (name == "n"):
        settings[f"{ROLLOUT}.val_kwargs.do_sample"] = True
    return Interpretation(settings)


def importance_weights(name: str) -> Conversion:
    """Return the conversion of a key of verl 0.6.0's importance weights, to a correction's name.

    They are off unless ``rollout_is`` is true and there is a threshold (0.6.0 computes metrics).
    """
    old = "algorithm.rollout_is"

    def weights(key: str, value: Any, line: Line) -> Interpretation:
        is_on = line.words.get(old) is True
        if is_on and line.words.get(f"{old}_threshold") is None:
            return Interpretation(
                rule="has no effect in verl without algorithm.rollout_is_threshold",
                fix=f"give the threshold, or leave {old} out",
            )
        if not is_on or value is None:
            return Interpretation(unused=f"{old} is not True, so nothing is weighted")
        setting = line.words.get(f"{old}_level", "token") if key == old else value
        return Interpretation({f"algorithm.rollout_correction.{name}": setting})

    return weights


def turns_of_the_user(key: str, value: Any, line: Line) -> Interpretation:
    """Read the turns of user and tools together: the policy answers once more."""
    turns = f"{ROLLOUT}.multi_turn.max_assistant_turns"
    given = line.value(turns)
    if not whole_number(value) or whole_number(given) and given <= value + 1:
        return Interpretation(unused=f"{turns} bounds an episode's turns")
    return Interpretation({turns: value + 1}, replaces=True)


CONVERSIONS: dict[str, Conversion] = {
    "algorithm.rollout_is": importance_weights("rollout_is"),
    "algorithm.rollout_is_level": importance_weights("rollout_is"),
    "algorithm.rollout_is_threshold": importance_weights("rollout_is_threshold"),
    "algorithm.rollout_is_threshold_lower": importance_weights("rollout_rs_threshold_lower"),
    "algorithm.rollout_is_veto_threshold": importance_weights("rollout_token_veto_threshold"),
    f"{ROLLOUT}.multi_turn.max_user_turns": turns_of_the_user,
    f"{ACTOR}.ppo_micro_batch_size": over_all_ranks(f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    "critic.ppo_micro_batch_size": over_all_ranks("critic.ppo_micro_batch_size_per_gpu"),
    f"{ROLLOUT}.n_val": sampled_validation,
    f"{ROLLOUT}.val_temperature": sampled_validation,
}
