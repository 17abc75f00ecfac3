"""Overrides and recipe files to one untyped tree. Hydra reads and composes; what is wrong is reported here.

A recipe's folder ``recipes/<recipe>/config/`` holds ``<recipe>.yaml``, with only what differs from the schema's
defaults, and may hold ``preset/<name>.yaml``, chosen by ``preset=<name>``. Overrides before a lone ``--`` are a run
script's own, those after it were typed; without ``--`` all were typed. Later layers win: schema, recipe, script (its
preset, then its keys), typed preset, typed keys. A typed preset takes the place of the script's, and of the script's
keys it overrides those that it names. A run that is not named by a typed key is named after what distinguishes it.
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
from hydra.core.override_parser.types import Glob, Override, Sweep
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from core.config import convert, peer_names, recipes, verl_keys
from core.config.problem import Problem, brief, show
from core.config.schema import Config
from core.config.unknown_keys import unknown_key

PRESET = "preset"
SEPARATOR = "--"  # between a script's own arguments and the typed ones


@dataclass
class Layers:
    """The overrides of a recipe with this schema, sorted; each list is applied from left to right."""

    schema: type[Config] = Config
    script_presets: list[str] = field(default_factory=list)
    script_values: list[tuple[str, Any]] = field(default_factory=list)
    presets: list[str] = field(default_factory=list)  # the typed ones, as are values
    values: list[tuple[str, Any]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)  # what was set by an override
    unused: dict[str, tuple[Any, str]] = field(default_factory=dict)  # accepted keys that mean nothing here
    problems: list[Problem | str] = field(default_factory=list)


# --- reading overrides ---


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a script's own overrides and the typed ones."""
    if SEPARATOR not in overrides:
        return [], list(overrides)
    at = list(overrides).index(SEPARATOR)
    return list(overrides[:at]), [text for text in overrides[at + 1 :] if text != SEPARATOR]


def read(overrides: Sequence[str], schema: type[Config] = Config) -> Layers:
    """Read the overrides, each on its own, so that one that cannot be read hides no other."""
    script, typed = split(overrides)
    layers = Layers(schema)
    _read_into(layers, script)
    layers.script_presets, layers.presets = layers.presets, []
    layers.script_values, layers.values = layers.values, []
    _read_into(layers, typed)
    return layers


def _read_into(layers: Layers, overrides: Sequence[str]) -> None:
    parser, schema = OverridesParser.create(), layers.schema
    for text in overrides:
        try:
            override, value = _parsed(parser, text, schema)
        except _Unreadable as error:
            layers.problems.append(f"{brief(text) or repr(text)}: {error}")
        else:
            _sort(override, value, layers)


class _Unreadable(ValueError):
    """A text that is no override; the message completes "<text>: "."""


# What Hydra's parser raises; ValueError is that of a number with too many digits, RecursionError of deep brackets.
_PARSER_ERRORS = (HydraException, ValueError, RecursionError)


def _parsed(parser: OverridesParser, text: str, schema: type[Config]) -> tuple[Override, Any]:
    """Return the parsed override and its value."""
    if text.startswith("-"):
        told = peer_names.advice(text.partition("=")[0])
        known = f"; it {told[0]}, {told[1]}" if told else ""
        dry = "DRY_RUN=1 in the environment checks without running"
        raise _Unreadable(f"is not an override; write key=value ({dry}){known}")
    key, separator, value = text.partition("=")
    if not separator and not text.startswith("~"):
        raise _Unreadable("cannot be read; write key=value")
    try:
        override = parser.parse_override(text)
        found = override, override.value()
    except _PARSER_ERRORS as error:
        found = _with_key(parser, key, schema), value
        # ~/data, a=b: plain text with a character of Hydra's
        if not isinstance(error, HydraException) or not value or value[0] in "[{'\"" or "$" in value:
            reason = brief(str(error).split("\n")[0])
            fix = f"quote text: {brief(key)}=\"'...'\", and each text in a list"
            raise _Unreadable(f"cannot be read ({reason}); {fix}") from None
    if not found[0].key_or_group:
        raise _Unreadable(_NO_KEY)
    return found


