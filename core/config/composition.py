"""Overrides and recipe files to one checked configuration: ``compose`` and ``examine``.

A recipe's folder ``recipes/<recipe>/config/`` holds ``<recipe>.yaml``, with only what differs from
the schema's defaults, and ``preset/<name>.yaml``, chosen by ``preset=<name>``. Overrides before a
lone ``--`` are a run script's own, those after it were typed; without ``--`` all were typed. Later
layers win: schema, file, script preset (unless one is typed), script keys, typed preset, typed
keys. Hydra's parser reads overrides.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from core.config import convert, defaults, recipes, rules, verl_names
from core.config.convert import nested, over
from core.config.recorded import code_in, own_tree, validated
from core.config.schema import Config
from core.config.section import IS_SECTION, Problem, brief, show
from core.config.unused_keys import unused
from core.config.verl_names import Line
from core.errors import InputError
from core.secret_keys import shown_word

OPTIONS = ("--config-path=", "--config-name=")  # a file in place of the recipe's
KEY = re.compile(r"\+*[A-Za-z_][\w-]*(\.[\w-]+)*")
# ValueError is that of a number with too many digits, RecursionError of deep brackets
PARSER_ERRORS = (HydraException, ValueError, RecursionError)
FILE_ERRORS = (OSError, TypeError, ValueError, OmegaConfBaseException, convert.yaml.YAMLError)
Tree = dict[str, Any]
Problems = list[Problem | str]


@dataclass(frozen=True)
class Composed:
    """A configuration, and everything that was found out about it and about the command line."""

    config: Config  # resolved; with ``problems`` a refused value is replaced by its default
    problems: Sequence[str]
    warnings: Sequence[str]
    words: Mapping[str, Any]  # every key of the line, as it was typed -> value
    given: Mapping[str, Any]  # keys that an override set, and no recipe's file -> value as read
    typed: frozenset[str]  # those of them that were typed
    scripted: frozenset[str]  # those that a run script gives, whatever was typed over them
    read: Mapping[str, tuple[Any, Mapping[str, Any]]]  # key of another version -> value, settings
    unused: Mapping[str, tuple[Any, str]]  # override that does nothing here -> value, reason
    without_effect: frozenset[str]  # every key that has no effect, from any source


def compose(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """Return the resolved configuration of a recipe under these overrides.

    Whether the files that it names exist is checked at start. Raises InputError: every problem
    there is, a line each.
    """
    composed = examine(recipe, overrides)
    if composed.problems:
        raise InputError(composed.problems)
    return composed.config


def examine(
    recipe: str, overrides: Sequence[str], base: Mapping[str, Any] | None = None
) -> Composed:
    """Compose and check without raising.

    ``base`` holds values by flat key that lie over the recipe's and below typed keys: those of a
    run, say. They are taken as they are: a ``${...}`` in them could read the environment.
    """
    schema = recipes.schema_of(recipe)
    line, file, script, typed = _read(recipe, overrides)
    trees, no_presets, warnings = _presets(recipe, file, script, typed)
    tree = over(convert.as_tree(schema()), trees[0], nested(file.values))
    tree = over(tree, trees[1], nested(script.values), trees[2])
    tree = over(tree, literal(own_tree(base or {}, schema)), nested(typed.values))
    layers = (file, script, typed)
    problems = [problem for layer in layers for problem in layer.problems]
    foreign = _joined(layer.foreign for layer in layers)
    techniques_on, techniques_off = _techniques(foreign)
    problems += [*no_presets, *techniques_on]
    tree, unresolved = _resolved(tree, schema)
    warnings = [*typed.warnings, *warnings]
    config, refused = validated(schema, tree, line)
    given = script.values | typed.values
    config, misplaced = defaults.over_ray(config, given)
    config = defaults.resolve(config, recipe)
    problems += [*unresolved, *refused]
    problems += _of_meant_values([*misplaced, *rules.broken("PROBLEMS", config, recipe)], problems)
    warnings += map(str, rules.broken("WARNINGS", config, recipe))
    reasons = {key: unused(config, key) for key in (*given, *convert.all_keys(schema))}
    return Composed(
        config=config,
        problems=tuple(dict.fromkeys(map(str, problems))),
        warnings=tuple(warnings),
        words=line.words,
        given=given,
        typed=frozenset(typed.values),
        scripted=frozenset(script.values),
        read=_joined(layer.read for layer in layers),
        unused=_joined(layer.unused for layer in layers)
        | techniques_off
        | {key: (given[key], reasons[key]) for key in given if reasons[key]},
        without_effect=frozenset(key for key, reason in reasons.items() if reason),
    )


def _joined(parts: Iterable[Mapping[str, Any]]) -> Tree:
    return {key: value for part in parts for key, value in part.items()}


def _of_meant_values(broken: Iterable[Problem], problems: Problems) -> list[Problem]:
    """Return the broken rules of keys that hold what was written.

    The default that stands for a refused value breaks no rule.
    """
    refused = {problem.key for problem in problems if isinstance(problem, Problem)}
    return [
        problem
        for problem in broken
        if not refused & {problem.key, *re.findall(r"[\w.]+\w", problem.rule)}
    ]


# --- words to keys and values ---


@dataclass
class Layer:
    """The keys of a file, of a run script, or of what was typed, in the schema's names."""

    preset: str | None = None
    values: Tree = field(default_factory=dict)
    read: dict[str, tuple[Any, Mapping[str, Any]]] = field(default_factory=dict)
    unused: dict[str, tuple[Any, str]] = field(default_factory=dict)
    foreign: Tree = field(default_factory=dict)  # keys of another recipe's techniques
    problems: Problems = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def _read(recipe: str, overrides: Sequence[str]) -> tuple[Line, Layer, Layer, Layer]:
    """Return the command line, and the layers of the file, of the run script, of what was typed."""
    options = dict(word.split("=", 1) for word in overrides if word.startswith(OPTIONS))
    words = [word for word in overrides if not word.startswith(OPTIONS)]
    typed_from = words.index("--") if "--" in words else -1
    layers = Layer(), Layer(), Layer()
    parts = [
        [_file(recipe, options, layers[0])],
        [{key: value} for key, value in _overrides(words[: max(typed_from, 0)], layers[1])],
        [{key: value} for key, value in _overrides(words[typed_from + 1 :], layers[2])],
    ]
    schema = recipes.schema_of(recipe)
    pairs = [[leaf for tree in part for leaf in _leaves(tree, schema)] for part in parts]
    in_words = pairs if options else pairs[1:]  # a user's file is part of the line
    line = Line(recipe, {key: value for part in in_words for key, value in part})
    for layer, part in zip(layers, pairs, strict=True):
        _fill(layer, part, line)
    return line, *layers


