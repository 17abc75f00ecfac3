"""Overrides, recipe files and a user's own file to one checked configuration: ``compose`` and ``examine``.

Hydra reads overrides and files; values are put over each other here, untyped, so that all problems are reported
together. A recipe's folder ``recipes/<recipe>/config/`` holds ``<recipe>.yaml``, with only what differs from the
schema's defaults, and ``preset/<name>.yaml``, chosen by ``preset=<name>``. ``--config-path`` and ``--config-name``
take another file in the recipe's place; its defaults list may name the recipe's file or ``ppo_trainer``.

Overrides before a lone ``--`` are a run script's own, those after it were typed; without ``--`` all were typed. Later
layers win: schema, file, script preset, script keys, typed preset, typed keys. A typed preset takes the place of the
script's, and of the script's keys it overrides those that it names.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Sweep
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from core.config import convert, defaults, recipes, rules, verl_names
from core.config.recorded import own_tree, validated
from core.config.schema import Config
from core.config.secret_keys import without_login
from core.config.section import Problem, brief, show, without
from core.config.verl_names import CommandLine, nearest, unknown_key
from core.errors import InputError

PRESET, SEPARATOR = "preset", "--"
NAME, MODEL, OF_SEED = "trainer.experiment_name", "actor_rollout_ref.model.path", "-seed${trainer.seed}"
VERL_BASE = Path(__file__).with_name("verl_base")  # verl's base file, which defaults lists of users' files name
OPTIONS = ("--config-path", "--config-name")
# What Hydra's parser raises; ValueError is that of a number with too many digits, RecursionError of deep brackets.
PARSER_ERRORS = (HydraException, ValueError, RecursionError)


@dataclass
class Layer:
    """The presets and the values that a script, or whoever types, gives."""

    presets: list[str] = field(default_factory=list)
    values: list[tuple[str, Any]] = field(default_factory=list)


@dataclass
class Layers:
    """What a command line says, sorted."""

    line: CommandLine  # the whole, for keys of other versions
    script: Layer = field(default_factory=Layer)
    typed: Layer = field(default_factory=Layer)
    options: dict[str, str] = field(default_factory=dict)  # of Hydra, which name a file in place of the recipe's
    given: dict[str, Any] = field(default_factory=dict)  # what was set by an override
    foreign: dict[str, Any] = field(default_factory=dict)  # keys of another recipe's techniques
    unused: dict[str, tuple[Any, str]] = field(default_factory=dict)  # accepted keys that mean nothing here
    problems: list[Problem | str] = field(default_factory=list)

    @property
    def preset(self) -> str | None:
        """The chosen preset: the last typed one, else the script's."""
        return next(reversed([*self.script.presets, *self.typed.presets]), None)

    @property
    def folders(self) -> list[Path]:
        """Where a file is looked for: --config-path, the recipe's folder, verl's base file."""
        own, requested = recipes.folder(self.line.recipe), self.options.get("--config-path")
        here = Path(requested or ".").expanduser()
        first = [here if here.is_dir() else own.parent / here] if requested else []
        return [folder.resolve() for folder in (*first, own, VERL_BASE)]


# --- overrides ---


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a script's own overrides and the typed ones."""
    at = list(overrides).index(SEPARATOR) if SEPARATOR in overrides else -1
    return list(overrides[: max(at, 0)]), [text for text in overrides[at + 1 :] if text != SEPARATOR]


def read(overrides: Sequence[str], recipe: str) -> Layers:
    """Read the overrides, each on its own, so that one that cannot be read hides no other."""
    layers = Layers(CommandLine(recipe, recipes.schema_of(recipe)))
    script, typed = (list(_parsed(part, layers)) for part in split(overrides))
    layers.line.given.update({each.key_or_group: value for each, value in [*script, *typed]})
    for layer, parsed in ((layers.script, script), (layers.typed, typed)):
        for override, value in parsed:
            _sort(override, value, layer, layers)
    for key, (value, settings) in layers.line.read.items():
        for name, item in settings.items():
            other = layers.line.given.get(name, item)
            if other != item:
                rule = f"means {name}={show(item, name)}, and {name}={show(other, name)} is given too"
                layers.problems.append(Problem(key, value, rule, "leave one of them out"))
    return layers


