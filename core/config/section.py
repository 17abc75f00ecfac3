"""Building blocks of the configuration schema: bounded types, keys with a role, sections, problems.

A section is a pydantic model: frozen, strict, without unknown keys and without NaN. Whole, Name and
AllowSingle accept other forms, as YAML and the command line write them: ``1e3`` for a count, a
number for a name, a single text for a list.
"""

from __future__ import annotations

import copy
import functools
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError, core_schema

from core.errors import one_line
from core.secret_keys import hidden

# --- types: pydantic validates their bounds, and --help prints them ---


@dataclass(frozen=True)
class Limit:
    """A bound on a value of the right type; ``requirement`` completes "must be ..."."""

    requirement: str
    holds: Callable[[Any], bool]
    # Names to suggest for a misspelt value; others may be allowed too
    names: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        if not self.holds(value):
            refuse(self.requirement)
        return value


def refuse(requirement: str) -> NoReturn:
    """Raise the error that pydantic collects for a value: "must be ..."."""
    # pydantic fills in {requirement}
    raise PydanticCustomError("limit", "must be {requirement}", {"requirement": requirement})


OWN_CODE_HINT = "your own as package.module:function or path/file.py:function"
CODE_PATH = re.compile(r"(?:[\w.]+|[^:]+\.py):[A-Za-z_]\w*")


def name_or_code_path(*known: str) -> Limit:
    """Return a Limit: the value is one of ``known``, or the path of a function or class."""
    requirement = f"one of {', '.join(known)}, or {OWN_CODE_HINT}" if known else OWN_CODE_HINT

    def holds(value: str) -> bool:
        return value in known or bool(CODE_PATH.fullmatch(value))

    return Limit(requirement, holds, known)


def names_of(hint: Any) -> tuple[str, ...]:
    """Return the names that a type admits; none if it admits any text."""
    if isinstance(hint, Limit):
        return hint.names
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return tuple(part for part in parts if isinstance(part, str))
    # The members of a union; of an Annotated type the type and its Limit
    return tuple(name for part in parts for name in names_of(part))


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    # Tensors hold whole numbers as int64
    if isinstance(value, int) and abs(value) >= 2**63:
        refuse("a whole number below 2**63")
    return value


def _text(value: Any) -> Any:
    # In trainer.experiment_name=7 the name is read as a number
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number else value


def _allow_single(value: Any) -> Any:
    if value is None:
        return None
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _mapping(value: Any) -> Any:
    if not isinstance(value, Mapping):
        refuse("a mapping, as in {name: value}")
    return dict(value)


# First no dot, slash, backslash, blank or dash; then no slashes; last no blank
NAME = re.compile(r"[^./\\\s-][^/\\]*(?<!\s)")


def _is_name(value: str) -> bool:
    is_short = len(value.encode(errors="replace")) <= 200
    return is_short and value.isprintable() and bool(NAME.fullmatch(value))


def _is_day(value: str) -> bool:
    try:
        # fromisoformat also reads 20260131
        return date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


def _is_frequency(value: int | str) -> bool:
    return value == "after_each_epoch" or (not isinstance(value, str) and value >= -1)


NAME_REQUIREMENT = (
    "a name of at most 200 bytes without / or \\, line breaks or outer spaces, that starts with "
    "neither a dot nor a dash"
)
# Such a name becomes part of file paths, of shell commands and of a logging service's pages
Name = Annotated[str, BeforeValidator(_text), Limit(NAME_REQUIREMENT, _is_name)]
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
# A single value is accepted for a list of one
AllowSingle = BeforeValidator(_allow_single)
Betas = Annotated[
    tuple[float, ...],
    AllowSingle,
    Limit("two numbers in [0, 1)", lambda v: len(v) == 2 and all(0 <= beta < 1 for beta in v)),
]
Texts = Annotated[tuple[str, ...], AllowSingle]
Paths = Annotated[Texts, Limit("at least one path", lambda v: len(v) > 0 and all(v))]
# The list may be empty, its paths may not
PathsMaybeEmpty = Annotated[Texts, Limit("paths, or [] for none", lambda v: all(v))]
ModuleNames = Annotated[Texts, Limit("at least one name", lambda v: len(v) > 0 and all(v))]
# A mapping whose keys the schema does not check: another library or the user defines them
Open = Annotated[dict[str, Any], PlainValidator(_mapping)]
DType = Literal["bfloat16", "bf16", "float32", "fp32"]
FULL_PRECISION = ("float32", "fp32")

# --- keys ---

# Roles: what a change of a key means for a run that is resumed, or compared with another.

# The key decides what is trained or how it is measured. A change makes another run.
IDENTITY = "identity"
# The key names files. A change of their content makes another run, so a run records their hash.
FILES = "files"
# The key decides where and how fast a run computes, and when it ends. The steps that two such runs
# share differ in rounding and timing alone.
EXECUTION = "execution"
# The key decides what is recorded, watched or kept. No result depends on it.
BOOKKEEPING = "bookkeeping"


@dataclass(frozen=True)
class Condition:
    """The condition under which a key has an effect.

    ``holds(config, section)`` receives the configuration and the section that has the key. If the
    result is False, ``because`` is printed as the reason, with the section's path in place of
    ``{section}``.
    """

    holds: Callable[[Any, Any], bool]
    because: str


