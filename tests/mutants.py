"""Programs with one thing changed: a condition turned around, an operator or a number replaced, a result left out."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

_SWAPPED = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult},
    **{ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
}


def mutants(source: str) -> Iterator[str]:
    """Every one, in the order of the source. Some are equivalent to it."""
    tree = ast.parse(source)
    for number, node in enumerate(ast.walk(tree)):
        if _change(copy.deepcopy(node)):
            changed = copy.deepcopy(tree)
            for place, copied in enumerate(ast.walk(changed)):
                if place == number:
                    _change(copied)
                    break
            yield ast.unparse(ast.fix_missing_locations(changed))


def without_results(source: str) -> str:
    """The program with every function returning nothing."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Return):
            node.value = None
    return ast.unparse(tree)


def _change(node: ast.AST) -> bool:
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _SWAPPED:
        node.op = _SWAPPED[type(node.op)]()
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        node.ops[0] = _SWAPPED[type(node.ops[0])]()
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
    elif isinstance(node, ast.Return) and node.value is not None:
        node.value = None
    elif isinstance(node, ast.If):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    else:
        return False
    return True
