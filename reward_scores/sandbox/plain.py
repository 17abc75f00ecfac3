"""Encode values as plain data, the form in which results leave the process of untrusted code.

What is decoded is built here from exact built-in types, so that no class, ``__eq__`` or ``__hash__`` of the program
crosses the border; any other object stays where it is and is known by a number.
"""

from __future__ import annotations

import builtins
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

EXACT_INTEGER = 1 << 53
MAX_BYTES = 1 << 22  # of one message, as of what a script prints; its objects take a hundred times that in memory
MAX_DEPTH = 200  # of brackets in one message: decoding calls itself, whatever called it
HARD_KEYS = 1000  # of a message whose hashes a program can choose: 1000 equal ones cost milliseconds, 1e5 minutes
_SEQUENCES = {"l": list, "t": tuple, "s": set, "z": frozenset}


class NotPlain(ValueError):
    """A message that is no plain value."""


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """Return JSON for the value. ``keep(object)`` gives the number of an object that is not plain data.

    Subclasses of plain types (named tuples, counters) become the plain type.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__index__(value) + 0
        return number if abs(number) < EXACT_INTEGER else ["i", hex(number)]
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return ["b", bytes(value).hex()]
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if isinstance(value, range):
        return ["r", *(encode(part, keep) for part in (value.start, value.stop, value.step))]
    if isinstance(value, dict):
        return ["d", *([encode(key, keep), encode(item, keep)] for key, item in dict.items(value))]
    for tag, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [tag, *(encode(item, keep) for item in kind.__iter__(value))]
    if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
        return ["n", value.__name__]
    return ["h", keep(value)]


def decode(message: Any, handle: Callable[[int], Any]) -> Any:
    """Return the value of :func:`encode`'s JSON. ``handle(number)`` stands for an object. Raises NotPlain."""
    return _Decoder(handle).decode(message)


class _Decoder:
    """A decoder of one message."""

    def __init__(self, handle: Callable[[int], Any]):
        self.handle, self.hard_keys = handle, 0

    def decode(self, message: Any) -> Any:
        if not isinstance(message, list):
            if message is None or isinstance(message, (bool, int, float, str)):
                return message
            raise NotPlain(f"a {type(message).__name__} in a message")
        try:
            return self._tagged(message[0], message[1:])
        except (TypeError, ValueError, IndexError, KeyError, OverflowError, RecursionError, MemoryError) as error:
            raise NotPlain(f"a message that is no value: {type(error).__name__}: {error}") from error

    def _tagged(self, tag: Any, parts: list[Any]) -> Any:
        if tag in ("s", "z"):
            return _SEQUENCES[tag](map(self._key, parts))
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](map(self.decode, parts))
        if tag == "d":
            return {self._key(key): self.decode(item) for key, item in parts}
        if tag == "i":
            return int(parts[0], 16)
        if tag == "b":
            return bytes.fromhex(parts[0])
        if tag == "c":
            return complex(*parts)
        if tag == "r":
            return range(*map(self.decode, parts))
        if tag == "n" and isinstance(getattr(builtins, parts[0], None), type):
            return getattr(builtins, parts[0])
        if tag == "h" and type(parts[0]) is int:
            return self.handle(parts[0])
        raise NotPlain(f"an unknown tag {tag!r:.50} in a message")

    def _key(self, message: Any) -> Any:
        """Return a member of a set or a key; the hash of what is not text or a small number can be any number."""
        easy = message is None or type(message) in (bool, str) or (type(message) is int and abs(message) < 1 << 60)
        self.hard_keys += not easy
        if self.hard_keys > HARD_KEYS:
            raise NotPlain(f"more than {HARD_KEYS} keys that are neither texts nor small numbers")
        return self.decode(message)


def dumps(message: Any) -> bytes:
    return json.dumps(message).encode("ascii")


def loads(data: bytes) -> Any:
    """Return the message of these bytes. Raises NotPlain."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise NotPlain(f"not JSON: {error}") from error


def loads_foreign(data: bytes) -> Any:
    """Return a program's message; one that is nested deeply is refused before a recursive reader meets it."""
    brackets = _STRING.sub(b"", data).translate(None, _NO_BRACKETS)
    if max(itertools.accumulate(map(_DEPTH.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise NotPlain(f"more than {MAX_DEPTH} nested brackets")
    return loads(data)


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_DEPTH = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - _DEPTH.keys())
