"""Overrides, recipe files and a user's own file to one checked configuration: ``compose`` and ``examine``.

A recipe's folder ``recipes/<recipe>/config/`` holds ``<recipe>.yaml``, with only what differs from the schema's
defaults, and ``preset/<name>.yaml``, chosen by ``preset=<name>``. Overrides before a lone ``--`` are a run script's
own, those after it were typed; without ``--`` all were typed. Later layers win: schema, file, script preset (unless
one is typed), script keys, typed preset, typed keys. Hydra reads overrides, and a user's file of ``--config-name``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Sweep
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from core.config import convert, defaults, recipes, rules, verl_names
from core.config.convert import nested, over
from core.config.recorded import code_in, own_tree, validated
from core.config.schema import Config
from core.config.section import NO_SECTION, Problem, brief, show, without
from core.config.section import typed as as_typed
from core.config.verl_names import CommandLine, unknown_key
from core.errors import InputError

VERL_BASE = Path(__file__).with_name("verl_base")  # verl's base file, which defaults lists of users' files name
OPTIONS = ("--config-path", "--config-name")
# What Hydra's parser raises; ValueError is that of a number with too many digits, RecursionError of deep brackets.
PARSER_ERRORS = (HydraException, ValueError, RecursionError)
Tree = dict[str, Any]


@dataclass
class Composed:
    """A configuration and everything that was found out about it and about the command line.

    config: resolved; with ``problems`` a refused value is replaced by its default.
    given: the keys that an override set (not those of the recipe's file), with the values as read.
    typed: those of them that were typed, not given by a run script.
    unused: key -> (value, reason), for overrides that do nothing in this configuration.
    without_effect: every key that has no effect in it, from any source.
    options: of Hydra, which name a file in place of the recipe's. foreign: keys of another recipe's techniques.
    """

    line: CommandLine
    config: Config = None
    problems: Sequence[Any] = field(default_factory=list)
    warnings: Sequence[str] = ()
    given: Tree = field(default_factory=dict)
    typed: frozenset[str] = frozenset()
    unused: dict[str, tuple[Any, str]] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    options: dict[str, str] = field(default_factory=dict)
    foreign: Tree = field(default_factory=dict)

    @property
    def read(self) -> Mapping[str, tuple[Any, Mapping[str, Any]]]:
        """Key of another version -> its value, and the settings here that it was read as."""
        return self.line.read


def compose(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """Return the resolved configuration of a recipe under these overrides.

    Whether the files that it names exist is checked at start. Raises InputError: every problem there is, a line each.
    """
    composed = examine(recipe, overrides)
    if composed.problems:
        raise InputError(composed.problems)
    return composed.config


def examine(recipe: str, overrides: Sequence[str], base: Mapping[str, Any] | None = None) -> Composed:
    """Compose and check without raising.

    ``base`` holds values by flat key that lie over the recipe's and below typed keys: those of a run, say. They are
    taken as they are: a ``${...}`` in them could read the environment.
    """
    schema = recipes.schema_of(recipe)
    found = Composed(CommandLine(recipe, schema))
    at = list(overrides).index("--") if "--" in overrides else -1
    parts = [_overrides(part, found) for part in (overrides[: max(at, 0)], overrides[at + 1 :])]
    found.line.given.update({each.key_or_group: value for part in parts for each, value in part})
    (script_preset, script), (typed_preset, typed) = (_layer(part, found) for part in parts)
    script_preset = None if typed_preset else script_preset
    tree = over(convert.as_tree(schema()), _file(found), _preset(script_preset, found), nested(script))
    tree = over(tree, _preset(typed_preset, found), literal(own_tree(base or {}, schema)), nested(typed))
    tree = _resolved(tree, schema, found.problems)
    _refuse_techniques(found, overrides)
    config = validated(schema, tree, found.problems, found.line)
    found.config = defaults.resolve(defaults.over_ray(config, found.given), recipe)
    bad = {one.key for one in found.problems if isinstance(one, Problem)}
    broken = rules.problems(rules.View(found.config, found.given, recipe, bad))
    found.problems = tuple(dict.fromkeys(map(str, [*found.problems, *broken])))
    view = rules.View(found.config, found.given, recipe)
    reasons = rules.reasons(view, [*found.given, *convert.all_keys(schema)])
    found.warnings = (*rules.warnings(view), *verl_names.older_defaults(found.line))
    found.unused |= {key: (value, reasons[key]) for key, value in found.given.items() if key in reasons}
    found.typed, found.without_effect = frozenset(typed), frozenset(reasons)
    return found


# --- overrides ---


def _overrides(texts: Sequence[str], found: Composed) -> list[tuple[Override, Any]]:
    """Return the parsed overrides and their values, each read on its own, so that a bad one hides no other."""
    parser, rest, parsed = OverridesParser.create(), iter(texts), []
    for text in rest:
        key, separator, value = text.partition("=")
        if key in OPTIONS:
            found.options[key] = (value if separator else next(rest, "")).strip("'\"")
            continue
        if text.startswith("-") or not key.strip("+") or not (separator or text.startswith("~")):
            problem = "is no override; write key=value (DRY_RUN=1 in the environment checks without running)"
            found.problems.append(f"{brief(text) or repr(text)}: {problem}")
            continue
        try:
            override = parser.parse_override(text)
            parsed.append((override, override.value()))
        except PARSER_ERRORS as error:
            try:  # ~/data, a=b: plain text with a character of Hydra's
                override = parser.parse_override(f"{key}=x")
                if isinstance(error, HydraException) and value and value[0] not in "[{'\"" and "$" not in value:
                    parsed.append((override, value))
                    continue
                problem = f"cannot be read ({_reason(error)}); quote text: {brief(key)}=\"'...'\", and each in a list"
            except PARSER_ERRORS:
                problem = "does not begin with a key, which is names joined by single dots; write key=value"
            found.problems.append(f"{brief(text)}: {problem}")
    return parsed


def _reason(error: Exception) -> str:
    return brief(str(error).split("\n")[0])


def _layer(parsed: Sequence[tuple[Override, Any]], found: Composed) -> tuple[str | None, Tree]:
    """Return the preset (the last one) and flat key -> value of a part of a command line."""
    preset, values = None, {}
    for override, value in parsed:
        key, text = override.key_or_group, brief(override.input_line or "")
        if isinstance(value, Sweep | Glob) or override.is_delete() or override.package is not None or "/" in key:
            rule = "is a sweep, a config group or a deletion, and a run has key=value or preset=<name>"
            found.problems.append(f"{text}: {rule}; quote it if it is text")
        elif key == "preset":
            preset = show(value)
        else:
            for leaf, item in _leaves(key, value, found.line.schema):
                _set(leaf, item, values, found)
    return preset, values


def _leaves(key: str, value: Any, schema: type[Config]) -> Iterator[tuple[str, Any]]:
    """Yield ``data={seed: 1}`` as ``data.seed=1``, down to the schema's keys, or to plain values where it has none."""
    if isinstance(value, Mapping) and value and (key in convert.sections(schema) or not convert.known(key, schema)):
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}" if key else str(name), item, schema)
    else:
        yield key, value


