"""Overrides and recipe files to one checked configuration: ``compose`` and ``examine``.

A recipe's folder ``recipes/<recipe>/config/`` holds ``<recipe>.yaml``, with only what differs from
the schema's defaults, and ``preset/<name>.yaml``, chosen by ``preset=<name>``. Overrides before a
lone ``--`` are a run script's own, those after it were typed; without ``--`` all were typed. Later
layers win: schema, file, script preset (unless one is typed), script keys, typed preset, typed
keys. Hydra's parser reads overrides.
"""

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
from core.config.section import RULE_SECTION, Problem, brief, show
from core.config.unknown_keys import unknown_key
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
Pairs = Iterable[tuple[str, Any]]
Problems = list[Problem | str]


@dataclass(frozen=True)
class Composed:
    """A configuration, and everything that was found out about it and about the command line."""

    config: Config  # resolved; with ``problems`` a refused value is replaced by its default
    problems: Sequence[str]
    warnings: Sequence[str]
    words: Mapping[str, Any]  # every key of the line, as it was typed -> value
    script: Mapping[str, Any]  # key that a run script set -> value as read
    typed: Mapping[str, Any]  # key that was typed -> value as read
    read: Mapping[str, tuple[Any, Mapping[str, Any]]]  # key of another version -> value, settings
    unused: Mapping[str, tuple[Any, str]]  # override that does nothing here -> value, reason

    @property
    def given(self) -> dict[str, Any]:
        """Return the keys that an override set, and no recipe's file."""
        return {**self.script, **self.typed}


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
    problems: Problems = []
    options, script_words, typed_words = _split(overrides)
    file_pairs = [*_leaves(_file(recipe, options, problems), schema)]
    script_pairs = [*_pairs(script_words, schema, problems)]
    typed_pairs = [*_pairs(typed_words, schema, problems)]
    # A user's file is part of the line
    in_line = [*(file_pairs if options else ()), *script_pairs, *typed_pairs]
    reader = Reader(Line(recipe, dict(in_line)), problems)
    file = reader.values(file_pairs)
    script = reader.values(script_pairs)
    typed = reader.values(typed_pairs)
    file_preset = file.pop("preset", None)
    script_preset = script.pop("preset", None)
    typed_preset = typed.pop("preset", None)

    tree = convert.as_tree(schema())
    chosen = typed_preset or script_preset
    if chosen is None:
        tree = over(tree, _preset(recipe, file_preset, problems))
    elif file_preset not in (None, chosen):
        reader.warnings.append(_given_twice("preset", chosen, file_preset))
    tree = over(tree, nested(file))
    if typed_preset is None:
        tree = over(tree, _preset(recipe, script_preset, problems))
    tree = over(tree, nested(script), _preset(recipe, typed_preset, problems))
    tree = over(tree, literal(own_tree(base or {}, schema)), nested(typed))
    techniques_off = _techniques(reader.foreign, problems)
    tree = _resolved(tree, schema, problems)
    dashed = _write_dashes(tree)
    config, refused = validated(schema, tree, reader.line)
    given = {**script, **typed}
    config, misplaced = defaults.over_ray(config, given)
    config = defaults.resolve(config, recipe)
    problems += refused
    problems += _of_meant_values([*misplaced, *rules.broken("PROBLEMS", config, recipe)], problems)
    reasons = {key: unused(config, key) for key in given}
    without_effect = {key: (given[key], reason) for key, reason in reasons.items() if reason}
    return Composed(
        config=config,
        problems=tuple(dict.fromkeys(map(str, problems))),
        warnings=(
            *reader.warnings,
            *dashed,
            *map(str, rules.broken("WARNINGS", config, recipe)),
        ),
        words=reader.line.words,
        script=script,
        typed=typed,
        read=reader.read,
        unused=reader.unused | techniques_off | without_effect,
    )


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


