"""Keys that the schema lacks, and values that it refuses: what other versions meant by them, or the nearest key.

The nearest key is looked for within a key's own section. ``core/config/verl_keys`` knows other versions' names; it is
imported only where a command line has such a key or value.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from core.config import recipes
from core.config.convert import all_keys, get
from core.config.problem import Problem, show
from core.config.schema import Config
from core.config.section import MAPPING, build, hints

SIMILAR = 0.7  # of names in one section: shufle and shuffle, not timeout_s and topk
NOTHING_NEAR = "no key of its section is close to it; the command with --help WORD lists the keys with a word"


@dataclass(frozen=True)
class CommandLine:
    """What a key or a value is read with.

    given: every key of the line, as it was typed, with its value.
    read: what has been read so far: key -> its value, and the settings that it means.
    """

    recipe: str
    schema: type[Config]
    given: dict[str, Any] = field(default_factory=dict)
    read: dict[str, tuple[Any, Mapping[str, Any]]] = field(default_factory=dict)

    def value(self, key: str) -> Any:
        """Return what the line gives to a key of the schema, or the schema's default."""
        return self.given[key] if key in self.given else get(self.schema(), key)


@dataclass(frozen=True)
class Interpretation:
    """What a key or value of another version means: settings here, a reason why it does nothing, or rule and fix."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    unused: str = ""
    rule: str = ""
    fix: str = ""


def unknown_key(key: str, value: Any, line: CommandLine) -> Problem:
    """Return the problem with a key that the schema lacks, with what to do instead."""
    from core.config.verl_keys import reading as other_versions

    reading = other_versions.read(key, value, line)
    if reading and reading.rule:
        return Problem(key, value, reading.rule, reading.fix)
    for recipe, module in recipes.extended():
        own_sections = hints(module.SCHEMA).keys() - hints(line.schema).keys()
        if key in all_keys(module.SCHEMA) or key.partition(".")[0] in own_sections:
            fix = f"use the recipe that has it: python -m recipes.{recipe}.main_{recipe}"
            return Problem(key, value, f"belongs to {module.PAPER}, and this recipe has no such key", fix)
    near = nearest(key, all_keys(line.schema))
    return Problem(key, value, "unknown key", f"the nearest known key is {near}" if near else NOTHING_NEAR)


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the known key that was probably meant, or None: no advice is better than a wrong one.

    It is the one key that ends like this one, whose first sections were left out, or the most similar of those that
    differ in one name alone: ``data.train_bach_size``, ``actor_rollout_ref.rolout.n``.
    """
    known = list(known)
    if key in known:
        return key
    ends = [other for other in known if other.endswith(f".{key}")]
    if len(ends) == 1:
        return ends[0]
    parts, candidates = key.split("."), {}
    for other in known:
        pairs = list(zip(parts, other.split("."), strict=False))
        differing = [pair for pair in pairs if pair[0] != pair[1]]
        if other.count(".") == key.count(".") and len(differing) == 1:
            name, near = differing[0]
            if _of_validation(name) == _of_validation(near):  # what is typed for one is never the other's
                candidates[other] = difflib.SequenceMatcher(None, name, near).ratio()
    best = max(candidates, key=lambda other: candidates[other], default=None)
    return best if best is not None and candidates[best] > SIMILAR else None


def _of_validation(name: str) -> bool:
    return not {"val", "valid", "validation", "eval", "test"}.isdisjoint(name.split("_"))


def validated(schema: type[Config], tree: Any, problems: list[Problem], line: CommandLine | None = None) -> Config:
    """Return the typed configuration of a tree. What is wrong goes to ``problems``, and its key keeps the default.

    With ``line``, of a command line, a value that the schema refuses may be one of another version's.
    """
    config, refused = build(schema, tree)
    known, readings = all_keys(schema), {}
    if line and refused:
        from core.config.verl_keys import reading as other_versions

        read = {
            key: other_versions.read_value(key, value, line) for key, value, rule in refused if rule and key in known
        }
        readings = {key: reading for key, reading in read.items() if reading}
    if settings := {name: value for reading in readings.values() for name, value in reading.settings.items()}:
        line.read.update({key: (value, readings[key].settings) for key, value, _ in refused if key in readings})
        return validated(schema, _with(tree, settings), problems, line)
    for key, value, rule in refused:
        if not rule:
            problems.append(unknown_key(key, value, line or CommandLine("", schema)))
        elif rule == MAPPING and key not in known:
            problems.append(Problem(key, value, "is a section of the configuration", "set one of its keys"))
        else:
            fix = readings[key].fix if key in readings else f"the default is {show(get(config, key))}"
            problems.append(Problem(key, value, f"must be {rule}", fix))
    return config


def _with(tree: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree with other values of these keys, which it has."""
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        tree = {**tree, name: _with(tree[name], {rest: value}) if rest else value}
    return dict(tree)