def _set(key: str, value: Any, values: Tree, found: Composed) -> None:
    """Set a key, or what a key or value of another version means."""
    schema, line = found.line.schema, found.line
    own = key in convert.all_keys(schema)
    meant = (verl_names.read_value if own else verl_names.read)(key, value, line)
    if not own and recipes.switch_of(key):
        found.foreign[key] = value
    elif meant and meant.settings:
        for name, item in meant.settings.items():
            if line.given.get(name, item) != item and name != key:
                rule = f"means {name}={show(item, name)}, and {name}={show(line.given[name], name)} is given too"
                found.problems.append(Problem(key, value, rule, "leave one of them out"))
            _set(name, item, values, found)
        line.read[key] = (value, meant.settings)
    elif not own and meant and meant.unused:
        found.unused[key] = (value, meant.unused)
    elif key in convert.sections(schema):
        found.problems.append(Problem(key, value, NO_SECTION, "set one of its keys"))
    elif not convert.known(key, schema):
        found.problems.append(unknown_key(key, value, line))
    else:
        values[key] = found.given[key] = value


def _refuse_techniques(found: Composed, overrides: Sequence[str]) -> None:
    """Accept another recipe's techniques where they are off; refuse one that is on, with that recipe's command.

    The command takes this recipe's file and presets, so that nothing else of the run is changed by it. There is none
    for a recipe with keys of its own, which the other one lacks.
    """
    here, refused = found.line.recipe, {}
    for key, value in found.foreign.items():
        recipe, switch = recipes.switch_of(key)
        if found.foreign.get(switch):
            refused.setdefault(recipe, switch)
        else:
            found.unused[key] = (value, f"{switch} is off")
    for recipe, switch in refused.items():
        folder = recipes.folder(here)
        path = f"../{here}/config" if folder.is_relative_to(recipes.RECIPES) else folder
        file = [] if found.options else [f"--config-path={path}", f"--config-name={here}"]
        fix = f"run python -m recipes.{recipe}.main_{recipe} {shlex.join([*file, *overrides])}"
        fix = fix if found.line.schema is Config else f"set {switch}=False"
        rule = f"belongs to {recipes.module_of(recipe).PAPER}, and this recipe has no such key"
        found.problems.append(Problem(switch, found.foreign[switch], rule, fix))


# --- files ---


