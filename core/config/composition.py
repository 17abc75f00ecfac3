"""Overrides, recipe files and a user's own files to one untyped tree. Hydra reads and composes; problems are reported.

A recipe's folder ``recipes/<recipe>/config/`` holds ``<recipe>.yaml``, with only what differs from the schema's
defaults, and may hold config groups: ``preset/<name>.yaml`` is chosen by ``preset=<name>``. ``--config-name`` takes
another file in place of the recipe's, from ``--config-path``, and its defaults list is Hydra's: it may name the
recipe's file. Overrides before a lone ``--`` are a run script's own, those after it were typed; without ``--`` all were
typed. Later layers win: schema, file, script (its preset, then its keys), typed preset, typed keys. A typed preset
takes the place of the script's, and of the script's keys it overrides those that it names. A run that is not named by a
typed key is named after what distinguishes it.
"""

from __future__ import annotations

import copy
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
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from core.config import convert, recipes, verl_names
from core.config.problem import Problem, brief, show
from core.config.schema import Config
from core.config.verl_names import CommandLine, nearest, unknown_key

PRESET = "preset"
SEPARATOR = "--"  # between a script's own arguments and the typed ones
VERL_BASE = Path(__file__).with_name("verl_base")  # verl's base file, which defaults lists of users' files name
OPTIONS = {  # of Hydra: what names the file that is composed
    **{"--config-path": "path", "-cp": "path", "--config-dir": "path", "-cd": "path"},
    **{"--config-name": "name", "-cn": "name"},
}


@dataclass
class Layers:
    """What a command line says, sorted; each list is applied from left to right."""

    line: CommandLine  # the whole, for keys that are read by others
    options: dict[str, str] = field(default_factory=dict)  # Hydra's: path and name of a file in place of the recipe's
    script_presets: list[str] = field(default_factory=list)
    script_values: list[tuple[str, Any]] = field(default_factory=list)
    presets: list[str] = field(default_factory=list)  # the typed ones, as are values
    values: list[tuple[str, Any]] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)  # choices of a file's config groups
    deleted: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)  # what was set by an override
    foreign: dict[str, Any] = field(default_factory=dict)  # keys of another recipe's techniques
    unused: dict[str, tuple[Any, str]] = field(default_factory=dict)  # accepted keys that mean nothing here
    problems: list[Problem | str] = field(default_factory=list)

    @property
    def preset(self) -> str | None:
        """The chosen preset: the last typed one, else the script's."""
        return next(reversed([*self.script_presets, *self.presets]), None)


# --- reading overrides ---


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a script's own overrides and the typed ones."""
    if SEPARATOR not in overrides:
        return [], list(overrides)
    at = list(overrides).index(SEPARATOR)
    return list(overrides[:at]), [text for text in overrides[at + 1 :] if text != SEPARATOR]


def read(overrides: Sequence[str], recipe: str) -> Layers:
    """Read the overrides, each on its own, so that one that cannot be read hides no other."""
    layers = Layers(CommandLine(recipe, recipes.schema_of(recipe)))
    script, typed = (list(_parsed(part, layers)) for part in split(overrides))
    layers.line.given.update({each.key_or_group: value for each, value in [*script, *typed]})
    for override, value in script:
        _sort(override, value, layers)
    layers.script_presets, layers.presets = layers.presets, []
    layers.script_values, layers.values = layers.values, []
    for override, value in typed:
        _sort(override, value, layers)
    for key, (value, settings) in layers.line.read.items():
        for name, item in settings.items():
            if name in layers.line.given and layers.line.given[name] != item:
                rule = f"means {name}={show(item, name)}, and {name}={show(layers.line.given[name], name)} is given too"
                layers.problems.append(Problem(key, value, rule, "leave one of them out"))
    return layers


def _parsed(overrides: Sequence[str], layers: Layers) -> Iterator[tuple[Override, Any]]:
    """Yield the parsed overrides and their values; Hydra's options and problems go to ``layers``."""
    parser, rest = OverridesParser.create(), iter(overrides)
    for text in rest:
        name, separator, value = text.partition("=")
        if name in OPTIONS:
            layers.options[OPTIONS[name]] = (value if separator else next(rest, "")).strip("'\"")
            continue
        try:
            yield _override(parser, text, layers)
        except _Unreadable as error:
            layers.problems.append(f"{brief(text) or repr(text)}: {error}")


class _Unreadable(ValueError):
    """A text that is no override; the message completes "<text>: "."""


# What Hydra's parser raises; ValueError is that of a number with too many digits, RecursionError of deep brackets.
_PARSER_ERRORS = (HydraException, ValueError, RecursionError)
_NO_KEY = "does not begin with a key, which is names joined by single dots; write key=value"


