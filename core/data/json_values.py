"""Bytes, dates and decimals, which parquet holds and JSON lacks, in a form that JSON can hold.

What scores recorded answers has to get the ground truth that training gives. Text that only looks
like a date stays text. Names of code are not restored, only the values that are listed here.
"""

import base64
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

# Keys of the object that stands for such a value
KIND = "value of kind"
TEXT = "as"


def to_json(value: Any) -> Any:
    """Return a value with an object of KIND and TEXT for each part that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {name: to_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [to_json(part) for part in value]
    kind = type(value).__name__
    if isinstance(value, tuple):  # an entry of parquet's map
        return {KIND: kind, TEXT: [to_json(part) for part in value]}
    if isinstance(value, bytes):
        return {KIND: kind, TEXT: base64.b64encode(value).decode()}
    if isinstance(value, date | time):
        return {KIND: kind, TEXT: value.isoformat()}
    if isinstance(value, timedelta):
        nanoseconds = getattr(value, "nanoseconds", 0)  # of pandas
        return {KIND: kind, TEXT: [value.days, value.seconds, value.microseconds, nanoseconds]}
    if isinstance(value, Decimal):
        return {KIND: kind, TEXT: str(value)}
    return value


def from_json(value: Any) -> Any:
    """Return the value of which :func:`to_json` made this one."""
    if isinstance(value, list):
        return [from_json(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {KIND, TEXT} and value[KIND] in RESTORED:
        return RESTORED[value[KIND]](value[TEXT])
    return {name: from_json(part) for name, part in value.items()}


def _timestamp(text: str) -> Any:
    import pandas  # which pyarrow takes for times in nanoseconds

    return pandas.Timestamp(text)


def _pandas_timedelta(parts: list[int]) -> Any:
    import pandas

    names = ("days", "seconds", "microseconds", "nanoseconds")
    return pandas.Timedelta(**dict(zip(names, parts, strict=True)))


# By the name of the type
RESTORED: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda parts: tuple(from_json(parts)),
    "bytes": base64.b64decode,
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts[:3]),
    "Timestamp": _timestamp,
    "Timedelta": _pandas_timedelta,
    "Decimal": Decimal,
}