def _leaves(tree: Mapping[str, Any], schema: type[Config]) -> Iterator[tuple[str, Any]]:
    """Yield ``data={seed: 1}`` as ``data.seed=1``, down to the schema's keys, or plain values."""
    return convert.leaves(tree, lambda key: convert.known(key, schema))


def _overrides(texts: Iterable[str], layer: Layer) -> Iterator[tuple[str, Any]]:
    """Yield key and value of overrides, each read on its own, so that a bad one hides no other."""
    parser = OverridesParser.create()
    for text in texts:
        key, separator, value = text.partition("=")
        shown = brief(shown_word(text))
        if not separator or not KEY.fullmatch(key):
            rule = "is no override; write key=value, with names joined by single dots"
            layer.problems.append(f"{shown or repr(text)}: {rule} (DRY_RUN=1 only checks)")
            continue
        try:
            override = parser.parse_override(text)
            if not override.is_sweep_override():
                yield override.key_or_group, override.value()
                continue
            rule = "is a sweep, and this is one run; quote it if it is text"
        except PARSER_ERRORS as error:
            plain = value and value[0] not in "[{'\"" and "$" not in value
            if plain and isinstance(error, HydraException):
                yield key.lstrip("+"), value  # ~/data, a=b: text with a character of Hydra's
                continue
            # The reason quotes what was typed: it is left out of a word that holds a secret
            reason = f" ({_reason(error)})" if shown == brief(text) else ""
            fix = f"quote text: {brief(key)}=\"'...'\", and each in a list"
            rule = f"cannot be read{reason}; {fix}"
        layer.problems.append(f"{shown}: {rule}")