def _parsed(overrides: Sequence[str], layers: Layers) -> Iterator[tuple[Override, Any]]:
    """Yield the parsed overrides and their values; Hydra's options and problems go to ``layers``."""
    parser, rest = OverridesParser.create(), iter(overrides)
    for text in rest:
        name, separator, value = text.partition("=")
        if name in OPTIONS:
            layers.options[name] = (value if separator else next(rest, "")).strip("'\"")
            continue
        try:
            yield _override(parser, text, layers.line.schema)
        except _Unreadable as error:
            layers.problems.append(f"{brief(text) or repr(text)}: {error}")


class _Unreadable(Exception):
    """A text that is no override; the message completes "<text>: "."""


def _override(parser: OverridesParser, text: str, schema: type[Config]) -> tuple[Override, Any]:
    """Return the parsed override and its value."""
    key, separator, value = text.partition("=")
    if text.startswith("-") or not (separator or text.startswith("~")):
        raise _Unreadable("is no override; write key=value (DRY_RUN=1 in the environment checks without running)")
    try:
        override = parser.parse_override(text)
        parsed = override, override.value()
    except PARSER_ERRORS as error:
        try:
            parsed = parser.parse_override(f"{key}=x"), value
        except PARSER_ERRORS:
            near = nearest(key.lstrip("+~").strip(" ."), convert.all_keys(schema))
            fix = f"write key=value; the nearest known key is {near}" if near else "write key=value"
            raise _Unreadable(f"does not begin with a key, which is names joined by single dots; {fix}") from None
        # ~/data, a=b: plain text with a character of Hydra's
        if not isinstance(error, HydraException) or not value or value[0] in "[{'\"" or "$" in value:
            fix = f"quote text: {brief(key)}=\"'...'\", and each text in a list"
            raise _Unreadable(f"cannot be read ({_reason(error)}); {fix}") from None
    if not parsed[0].key_or_group:
        raise _Unreadable("does not begin with a key; write key=value")
    return parsed


def _reason(error: Exception) -> str:
    return brief(str(error).split("\n")[0])


def _sort(override: Override, value: Any, layer: Layer, layers: Layers) -> None:
    """Put an override where it belongs."""
    key, text = override.key_or_group, brief(override.input_line or "")
    if any(isinstance(item, Sweep | Glob) for item in _items(value)):
        layers.problems.append(f"{text}: is a sweep, and a run has one value; quote it if it is text")
    elif override.package is not None or "/" in key:
        layers.problems.append(f"{text}: no config group of this name; {PRESET}=<name> is one, other settings are keys")
    elif override.is_delete():
        layers.problems.append(f"{text}: takes a key away; leave its other settings out, or give its default")
    elif key == PRESET:
        layer.presets.append(show(value))
    else:
        for leaf, item in _leaves(key, value, layers):
            _set(leaf, item, layer, layers)


def _leaves(key: str, value: Any, layers: Layers) -> Iterator[tuple[str, Any]]:
    """Yield ``data={seed: 1}`` as ``data.seed=1``, down to the schema's keys, or to plain values where it has none."""
    schema = layers.line.schema
    if isinstance(value, Mapping) and value and (key in convert.sections(schema) or not convert.known(key, schema)):
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item, layers)
    else:
        yield key, value