def _split(overrides: Sequence[str]) -> tuple[dict[str, str], Sequence[str], Sequence[str]]:
    """Return the options that name a file, the words of a run script, and those that were typed."""
    options: dict[str, str] = {}
    for word in overrides:
        if word.startswith(OPTIONS):
            name, _, value = word.partition("=")
            if options.setdefault(name, value) != value:
                before = options[name]
                rule = f"names a second file, after {name}={before}"
                raise InputError(f"{name}={value}: {rule}; one file takes the recipe's place")
    words = [word for word in overrides if not word.startswith(OPTIONS)]
    if "--" not in words:
        return options, (), words
    separator = words.index("--")
    return options, words[:separator], words[separator + 1 :]


def _leaves(tree: Mapping[str, Any], schema: type[Config]) -> Iterator[tuple[str, Any]]:
    """Yield ``data={seed: 1}`` as ``data.seed=1``, down to the schema's keys, or plain values."""
    return convert.leaves(tree, lambda key: convert.known(key, schema))


def _pairs(
    texts: Iterable[str], schema: type[Config], problems: Problems
) -> Iterator[tuple[str, Any]]:
    """Yield key and value of overrides, each read on its own, so that a bad one hides no other."""
    parser = OverridesParser.create()
    for text in texts:
        key, separator, value = text.partition("=")
        shown = brief(shown_word(text))
        if not separator or not KEY.fullmatch(key):
            rule = "is no override; write key=value, with names joined by single dots"
            problems.append(f"{shown or repr(text)}: {rule} (DRY_RUN=1 only checks)")
            continue
        try:
            override = parser.parse_override(text)
            if not override.is_sweep_override():
                yield from _leaves({override.key_or_group: override.value()}, schema)
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
        problems.append(f"{shown}: {rule}")


def _reason(error: Exception) -> str:
    """Return the first line of an error; of a file that is no YAML the line of the file too."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error}"
    return brief(str(error).split("\n")[0])


def _file(recipe: str, options: Mapping[str, str], problems: Problems) -> Tree:
    """Return the tree of the recipe's file, or of a user's in its place.

    The defaults list of a user's file may name verl's own defaults, which are those of the schema.
    """
    folder = recipes.folder(recipe)
    if not (folder / f"{recipe}.yaml").exists():
        fix = f"choose one of {', '.join(recipes.names())}"
        problems.append(Problem("recipe", recipe, "has no config file", fix))
        return {}
    name = options.get("--config-name", recipe).strip("'\"").removesuffix(".yaml")
    folder = Path(options.get("--config-path", str(folder)).strip("'\"")).expanduser()
    word = f"--config-name={folder / name}.yaml"
    try:
        tree = {**OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"))}
    except FILE_ERRORS as error:
        fix = "mend that line" if hasattr(error, "problem_mark") else "name a file that is there"
        problems.append(f"{word}: cannot be read ({_reason(error)}); {fix}")
        return {}
    tree.pop("hydra", None)
    listed = tree.pop("defaults", None) or ()
    others = [str(part) for part in listed if part not in ("ppo_trainer", "_self_")]
    if others:
        rule = f"its defaults list names {', '.join(others)}, and a file here is whole"
        problems.append(f"{word}: {rule}; write those keys into it, or type them")
    return tree


def _preset(recipe: str, name: str | None, problems: Problems) -> Tree:
    """Return the tree of a preset; of None an empty one."""
    files = {path.stem: path for path in (recipes.folder(recipe) / "preset").glob("*.yaml")}
    if name is not None and name not in files:
        choose = f"choose one of {', '.join(sorted(files))}"
        fix = choose if files else "leave it out: this recipe has none"
        problems.append(Problem("preset", name, "unknown preset", fix))
    return (name in files and convert.read_table(files[name])) or {}


# --- the schema's names for what was written ---


@dataclass
class Reader:
    """Reads the keys of a file or of words in the schema's names, and keeps what it found out."""

    line: Line
    problems: Problems
    warnings: list[str] = field(default_factory=list)
    read: dict[str, tuple[Any, Mapping[str, Any]]] = field(default_factory=dict)
    unused: dict[str, tuple[Any, str]] = field(default_factory=dict)
    foreign: Tree = field(default_factory=dict)  # keys of another recipe's techniques

    def values(self, pairs: Pairs) -> Tree:
        """Return key of the schema -> value. Of a key given twice the last one counts."""
        values: Tree = {}
        last: Tree = {}
        for key, value in pairs:
            if key in last and last[key] != value:
                self.warnings.append(_given_twice(key, value, last[key]))
            last[key] = value
            if key == "preset":
                values[key] = show(value)
            else:
                self._set(key, value, values)
        return values

    def _set(self, key: str, value: Any, values: Tree) -> None:
        """Set a key, or what a key or value of another version means."""
        schema = self.line.schema
        known = convert.known(key, schema)
        in_schema = key in convert.all_keys(schema)
        reading = (verl_names.read_value if in_schema else verl_names.read)(key, value, self.line)
        if not known and recipes.owner_of(key):
            self.foreign[key] = value
        elif reading and reading.settings:
            self.read[key] = (value, reading.settings)
            for name, setting in reading.settings.items():
                typed = self.line.words.get(name, setting)
                if typed != setting and name != key and not reading.replaces:
                    given = f"{name}={show(typed, name)} is given too"
                    rule = f"means {name}={show(setting, name)}, and {given}"
                    self.problems.append(Problem(key, value, rule, "leave one of them out"))
                self._set(name, setting, values)
        elif reading and reading.unused and not in_schema:
            self.unused[key] = (value, reading.unused)
        elif key in convert.sections(schema):
            self.problems.append(Problem(key, value, RULE_SECTION, "set one of its keys"))
        elif not known and reading:
            self.problems.append(Problem(key, value, reading.rule, reading.fix))
        elif not known:
            self.problems.append(unknown_key(key, value, schema))
        else:
            values[key] = value


