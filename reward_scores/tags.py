"""Find the text between two tags in linear time: a regular expression is quadratic in tags that
nothing closes.

Attributes and tags inside a tag of the same name are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def between(text: str, tag: str, one_line: bool = False) -> list[str]:
    """Return the contents of ``<tag>...</tag>`` in order, not overlapping; within a line each, if
    ``one_line``."""
    if one_line:
        return [content for line in text.split("\n") for content in between(line, tag)]
    opening = f"<{tag}>"
    closing = f"</{tag}>"
    found = []
    at = 0
    while True:
        start = text.find(opening, at)
        end = text.find(closing, start + len(opening)) if start >= 0 else -1
        if end < 0:
            return found
        found.append(text[start + len(opening) : end])
        at = end + len(closing)


def opened_tag(extra_info: Mapping[str, Any] | None, tag: str) -> str:
    """Return ``<tag>`` where the prompt's end opened it, so that it is no part of the response;
    else nothing.

    The reward layer says so in ``extra_info["rollout"]``; a scorer never sees the prompt.
    """
    opened = ((extra_info or {}).get("rollout") or {}).get("opened_tag")
    return opened if opened == f"<{tag}>" else ""
