"""What a key's type leaves open: bounds, and names that a user can extend. pydantic validates, ``--help`` shows."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import GetCoreSchemaHandler, PlainValidator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

PLUGIN = re.compile(r"(?:[\w.]+|[^:]+\.py):[A-Za-z_]\w*")


@dataclass(frozen=True)
class Limit:
    """A rule on a value of the right type; ``rule`` completes "must be ..."."""

    rule: str
    holds: Callable[[Any], bool]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        if not self.holds(value):
            raise PydanticCustomError("limit", "{rule}", {"rule": self.rule})
        return value


def names(*known: str) -> Limit:
    """Return the limit of a name: one of ``known``, or a user's own function or class by its path."""
    own = "your own as package.module:function or path/file.py:function"
    rule = f"one of {', '.join(known)}, or {own}" if known else own
    return Limit(rule, lambda value: value in known or PLUGIN.fullmatch(value) is not None)


def is_plugin(value: str) -> bool:
    """Return whether the value is the path of a user's own function, not a known name."""
    return ":" in value


def _is_name(value: str) -> bool:
    plain = value == value.strip() and value.isprintable() and not {*"/\\"} & {*value}
    return plain and value[:1] not in ("", ".", "-") and len(value.encode(errors="replace")) <= 200


# Part of a path and of commands, in services' pages and in the title of a report
Name = Annotated[
    str,
    Limit(
        "a name of at most 200 bytes without /, \\, line breaks, and spaces around it, that does not begin with a dot "
        "or a dash (a run folder elsewhere is trainer.default_local_dir's to name)",
        _is_name,
    ),
]
Count = Annotated[int, Limit("at least 1", lambda v: v >= 1)]
Size = Annotated[int, Limit("at least 0", lambda v: v >= 0)]
OffOrCount = Annotated[int, Limit("-1 (off) or at least 1", lambda v: v == -1 or v >= 1)]
OffOrSize = Annotated[int, Limit("-1 (off) or at least 0", lambda v: v >= -1)]
Positive = Annotated[float, Limit("above 0", lambda v: v > 0)]
NonNegative = Annotated[float, Limit("at least 0", lambda v: v >= 0)]
Share = Annotated[float, Limit("between 0 and 1", lambda v: 0 <= v <= 1)]
PositiveShare = Annotated[float, Limit("above 0 and at most 1", lambda v: 0 < v <= 1)]
ClipLow = Annotated[float, Limit("at least 0 and below 1", lambda v: 0 <= v < 1)]
AboveOne = Annotated[float, Limit("above 1", lambda v: v > 1)]
Betas = Annotated[
    tuple[float, ...], Limit("two numbers in [0, 1)", lambda v: len(v) == 2 and all(0 <= b < 1 for b in v))
]


def _number_or_text(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    raise PydanticCustomError("limit", "{rule}", {"rule": "a number or text"})


NumberOrText = Annotated[object, PlainValidator(_number_or_text)]  # a float, or text that is read later
NonEmpty = Annotated[tuple[str, ...], Limit("at least one path", lambda v: len(v) > 0 and all(v))]
DType = Literal["bfloat16", "bf16", "float32", "fp32"]
FULL_PRECISION = ("float32", "fp32")
Names = Annotated[tuple[str, ...], Limit("at least one name", lambda v: len(v) > 0 and all(v))]
