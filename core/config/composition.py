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
from collections.abc import Iterator, Mapping, Sequence
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
from core.config.section import NO_SECTION, Problem, brief, show
from core.config.section import typed as as_typed
from core.config.verl_names import Composed
from core.errors import InputError
from core.secret_keys import shown_word

OPTIONS = ("--config-path=", "--config-name=")  # a file in place of the recipe's
KEY = re.compile(r"\+*[A-Za-z_][\w-]*(\.[\w-]+)*")
# ValueError is that of a number with too many digits, RecursionError of deep brackets
PARSER_ERRORS = (HydraException, ValueError, RecursionError)
Tree = dict[str, Any]


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
    found = Composed(recipe, schema)
    options = dict(word.split("=", 1) for word in overrides if word.startswith(OPTIONS))
    texts = [word for word in overrides if not word.startswith(OPTIONS)]
    at = texts.index("--") if "--" in texts else -1
    parts = [list(_overrides(part, found)) for part in (texts[: max(at, 0)], texts[at + 1 :])]
    parts.insert(0, _file(found, options))
    found.words.update({key: value for part in parts[not options :] for key, value in part})
    (file_preset, file), (script_preset, script) = (_layer(part, found) for part in parts[:2])
    found.warnings.clear()  # a script's own keys are over those that it shares with others
    typed_preset, typed = _layer(parts[2], found)
    found.given, found.typed = script | typed, frozenset(typed)
    found.scripted = frozenset(script)
    if file_preset and (over_file := typed_preset or script_preset) not in (None, file_preset):
        found.warnings.append(str(_twice("preset", over_file, file_preset)))
        file_preset = None
    script_preset = None if typed_preset else script_preset
    tree = over(convert.as_tree(schema()), _preset(file_preset, found), nested(file))
    tree = over(tree, _preset(script_preset, found), nested(script))
    tree = over(
        tree, _preset(typed_preset, found), literal(own_tree(base or {}, schema)), nested(typed)
    )
    _refuse_techniques(found)
    resolved = _resolved(tree, schema, found.problems)
    _without_slashes(resolved, found)
    config = validated(schema, resolved, found.problems, found)
    found.config = defaults.resolve(defaults.over_ray(config, found.given), recipe)
    view = rules.View(found.config, found.given, recipe)
    # The default that stands for a refused value breaks no rule
    refused = {one.key for one in found.problems if isinstance(one, Problem)}
    broken = rules.broken("PROBLEMS", view)
    broken = [one for one in broken if not refused & {one.key, *re.findall(r"[\w.]+\w", one.rule)}]
    found.problems = tuple(dict.fromkeys(map(str, [*found.problems, *broken])))
    found.warnings = (
        *found.warnings,
        *map(str, rules.broken("WARNINGS", view)),
        *verl_names.older_defaults(found),
    )
    reasons = {key: rules.unmet(view, key) for key in (*found.given, *convert.all_keys(schema))}
    found.unused |= {
        key: (value, reasons[key]) for key, value in found.given.items() if reasons[key]
    }
    found.without_effect = frozenset(key for key, reason in reasons.items() if reason)
    return found


# --- overrides ---


def _overrides(texts: Sequence[str], found: Composed) -> Iterator[tuple[str, Any]]:
    """Yield key and value of overrides, each read on its own, so that a bad one hides no other."""
    parser = OverridesParser.create()
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not KEY.fullmatch(key):
            rule = (
                "is no override; write key=value, with names joined by single dots (DRY_RUN=1 "
                "only checks)"
            )
            found.problems.append(f"{brief(shown_word(text)) or repr(text)}: {rule}")
            continue
        shown = brief(shown_word(text))
        try:
            override = parser.parse_override(text)
            if override.is_sweep_override():
                found.problems.append(
                    f"{shown}: is a sweep, and this is one run; quote it if it is text"
                )
            else:
                yield override.key_or_group, override.value()
        except PARSER_ERRORS as error:
            if (
                isinstance(error, HydraException)
                and value
                and value[0] not in "[{'\""
                and "$" not in value
            ):
                yield key.lstrip("+"), value  # ~/data, a=b: plain text with a character of Hydra's
            else:
                fix = f"quote text: {brief(key)}=\"'...'\", and each in a list"
                # Which quotes what was typed
                reason = f" ({_reason(error)})" if shown == brief(text) else ""
                found.problems.append(f"{shown}: cannot be read{reason}; {fix}")