def _set(key: str, value: Any, layer: Layer, layers: Layers) -> None:
    """Set a key, or what a key of another version means."""
    schema = layers.line.schema
    own = key in convert.all_keys(schema)
    if not own and recipes.switch_of(key):
        layers.foreign[key] = value
    elif not own and (reading := verl_names.read(key, value, layers.line)):
        if reading.rule:
            layers.problems.append(Problem(key, value, reading.rule, reading.fix))
        elif reading.unused:
            layers.unused[key] = (value, reading.unused)
        else:
            layers.line.read[key] = (value, reading.settings)
            for name, item in reading.settings.items():
                _set(name, item, layer, layers)
    elif key in convert.sections(schema):
        layers.problems.append(Problem(key, value, "is a section of the configuration", "set one of its keys"))
    elif not convert.known(key, schema):
        layers.problems.append(unknown_key(key, value, layers.line))
    else:
        layer.values.append((key, value))
        layers.given[key] = value


def _others(layers: Layers, overrides: Sequence[str]) -> None:
    """Accept another recipe's techniques where they are off. One that is on is refused with that recipe's command.

    The command takes this recipe's file and presets, so that nothing else of the run is changed by it. There is none
    for a recipe with keys of its own, which the other one lacks.
    """
    refused: dict[str, str] = {}
    for key, value in layers.foreign.items():
        recipe, switch = recipes.switch_of(key)
        if layers.foreign.get(switch):
            refused.setdefault(recipe, switch)
        else:
            layers.unused[key] = (value, f"{switch} is off")
    here = layers.line.recipe
    for recipe, switch in refused.items():
        folder = recipes.folder(here)
        path = f"../{here}/config" if folder.is_relative_to(recipes.RECIPES) else folder
        file = [] if layers.options else [f"--config-path={path}", f"--config-name={here}"]
        rule = f"belongs to {recipes.module_of(recipe).PAPER}, and this recipe has no such key"
        command = f"run python -m recipes.{recipe}.main_{recipe} {shlex.join([*file, *overrides])}"
        fix = command if layers.line.schema is Config else f"set {switch}=False"
        layers.problems.append(Problem(switch, layers.foreign[switch], rule, fix))


# --- one tree of all layers ---


def tree(layers: Layers) -> dict[str, Any]:
    """Return the composed tree with interpolations resolved; problems go to ``layers``."""
    composed, named = _files(layers), _named_by_preset(layers)
    for key, value in layers.script.values:
        if key not in named:
            composed = _over(composed, _nested(key, value))
    name = _run_name(composed, layers, NAME in named)
    for key, value in [*layers.typed.values, *([(NAME, name)] if name is not None else [])]:
        composed = _over(composed, _nested(key, value))
    return _resolved(_over(convert.as_tree(layers.line.schema()), composed), layers.line.schema, layers.problems)


