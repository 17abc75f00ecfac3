"""The text of ``--help``: every key with its type, its default and what it is for, or those that fit a search.

The words about a key are its field's description. Types, choices and bounds come from the annotations, defaults from
the recipe's files, and the keys of other versions from ``verl_names.yaml``.
"""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin

from core.config import composition, convert, recipes, rules, verl_names
from core.config.checked import validated
from core.config.defaults import resolve
from core.config.limits import Limit, NumberOrText
from core.config.problem import show
from core.config.rules import View
from core.config.section import MAPPING, Open, optional

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
    unused: str = ""

    @property
    def text(self) -> str:
        """What stands below the key: the comment, the values it admits, what null becomes, why it does nothing."""
        null = f"null is {show(self.resolved)} here" if self.default != self.resolved else ""
        parts = [self.comment, self.type, null, f"does nothing here: {self.unused}" if self.unused else ""]
        return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts if part)


def type_text(hint: Any) -> str:
    """Return what values a type admits, in words."""
    alone, none_too = optional(hint)
    if none_too:
        return f"{type_text(alone)}, or null"
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Open:
        return MAPPING
    if hint in NAMES:
        return NAMES[hint]
    if origin is Annotated:
        rules = [limit.rule for limit in parts[1:] if isinstance(limit, Limit)]
        base = "a number or text" if parts[0] is object else type_text(parts[0])
        return ", ".join([base, *rules]) if parts[0] is not str else ", ".join(rules) or base
    if origin is Literal:
        return f"one of {', '.join(parts)}"
    return "a list of texts" if parts[0] is str else f"a list, each entry {type_text(parts[0])}"


def entries(recipe: str, overrides: Sequence[str] = (), hooks: Collection[str] = ()) -> list[Entry]:
    """Return every key of the recipe, with its default under these overrides."""
    schema = recipes.schema_of(recipe)
    layers = composition.read(overrides, recipe)
    plain = validated(schema, composition.tree(layers), [])
    config = resolve(plain, recipe)
    reasons = rules.reasons(View(config, layers.given, hooks, recipe), convert.all_keys(schema))
    sections = {"": schema, **convert.sections(schema)}
    listed = []
    for key, hint in convert.all_keys(schema).items():
        parts = key.split(".")
        above = [(".".join(parts[:depth]), name) for depth, name in enumerate(parts)]
        comments = [
            sections[section].model_fields[name].description for section, name in above
        ]  # a section's are its keys'
        comment = ". ".join(text[0].upper() + text[1:] for text in comments if text)
        default, resolved = convert.get(plain, key), convert.get(config, key)
        listed.append(Entry(key, type_text(hint), comment, default, resolved, reasons.get(key, "")))
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


def shown(recipe: str, overrides: Sequence[str], words: Sequence[str], hooks: Collection[str] = ()) -> tuple[str, bool]:
    """Return the text of ``--help`` and whether anything was found. ``words`` are searched for, all of them."""
    listed = entries(recipe, overrides, hooks)
    if not words:
        return "\n".join([*_usage(recipe), *_listed(listed)]), True
    hits = [entry for entry in listed if _matches(words, f"{entry.key} {entry.comment} {entry.type}")]
    others = [(key, text) for key, text in verl_names.described(recipe) if _matches(words, f"{key} {text}")]
    lines = _listed(hits, reasons=True)
    if others:
        lines += _item("keys of other versions:", "")
        lines += [line for key, text in others for line in _item(key, text)]
    if lines:
        return "\n".join(lines), True
    return _nothing(" ".join(words), [entry.key for entry in listed]), False


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
    hint = (
        f"close names: {', '.join(dict.fromkeys(parts[name] for name in near))}" if near else "no name is close to it"
    )
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


def _listed(entries: Sequence[Entry], reasons: bool = False) -> list[str]:
    """Return the lines of these keys. A reason why a key does nothing is shown only where few are listed."""
    shown = entries if reasons else [replace(entry, unused="") for entry in entries]
    return [line for entry in shown for line in _item(f"{entry.key}={show(entry.default, entry.key)}", entry.text)]


def _usage(recipe: str) -> list[str]:
    command = f"python -m recipes.{recipe}.main_{recipe}"
    lines = [
        f"usage: {command} [preset=NAME] [key=value ...]",
        f"       {command} --help WORD ...    only the keys in which all the words occur",
        "",
        *textwrap.wrap(
            f"The command trains with the recipe {recipe}. DRY_RUN=1 in the environment only composes and checks the "
            "configuration, prints what differs from the defaults and what the run will need, and ends.",
            _width(),
        ),
        "",
    ]
    known = presets(recipe)
    if known:
        lines += textwrap.wrap(
            "preset=NAME puts the settings of a file over the recipe's defaults; key=value wins over both. Presets:",
            _width(),
        )
        lines += [line for name, text in known.items() for line in _item(f"preset={name}", text, "  ")]
        lines.append("")
    how = "keys with their defaults (a list is written [a,b]; text with special characters is quoted: key=\"'a=b'\"):"
    return [*lines, how]