def _override(parser: OverridesParser, text: str, layers: Layers) -> tuple[Override, Any]:
    """Return the parsed override and its value."""
    if text.startswith("-"):
        dry = "DRY_RUN=1 in the environment checks without running"
        raise _Unreadable(f"is not an override; write key=value ({dry})")
    key, separator, value = text.partition("=")
    if not separator and not text.startswith("~"):
        raise _Unreadable("cannot be read; write key=value")
    try:
        override = parser.parse_override(text)
        parsed = override, override.value()
    except _PARSER_ERRORS as error:
        try:
            parsed = parser.parse_override(f"{key}=x"), value
        except _PARSER_ERRORS:
            name = key.lstrip("+~").strip(" .")
            near = nearest(name, convert.all_keys(layers.line.schema)) if name else None
            raise _Unreadable(_NO_KEY + (f"; the nearest known key is {near}" if near else "")) from None
        # ~/data, a=b: plain text with a character of Hydra's
        if not isinstance(error, HydraException) or not value or value[0] in "[{'\"" or "$" in value:
            reason = brief(str(error).split("\n")[0])
            fix = f"quote text: {brief(key)}=\"'...'\", and each text in a list"
            raise _Unreadable(f"cannot be read ({reason}); {fix}") from None
    if not parsed[0].key_or_group:
        raise _Unreadable(_NO_KEY)
    return parsed


def _sort(override: Override, value: Any, layers: Layers) -> None:
    """Put an override where it belongs in ``layers``."""
    key, text = override.key_or_group, brief(override.input_line or "")
    if any(isinstance(item, Sweep | Glob) for item in _items(value)):
        layers.problems.append(f"{text}: is a sweep, and a run has one value; quote it if it is text")
    elif key != PRESET and layers.options and any((folder / key).is_dir() for folder in _folders(layers)):
        layers.groups.append(override.input_line)  # a config group beside the file that is composed
    elif override.package is not None or "/" in key:
        layers.problems.append(f"{text}: no config group of this name; {PRESET}=<name> is one, other settings are keys")
    elif override.is_delete():
        _delete(text, key, layers)
    elif key == PRESET:
        layers.presets.append(show(value))
    else:
        for leaf, item in _leaves(key, value, layers):
            _set(leaf, item, layers)


def _delete(text: str, key: str, layers: Layers) -> None:
    """Take the key of ``~key`` back to its default."""
    schema = layers.line.schema
    if "=" in text:
        layers.problems.append(f"{text}: takes a key back to its default, whatever its value; write ~{key}")
    elif key == PRESET:
        layers.presets.clear()
        layers.script_presets.clear()
    elif key in convert.all_keys(schema) or key in convert.sections(schema):
        layers.deleted.append(key)
        for values in (layers.script_values, layers.values):
            values[:] = [(name, value) for name, value in values if not _within(name, key)]
        layers.given = {name: value for name, value in layers.given.items() if not _within(name, key)}
    else:
        layers.problems.append(unknown_key(key, None, layers.line))


def _within(key: str, parent: str) -> bool:
    return key == parent or key.startswith(f"{parent}.")


def _leaves(key: str, value: Any, layers: Layers) -> Iterator[tuple[str, Any]]:
    """Yield ``data={seed: 1}`` as ``data.seed=1``, down to the schema's keys, or to plain values where it has none."""
    schema = layers.line.schema
    if isinstance(value, Mapping) and value and (key in convert.sections(schema) or not convert.known(key, schema)):
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item, layers)
    else:
        yield key, value


def _set(key: str, value: Any, layers: Layers) -> None:
    """Set a key, or what a key of another version means."""
    schema = layers.line.schema
    if key not in convert.all_keys(schema) and recipes.switch_of(key):
        layers.foreign[key] = value
    elif key not in convert.all_keys(schema) and (reading := verl_names.read(key, value, layers.line)):
        if reading.rule:
            layers.problems.append(Problem(key, value, reading.rule, reading.fix))
        elif reading.unused:
            layers.unused[key] = (value, reading.unused)
        else:
            layers.line.read[key] = (value, reading.settings)
            for name, item in reading.settings.items():
                _set(name, item, layers)
    elif key in convert.sections(schema):
        layers.problems.append(Problem(key, value, "is a section of the configuration", "set one of its keys"))
    elif not convert.known(key, schema):
        layers.problems.append(unknown_key(key, value, layers.line))
    elif (reason := _unusable(value)) is not None:
        fix = "mend the ${...}, or write \\${ for the text; quote other text"
        layers.problems.append(Problem(key, value, f"cannot be read ({reason})", fix))
    else:
        layers.values.append((key, value))
        layers.given[key] = value


def of_other_recipes(layers: Layers, overrides: Sequence[str]) -> None:
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