_NO_KEY = "does not begin with a key, which is names joined by single dots; write key=value"


def _with_key(parser: OverridesParser, key: str, schema: type[Config]) -> Override:
    """Return an override of this key with some value."""
    try:
        return parser.parse_override(f"{key}=x")
    except _PARSER_ERRORS:
        name = key.lstrip("+~").strip(" .")
        near = verl_keys.nearest(name, convert.all_keys(schema)) if name else None
        raise _Unreadable(_NO_KEY + (f"; the nearest known key is {near}" if near else "")) from None


def _sort(override: Override, value: Any, layers: Layers) -> None:
    key, text = override.key_or_group, brief(override.input_line or "")
    if override.package is not None or "/" in key:
        layers.problems.append(f"{text}: config groups are not used, {PRESET}=<name> excepted; set keys")
    elif any(isinstance(item, Sweep | Glob) for item in _items(value)):
        layers.problems.append(f"{text}: is a sweep, and a run has one value; quote it if it is text")
    elif override.is_delete():
        _delete(text, key, layers)
    elif key == PRESET:
        layers.presets.append(show(value))
    else:
        for leaf, item in _leaves(key, value, convert.sections(layers.schema)):
            _set(leaf, item, layers)


def _delete(text: str, key: str, layers: Layers) -> None:
    """Take the key of ``~key`` back to its default."""
    if "=" in text:
        layers.problems.append(f"{text}: takes a key back to its default, whatever its value; write ~{key}")
    elif key == PRESET:
        layers.presets.clear()
        layers.script_presets.clear()
    elif key in convert.all_keys(layers.schema) or key in convert.sections(layers.schema):
        layers.deleted.append(key)
        for values in (layers.script_values, layers.values):
            values[:] = [(name, value) for name, value in values if not _within(name, key)]
        layers.given = {name: value for name, value in layers.given.items() if not _within(name, key)}
    else:
        layers.problems.append(unknown_key(key, None, layers.schema))


def _within(key: str, parent: str) -> bool:
    return key == parent or key.startswith(f"{parent}.")


