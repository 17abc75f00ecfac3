"""Sums with a calculator: a task of the ``verifiers`` package, whose own reward scores the episode.

``agent.command`` runs it in an environment of its own (``requirements_verifiers.txt``). The example
comes as JSON on standard input, and the last line is the reward.
"""

import ast
import asyncio
import json
import operator
import os
import sys

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Calculating"]  # verifiers looks a harness up by the name of its module
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
CALCULATOR = {"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}


def value(node: ast.AST) -> int:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    return int(node.value)


def calculator(arguments: str) -> str:
    try:
        return str(value(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except Exception as error:
        return f"error: {error}"


class SumData(vf.TaskData):
    ground_truth: str


class Sum(vf.Task[SumData]):
    """One sum. Its rubric is one reward: the number after the last ``####`` is the sum."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        answer = trace.last_reply.rpartition("####")[2].strip()
        return float(answer == self.data.ground_truth)


class Calculating(vf.Harness[vf.HarnessConfig]):
    """Plays in this process. verifiers records what passes its own endpoint, and passes it on."""

    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, max_retries=0)
        while trace.num_turns < 3:
            answer = await client.chat.completions.create(
                model=ctx.model, messages=messages, tools=[CALCULATOR]
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                result = calculator(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def main() -> float:
    example = json.load(sys.stdin)
    policy = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    config = vf.AgentConfig(
        harness={"id": "verifiers_sums"},
        runtime={"type": "subprocess"},
        model="policy",
        client=policy,
    )
    data = SumData(prompt=example["messages"][-1]["content"], ground_truth=example["ground_truth"])
    trace = await vf.Agent(config).run(Sum(data))
    if not trace.ok:
        raise RuntimeError(trace.errors[-1].message)
    return trace.reward


if __name__ == "__main__":
    print(asyncio.run(main()))
