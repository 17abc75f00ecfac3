"""Overrides and recipe files to one untyped tree. Hydra reads and composes; what is wrong is reported here.

A recipe's folder ``recipes/<recipe>/config/`` holds ``<recipe>.yaml``, with only what differs from the schema's
defaults, and may hold ``preset/<name>.yaml``, chosen by ``preset=<name>``. Later layers win: schema, recipe, preset,
overrides from left to right.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from core.config import convert, recipes, verl_keys
from core.config.convert import Problem
from core.config.schema import Config

PRESET = "preset"


@dataclass
class Layers:
    """The overrides of a recipe with this schema, sorted; ``values`` are applied from left to right."""

    schema: type[Config] = Config
    presets: list[str] = field(default_factory=list)
    values: list[tuple[str, Any]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)  # what was set by an override
    unused: dict[str, tuple[Any, str]] = field(default_factory=dict)  # accepted keys that mean nothing here
    problems: list[Problem | str] = field(default_factory=list)


# --- reading overrides ---


def read(overrides: Sequence[str], schema: type[Config] = Config) -> Layers:
    """Read the overrides, each on its own, so that one that cannot be read hides no other."""
    parser, layers = OverridesParser.create(), Layers(schema)
    for text in overrides:
        override = _parsed(parser, text)
        if isinstance(override, str):
            layers.problems.append(override)
        else:
            _sort(override, layers)
    return layers


def _parsed(parser: OverridesParser, text: str) -> Override | str:
    """Return the parsed override, or the problem with it."""
    if text.startswith("-"):
        return f"{text}: is not an override; write key=value (DRY_RUN=1 in the environment checks without running)"
    try:
        return parser.parse_override(text)
    except HydraException as error:
        key, separator, value = text.partition("=")
        if not separator:
            return f"{text}: cannot be read; write key=value"
        # ~/data, a=b: plain text with a character of Hydra's
        if value and value[0] not in "[{'\"" and "$" not in value:
            return parser.parse_override(f"{key}='{value.translate(_ESCAPED)}'")
        reason = str(error).splitlines()[0]
        return f"{text}: cannot be read ({reason}); quote text: {key}=\"'...'\", and each text in a list"


_ESCAPED = str.maketrans({"'": "\\'", "\\": "\\\\"})


def _sort(override: Override, layers: Layers) -> None:
    key = override.key_or_group
    if key == PRESET and not override.package:
        layers.presets.append(str(override.value()))
    elif override.package is not None or "/" in key:
        layers.problems.append(f"{override.input_line}: config groups are not used, {PRESET}=<name> excepted; set keys")
    elif override.is_sweep_override():
        layers.problems.append(f"{override.input_line}: is a sweep, and a run has one value; quote it if it is text")
    elif override.is_delete():
        _delete(key, override.value(), layers)
    else:
        for leaf, value in _leaves(key, override.value(), convert.sections(layers.schema)):
            _set(leaf, value, layers)


def _delete(key: str, value: Any, layers: Layers) -> None:
    """Take the key of ``~key`` back to its default."""
    if key in convert.all_keys(layers.schema) or key in convert.sections(layers.schema):
        layers.deleted.append(key)
        layers.values = [(name, value) for name, value in layers.values if not _within(name, key)]
        layers.given = {name: value for name, value in layers.given.items() if not _within(name, key)}
    else:
        layers.problems.append(str(convert.unknown(key, value, layers.schema)))


def _within(key: str, parent: str) -> bool:
    return key == parent or key.startswith(f"{parent}.")


def _leaves(key: str, value: Any, sections: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield ``data={seed: 1}`` as ``data.seed=1``."""
    if key in sections and isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item, sections)
    else:
        yield key, value


def _set(key: str, value: Any, layers: Layers) -> None:
    if (reason := verl_keys.without_effect(key, value)) is not None:
        layers.unused[key] = (value, reason)
    elif key in convert.sections(layers.schema):
        layers.problems.append(Problem(key, value, "is a section of the configuration", "set one of its keys"))
    elif not convert.known(key, layers.schema) or verl_keys.advice(key) and key not in convert.all_keys(layers.schema):
        layers.problems.append(convert.unknown(key, value, layers.schema))
    elif isinstance(value, list) and isinstance(default := _default(key, layers.schema), Mapping):
        layers.problems.append(convert.mismatch(key, value, convert.MAPPING, default))  # OmegaConf cannot merge the two
    else:
        layers.values.append((key, value))
        layers.given[key] = value