def _leaves(key: str, value: Any, sections: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield ``data={seed: 1}`` as ``data.seed=1``."""
    if key in sections and isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item, sections)
    else:
        yield key, value


def _set(key: str, value: Any, layers: Layers) -> None:
    sections = convert.sections(layers.schema)
    if (reason := verl_keys.without_effect(key, value, sections)) is not None:
        layers.unused[key] = (value, reason)
    elif key in sections:
        layers.problems.append(Problem(key, value, "is a section of the configuration", "set one of its keys"))
    elif not convert.known(key, layers.schema) or verl_keys.advice(key) and key not in convert.all_keys(layers.schema):
        layers.problems.append(unknown_key(key, value, layers.schema))
    elif (reason := _unusable(value)) is not None:
        rule = f"cannot be read ({reason})"
        layers.problems.append(
            Problem(key, value, rule, "mend the ${...}, or write \\${ for the text; quote other text")
        )
    else:
        layers.values.append((key, value))
        layers.given[key] = value


def _unusable(value: Any) -> str | None:
    """Return why OmegaConf refuses a value by itself: the grammar of ``${...}``, a function or null in a mapping."""
    try:
        OmegaConf.create({"value": value})
    except (OmegaConfBaseException, RecursionError) as error:
        return brief(str(error).split("\n")[0])
    return None


# --- composing ---


def tree(recipe: str, layers: Layers) -> dict[str, Any]:
    """Return the composed tree with interpolations resolved; problems go to ``layers``."""
    below, above = _recipe_trees(recipe, layers)
    for key in layers.deleted:
        _forget(below, key)
        _forget(above, key)
    for key, value in layers.script_values:
        _put(below, key, value, layers.problems)
    composed = _merged(below, above)
    name = _run_name(composed, layers, above)
    for key, value in layers.values:
        _put(composed, key, value, layers.problems)
    if name is not None:
        composed["trainer"] = {**(composed.get("trainer") or {}), "experiment_name": name}
    _drop_missing(composed, "", layers.problems)
    merged = _merged(convert.as_tree(layers.schema()), composed)
    if not _refers(merged):
        return merged
    return _resolved(OmegaConf.create(merged), merged, "", layers.problems)


NAME, MODEL, OF_SEED = "trainer.experiment_name", "actor_rollout_ref.model.path", "-seed${trainer.seed}"


def _run_name(untyped: Mapping[str, Any], layers: Layers, preset: Mapping[str, Any]) -> str | None:
    """Return the run's name, so that runs of other settings have other folders; None where resolving gives one.

    It is the name that the script gives (else a preset or the recipe), the typed preset and model where they are not
    the script's, and the seed: ``qwen2.5_32b-paper-seed1``. ``untyped`` is the tree without typed keys, ``preset`` what
    the typed preset holds.
    """
    typed, scripts = dict(layers.values), dict(layers.script_values).get(NAME)
    given = scripts or _at(untyped, NAME)
    foreign = layers.presets[-1:] if layers.presets[-1:] != layers.script_presets[-1:] else []
    if not scripts and _at(preset, NAME) is not None:  # the preset itself names its runs
        foreign = []
    if NAME in typed or not isinstance(given or "", str) or not given and not foreign:
        return None
    untyped_model = _at(untyped, MODEL) or layers.schema().actor_rollout_ref.model.path
    model = typed.get(MODEL, untyped_model)
    base = given.removesuffix(OF_SEED) if given else _word(model)
    parts = [base, *foreign, *([_word(model)] if given and model != untyped_model else [])]
    return "-".join(filter(None, parts)) + ("" if "${trainer.seed}" in base else OF_SEED)


def _word(model: Any) -> str:
    """Return a model's name as part of a folder's name; of a path its last part, of an unusable value nothing."""
    if not isinstance(model, str) or "${" in model:
        return ""
    return re.sub(r"[^\w.-]+", "_", model.rstrip("/").rpartition("/")[2]).strip(".~-")


def _at(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value of a flat key, or None."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _merged(below: Any, above: Any) -> Any:
    """Return ``above`` over ``below``: mappings joined, with names as text, and anything else replaced."""
    if not isinstance(above, Mapping):
        return above
    joined = dict(below) if isinstance(below, Mapping) else {}
    for name, value in above.items():
        joined[str(name)] = _merged(joined.get(str(name)), value)
    return joined


def _put(composed: dict[str, Any], key: str, value: Any, problems: list[Problem | str]) -> None:
    """Set a flat key, unless a value without keys stands where its mapping would be."""
    *parents, name = key.split(".")
    node = composed
    for depth, parent in enumerate(parents, start=1):
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            above = ".".join(parents[:depth])
            rule = f"is a key of {above}, and {above}={show(node)} has no keys"
            problems.append(Problem(key, value, rule, "leave one of them out"))
            return
    node[name] = _merged(node.get(name), value)


def _recipe_trees(recipe: str, layers: Layers) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what lies below a script's keys, recipe and preset, and what lies above them, a typed preset."""
    folder = recipes.folder(recipe)
    if not (folder / f"{recipe}.yaml").exists():
        known = ", ".join(recipes.names())
        layers.problems.append(f"recipe={recipe}: has no config/{recipe}.yaml; choose one of {known}")
        return {}, {}
    chosen = _preset(folder, layers)
    above = _preset_alone(folder, chosen) if chosen is not None and layers.presets else {}
    return _merged({}, _composed_files(recipe, chosen)), _merged({}, above)


@functools.cache
def _composed_files(recipe: str, preset: str | None) -> dict[str, Any]:
    """Return what a recipe's files hold, interpolations untouched. They are read once a process."""
    with initialize_config_dir(config_dir=str(recipes.folder(recipe)), version_base="1.3"):
        composed = hydra_compose(config_name=recipe, overrides=[f"+{PRESET}={preset}"] if preset else [])
    return OmegaConf.to_container(composed, resolve=False)


@functools.cache
def _preset_alone(folder: Path, preset: str) -> dict[str, Any]:
    """Return what a preset's file holds, interpolations untouched."""
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        composed = hydra_compose(config_name=f"{PRESET}/{preset}")
    return OmegaConf.to_container(composed, resolve=False)


def _preset(folder: Path, layers: Layers) -> str | None:
    """Return the chosen preset; a typed one takes the place of a script's."""
    known = sorted(path.stem for path in (folder / PRESET).glob("*.yaml"))
    chosen = next(reversed([*layers.script_presets, *layers.presets]), None)
    if chosen is None or chosen in known:
        return chosen
    choice = f"choose one of {', '.join(known)}" if known else "leave it out: this recipe has none"
    layers.problems.append(f"{PRESET}={chosen}: unknown preset; {choice}")
    return None


def _forget(composed: dict[str, Any], key: str) -> None:
    *parents, name = key.split(".")
    for parent in parents:
        composed = composed.get(parent) or {}
    composed.pop(name, None)


def _drop_missing(composed: dict[str, Any], prefix: str, problems: list[Problem | str]) -> None:
    """Report and drop what is ``???``; a dropped key keeps its default."""
    for name, value in list(composed.items()):
        if isinstance(value, dict):
            _drop_missing(value, f"{prefix}{name}.", problems)
        elif "???" in _items(value):
            problems.append(Problem(f"{prefix}{name}", value, "has no default", "give it a value"))
            del composed[name]


def _items(value: Any) -> Iterator[Any]:
    """Yield what a value holds, without the mappings and lists around it."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _items(item)
    else:
        yield value


def literal(value: Any) -> Any:
    """Return the value with every ``${`` in its texts written so that it stands for itself."""
    if isinstance(value, Mapping):
        return {name: literal(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _refers(value: Any) -> bool:
    return any(isinstance(item, str) and "${" in item for item in _items(value))


_REFERENCE = re.compile(r"(?<!\\)\$\{\s*([\w.]+)\s*\}")


def _resolved(node: DictConfig, raw: Mapping[str, Any], prefix: str, problems: list[Problem | str]) -> dict[str, Any]:
    """Return the node as plain values. One that cannot be resolved is left out, and so keeps its default."""
    found = {}
    for name, value in raw.items():
        key = f"{prefix}{name}"
        if not _refers(value):
            found[name] = value
        elif isinstance(value, Mapping):
            found[name] = _resolved(node[name], value, f"{key}.", problems)
        else:
            try:
                found[name] = _value(node, name, value)
            except _Unresolved as error:
                problems.append(Problem(key, value, *error.args))
    return found


class _Unresolved(ValueError):
    """An interpolation without a usable value: the rule that it breaks, and the fix."""


def _value(node: DictConfig, name: str, raw: Any) -> Any:
    """Return the value of a text or list with interpolations."""
    try:
        value = node[name]
        if isinstance(value, DictConfig | ListConfig):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        parts = {key: OmegaConf.select(node if key[0] == "." else node._get_root(), key) for key in _parts(raw)}
    except RecursionError:
        raise _Unresolved("leads back to itself", "name another key") from None
    except OmegaConfBaseException as error:
        reason = brief(str(error).split("\n")[0])
        raise _Unresolved(f"cannot be resolved ({reason})", "mend the ${...}") from None
    for key, part in parts.items():
        if part is None:
            raise _Unresolved(f"names {key}, which is null", f"set {key} as well")
        if isinstance(part, DictConfig | ListConfig):
            raise _Unresolved(f"names {key}, which holds several values", "name one of them")
    return value


def _parts(raw: Any) -> list[str]:
    """Return the keys whose values are written into a longer text."""
    texts = [item for item in _items(raw) if isinstance(item, str) and not _REFERENCE.fullmatch(item)]
    keys = [key for text in texts for key in _REFERENCE.findall(text)]
    return [key for key in keys if key[0] != "." or isinstance(raw, str)]  # in a list "." is the list