def _unusable(value: Any) -> str | None:
    """Return why OmegaConf refuses a value by itself: the grammar of ``${...}``, a function or null in a mapping."""
    try:
        OmegaConf.create({"value": value})
    except (OmegaConfBaseException, RecursionError) as error:
        return brief(str(error).split("\n")[0])
    return None


# --- composing ---


def tree(layers: Layers) -> dict[str, Any]:
    """Return the composed tree with interpolations resolved; problems go to ``layers``."""
    composed = _files(layers)
    for key in layers.deleted:
        section, _, name = key.rpartition(".")
        if isinstance(parent := _at(composed, section), dict):
            parent.pop(name, None)
    named = _named_by_preset(layers)
    for key, value in layers.script_values:
        if key not in named:
            _put(composed, key, value, layers.problems)
    name = _run_name(composed, layers, NAME in named)
    for key, value in [*layers.values, *([(NAME, name)] if name is not None else [])]:
        _put(composed, key, value, layers.problems)
    _drop_missing(composed, "", layers.problems)
    plain = _over(convert.as_tree(layers.line.schema()), composed)
    return _resolved(OmegaConf.create(_referring(plain)), plain, "", layers.problems)


def _files(layers: Layers) -> dict[str, Any]:
    """Return what Hydra composes of the recipe's file, or of a user's in its place, and of the chosen preset."""
    recipe, folder = layers.line.recipe, recipes.folder(layers.line.recipe)
    if not (folder / f"{recipe}.yaml").exists():
        known = ", ".join(recipes.names())
        layers.problems.append(f"recipe={recipe}: has no config/{recipe}.yaml; choose one of {known}")
        return {}
    chosen, known = layers.preset, sorted(_presets(layers))
    if chosen is not None and chosen not in known:
        choice = f"choose one of {', '.join(known)}" if known else "leave it out: this recipe has none"
        layers.problems.append(f"{PRESET}={chosen}: unknown preset; {choice}")
    preset = (f"+{PRESET}={chosen}",) if chosen in known else ()
    return _own_file(layers, preset) if layers.options else copy.deepcopy(_composed(folder, recipe, preset))