def _default(key: str, schema: type[Config]) -> Any:
    return convert.get(schema(), key) if key in convert.all_keys(schema) else None


# --- composing ---


def tree(recipe: str, layers: Layers) -> dict[str, Any]:
    """Return the composed tree with interpolations resolved; problems go to ``layers``."""
    composed = _recipe_tree(recipe, layers)
    for key in layers.deleted:
        _forget(composed, key)
    for key, value in layers.values:
        OmegaConf.update(composed, key, value, force_add=True)
    for key in _missing(OmegaConf.to_container(composed, resolve=False)):
        layers.problems.append(Problem(key, "???", "has no default", "give it a value"))
    merged = OmegaConf.merge(_base(layers.schema), composed)
    return _resolved(merged, "", layers.problems)


@functools.cache
def _base(schema: type[Config]) -> DictConfig:
    return OmegaConf.create(convert.as_tree(schema()))


def _recipe_tree(recipe: str, layers: Layers) -> DictConfig:
    folder = recipes.folder(recipe)
    if not (folder / f"{recipe}.yaml").exists():
        known = ", ".join(recipes.names())
        layers.problems.append(f"recipe={recipe}: has no config/{recipe}.yaml; choose one of {known}")
        return OmegaConf.create({})
    return OmegaConf.create(_composed_files(recipe, _preset(folder, layers)))


@functools.cache
def _composed_files(recipe: str, preset: str | None) -> dict[str, Any]:
    """Return what a recipe's files hold, interpolations untouched. They are read once a process."""
    with initialize_config_dir(config_dir=str(recipes.folder(recipe)), version_base="1.3"):
        composed = hydra_compose(config_name=recipe, overrides=[f"+{PRESET}={preset}"] if preset else [])
    return OmegaConf.to_container(composed, resolve=False)


def _preset(folder: Path, layers: Layers) -> str | None:
    """Return the chosen preset; a typed one takes the place of a script's."""
    known = sorted(path.stem for path in (folder / PRESET).glob("*.yaml"))
    chosen = layers.presets[-1] if layers.presets else None
    if chosen is None or chosen in known:
        return chosen
    choice = f"choose one of {', '.join(known)}" if known else "leave it out: this recipe has none"
    layers.problems.append(f"{PRESET}={chosen}: unknown preset; {choice}")
    return None


def _forget(composed: DictConfig, key: str) -> None:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(composed, parent) if parent else composed
    if isinstance(node, DictConfig) and name in node:
        del node[name]


def _missing(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield keys that a file marks as ``???``: merging would quietly give them the schema's default."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _missing(value, f"{prefix}{name}.")
        elif value == "???":
            yield f"{prefix}{name}"


_REFERENCE = re.compile(r"\$\{\s*([\w.]+)\s*\}")


def _resolved(node: DictConfig, prefix: str, problems: list[Problem | str]) -> dict[str, Any]:
    """Return the node as plain values. One that cannot be resolved is left out, and so keeps its default."""
    raw = OmegaConf.to_container(node, resolve=False)
    found = {}
    for name in node:
        key = f"{prefix}{name}"
        try:
            value = node[name]
            if isinstance(value, ListConfig):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            problems.append(
                Problem(key, raw[name], f"cannot be resolved ({str(error).splitlines()[0]})", "mend the ${...}")
            )
            continue
        if isinstance(value, DictConfig):
            value = _resolved(value, f"{key}.", problems)
        elif isinstance(value, str) and (missing := _null_reference(node, raw[name])):
            problems.append(Problem(key, raw[name], f"names {missing}, which is null", f"set {missing} as well"))
            continue
        found[name] = value
    return found


def _null_reference(node: DictConfig, text: Any) -> str | None:
    """Return a key that is null and would be written into the text as "None"."""
    references = _REFERENCE.findall(text) if isinstance(text, str) else []
    root = node._get_root()
    return next((key for key in references if OmegaConf.select(root, key) is None), None)