def _reason(error: Exception) -> str:
    return brief(str(error).split("\n")[0])


def _layer(parsed: Sequence[tuple[str, Any]], found: Composed) -> tuple[str | None, Tree]:
    """Return the preset and flat key -> value of a part of a command line. Of a key given twice the
    last one counts."""
    preset, values, seen, schema = None, {}, {}, found.schema
    for key, value in (leaf for pair in parsed for leaf in _leaves(*pair, schema)):
        if key in seen and seen[key] != value:
            found.warnings.append(str(_twice(key, value, seen[key])))
        seen[key] = value
        if key == "preset":
            preset = show(value)
            continue
        _set(key, value, values, found)
    return preset, values


def _twice(key: str, value: Any, before: Any) -> Problem:
    return Problem(
        key, value, f"is given twice, before as {show(before, key)}", "this last one counts"
    )


def _leaves(key: str, value: Any, schema: type[Config]) -> Iterator[tuple[str, Any]]:
    """Yield ``data={seed: 1}`` as ``data.seed=1``, down to the schema's keys, or to plain values
    where it has none."""
    if (
        isinstance(value, Mapping)
        and value
        and (key in convert.sections(schema) or not convert.known(key, schema))
    ):
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}" if key else str(name), item, schema)
    else:
        yield key, value


def _set(key: str, value: Any, values: Tree, found: Composed) -> None:
    """Set a key, or what a key or value of another version means."""
    schema = found.schema
    own = key in convert.all_keys(schema)
    meant = (verl_names.read_value if own else verl_names.read)(key, value, found)
    if not convert.known(key, schema) and recipes.owner_of(key):
        found.foreign[key] = value
    elif meant and meant.settings:
        found.read[key] = (value, meant.settings)
        for name, item in meant.settings.items():
            if found.words.get(name, item) != item and name != key:
                rule = (
                    f"means {name}={show(item, name)}, and "
                    f"{name}={show(found.words[name], name)} is given too"
                )
                found.problems.append(Problem(key, value, rule, "leave one of them out"))
            _set(name, item, values, found)
    elif not own and meant and meant.unused:
        found.unused[key] = (value, meant.unused)
    elif key in convert.sections(schema):
        found.problems.append(Problem(key, value, NO_SECTION, "set one of its keys"))
    elif not convert.known(key, schema):
        found.problems.append(verl_names.unknown_key(key, value, found))
    else:
        values[key] = value


def _refuse_techniques(found: Composed) -> None:
    """Accept another recipe's techniques where they are off; refuse one that is on, with that
    recipe's name."""
    for key, value in found.foreign.items():
        recipe, switch = recipes.owner_of(key)
        if not found.foreign.get(switch):
            found.unused[key] = (value, f"{switch} is off")
        elif key == switch:
            rule = f"belongs to {recipes.module_of(recipe).PAPER}, and this recipe has no such key"
            found.problems.append(
                Problem(key, value, rule, f"run python -m recipes.{recipe}.main_{recipe}")
            )


# --- files ---


