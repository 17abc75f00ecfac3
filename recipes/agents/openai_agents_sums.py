"""Sums with a calculator, played by an agent of the ``openai-agents`` library.

``agent.command`` runs it in an environment of its own (``requirements_openai_agents.txt``). The
example comes as JSON on standard input, and the last line is the reward.
"""

import ast
import asyncio
import json
import operator
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value(node: ast.AST) -> int:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    return int(node.value)


@function_tool
def calculator(expression: str) -> str:
    """Compute an expression of whole numbers, + - * and parentheses."""
    return str(value(ast.parse(expression, mode="eval").body))


async def main() -> float:
    example = json.load(sys.stdin)
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI(timeout=None, max_retries=0))
    agent = Agent(name="sums", model=model, tools=[calculator])
    result = await Runner.run(agent, example["messages"], max_turns=3)
    answer = str(result.final_output).rpartition("####")[2].strip()
    return float(answer == example["ground_truth"])


if __name__ == "__main__":
    print(asyncio.run(main()))
