"""The tools of the lab: arithmetic, and a sandbox for Python scripts. ``tools.yaml`` lists them for
the tool agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.rollout.tools import BaseTool, OpenAIFunctionToolSchema, ToolError


def _function(name: str, description: str, parameter: str, meaning: str) -> Mapping[str, Any]:
    properties = {parameter: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


class Calculator(BaseTool):
    """Arithmetic on numbers, without ``eval``."""

    tool_schema = _function(
        "calculator",
        "Computes an arithmetic expression of numbers, + - * / // ** and parentheses.",
        *("expression", "for example (3 + 4) * 12"),
    )

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        from reward_scores.arithmetic import CannotEvaluate, evaluate

        try:
            value = evaluate(parameters["expression"])
            return (
                str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
            )
        except (CannotEvaluate, ValueError) as error:
            # The latter for a number of more than 4,300 digits
            raise ToolError(f"cannot compute that: {error}") from error


class PythonSandbox(BaseTool):
    """Runs a script where it can harm nothing (:mod:`reward_scores.sandbox`) and returns what it
    printed.

    ``config``: ``seconds`` of processor time and ``memory_mb`` of a script. Raises
    SandboxUnavailable, when made, where this machine cannot isolate a program.
    """

    tool_schema = _function(
        "python",
        "Runs a Python script in an empty sandbox and returns what it prints.",
        "code",
        "the script",
    )

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        from reward_scores.sandbox.sandbox import Limits, required_isolation

        super().__init__(config, tool_schema)
        self.how = required_isolation()
        self.limits = Limits(
            seconds=float(config.get("seconds", 5)), memory_mb=int(config.get("memory_mb", 512))
        )

    def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        from reward_scores.sandbox.sandbox import Sandbox

        with Sandbox(self.limits, self.how) as box:
            ran = box.run(parameters["code"])
        if ran.status == "ok":
            return ran.stdout
        last = (ran.stderr.strip().splitlines() or [""])[-1]
        reasons = {"timeout": "it took too long", "output": "it printed too much"}
        raise ToolError(reasons.get(ran.status) or last or "it ended early and printed no reason")