@functools.cache
def _composed(folder: Path, name: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the plain values that Hydra composes, interpolations untouched. Files are read once a process."""
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        return OmegaConf.to_container(hydra_compose(config_name=name, overrides=list(overrides)), resolve=False)


def _files(layers: Layers) -> dict[str, Any]:
    """Return what Hydra composes of the recipe's file, or of a user's in its place, and of the chosen preset."""
    recipe, (first, *others) = layers.line.recipe, layers.folders
    if not (recipes.folder(recipe) / f"{recipe}.yaml").exists():
        layers.problems.append(f"recipe={recipe}: has no config file; choose one of {', '.join(recipes.names())}")
        return {}
    chosen, known = layers.preset, sorted(_presets(layers))
    if chosen is not None and chosen not in known:
        choice = f"choose one of {', '.join(known)}" if known else "leave it out: this recipe has none"
        layers.problems.append(f"{PRESET}={chosen}: unknown preset; {choice}")
    preset = [f"+{PRESET}={chosen}"] if chosen in known else []
    if not layers.options:
        return _composed(first, recipe, tuple(preset))
    path = ",".join(f"file://{folder}" for folder in others)
    name = layers.options.get("--config-name", recipe).removesuffix(".yaml")
    if not first.is_dir():
        rule = f"--config-path={layers.options['--config-path']}: there is no such folder"
        layers.problems.append(f"{rule}, and the keys of its file are needed; give the path of your copy")
        return {}
    try:
        composed = _composed(first, name, (f"hydra.searchpath=[{path}]", *preset))
    except (HydraException, OmegaConfBaseException) as error:
        reason = brief(" ".join(str(error).split()))
        layers.problems.append(f"--config-name={name}: {reason}; mend or name a file of {first}")
        return {}
    file = Layer()  # its keys are read as typed ones are
    leaves = [leaf for key, value in composed.items() for leaf in _leaves(key, value, layers)]
    for key, value in leaves:
        layers.line.given.setdefault(key, value)
    for key, value in leaves:
        _set(key, value, file, layers)
    return functools.reduce(lambda tree, one: _over(tree, _nested(*one)), file.values, {})


def _presets(layers: Layers) -> dict[str, Path]:
    """Return the presets: those beside the file of --config-path first, then the recipe's."""
    return {path.stem: path for folder in reversed(layers.folders) for path in (folder / PRESET).glob("*.yaml")}


def _named_by_preset(layers: Layers) -> set[str]:
    """Return the keys that a typed preset names, which a script's own values leave to it."""
    path = _presets(layers).get(layers.preset)
    if not layers.typed.presets or path is None:
        return set()
    alone = _composed(path.parent.parent, f"{PRESET}/{path.stem}", ())  # with what its own defaults list names
    return {key for name, value in alone.items() for key, _ in _leaves(name, value, layers)}


def _run_name(untyped: dict[str, Any], layers: Layers, preset_names_it: bool) -> str | None:
    """Return the run's name, so that runs of other settings have other folders; None where resolving gives one.

    It is the name that the script gives (else a preset or the recipe), the typed preset and model where they are not
    the script's, and the seed: ``qwen2.5_32b-paper-seed1``. ``untyped`` is the tree without typed keys.
    """
    typed, scripts = dict(layers.typed.values), dict(layers.script.values).get(NAME)
    name = scripts or _at(untyped, NAME)
    foreign = layers.typed.presets[-1:] if layers.typed.presets[-1:] != layers.script.presets[-1:] else []
    if not scripts and preset_names_it:
        foreign = []
    if NAME in typed or not isinstance(name or "", str) or not name and not foreign:
        return None
    untyped_model = _at(untyped, MODEL) or layers.line.schema().actor_rollout_ref.model.path
    model = typed.get(MODEL, untyped_model)
    base = name.removesuffix(OF_SEED) if name else _word(model)
    parts = [base, *foreign, *([_word(model)] if name and model != untyped_model else [])]
    return "-".join(filter(None, parts)) + ("" if "${trainer.seed}" in base else OF_SEED)


def _word(model: Any) -> str:
    """Return a model's name as part of a folder's name; of a path its last part, of an unusable value nothing."""
    if not isinstance(model, str) or "${" in model:
        return ""
    return re.sub(r"[^\w.-]+", "_", model.rstrip("/").rpartition("/")[2]).strip(".~-")


def _at(tree: Any, key: str) -> Any:
    """Return what stands at a flat key of a tree; None where nothing does."""
    for name in filter(None, key.split(".")):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return a tree that holds one flat key."""
    return functools.reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value)


def _over(below: Any, above: Any) -> Any:
    """Return ``above`` over ``below``: mappings joined, with names as text, and anything else replaced."""
    if not isinstance(above, Mapping):
        return above
    joined = dict(below) if isinstance(below, Mapping) else {}
    return joined | {str(name): _over(joined.get(str(name)), value) for name, value in above.items()}


def _items(value: Any) -> Iterator[Any]:
    """Yield what a value holds, without the mappings and lists around it."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _items(item)
    else:
        yield value


def _resolved(plain: dict[str, Any], schema: type[Config], problems: list[Problem | str]) -> dict[str, Any]:
    """Return the tree with its interpolations resolved. A value that cannot be is reported and left out."""
    while True:
        try:
            resolved = OmegaConf.to_container(OmegaConf.create(plain), resolve=True, throw_on_missing=True)
            break
        except (OmegaConfBaseException, RecursionError) as error:
            key = (getattr(error, "full_key", None) or "").partition("[")[0]
            value = _at(plain, key)
            problems.append(Problem(key, value, f"cannot be read ({_reason(error)})", "give it a value, or mend it"))
            if value is None or not key:
                return {}
            plain = without(plain, key.split("."))
    for key in convert.all_keys(schema):
        raw, value = _at(plain, key), _at(resolved, key)
        if "${" in str(raw) and "None" in str(value) and value is not None:
            problems.append(Problem(key, raw, "names a key that is null", "set that key as well"))
            resolved = without(resolved, key.split("."))
    return resolved


# --- checked ---


@dataclass(frozen=True)
class Composed:
    """A configuration and everything that was found out about it.

    config: resolved; with ``problems`` a refused value is replaced by its default.
    given: the keys that an override set (not those of the recipe's file), with the values as read.
    read: key of another version -> (value, the settings here that it was read as).
    unused: key -> (value, reason), for overrides that do nothing in this configuration.
    without_effect: every key that has no effect in it, from any source.
    """

    config: Config
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    given: Mapping[str, Any]
    read: Mapping[str, tuple[Any, Mapping[str, Any]]]
    unused: Mapping[str, tuple[Any, str]]
    without_effect: frozenset[str]


def compose(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """Return the resolved configuration of a recipe under these overrides.

    Whether the files that it names exist is checked at start, not here.

    Raises:
        InputError: every problem there is, a line each.
    """
    composed = examine(recipe, overrides)
    if composed.problems:
        raise InputError(composed.problems)
    return composed.config


def examine(recipe: str, overrides: Sequence[str], base: Mapping[str, Any] | None = None) -> Composed:
    """Compose and check without raising.

    ``base`` holds values by flat key that lie over the recipe's and below the overrides: those of a run, say. They are
    taken as they are: a ``${...}`` in them could read the environment.
    """
    schema = recipes.schema_of(recipe)
    layers = read(overrides, recipe)
    layers.typed.values[:0] = literal(own_tree(base or {}, schema)).items()
    found = tree(layers)
    _others(layers, overrides)
    refused = list(layers.problems)
    config = defaults.resolve(validated(schema, found, refused, layers.line), recipe)
    bad = {one.key for one in refused if isinstance(one, Problem)}
    view = rules.View(config, layers.given, recipe, bad)
    lines = [*refused, *_logins(config), *rules.problems(view)]
    seen = rules.View(config, layers.given, recipe)
    without_effect = rules.reasons(seen, [*layers.given, *convert.all_keys(schema)])
    unused = {key: (value, without_effect[key]) for key, value in layers.given.items() if key in without_effect}
    return Composed(
        config=config,
        problems=tuple(dict.fromkeys(map(str, lines))),
        warnings=(*rules.warnings(seen), *verl_names.older_defaults(layers.line)),
        given=layers.given,
        read=layers.line.read,
        unused={**layers.unused, **unused},
        without_effect=frozenset(without_effect),
    )


def literal(value: Any) -> Any:
    """Return the value with every ``${`` in its texts written so that it stands for itself."""
    if isinstance(value, Mapping):
        return {name: literal(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _logins(config: Config) -> Iterator[Problem]:
    """Yield the URLs that hold a login: a URL is a name, which is recorded, printed and compared."""
    reported, keys = set(), convert.all_keys(type(config))  # other keys follow one that names a model
    for key, value in convert.flat(config).items():
        own = next((name for name in _neighbours(key) if name in keys), None)
        fix = f"put the key into an environment variable, and its name into {own} (api_key_env)"
        other = "leave it out and export the login (AWS_ACCESS_KEY_ID), or copy the file and give its path"
        for text in _items(value):
            if isinstance(text, str) and text not in reported and without_login(text) != text:
                reported.add(text)
                yield Problem(key, without_login(text), "holds a login, and is recorded", fix if own else other)


def _neighbours(key: str) -> tuple[str, str]:
    section = key.rpartition(".")[0]
    return f"{section}.api_key_env", f"{section}.client"
