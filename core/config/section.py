"""What the schema is written with: types with bounds, keys with a role, sections, problems.

A section is a pydantic model: frozen, strict, without unknown keys and without NaN. Three types
accept what YAML and the command line write in another form: ``1e3`` for a count, a number for a
name, a single text for a list.
"""

from __future__ import annotations

import copyreg
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from types import MappingProxyType
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError, core_schema

from core.errors import one_line
from core.secret_keys import hidden


def freeze(value: Any) -> Any:
    """Return read-only mappings with text keys, and tuples for lists, all the way down."""
    if isinstance(value, Mapping):
        return MappingProxyType({str(key): freeze(item) for key, item in value.items()})
    return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value


def thaw(value: Any) -> Any:
    """Return the reverse of :func:`freeze`: dicts and lists, as YAML and OmegaConf require them."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    return list(map(thaw, value)) if isinstance(value, list | tuple) else value


# A configuration travels to the actors of Ray by pickle, which lacks a form for these mappings
copyreg.pickle(MappingProxyType, lambda mapping: (freeze, (dict(mapping),)))
EMPTY: Mapping[str, Any] = freeze({})

# --- types: pydantic validates their bounds, and --help prints them ---


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
    """Return the limit of a name: one of ``known``, or the path of a user's function or class."""
    rule = f"one of {', '.join(known)}, or {OWN_CODE}"
    return Limit(rule, lambda value: value in known or bool(CODE_PATH.fullmatch(value)))


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    too_large = isinstance(value, int) and abs(value) >= 2**63  # more than a tensor holds
    return refuse("a whole number below 2**63") if too_large else value


def _text(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if whole else value  # trainer.experiment_name=7


def _several(value: Any) -> Any:
    if value is None:
        return None
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _mapping(value: Any) -> Any:
    return freeze(value) if isinstance(value, Mapping) else refuse(MAPPING)


def _is_name(value: str) -> bool:
    plain = value == value.strip() and value.isprintable() and not {*"/\\"} & {*value}
    return plain and value[:1] not in ("", ".", "-") and len(value.encode(errors="replace")) <= 200


def _is_day(value: str) -> bool:
    try:
        return date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


def _is_frequency(value: int | str) -> bool:
    return value == "after_each_epoch" or not isinstance(value, str) and value >= -1


def _are_betas(values: Sequence[float]) -> bool:
    return len(values) == 2 and all(0 <= beta < 1 for beta in values)


MAPPING = "a mapping, as in {name: value}"
NAME = (
    "a name of at most 200 bytes without /, \\, line breaks, outer spaces, "
    "and a dot or a dash in front"
)
# Part of a path, of commands and of services' pages
Name = Annotated[str, BeforeValidator(_text), Limit(NAME, _is_name)]
Day = Annotated[str, Limit("a date as 2026-01-31", _is_day)]
Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Limit("at least 1", lambda v: v >= 1)]
Size = Annotated[Whole, Limit("at least 0", lambda v: v >= 0)]
OffOrCount = Annotated[Whole, Limit("-1 (off) or at least 1", lambda v: v == -1 or v >= 1)]
OffOrSize = Annotated[Whole, Limit("-1 (off) or at least 0", lambda v: v >= -1)]
SaveFrequency = Annotated[int | str, Limit("at least -1, or after_each_epoch", _is_frequency)]
Positive = Annotated[float, Limit("above 0", lambda v: v > 0)]
NonNegative = Annotated[float, Limit("at least 0", lambda v: v >= 0)]
Share = Annotated[float, Limit("between 0 and 1", lambda v: 0 <= v <= 1)]
PositiveShare = Annotated[float, Limit("above 0 and at most 1", lambda v: 0 < v <= 1)]
ClipLow = Annotated[float, Limit("at least 0 and below 1", lambda v: 0 <= v < 1)]
AboveOne = Annotated[float, Limit("above 1", lambda v: v > 1)]
Several = BeforeValidator(_several)
Betas = Annotated[tuple[float, ...], Several, Limit("two numbers in [0, 1)", _are_betas)]
Texts = Annotated[tuple[str, ...], Several]
Paths = Annotated[Texts, Limit("at least one path", lambda v: len(v) > 0 and all(v))]
PathsOrNone = Annotated[Texts, Limit("paths, or [] for none", all)]
Names = Annotated[Texts, Limit("at least one name", lambda v: len(v) > 0 and all(v))]
# Keys that are another library's, or the user's own
Open = Annotated[Mapping[str, Any], PlainValidator(_mapping)]
DType = Literal["bfloat16", "bf16", "float32", "fp32"]
FULL_PRECISION = ("float32", "fp32")

# --- keys ---

# Roles: what a change of a key means for a run that is resumed, or compared with another.
IDENTITY = "identity"  # decides what is trained or how it is measured: makes another run
FILES = "files"  # names what lies elsewhere: the content counts, whose hash a run records
EXECUTION = "execution"  # where, how fast and how long: only rounding and timing may differ
BOOKKEEPING = "bookkeeping"  # what is recorded, watched and kept: no number depends on it


