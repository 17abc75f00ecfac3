"""The tools of the lab: what they compute, and what they refuse."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from core.rollout.tools import BaseTool, ToolError, load_listed
from recipes.lab.tools import Calculator
from reward_scores.sandbox.sandbox import isolation

TOOLS = Path(__file__).resolve().parents[2] / "recipes" / "lab" / "tools.yaml"


@pytest.mark.parametrize(
    "text",
    [
        "*".join(["9**999"] * 12),
        "9**9**9",
        "1/0",
        "1<<10**9",
        "-" * 900 + "1",
        "(" * 400,
        "1+\ud800",
        "1\x00",
        "",
    ],
)
def test_the_calculator_computes_or_refuses(text):
    try:
        found = asyncio.run(Calculator({}).execute("0", {"expression": text}))
        assert isinstance(found, str) and len(found) <= 4300
    except ToolError as error:
        assert str(error).startswith("cannot compute that: ")


@pytest.mark.skipif(isolation().mode == "none", reason="programs cannot be isolated here")
def test_a_script_runs_in_the_sandbox_and_its_output_comes_back(tmp_path):
    (tmp_path / "tools.yaml").write_text(TOOLS.read_text().replace("seconds: 5", "seconds: 1"))
    tool = load_listed(tmp_path / "tools.yaml", BaseTool)["python"]

    def run(code: str) -> str:
        return tool.execute("0", {"code": code})

    assert run("print(sum(range(10)))") == "45\n"
    for code, said in (
        ("1 / 0", "ZeroDivisionError"),
        ("while True: pass", "too long"),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "Error"),
        ("print(open('/etc/passwd').read())", "Error"),
    ):
        with pytest.raises(ToolError, match=said):
            run(code)
