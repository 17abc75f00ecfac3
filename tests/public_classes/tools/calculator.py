"""Arithmetic by the syntax tree; options and limits of the configuration."""

import ast
import operator

from verl.tools.base_tool import BaseTool, ToolResponse

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value(node):
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    raise ValueError("numbers and + - * / alone")


class Arithmetic(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        try:
            result = round(value(ast.parse(parameters["expression"], mode="eval").body), self.config["digits"])
        except (ValueError, SyntaxError, ZeroDivisionError) as error:
            return ToolResponse(text=f"Error: {error}"), -0.02, {"error": str(error)}
        return ToolResponse(text=f"{parameters['expression']} = {result}"), 0.0, {"result": result}
