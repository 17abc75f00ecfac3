"""From the dataclasses to trees, flat keys and texts, and from a value to its type."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from core.config.frozen import freeze, thaw
from core.config.limits import Limit, NumberOrText
from core.config.schema import Config
from core.redaction import redacted, redacted_text

SEQUENCES = (list, tuple)
MAPPING = "a mapping, as in {name: value}"


class Mismatch(ValueError):
    """A value that its key's type or limit refuses; the text completes "must be ..."."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A key, its value, the rule that it breaks and what to do; as text one line."""

    key: str
    value: Any
    rule: str
    fix: str = ""

    def __str__(self) -> str:
        told = f"{self.key}={brief(show(self.value, self.key))}: {redacted_text(self.rule)}"
        return one_line(told + (f"; {self.fix}" if self.fix else ""))


def show(value: Any, key: str = "") -> str:
    """Return the value of a key for a message: as one would type it, in one line, without secrets."""
    return typed(redacted(thaw(value), key))


def typed(value: Any) -> str:
    """Return a value as one would type it on the command line, in one line. Only for what runs: it shows secrets."""
    value = thaw(value)
    if value is None or isinstance(value, bool | list | dict):
        return one_line(json.dumps(value, default=str, ensure_ascii=False))
    return repr(value) if isinstance(value, float) else one_line(str(value))


def brief(text: str) -> str:
    """Return what was typed for a message: in one line, cut where it is longer than a screen's width, no secrets."""
    text = redacted_text(text)
    return one_line(text if len(text) <= 300 else f"{text[:200]}... ({len(text)} characters)")


def one_line(text: str) -> str:
    """Return the text with escapes for what a terminal cannot show: line breaks, controls, broken characters."""
    return printable(text, but="")


# Spaces of other widths, and what joins and parts letters of several scripts, change nothing but how a text looks
SHOWN = "\n\t\u00a0\u2002\u2003\u2009\u200c\u200d\u202f\u3000"


def printable(text: str, but: str = SHOWN) -> str:
    """Return the text as a terminal may show it: its control characters are escapes, and none acts.

    A model's text may hold sequences that clear the screen, write to the clipboard (OSC 52) or change the order of
    what stands beside them. Characters in ``but`` stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in but else ascii(c)[1:-1] for c in text)


# --- what the schema has ---


@functools.cache
def hints(section: type) -> dict[str, Any]:
    """Return field name -> type, of one dataclass."""
    return get_type_hints(section, include_extras=True)


def walk(section: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key and its type; a section's type is its dataclass."""
    for name, hint in hints(section).items():
        yield prefix + name, hint
        if is_dataclass(hint):
            yield from walk(hint, f"{prefix}{name}.")


@functools.cache
def all_keys(schema: type = Config) -> dict[str, Any]:
    """Return flat key -> type, of a whole configuration, sections left out."""
    return {key: hint for key, hint in walk(schema) if not is_dataclass(hint)}


@functools.cache
def sections(schema: type = Config) -> dict[str, type]:
    """Return flat key -> dataclass, of the sections of a whole configuration."""
    return {key: hint for key, hint in walk(schema) if is_dataclass(hint)}


def known(key: str, schema: type = Config) -> bool:
    """Return whether the schema has the key, or a mapping of the user's own that the key is a part of."""
    keys = all_keys(schema)
    if key in keys:
        return True
    return any(key.startswith(f"{parent}.") and any(map(_is_mapping, _alternatives(keys[parent]))) for parent in keys)


def get(config: Any, key: str) -> Any:
    """Return the value of a flat key."""
    return functools.reduce(getattr, key.split("."), config)


def flat(config: Any) -> dict[str, Any]:
    """Return flat key -> value, of every key."""
    return {key: get(config, key) for key in all_keys(type(config))}