def _file(found: Composed) -> Tree:
    """Return the tree of the recipe's file, or of a user's in its place, which Hydra composes."""
    recipe, options = found.line.recipe, found.options
    own = recipes.folder(recipe)
    if not (own / f"{recipe}.yaml").exists():
        known = ", ".join(recipes.names())
        found.problems.append(f"recipe={recipe}: has no config file; choose one of {known}")
        return {}
    if not options:
        return convert.read_table(own / f"{recipe}.yaml") or {}
    folder, name = _folder(found), options.get("--config-name", recipe).removesuffix(".yaml")
    if not folder.is_dir():
        problem = "there is no such folder, and the keys of its file are needed; give the path of your copy"
        found.problems.append(f"--config-path={options['--config-path']}: {problem}")
        return {}
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    search = f"hydra.searchpath=[file://{own.resolve()},file://{VERL_BASE}]"
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            composed = OmegaConf.to_container(hydra_compose(config_name=name, overrides=[search]), resolve=False)
    except (HydraException, OmegaConfBaseException) as error:
        reason = brief(" ".join(str(error).split()))
        found.problems.append(f"--config-name={name}: {reason}; mend or name a file of {folder}")
        return {}
    values: Tree = {}  # its keys are read as typed ones are
    leaves = list(_leaves("", composed, found.line.schema)) if composed else []  # ppo.yaml sets nothing
    for key, value in leaves:
        found.line.given.setdefault(key, value)
    for key, value in leaves:
        _set(key, value, values, found)
    return nested(values)


def _folder(found: Composed) -> Path:
    """Return the folder of the file that is read: that of --config-path, or the recipe's."""
    own, requested = recipes.folder(found.line.recipe), found.options.get("--config-path")
    here = Path(requested or own).expanduser()
    return (here if here.is_dir() else own.parent / here).resolve()


def _preset(name: str | None, found: Composed) -> Tree:
    """Return the tree of a preset: one beside the file of --config-path, or else the recipe's."""
    folders = recipes.folder(found.line.recipe), _folder(found)
    known = {path.stem: path for folder in folders for path in (folder / "preset").glob("*.yaml")}
    if name is not None and name not in known:
        choice = f"choose one of {', '.join(sorted(known))}" if known else "leave it out: this recipe has none"
        found.problems.append(f"preset={name}: unknown preset; {choice}")
    return (name in known and convert.read_table(known[name])) or {}


# --- trees ---


def _at(tree: Any, key: str) -> Any:
    """Return what stands at a flat key of a tree; None where nothing does."""
    for name in filter(None, key.split(".")):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _resolved(tree: Tree, schema: type[Config], problems: list[Problem | str]) -> Tree:
    """Return the tree with its interpolations resolved. A value that cannot be is reported and left out."""
    while True:
        try:
            resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
            break
        except (OmegaConfBaseException, RecursionError) as error:
            key = (getattr(error, "full_key", None) or "").partition("[")[0]
            value = _at(tree, key)
            problems.append(Problem(key, value, f"cannot be read ({_reason(error)})", "give it a value, or mend it"))
            if value is None or not key:
                return {}
            tree = without(tree, key.split("."))
    for key in convert.all_keys(schema):
        raw, value = _at(tree, key), _at(resolved, key)
        if "${" in str(raw) and "None" in str(value) and value is not None:
            problems.append(Problem(key, raw, "names a key that is null", "set that key as well"))
            resolved = without(resolved, key.split("."))
    return resolved


def literal(value: Any) -> Any:
    """Return the value with every ``${`` in its texts written so that it stands for itself."""
    if isinstance(value, Mapping):
        return {name: literal(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def refuse_code(
    artefact: str, config: Config, recipe: str, overrides: Sequence[str] = (), unread: Sequence[str] = ()
) -> None:
    """Check that ``config``, into which settings of an artefact went, names no code of its own accord.

    What the ``overrides`` of the command line name is the user's word, and what the recipe's presets name is this
    repository's. Keys that begin with one of ``unread`` are left out: the command loads nothing that they name.

    Raises InputError: the artefact, the keys, and what to append to the command.
    """
    unnamed = {key: value for key, value in code_in(config).items() if not key.startswith(tuple(unread))}
    presets = ([f"preset={path.stem}"] for path in (recipes.folder(recipe) / "preset").glob("*.yaml"))
    for texts in (overrides, *presets) if unnamed else ():
        allowed = code_in(examine(recipe, texts).config)
        unnamed = {key: value for key, value in unnamed.items() if key not in allowed or allowed[key] != value}
    if unnamed:
        append = " ".join(shlex.quote(f"{key}={as_typed(value)}") for key, value in unnamed.items())
        raise InputError(
            f"{artefact}: its settings name code that would run here: {', '.join(unnamed)}. They may come from "
            f"anybody, and code is named on the command line alone. If you trust that code, append {append}"
        )
