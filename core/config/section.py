"""What the schema is written with: types with bounds, fields with a role, sections; building one of
a tree; problems.

A section is a pydantic model: frozen, strict, without unknown keys, without NaN. What YAML and the
command line write in another form than the type (``1e3`` for a count, one text for a list of one)
is brought into it before validation.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, field_validator
from pydantic_core import PydanticCustomError, core_schema

from core.errors import one_line
from core.secret_keys import hidden


class FrozenDict(dict):
    """Hashable where its values are, picklable, equal to a dict of the same items."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the configuration cannot be changed once it is resolved")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Return mappings as FrozenDict with text keys, sequences as tuples, all the way down."""
    if isinstance(value, Mapping):
        return FrozenDict({str(key): freeze(item) for key, item in value.items()})
    return tuple(freeze(item) for item in value) if isinstance(value, list | tuple) else value


def thaw(value: Any) -> Any:
    """Return the reverse of :func:`freeze`: dicts and lists, as YAML and OmegaConf require them."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    return [thaw(item) for item in value] if isinstance(value, list | tuple) else value


# --- types: bounds, and names that a user can extend; pydantic validates, --help shows ---


@dataclass(frozen=True)
class Limit:
    """A rule on a value of the right type; ``rule`` completes "must be ..."."""

    rule: str
    holds: Callable[[Any], bool]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        return value if self.holds(value) else refuse(self.rule)


def refuse(rule: str) -> NoReturn:
    """Raise what pydantic reports as this rule."""
    raise PydanticCustomError("limit", "must be {rule}", {"rule": rule})


OWN_CODE = "your own as package.module:function or path/file.py:function"
CODE_PATH = re.compile(r"(?:[\w.]+|[^:]+\.py):[A-Za-z_]\w*")


def names(*known: str) -> Limit:
    """Return the limit of a name: one of ``known``, or a user's own function or class by its
    path."""
    return Limit(
        f"one of {', '.join(known)}, or {OWN_CODE}",
        lambda v: v in known or bool(CODE_PATH.fullmatch(v)),
    )


def _is_name(value: str) -> bool:
    plain = value == value.strip() and value.isprintable() and not {*"/\\"} & {*value}
    return plain and value[:1] not in ("", ".", "-") and len(value.encode(errors="replace")) <= 200


def _is_day(value: str) -> bool:
    try:
        return date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


def _number_or_text(value: Any) -> Any:
    number = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )
    return (
        float(value) if number else value if isinstance(value, str) else refuse("a number or text")
    )


def _mapping(value: Any) -> FrozenDict:
    return freeze(value) if isinstance(value, Mapping) else refuse(MAPPING)


MAPPING = "a mapping, as in {name: value}"
NAME = (
    "a name of at most 200 bytes without /, \\, line breaks, outer spaces, and a dot or a dash "
    "in front"
)
Name = Annotated[str, Limit(NAME, _is_name)]  # part of a path, of commands and of services' pages
Day = Annotated[str, Limit("a date as 2026-01-31", _is_day)]
Count = Annotated[int, Limit("at least 1", lambda v: v >= 1)]
Size = Annotated[int, Limit("at least 0", lambda v: v >= 0)]
OffOrCount = Annotated[int, Limit("-1 (off) or at least 1", lambda v: v == -1 or v >= 1)]
OffOrSize = Annotated[int, Limit("-1 (off) or at least 0", lambda v: v >= -1)]
_FREQUENCY = Limit(
    "at least -1, or after_each_epoch", lambda v: v == "after_each_epoch" or str(v) != v and v >= -1
)
SaveFrequency = Annotated[int | str, _FREQUENCY]
Positive = Annotated[float, Limit("above 0", lambda v: v > 0)]
NonNegative = Annotated[float, Limit("at least 0", lambda v: v >= 0)]
Share = Annotated[float, Limit("between 0 and 1", lambda v: 0 <= v <= 1)]
PositiveShare = Annotated[float, Limit("above 0 and at most 1", lambda v: 0 < v <= 1)]
ClipLow = Annotated[float, Limit("at least 0 and below 1", lambda v: 0 <= v < 1)]
AboveOne = Annotated[float, Limit("above 1", lambda v: v > 1)]
_BETAS = Limit("two numbers in [0, 1)", lambda v: len(v) == 2 and all(0 <= b < 1 for b in v))
Betas = Annotated[tuple[float, ...], _BETAS]
# A float, or text that is read later
NumberOrText = Annotated[object, PlainValidator(_number_or_text)]
Paths = Annotated[tuple[str, ...], Limit("at least one path", lambda v: len(v) > 0 and all(v))]
PathsOrNone = Annotated[tuple[str, ...], Limit("paths, or [] for none", lambda v: all(v))]
Names = Annotated[tuple[str, ...], Limit("at least one name", lambda v: len(v) > 0 and all(v))]
# Keys that are another library's, or the user's own
Open = Annotated[Mapping[str, Any], PlainValidator(_mapping)]
DType = Literal["bfloat16", "bf16", "float32", "fp32"]
FULL_PRECISION = ("float32", "fp32")

# --- fields ---

# Roles: what a change of a key means for a run that is resumed, or compared with another
# It decides what is trained, or how it is measured: another value makes another run
IDENTITY = "identity"
FILES = "files"  # it names what lies elsewhere: the content counts, whose hash a run records
# Where, how fast and how long: no other objective, but rounding and timing may differ
EXECUTION = "execution"
# What is recorded, watched and kept: no number of the run depends on it
BOOKKEEPING = "bookkeeping"