def _given_twice(key: str, value: Any, before: Any) -> str:
    """Return the warning of a key whose last value counts."""
    rule = f"is given twice, before as {show(before, key)}"
    return str(Problem(key, value, rule, "this last one counts"))


def _techniques(foreign: Tree, problems: Problems) -> dict[str, tuple[Any, str]]:
    """Return the keys of another recipe's techniques that are off, with the reason.

    One that is on is a problem with that recipe's name.
    """
    unused = {}
    for key, value in foreign.items():
        recipe, switch = recipes.owner_of(key)
        if not foreign.get(switch):
            unused[key] = (value, f"{switch} is off")
        elif key == switch:
            rule = f"belongs to {recipes.module_of(recipe).PAPER}, and this recipe has no such key"
            fix = f"run python -m recipes.{recipe}.main_{recipe}"
            problems.append(Problem(key, value, rule, fix))
    return unused


# --- trees ---


def _write_dashes(tree: Tree) -> list[str]:
    """Write a dash for each slash in the names of run and project, and return a warning of each.

    verl reads such a name as a path.
    """
    warnings = []
    for name in ("experiment_name", "project_name"):
        value = tree.get("trainer", {}).get(name)
        if isinstance(value, str) and "/" in value.strip("/"):
            written = re.sub("/+", "-", value.strip("/"))
            tree["trainer"][name] = written
            fix = f"it is read as {written}"
            warnings.append(str(Problem(f"trainer.{name}", value, "is one step of a path", fix)))
    return warnings


def _resolved(tree: Tree, schema: type[Config], problems: Problems) -> Tree:
    """Return the tree with its interpolations resolved. If one cannot be, all are left out."""
    raw = dict(_leaves(tree, schema))
    unresolved = [key for key, value in raw.items() if "${" in str(value) or "???" in str(value)]
    if not unresolved:  # OmegaConf would take half of the time of composing
        return tree
    try:
        resolved = OmegaConf.to_container(
            OmegaConf.create(tree), resolve=True, throw_on_missing=True
        )
    except (OmegaConfBaseException, RecursionError) as error:
        key = (getattr(error, "full_key", None) or "").partition("[")[0]
        rule = f"cannot be read ({_reason(error)})"
        problems.append(Problem(key, raw.get(key), rule, "give it a value, or mend it"))
        return nested({key: raw[key] for key in raw if key not in unresolved})
    values = dict(_leaves(resolved, schema))
    for key in unresolved:
        if "None" in str(values[key]) and values[key] is not None:
            rule = "names a key that is null"
            problems.append(Problem(key, raw[key], rule, "set that key as well"))
            del values[key]
    return nested(values)


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
