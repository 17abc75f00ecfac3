"""Rewrite an answer as PRIME's published scorer runs it: a script in a function behind many
imports.

An answer is read by Python's parser here, which can take long, or all memory, for a hostile text:
``prime_code`` runs this file in its sandbox. It imports nothing but the standard library.
"""

from __future__ import annotations

import ast

NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)  # what the parser raises
_MODULES = """
string re datetime collections heapq bisect copy math random statistics itertools functools
operator io sys json builtins typing
"""
_IMPORTED = _MODULES.split()
HEAD = "\n".join(
    [
        *(f"from {name} import *" for name in _IMPORTED),
        *(f"import {name}" for name in _IMPORTED[:-2]),
    ]
    + ["sys.setrecursionlimit(6 * 10**5)", ""]
)
# As published, names bound to the streams before the call lead nowhere.
_BEFORE = """import io as _io, sys as _sys
_streams = _sys.stdin, _sys.stdout
_sys.stdin, _sys.stdout = _io.StringIO(), _io.StringIO()
"""


def prepared(source: str) -> tuple[str, bool, bool]:
    """Return the script in a function, whether that is Python, and whether the answer itself is."""
    script = as_function(source)
    return script, _parses(script), _parses(source)


def as_function(source: str) -> str:
    """Return the script as published: in a function ``code`` behind many imports, its main guard
    taken away."""
    lines = []
    inside = False
    for line in _without_guard(source).split("\n"):
        imports = line.startswith(("from ", "import "))
        if not imports and not inside:
            lines += ["stdin = sys.stdin", "stdout = sys.stdout", "def code():"]
            inside = True
        lines.append(f"\t{line}" if inside else line)
    return _BEFORE + HEAD + "\n".join(lines) + "\n"


def _without_guard(source: str) -> str:
    try:
        body = ast.parse(source).body
        last = body[-1] if body else None
        if isinstance(last, ast.If) and ast.unparse(last.test).strip() == "__name__ == '__main__'":
            return f"{ast.unparse(body[:-1])}\n{ast.unparse(last.body)}"
    except NO_PYTHON:
        return source
    return source


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except NO_PYTHON:
        return False
    return True