def as_json(config: Any) -> dict[str, Any]:
    """Return flat key -> value, of every key, as a JSON file would give it back, without secrets.

    It is recorded, hashed and compared: a run with another secret is the same run.
    """
    shown = {key: redacted(thaw(value), key) for key, value in flat(config).items()}
    return json.loads(json.dumps(shown, default=str))


def replaced(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return the configuration with the values of these flat keys."""
    for key, value in changes.items():
        config = _replace(config, key.split("."), value)
    return config


def _replace(section: Any, path: list[str], value: Any) -> Any:
    name, rest = path[0], path[1:]
    return dataclasses.replace(section, **{name: _replace(getattr(section, name), rest, value) if rest else value})


def as_recorded(config: Any) -> dict[str, Any]:
    """Return a configuration as nested dicts and lists, without secrets: what a run writes, and sends to loggers."""
    return redacted(as_tree(config))


def as_tree(section: Any) -> dict[str, Any]:
    """Return a section as nested dicts and lists."""
    return {
        field.name: as_tree(value) if is_dataclass(value := getattr(section, field.name)) else thaw(value)
        for field in dataclasses.fields(section)
    }


# --- values ---


def parse(hint: Any, value: Any) -> Any:
    """Return the value as the type requires it.

    Raises:
        Mismatch: the type or a limit of it refuses the value.
    """
    if get_origin(hint) is Annotated:
        base, *limits = get_args(hint)
        if base is str and not isinstance(value, str):
            # a name that is no text: the list of names says more than the type
            choice = next((one.rule for one in limits if one.rule.startswith("one of ")), None)
            if choice is not None:
                raise Mismatch(choice)
        result = parse(base, value)
        for limit in limits:
            if isinstance(limit, Limit) and not limit.holds(result):
                raise Mismatch(limit.rule)
        return result
    if get_origin(hint) in (Union, types.UnionType):
        return _parse_union(_alternatives(hint), value)
    if get_origin(hint) is Literal:
        if value in get_args(hint) and isinstance(value, str):
            return value
        raise Mismatch(f"one of {', '.join(get_args(hint))}")
    if get_origin(hint) is tuple:
        return _parse_sequence(get_args(hint)[0], value)
    if _is_mapping(hint):
        if isinstance(value, Mapping):
            return freeze(value)
        raise Mismatch(MAPPING)
    return _SCALARS[hint](value)


def is_choice(hint: Any) -> bool:
    """Return whether a key's values are fixed: one of some names, or none."""
    return all(get_origin(part) is Literal for part in _alternatives(hint) if part is not type(None))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_mapping(hint: Any) -> bool:
    return get_origin(hint) is Mapping


def _parse_union(alternatives: tuple[Any, ...], value: Any) -> Any:
    (hint,) = (part for part in alternatives if part is not type(None))
    if value is None:
        return None
    try:
        return parse(hint, value)
    except Mismatch as error:
        raise Mismatch(f"{error}, or null") from None


def _parse_sequence(item: Any, value: Any) -> tuple[Any, ...]:
    items = value if isinstance(value, SEQUENCES) else (value,)  # a single value stands for a list of one
    return tuple(parse(item, entry) for entry in items)


def _parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise Mismatch("True or False")


def _parse_int(value: Any) -> int:
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:  # 1e3 is a count too
        if abs(value) < 2**63:  # tensors and files hold no larger ones, and no float overflows in a plan
            return int(value)
        raise Mismatch("a whole number below 2**63")
    raise Mismatch("a whole number")


def _parse_float(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    raise Mismatch("a number")


def _parse_str(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):  # trainer.experiment_name=7
        return str(value)
    raise Mismatch("text (quote what looks like something else: key=\"'1e-6'\")")


def _parse_number_or_text(value: Any) -> Any:
    if isinstance(value, str):
        return value
    try:
        return _parse_float(value)
    except Mismatch:
        raise Mismatch("a number or text") from None


_SCALARS = {
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    str: _parse_str,
    NumberOrText: _parse_number_or_text,
}