def key(
    default: Any, text: str = "", used_if: str = "", *, role: str | None = None, follows: str = ""
) -> Any:
    """Return the field of a key. A role that is not given is that of the section around it, at last
    IDENTITY.

    ``used_if`` is a condition as ``rules.unmet`` reads it. ``follows`` is the key whose value a
    null stands for.
    """
    marks = {"role": role, "used_if": used_if, "follows": follows}
    return Field(
        default,
        description=f"{text}; null: {follows}" if follows else text,
        json_schema_extra=marks,
    )


files = functools.partial(key, role=FILES)
execution = functools.partial(key, role=EXECUTION)
bookkeeping = functools.partial(key, role=BOOKKEEPING)


class Section(BaseModel):
    """A section of the configuration; a subclass lists its keys, each with its type and
    :func:`key`."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _in_the_form_of_its_type(cls, value: Any, info: Any) -> Any:
        return _typed(hints(cls)[info.field_name], value)

    def replace(self, **changes: Any) -> Section:
        """Return the section with other values for these fields, which are not validated again."""
        return self.model_copy(update=changes)


def mark(section: type[Section], name: str, which: str) -> Any:
    """Return what a field is marked with: ``role``, ``used_if`` or ``follows``."""
    return (section.model_fields[name].json_schema_extra or {}).get(which)


@functools.cache
def hints(section: type[Section]) -> dict[str, Any]:
    """Return field name -> type, of one section, in the order of its definition."""
    found = get_type_hints(section, include_extras=True)
    return {name: found[name] for name in section.model_fields}


def is_section(hint: Any) -> bool:
    """Return whether a type is that of a section."""
    return isinstance(hint, type) and issubclass(hint, Section)


def optional(hint: Any) -> Any:
    """Return the type without None."""
    union = get_origin(hint) in (Union, types.UnionType)
    return next(part for part in get_args(hint) if part is not type(None)) if union else hint


def _typed(hint: Any, value: Any) -> Any:
    """Return a value as its type writes it, where that is clear; pydantic judges the rest."""
    hint = optional(hint)
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(hint) is tuple and value is not None:  # a single value stands for a list of one
        items = value if isinstance(value, list | tuple) else (value,)
        return tuple(_typed(get_args(hint)[0], item) for item in items)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if hint is int and value == value // 1:  # 1e3 is a count too
        # As tensors hold
        return int(value) if abs(value) < 2**63 else refuse("a whole number below 2**63")
    if hint is float:
        return float(value) if abs(value) <= sys.float_info.max else refuse("a number")
    # trainer.experiment_name=7
    return str(value) if hint is str and isinstance(value, int) else value


# --- problems, and values as messages show them: in one line, without secrets ---


@dataclass(frozen=True)
class Problem:
    """A key, its value, the rule that it breaks and what to do; as text one line."""

    key: str
    value: Any
    rule: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.key}={brief(show(self.value, self.key))}: {self.rule}"
        return one_line(text + (f"; {self.fix}" if self.fix else ""))


def show(value: Any, key: str = "") -> str:
    """Return the value of a key for a message: as one would type it, in one line, without
    secrets."""
    return typed(hidden(thaw(value), key))


def typed(value: Any) -> str:
    """Return a value as one would type it on the command line, in one line. Only for what runs: it
    shows secrets."""
    value = thaw(value)
    if value is None or isinstance(value, bool | list | dict):
        return one_line(json.dumps(value, default=str, ensure_ascii=False))
    return repr(value) if isinstance(value, float) else one_line(str(value))


def brief(text: str) -> str:
    """Return what was typed for a message: in one line, cut where it is longer than a screen's
    width."""
    return one_line(text if len(text) <= 300 else f"{text[:200]}... ({len(text)} characters)")


# --- from an untyped tree ---

UNKNOWN, NO_SECTION = "unknown key", "is a section of the configuration"


def build(schema: type[Section], tree: Any) -> tuple[Any, list[tuple[str, Any, str]]]:
    """Return the typed configuration of a tree, and (key, value, rule) of what was refused; that
    keeps its default."""
    refused: dict[str, tuple[str, Any, str]] = {}
    while True:
        try:
            return schema.model_validate(tree), list(refused.values())
        except ValidationError as error:
            found = {_path(schema, one["loc"]): one for one in error.errors(include_url=False)}
        for path, one in found.items():
            must = "must be one of " if one["type"] == "literal_error" else "must be "
            rule = {"extra_forbidden": UNKNOWN, "model_type": NO_SECTION}.get(one["type"])
            rule = rule or one["msg"].replace("Input should be ", must)
            rule += (
                " (quote what looks like something else: key=\"'1e-6'\")"
                if one["type"] == "string_type"
                else ""
            )
            value = functools.reduce(lambda node, name: node[name], path, tree)
            refused[".".join(path)] = (".".join(path), value, rule)
        for path in found:
            tree = without(tree, path)


def _path(schema: type[Section], loc: Sequence[int | str]) -> tuple[str, ...]:
    """Return the part of an error's location that names a key: items of lists and the like are left
    out."""
    depth = 0
    while is_section(schema) and depth < len(loc):
        schema, depth = hints(schema).get(str(loc[depth])), depth + 1
    return tuple(map(str, loc[:depth]))


def without(tree: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Return a tree without the key of this path."""
    name, *rest = path
    if rest:
        return {**tree, name: without(tree[name], rest)}
    return {key: value for key, value in tree.items() if str(key) != name}