@functools.cache
def _composed(folder: Path, name: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the plain values that Hydra composes, interpolations untouched. Files are read once a process."""
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        return OmegaConf.to_container(hydra_compose(config_name=name, overrides=list(overrides)), resolve=False)


def _folders(layers: Layers) -> list[Path]:
    """Return where a file and its config groups are looked for: --config-path, the recipe's, verl's base file."""
    own, requested = recipes.folder(layers.line.recipe), layers.options.get("path")
    here = Path(requested or ".").expanduser()
    first = [here if here.is_dir() else own.parent / here] if requested else []
    return [folder.resolve() for folder in (*first, own, VERL_BASE)]


def _own_file(layers: Layers, preset: tuple[str, ...]) -> dict[str, Any]:
    """Return what Hydra composes of a user's file; keys in it that the schema lacks are read as typed ones are."""
    first, *others = _folders(layers)
    name = layers.options.get("name", layers.line.recipe).removesuffix(".yaml")
    if not first.is_dir():
        rule = f"--config-path={layers.options['path']}: there is no such folder, and the keys of its file are needed"
        layers.problems.append(f"{rule}; give the path of your copy")
        return {}
    if not any((folder / f"{name}.yaml").exists() for folder in (first, *others)):
        names = ", ".join(sorted(path.name for path in first.glob("*.yaml"))) or "no YAML file"
        layers.problems.append(f"--config-name={name}: {first} has {names}; name one of them with --config-name")
        return {}
    path = ",".join(f"file://{folder}" for folder in others)
    try:
        composed = _composed(first, name, (f"hydra.searchpath=[{path}]", *preset, *layers.groups))
    except (HydraException, OmegaConfBaseException) as error:
        reason = brief(" ".join(str(error).split()))
        layers.problems.append(f"--config-name={name}: {reason}; mend the file {first}")
        return {}
    leaves = [leaf for key, value in composed.items() for leaf in _leaves(key, value, layers)]
    for key, value in leaves:
        layers.line.given.setdefault(key, value)
    typed, layers.values = layers.values, []
    for key, value in leaves:
        _set(key, value, layers)
    ours, layers.values = layers.values, typed
    tree: dict[str, Any] = {}
    for key, value in ours:
        _put(tree, key, value, layers.problems)
    return tree


def _presets(layers: Layers) -> dict[str, Path]:
    """Return the presets: those beside the file of --config-path first, then the recipe's."""
    folders = _folders(layers) if layers.options else [recipes.folder(layers.line.recipe)]
    return {path.stem: path for folder in reversed(folders) for path in (folder / PRESET).glob("*.yaml")}


def _named_by_preset(layers: Layers) -> set[str]:
    """Return the keys that a typed preset names, which a script's own values leave to it."""
    path = _presets(layers).get(layers.preset)
    if not layers.presets or path is None:
        return set()
    alone = _composed(path.parent.parent, f"{PRESET}/{path.stem}", ())  # with what its own defaults list names
    return {key for name, value in alone.items() for key, _ in _leaves(name, value, layers)}


NAME, MODEL, OF_SEED = "trainer.experiment_name", "actor_rollout_ref.model.path", "-seed${trainer.seed}"


def _run_name(untyped: dict[str, Any], layers: Layers, preset_names_it: bool) -> str | None:
    """Return the run's name, so that runs of other settings have other folders; None where resolving gives one.

    It is the name that the script gives (else a preset or the recipe), the typed preset and model where they are not
    the script's, and the seed: ``qwen2.5_32b-paper-seed1``. ``untyped`` is the tree without typed keys.
    """
    typed, scripts = dict(layers.values), dict(layers.script_values).get(NAME)
    name = scripts or _at(untyped, NAME)
    foreign = layers.presets[-1:] if layers.presets[-1:] != layers.script_presets[-1:] else []
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


def _put(tree: dict[str, Any], key: str, value: Any, problems: list[Problem | str]) -> None:
    """Set a flat key, unless a value without keys stands where its mapping would be. Mappings are joined."""
    *above, name = key.split(".")
    for depth, part in enumerate(above, 1):
        if tree.get(part) is None:
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            where = ".".join(above[:depth])
            rule = f"is a key of {where}, and {where}={show(tree)} has no keys"
            problems.append(Problem(key, value, rule, "leave one of them out"))
            return
    tree[name] = _over(tree.get(name), value)


def _drop_missing(tree: dict[str, Any], prefix: str, problems: list[Problem | str]) -> None:
    """Report and drop what is ``???``; a dropped key keeps its default."""
    for name, value in list(tree.items()):
        if isinstance(value, dict):
            _drop_missing(value, f"{prefix}{name}.", problems)
        elif "???" in _items(value):
            problems.append(Problem(f"{prefix}{name}", value, "has no default", "give it a value"))
            del tree[name]


def _over(below: Any, above: Any) -> Any:
    """Return ``above`` over ``below``: mappings joined, with names as text, and anything else replaced."""
    if not isinstance(above, Mapping):
        return above
    joined = dict(below) if isinstance(below, Mapping) else {}
    return joined | {str(name): _over(joined.get(str(name)), value) for name, value in above.items()}


# --- interpolations ---


def _items(value: Any) -> Iterator[Any]:
    """Yield what a value holds, without the mappings and lists around it."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _items(item)
    else:
        yield value


def _refers(value: Any) -> bool:
    return any(isinstance(item, str) and "${" in item for item in _items(value))


def _referring(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sections that hold an interpolation or are named by one: nodes for all others take half the time."""
    texts = [item for item in _items(tree) if isinstance(item, str) and "${" in item]
    if any(re.search(r"\$\{[^}]*\$\{", text) for text in texts):  # a name that is itself one
        return tree
    named = {word for text in texts for word in re.findall(r"\w+", text)}
    return {name: value for name, value in tree.items() if name in named or _refers(value)}


def _resolved(node: Any, raw: Mapping[str, Any], prefix: str, problems: list[Problem | str]) -> dict[str, Any]:
    """Return plain values. One that cannot be resolved is left out, and so keeps its default."""
    resolved = {}
    for name, value in raw.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            below = node[name] if _refers(value) else node
            resolved[name] = _resolved(below, value, f"{key}.", problems)
        elif not _refers(value):
            resolved[name] = value
        else:
            try:
                resolved[name] = _value(node, name, value)
            except _Unresolved as error:
                problems.append(Problem(key, value, *error.args))
    return resolved


class _Unresolved(ValueError):
    """An interpolation without a usable value: the rule that it breaks, and the fix."""


_REFERENCE = re.compile(r"(?<!\\)\$\{\s*([\w.]+)\s*\}")


def _value(node: DictConfig, name: str, raw: Any) -> Any:
    """Return the value of a text or list with interpolations."""
    texts = [item for item in _items(raw) if isinstance(item, str) and not _REFERENCE.fullmatch(item)]
    keys = [key for text in texts for key in _REFERENCE.findall(text)]  # whose values are part of a longer text
    keys = [key for key in keys if key[0] != "." or isinstance(raw, str)]  # in a list "." is the list
    try:
        value = node[name]
        if isinstance(value, DictConfig | ListConfig):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        parts = {key: OmegaConf.select(node if key[0] == "." else node._get_root(), key) for key in keys}
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