def needs(name: str, value: Any = None) -> Condition:
    """Return the condition that a key is set, or has this value.

    ``name`` with dots is the full path of a key. Without dots it is a key in the same section as
    the key that has this condition.
    """

    def holds(config: Any, section: Any) -> bool:
        start = config if "." in name else section
        setting = operator.attrgetter(name)(start)
        return bool(setting) if value is None else setting == value

    # Whoever prints the condition fills in {section}
    needed = name if "." in name else "{section}." + name
    if value is not None:
        needed += f"={value}"
    return Condition(holds, f"needs {needed}")


def key(
    default: Any = None,
    text: str = "",
    used_if: Condition | None = None,
    *,
    role: str | None = None,
    follows: str = "",
) -> Any:
    """Return the field of a key: its default, its text in ``--help``, when it is used, its role.

    If ``role`` is None, it is that of the nearest section around the key that has one, or IDENTITY.
    If ``follows`` names another key, a null value stands for that key's value.
    """
    options = {"role": role, "used_if": used_if, "follows": follows}
    parts = [text, f"null: {follows}" if follows else ""]
    description = "; ".join(part for part in parts if part)
    return Field(default, description=description, json_schema_extra=options)


# ``key`` with a role, as in ``path: str = files("", "the model's folder")``
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


def key_option(section: type[Section], name: str, option: str) -> Any:
    """Return the ``role``, ``used_if`` or ``follows`` of a key, as :func:`key` has them."""
    return (section.model_fields[name].json_schema_extra or {}).get(option)


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
    """A key, its value, the rule that the value breaks, and the fix; ``str()`` is one line."""

    key: str
    value: Any
    rule: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.key}={brief(show(self.value, self.key))}: {self.rule}"
        if self.fix:
            text += f"; {self.fix}"
        return one_line(text)  # the rule and the fix may quote input that has line breaks


def show(value: Any, key_path: str = "") -> str:
    """Return the value of a key as one would type it, in one line, without secrets."""
    value = hidden(value, key_path)
    if value is None or isinstance(value, bool | list | tuple | dict):
        text = json.dumps(value, default=str, ensure_ascii=False)
    else:
        text = repr(value) if isinstance(value, float) else str(value)
    return one_line(text)


def brief(text: str) -> str:
    """Return a text for a message: in one line, and cut if it is long."""
    if len(text) > 300:
        text = f"{text[:200]}... ({len(text)} characters)"
    return one_line(text)


# --- from an untyped tree ---

QUOTED = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?|true|false", re.IGNORECASE)  # a number, or a switch
RULE_UNKNOWN = "unknown key"
RULE_SECTION = "is a section of the configuration"


def build(schema: type[Section], tree: Mapping[str, Any]) -> tuple[Any, list[tuple[str, Any, str]]]:
    """Return the typed configuration of a tree, and (key, value, rule) of each refused value.

    Refused keys are removed, so that they get their defaults, and the rest is tried again.
    """
    tree = copy.deepcopy(tree)
    refused = []
    # It ends: each round removes at least one key, and every key has a default
    while True:
        try:
            return schema.model_validate(tree), refused
        except ValidationError as error:
            errors = error.errors(include_url=False)
        # Path of a key -> its errors: of a list one for each wrong item, of a union for each type
        by_path: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
        for details in errors:
            by_path.setdefault(_key_path(schema, details["loc"]), []).append(details)
        for path, details_of_key in by_path.items():
            *section_names, name = path
            parent = functools.reduce(operator.getitem, section_names, tree)
            value = parent.pop(name)
            rules = list(dict.fromkeys(map(_rule, details_of_key)))
            rule = rules[0] if len(rules) == 1 else _rule_of_key(schema, path, rules)
            refused.append((".".join(path), value, rule))


def _rule(details: Mapping[str, Any]) -> str:
    """Return a pydantic error's rule, to be put behind ``key=value: ``."""
    if details["type"] == "extra_forbidden":
        return RULE_UNKNOWN
    if details["type"] == "model_type":
        return RULE_SECTION
    # pydantic's messages begin with "Input should be "; its list of literals lacks "one of"
    must = "must be one of " if details["type"] == "literal_error" else "must be "
    rule = details["msg"].replace("Input should be ", must)
    given, of_number = details["input"], details["type"] in ("int_type", "float_type", "bool_type")
    if of_number and isinstance(given, str) and QUOTED.fullmatch(given):
        rule += ", and is text: take the quotes away"
    if details["type"] == "string_type":
        rule += " (quote a text that YAML reads as another type: key=\"'1e-6'\")"
    return rule


def _rule_of_key(schema: Any, path: Sequence[str], rules: Sequence[str]) -> str:
    """Return the requirement of the key's Limit; the rules of its parts or types if it has none."""
    hint = functools.reduce(lambda section, name: hints(section)[name], path, schema)
    limits = [part for part in get_args(hint) if isinstance(part, Limit)]
    return f"must be {limits[0].requirement}" if limits else " or ".join(rules)


def _key_path(schema: Any, location: Sequence[int | str]) -> tuple[str, ...]:
    """Return the path of the key that an error belongs to.

    That is pydantic's location without the indices of lists and the types of unions.
    """
    path: list[str] = []
    hint = schema  # the type at the end of path
    for step in map(str, location):
        if not is_section(hint):
            break
        hint = hints(hint).get(step)
        path.append(step)
    return tuple(path)
