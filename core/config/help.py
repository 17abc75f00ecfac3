"""The text of ``--help``: every key with its type, its default and what it is for, or those that fit a search.

The words about a key are its field's description. Choices and bounds come from the annotations, defaults from the
recipe's files, and the keys of other versions from ``verl_names.yaml``.
"""

from __future__ import annotations

import difflib
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from core.config import convert, recipes, verl_names
from core.config.composition import examine
from core.config.section import Limit, show

USAGE = """usage: python -m recipes.{recipe}.main_{recipe} [preset=NAME] [key=value ...]
       python -m recipes.{recipe}.main_{recipe} --help WORD ...    only the keys in which all the words occur

The command trains with the recipe {recipe}. DRY_RUN=1 in the environment only checks and prints the configuration and
what the run will need. preset=NAME puts the settings of a file over the recipe's defaults; key=value wins over both.
Presets: {presets}

keys with their defaults (a list is written [a,b]; text with special characters is quoted: key="'a=b'"):"""


def shown(recipe: str, overrides: Sequence[str], words: Sequence[str]) -> tuple[str, bool]:
    """Return the text of ``--help`` and whether anything was found. ``words`` are searched for, all of them."""
    entries, others = list(explained(recipe, overrides)), list(verl_names.described(recipe)) if words else []
    hits, older = ([one for one in some if _matches(words, " ".join(one))] for some in (entries, others))
    presets = sorted(path.stem for path in (recipes.folder(recipe) / "preset").glob("*.yaml"))
    lines = [] if words else USAGE.format(recipe=recipe, presets=", ".join(presets) or "none").splitlines()
    lines += [line for entry in hits for line in _item(*entry)]
    lines += ["keys of other versions:"] * bool(older) + [line for entry in older for line in _item(*entry)]
    if lines:
        return "\n".join(lines), True
    by_name = {key.rpartition(".")[2]: key for key in reversed(convert.all_keys(recipes.schema_of(recipe)))}
    near = difflib.get_close_matches("_".join(words).lower(), by_name, n=3, cutoff=0.7)
    nothing = f"--help {' '.join(words)}: no key has this in its name, its comment or its choices"
    return f"{nothing}; close names: {', '.join(by_name[name] for name in near) or 'none'}", False


def explained(recipe: str, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield ``key=default`` and what is said of it, of every key of the recipe. Defaults are under the overrides."""
    config = examine(recipe, overrides).config
    for key, hint in convert.all_keys(type(config)).items():
        section, said = type(config), []  # a section's description is its keys' too
        for name in key.split("."):
            said.append(section.model_fields[name].description)
            section = type(getattr(section(), name))
        text = " ".join(f"{part[0].upper()}{part[1:]}." for part in [*said, choices(hint)] if part)
        yield f"{key}={show(convert.get(config, key), key)}", text


def choices(hint: Any) -> str:
    """Return the names or bounds that a type admits, in words."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    parts = [part.rule if isinstance(part, Limit) else choices(part) for part in get_args(hint)]
    return ", ".join(filter(None, parts))


def _matches(words: Sequence[str], text: str) -> bool:
    return all(word.lower() in text.lower() for word in words)


def _item(head: str, text: str) -> list[str]:
    width = max(40, min(120, shutil.get_terminal_size((120, 24)).columns))
    options = {"width": width, "subsequent_indent": "    ", "break_on_hyphens": False, "break_long_words": False}
    return [*textwrap.wrap(head, **options), *textwrap.wrap(text, initial_indent="    ", **options)]