def _file(found: Composed, options: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Return the keys of the recipe's file, or of a user's in its place, whose keys are read as
    typed ones are.

    The defaults list of a user's file may name verl's own defaults, which are those of the schema.
    """
    recipe, schema = found.recipe, found.schema
    own = recipes.folder(recipe)
    if not (own / f"{recipe}.yaml").exists():
        fix = f"choose one of {', '.join(recipes.names())}"
        found.problems.append(Problem("recipe", recipe, "has no config file", fix))
        return []
    if not options:
        tree = convert.read_table(own / f"{recipe}.yaml")
        return list(_leaves("", tree, schema)) if tree else []  # ppo.yaml sets nothing
    name = options.get("--config-name", recipe).strip("'\"").removesuffix(".yaml")
    path = Path(str(options.get("--config-path", own)).strip("'\"")).expanduser() / f"{name}.yaml"
    try:
        tree = {**OmegaConf.to_container(OmegaConf.load(path))}
    except (
        OSError,
        TypeError,
        ValueError,
        OmegaConfBaseException,
        convert.yaml.YAMLError,
    ) as error:
        fix = "mend that line" if hasattr(error, "problem_mark") else "name a file that is there"
        found.problems.append(
            f"--config-name={path}: cannot be read ({convert.yaml_reason(error)}); {fix}"
        )
        return []
    tree.pop("hydra", None)
    if others := [
        one for one in tree.pop("defaults", None) or () if one not in ("ppo_trainer", "_self_")
    ]:
        rule = f"its defaults list names {', '.join(map(str, others))}, and a file here is whole"
        found.problems.append(
            f"--config-name={path}: {rule}; write those keys into it, or type them"
        )
    return list(_leaves("", tree, schema))


def _preset(name: str | None, found: Composed) -> Tree:
    """Return the tree of a recipe's preset."""
    known = {path.stem: path for path in (recipes.folder(found.recipe) / "preset").glob("*.yaml")}
    if name is not None and name not in known:
        fix = (
            f"choose one of {', '.join(sorted(known))}"
            if known
            else ("leave it out: this recipe has none")
        )
        found.problems.append(Problem("preset", name, "unknown preset", fix))
    return (name in known and convert.read_table(known[name])) or {}


# --- trees ---


def _without_slashes(tree: Tree, found: Composed) -> None:
    """Write a dash for each slash in the names of run and project, which verl reads as a path."""
    for name in ("experiment_name", "project_name"):
        value = tree.get("trainer", {}).get(name)
        if isinstance(value, str) and "/" in value.strip("/"):
            tree["trainer"][name] = re.sub("/+", "-", value.strip("/"))
            rule = "is one step of a path here"
            fix = f"it is read as {tree['trainer'][name]}"
            found.warnings.append(str(Problem(f"trainer.{name}", value, rule, fix)))


def _resolved(tree: Tree, schema: type[Config], problems: list[Any]) -> Tree:
    """Return the tree with its interpolations resolved; where one cannot be, it is reported and all
    are left out."""
    raw = dict(_leaves("", tree, schema))
    open_keys = {key for key, value in raw.items() if "${" in str(value) or "???" in str(value)}
    if not open_keys:  # half of the time that composing takes
        return tree
    try:
        resolved = OmegaConf.to_container(
            OmegaConf.create(tree), resolve=True, throw_on_missing=True
        )
    except (OmegaConfBaseException, RecursionError) as error:
        key = (getattr(error, "full_key", None) or "").partition("[")[0]
        fix = "give it a value, or mend it"
        problems.append(Problem(key, raw.get(key), f"cannot be read ({_reason(error)})", fix))
        return nested({key: value for key, value in raw.items() if key not in open_keys})
    found = dict(_leaves("", resolved, schema))
    for key in open_keys:
        if "None" in str(found[key]) and found[key] is not None:
            problems.append(
                Problem(key, raw[key], "names a key that is null", "set that key as well")
            )
            del found[key]
    return nested(found)


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
    """Check that ``config``, into which settings of an artefact went, names no code of its own
    accord.

    What ``overrides`` name is the user's word. Of keys that begin with one of ``unread`` the
    command loads nothing. Raises InputError: the artefact, the keys, and what to append to the
    command.
    """
    allowed = code_in(examine(recipe, overrides).config)
    unnamed = {
        key: value for key, value in code_in(config).items() if not key.startswith(tuple(unread))
    }
    unnamed = {
        key: value for key, value in unnamed.items() if key not in allowed or allowed[key] != value
    }
    if unnamed:
        append = " ".join(shlex.quote(f"{key}={as_typed(value)}") for key, value in unnamed.items())
        raise InputError(
            f"{artefact}: its settings name code that would run here: {', '.join(unnamed)}. They "
            f"may come from "
            f"anybody, and code is named on the command line alone. If you trust that code, "
            f"append {append}"
        )