def _reason(error: Exception) -> str:
    return brief(str(error).split("\n")[0])


def _file(recipe: str, options: Mapping[str, str], layer: Layer) -> Tree:
    """Return the tree of the recipe's file, or of a user's in its place.

    The defaults list of a user's file may name verl's own defaults, which are those of the schema.
    """
    folder = recipes.folder(recipe)
    if not (folder / f"{recipe}.yaml").exists():
        fix = f"choose one of {', '.join(recipes.names())}"
        layer.problems.append(Problem("recipe", recipe, "has no config file", fix))
        return {}
    if not options:
        return convert.read_table(folder / f"{recipe}.yaml") or {}  # ppo.yaml sets nothing
    name = options.get("--config-name", recipe).strip("'\"").removesuffix(".yaml")
    folder = Path(options.get("--config-path", str(folder)).strip("'\"")).expanduser()
    word = f"--config-name={folder / name}.yaml"
    try:
        tree = {**OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"))}
    except FILE_ERRORS as error:
        fix = "mend that line" if hasattr(error, "problem_mark") else "name a file that is there"
        layer.problems.append(f"{word}: cannot be read ({_yaml_reason(error)}); {fix}")
        return {}
    tree.pop("hydra", None)
    listed = tree.pop("defaults", None) or ()
    others = [str(part) for part in listed if part not in ("ppo_trainer", "_self_")]
    if others:
        rule = f"its defaults list names {', '.join(others)}, and a file here is whole"
        layer.problems.append(f"{word}: {rule}; write those keys into it, or type them")
    return tree


def _yaml_reason(error: Exception) -> str:
    """Return why a file is no YAML, with the line of the file, counted from 1, if it is known."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error).split("\n")[0]
    problem = getattr(error, "problem", None) or error
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


# --- the schema's names for what was written ---


def _fill(layer: Layer, pairs: Iterable[tuple[str, Any]], line: Line) -> None:
    """Set the keys of a part of the command line. Of a key given twice the last one counts."""
    last: Tree = {}
    for key, value in pairs:
        if key in last and last[key] != value:
            layer.warnings.append(str(_twice(key, value, last[key])))
        last[key] = value
        if key == "preset":
            layer.preset = show(value)
        else:
            _set(key, value, layer, line)


def _twice(key: str, value: Any, before: Any) -> Problem:
    rule = f"is given twice, before as {show(before, key)}"
    return Problem(key, value, rule, "this last one counts")


def _set(key: str, value: Any, layer: Layer, line: Line) -> None:
    """Set a key, or what a key or value of another version means."""
    known = convert.known(key, line.schema)
    in_schema = key in convert.all_keys(line.schema)
    reading = (verl_names.read_value if in_schema else verl_names.read)(key, value, line)
    if not known and recipes.owner_of(key):
        layer.foreign[key] = value
    elif reading and reading.settings:
        layer.read[key] = (value, reading.settings)
        for name, setting in reading.settings.items():
            typed = line.words.get(name, setting)
            if typed != setting and name != key and not reading.replaces:
                given = f"{name}={show(typed, name)} is given too"
                rule = f"means {name}={show(setting, name)}, and {given}"
                layer.problems.append(Problem(key, value, rule, "leave one of them out"))
            _set(name, setting, layer, line)
    elif reading and reading.unused and not in_schema:
        layer.unused[key] = (value, reading.unused)
    elif key in convert.sections(line.schema):
        layer.problems.append(Problem(key, value, IS_SECTION, "set one of its keys"))
    elif not known:
        layer.problems.append(verl_names.unknown_key(key, value, line))
    else:
        layer.values[key] = value


def _techniques(foreign: Tree) -> tuple[Problems, dict[str, tuple[Any, str]]]:
    """Return problems of another recipe's techniques that are on, and the keys of those off.

    A problem has that recipe's name.
    """
    problems: Problems = []
    unused = {}
    for key, value in foreign.items():
        recipe, switch = recipes.owner_of(key)
        if not foreign.get(switch):
            unused[key] = (value, f"{switch} is off")
        elif key == switch:
            rule = f"belongs to {recipes.module_of(recipe).PAPER}, and this recipe has no such key"
            problems.append(
                Problem(key, value, rule, f"run python -m recipes.{recipe}.main_{recipe}")
            )
    return problems, unused


# --- presets ---


def _presets(
    recipe: str, file: Layer, script: Layer, typed: Layer
) -> tuple[list[Tree], Problems, list[str]]:
    """Return the tree of the preset of each layer, problems and warnings.

    A typed preset takes the place of the script's, and both that of the file's.
    """
    files = {path.stem: path for path in (recipes.folder(recipe) / "preset").glob("*.yaml")}
    above = typed.preset or script.preset
    in_script = None if typed.preset else script.preset
    trees: list[Tree] = []
    problems: Problems = []
    for name in (None if above else file.preset, in_script, typed.preset):
        if name is not None and name not in files:
            choose = f"choose one of {', '.join(sorted(files))}"
            fix = choose if files else "leave it out: this recipe has none"
            problems.append(Problem("preset", name, "unknown preset", fix))
        trees.append((name in files and convert.read_table(files[name])) or {})
    hidden = file.preset is not None and above not in (None, file.preset)
    warnings = [str(_twice("preset", above, file.preset))] if hidden else []
    return trees, problems, warnings


# --- trees ---


def _resolved(tree: Tree, schema: type[Config]) -> tuple[Tree, Problems]:
    """Return the tree with its interpolations resolved, and problems.

    If one cannot be resolved all are left out.
    """
    raw = dict(_leaves(tree, schema))
    unresolved = [key for key, value in raw.items() if "${" in str(value) or "???" in str(value)]
    if not unresolved:  # OmegaConf would take half of the time of composing
        return tree, []
    try:
        resolved = OmegaConf.to_container(
            OmegaConf.create(tree), resolve=True, throw_on_missing=True
        )
    except (OmegaConfBaseException, RecursionError) as error:
        key = (getattr(error, "full_key", None) or "").partition("[")[0]
        rule = f"cannot be read ({_reason(error)})"
        problem = Problem(key, raw.get(key), rule, "give it a value, or mend it")
        return nested({key: raw[key] for key in raw if key not in unresolved}), [problem]
    values = dict(_leaves(resolved, schema))
    problems: Problems = []
    for key in unresolved:
        if "None" in str(values[key]) and values[key] is not None:
            rule = "names a key that is null"
            problems.append(Problem(key, raw[key], rule, "set that key as well"))
            del values[key]
    return nested(values), problems


def literal(value: Any) -> Any:
    """Return the value with every ``${`` in its texts written so that it stands for itself."""
    if isinstance(value, Mapping):
        return {name: literal(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def refuse_code(
    artefact: str,
    config: Config,
    recipe: str,
    overrides: Sequence[str] = (),
    unread: Sequence[str] = (),
) -> None:
    """Check that ``config``, into which settings of an artefact went, names no code by them.

    What ``overrides`` name is the user's word. Of keys that begin with one of ``unread`` the
    command loads nothing. Raises InputError: the artefact, the keys, and what to append to the
    command.
    """
    allowed = code_in(examine(recipe, overrides).config)
    unnamed = {}
    for key, value in code_in(config).items():
        if not key.startswith(tuple(unread)) and (key not in allowed or allowed[key] != value):
            unnamed[key] = value
    if unnamed:
        append = " ".join(shlex.quote(f"{key}={show(value)}") for key, value in unnamed.items())
        raise InputError(
            f"{artefact}: its settings name code that would run here: {', '.join(unnamed)}. They "
            f"may come from anybody, and code is named on the command line alone. If you trust "
            f"that code, append {append}"
        )
