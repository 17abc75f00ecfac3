"""The text of ``--help``: every key with its type, its default and what it is for, or those that fit a search.

The words about a key are its field's description. Types, choices and bounds come from the annotations, defaults from
the recipe's files, and the keys of other versions from ``verl_names.yaml``.
"""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from core.config import composition, convert, recipes, verl_names
from core.config.defaults import resolve
from core.config.recorded import validated
from core.config.section import MAPPING, Limit, NumberOrText, Open, optional, show

WIDEST = 120  # columns, also where the terminal is wider
NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "text", NumberOrText: "a number or text"}


def shown(recipe: str, overrides: Sequence[str], words: Sequence[str]) -> tuple[str, bool]:
    """Return the text of ``--help`` and whether anything was found. ``words`` are searched for, all of them."""
    entries = list(explained(recipe, overrides))
    others = [(key, text, text) for key, text in verl_names.described(recipe)] if words else []
    hits = [[one for one in some if _matches(words, f"{one[0]} {one[1]}")] for some in (entries, others)]
    lines = [] if words else _usage(recipe)
    lines += [line for head, _, text in hits[0] for line in _item(head, text)]
    lines += ["keys of other versions:"] * bool(hits[1])
    lines += [line for head, _, text in hits[1] for line in _item(head, text)]
    if lines:
        return "\n".join(lines), True
    nothing = f"--help {' '.join(words)}: no key has this in its name, its comment or its choices"
    by_name = {key.rpartition(".")[2]: key for key in reversed(convert.all_keys(recipes.schema_of(recipe)))}
    near = difflib.get_close_matches("_".join(words).lower(), by_name, n=3, cutoff=0.7)
    return f"{nothing}; close names: {', '.join(by_name[name] for name in near) or 'none'}", False


def explained(recipe: str, overrides: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield ``key=default``, the words that a search reads, and what is said, of every key of the recipe.

    Defaults are those under the overrides.
    """
    schema, layers = recipes.schema_of(recipe), composition.read(overrides, recipe)
    plain = validated(schema, composition.tree(layers), [])
    config = resolve(plain, recipe)
    for key, hint in convert.all_keys(schema).items():
        section, comments = schema, []  # a section's description is its keys' too
        for name in key.split("."):
            comments.append(section.model_fields[name].description)
            section = type(getattr(section(), name))
        default, resolved = convert.get(plain, key), convert.get(config, key)
        words = [*filter(None, comments), type_text(hint)]
        said = [*words, f"null is {show(resolved)} here" if default != resolved else ""]
        text = " ".join(f"{part[0].upper()}{part[1:]}." for part in said if part)
        yield f"{key}={show(default, key)}", " ".join(words), text


def type_text(hint: Any) -> str:
    """Return what values a type admits, in words."""
    alone, none_too = optional(hint)
    if none_too:
        return f"{type_text(alone)}, or null"
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Open or hint in NAMES:
        return MAPPING if hint is Open else NAMES[hint]
    if origin is Annotated:
        rules = [limit.rule for limit in parts[1:] if isinstance(limit, Limit)]
        base = "a number or text" if parts[0] is object else type_text(parts[0])
        return ", ".join(rules if rules and parts[0] is str else [base, *rules])
    if origin is Literal:
        return f"one of {', '.join(parts)}"
    return "a list of texts" if parts[0] is str else f"a list, each entry {type_text(parts[0])}"


def _matches(words: Sequence[str], text: str) -> bool:
    return all(word.lower() in text.lower() for word in words)


def _width() -> int:
    return max(40, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))


def _item(head: str, text: str) -> list[str]:
    options = {"width": _width(), "subsequent_indent": "    ", "break_on_hyphens": False, "break_long_words": False}
    return [*textwrap.wrap(head, **options), *textwrap.wrap(text, initial_indent="    ", **options)]


def _usage(recipe: str) -> list[str]:
    command, lines = f"python -m recipes.{recipe}.main_{recipe}", []
    for path in sorted((recipes.folder(recipe) / composition.PRESET).glob("*.yaml")):
        comments = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        text = " ".join(line.lstrip("# ") for line in comments if "@package" not in line)
        lines += _item(f"preset={path.stem}", re.split(r"(?<=[a-z)\]]\.) (?=[A-Z])", text)[0])  # its first sentence
    dry = "DRY_RUN=1 in the environment only checks and prints the configuration and what the run will need."
    wins = "preset=NAME puts the settings of a file over the recipe's defaults; key=value wins over both. Presets:"
    return [
        f"usage: {command} [preset=NAME] [key=value ...]",
        f"       {command} --help WORD ...    only the keys in which all the words occur",
        "",
        *textwrap.wrap(f"The command trains with the recipe {recipe}. {dry}", _width()),
        "",
        *([*textwrap.wrap(wins, _width()), *lines, ""] if lines else []),
        "keys with their defaults (a list is written [a,b]; text with special characters is quoted: key=\"'a=b'\"):",
    ]