@dataclass(frozen=True)
class Condition:
    """When a key has an effect: ``holds`` of the configuration and of the key's own section.

    ``because`` is the reason that is printed where it does not hold. In it ``{section}`` stands for
    the section's own key.
    """

    holds: Callable[[Any, Any], bool]
    because: str


def beside(name: str, value: Any = None) -> Condition:
    """Return the condition that another key of the section is set, or has this value."""
    if value is None:
        return Condition(
            lambda config, section: bool(getattr(section, name)), f"needs {{section}}.{name}"
        )
    because = f"needs {{section}}.{name}={value}"
    return Condition(lambda config, section: getattr(section, name) == value, because)


def key(
    default: Any,
    text: str = "",
    used_if: Condition | None = None,
    *,
    role: str | None = None,
    follows: str = "",
) -> Any:
    """Return the field of a key. A role that is not given is the section's, at last IDENTITY.

    ``follows`` is the key whose value a null stands for.
    """
    marks = {"role": role, "used_if": used_if, "follows": follows}
    description = f"{text}; null: {follows}" if follows else text
    return Field(default, description=description, json_schema_extra=marks)


files = functools.partial(key, role=FILES)
execution = functools.partial(key, role=EXECUTION)
bookkeeping = functools.partial(key, role=BOOKKEEPING)


class Section(BaseModel):
    """A section of the configuration; a subclass lists its keys with type and :func:`key`."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    def replace(self, **changes: Any) -> Section:
        """Return the section with other values for these fields, which are not validated again."""
        return self.model_copy(update=changes)


def mark(section: type[Section], name: str, which: str) -> Any:
    """Return what a field is marked with: ``role``, ``used_if`` or ``follows``."""
    return (section.model_fields[name].json_schema_extra or {}).get(which)


@functools.cache
def hints(section: type[Section]) -> dict[str, Any]:
    """Return field name -> type, of one section, in the order of its definition."""
    return {name: field.rebuild_annotation() for name, field in section.model_fields.items()}


def is_section(hint: Any) -> bool:
    """Return whether a type is that of a section."""
    return isinstance(hint, type) and issubclass(hint, Section)


# --- problems, and values in messages ---


@dataclass(frozen=True)
class Problem:
    """A key, its value, the rule that it breaks and what to do; as text one line."""

    key: str
    value: Any
    rule: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.key}={brief(show(self.value, self.key))}: {self.rule}"
        return one_line(f"{text}; {self.fix}" if self.fix else text)


def show(value: Any, key: str = "") -> str:
    """Return the value of a key as one would type it, in one line, without secrets."""
    value = hidden(thaw(value), key)
    if value is None or isinstance(value, bool | list | dict):
        return one_line(json.dumps(value, default=str, ensure_ascii=False))
    return repr(value) if isinstance(value, float) else one_line(str(value))


def brief(text: str) -> str:
    """Return a text for a message: in one line, and cut if it is long."""
    return one_line(text if len(text) <= 300 else f"{text[:200]}... ({len(text)} characters)")


# --- from an untyped tree ---

UNKNOWN = "unknown key"
NO_SECTION = "is a section of the configuration"


def build(schema: type[Section], tree: Any) -> tuple[Any, list[tuple[str, Any, str]]]:
    """Return the typed configuration of a tree, and (key, value, rule) of each refused value.

    A refused key keeps its default.
    """
    refused: dict[str, tuple[str, Any, str]] = {}
    while True:
        try:
            return schema.model_validate(tree), list(refused.values())
        except ValidationError as error:
            paths = {}
            for details in error.errors(include_url=False):
                paths[_key_path(schema, details["loc"])] = _rule(details)
        for path, rule in paths.items():
            value = functools.reduce(lambda node, name: node[name], path, tree)
            refused[".".join(path)] = (".".join(path), value, rule)
        for path in paths:
            tree = without(tree, path)


def _rule(details: Mapping[str, Any]) -> str:
    """Return the rule of an error of pydantic, which completes ``key=value: ...``."""
    if details["type"] == "extra_forbidden":
        return UNKNOWN
    if details["type"] == "model_type":
        return NO_SECTION
    must = "must be one of " if details["type"] == "literal_error" else "must be "
    rule = details["msg"].replace("Input should be ", must)
    if details["type"] == "string_type":
        rule += " (quote what looks like something else: key=\"'1e-6'\")"
    return rule


def _key_path(schema: Any, location: Sequence[int | str]) -> tuple[str, ...]:
    """Return the part of an error's location that names a key, without items of lists."""
    depth = 0
    while is_section(schema) and depth < len(location):
        schema = hints(schema).get(str(location[depth]))
        depth += 1
    return tuple(map(str, location[:depth]))


def without(tree: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Return a tree without the key of this path."""
    name, *rest = path
    if rest:
        return {**tree, name: without(tree[name], rest)}
    return {key: value for key, value in tree.items() if str(key) != name}
