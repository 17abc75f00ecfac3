"""The text of ``--help``: every key with its type, its default and what it is for, or those that fit a search.

The words about a key are its field's description. Types, choices and bounds come from the annotations, defaults from
the recipe's files, and the keys of other versions from ``verl_names.yaml``.
"""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from core.config import composition, convert, recipes, rules, verl_names
from core.config.defaults import resolve
from core.config.problem import show
from core.config.recorded import validated
from core.config.section import MAPPING, Limit, NumberOrText, Open, optional

WIDEST = 120  # columns, also where the terminal is wider
NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "text", NumberOrText: "a number or text"}


@dataclass(frozen=True)
class Entry:
    """One key: its default as the recipe's files have it, what a null default becomes, and why it does nothing."""

    key: str
    type: str
    comment: str
    default: Any
    resolved: Any
    unused: str

    def lines(self, with_reason: bool) -> list[str]:
        """Return what is printed. A reason why a key does nothing is shown only where few are listed."""
        null = f"null is {show(self.resolved)} here" if self.default != self.resolved else ""
        unused = f"does nothing here: {self.unused}" if self.unused and with_reason else ""
        text = " ".join(f"{part[0].upper()}{part[1:]}." for part in (self.comment, self.type, null, unused) if part)
        return _item(f"{self.key}={show(self.default, self.key)}", text)


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


def entries(recipe: str, overrides: Sequence[str] = ()) -> list[Entry]:
    """Return every key of the recipe, with its default under these overrides."""
    schema, layers = recipes.schema_of(recipe), composition.read(overrides, recipe)
    plain = validated(schema, composition.tree(layers), [])
    config = resolve(plain, recipe)
    keys, view = convert.all_keys(schema), rules.View(config, layers.given, recipe)
    reasons, listed = rules.reasons(view, keys), []
    for key, hint in keys.items():
        section, comments = schema, []  # a section's description is its keys' too
        for name in key.split("."):
            comments.append(section.model_fields[name].description)
            section = type(getattr(section(), name))
        comment = ". ".join(text[0].upper() + text[1:] for text in comments if text)
        values = convert.get(plain, key), convert.get(config, key)
        listed.append(Entry(key, type_text(hint), comment, *values, reasons.get(key, "")))
    return listed


def presets(recipe: str) -> dict[str, str]:
    """Return preset -> the first sentence of its file's comment."""
    by_name = {}
    for path in sorted((recipes.folder(recipe) / composition.PRESET).glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        comment = " ".join(line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line)
        by_name[path.stem] = re.split(r"(?<=[a-z)\]]\.) (?=[A-Z])", comment)[0]
    return by_name


# --- what is printed ---


def shown(recipe: str, overrides: Sequence[str], words: Sequence[str]) -> tuple[str, bool]:
    """Return the text of ``--help`` and whether anything was found. ``words`` are searched for, all of them."""
    listed = entries(recipe, overrides)
    if not words:
        return "\n".join([*_usage(recipe), *(line for entry in listed for line in entry.lines(False))]), True
    hits = [entry for entry in listed if _matches(words, f"{entry.key} {entry.comment} {entry.type}")]
    others = [(key, text) for key, text in verl_names.described(recipe) if _matches(words, f"{key} {text}")]
    lines = [line for entry in hits for line in entry.lines(True)]
    lines += ["keys of other versions:"] * bool(others)
    lines += [line for key, text in others for line in _item(key, text)]
    return "\n".join(lines) or _nothing(" ".join(words), [entry.key for entry in listed]), bool(lines)


def _matches(words: Sequence[str], text: str) -> bool:
    return all(word.lower() in text.lower() for word in words)


def _nothing(words: str, keys: Sequence[str]) -> str:
    """Return the line for a search without a hit, with the keys that have a name or a part of a name like it."""
    parts: dict[str, str] = {}
    for key in keys:
        name = key.rsplit(".", 1)[-1]
        for part in (name, *name.split("_")):
            parts.setdefault(part, key)
    near = difflib.get_close_matches(words.lower().replace(" ", "_"), parts, n=3, cutoff=0.7)
    close = ", ".join(dict.fromkeys(parts[name] for name in near))
    hint = f"close names: {close}" if near else "no name is close to it"
    return f"--help {words}: no key has this in its name, its comment or its choices; {hint}"


def _width() -> int:
    return max(40, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))


def _item(head: str, text: str, margin: str = "") -> list[str]:
    indent = f"{margin}    "
    options = {"width": _width(), "subsequent_indent": indent, "break_on_hyphens": False, "break_long_words": False}
    return [
        *textwrap.wrap(head, initial_indent=margin, **options),
        *textwrap.wrap(text, initial_indent=indent, **options),
    ]


def _usage(recipe: str) -> list[str]:
    command = f"python -m recipes.{recipe}.main_{recipe}"
    known = [line for name, text in presets(recipe).items() for line in _item(f"preset={name}", text, "  ")]
    dry = "DRY_RUN=1 in the environment only checks and prints the configuration and what the run will need."
    wins = "preset=NAME puts the settings of a file over the recipe's defaults; key=value wins over both. Presets:"
    return [
        f"usage: {command} [preset=NAME] [key=value ...]",
        f"       {command} --help WORD ...    only the keys in which all the words occur",
        "",
        *textwrap.wrap(f"The command trains with the recipe {recipe}. {dry}", _width()),
        "",
        *([*textwrap.wrap(wins, _width()), *known, ""] if known else []),
        "keys with their defaults (a list is written [a,b]; text with special characters is quoted: key=\"'a=b'\"):",
    ]
