"""The files of tools and users, what an example chooses of them, and the tools that come along."""

from __future__ import annotations

import asyncio

import pytest

from core.errors import InputError
from core.rollout.tools import BaseInteraction, BaseTool, Calculator, ToolError, chosen_tools, load_tools, load_users
from reward_scores.sandbox import isolation

CALCULATOR = "tools:\n  - class_name: core.rollout.tools:Calculator\n"


class Echo(BaseTool):
    tool_schema = {"type": "function", "function": {"name": "echo"}}

    async def execute(self, instance_id, parameters, **kwargs):
        return "echo"


class Idle(BaseTool):
    tool_schema = {"type": "function", "function": {"name": "idle"}}


class Broken(Echo):
    def __init__(self, config, tool_schema):
        raise ZeroDivisionError("no")


class PoliteInteraction(BaseInteraction):
    pass


def problems_of(tmp_path, text: str, load=load_tools) -> list[str]:
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(InputError) as error:
        load(tmp_path / "file.yaml")
    return error.value.problems


def test_all_problems_of_a_file_of_tools_come_together(tmp_path):
    entries = [
        ("class_name: core.rollout.tools:Nothing", "no 'Nothing'"),
        ("config: {}", "must hold class_name"),
        ("{class_name: core.rollout.tools.Calculator, timeout_s: 5}", "must hold class_name"),
        ("{class_name: core.rollout.tools:Calculator, config: {type: mcp}}", "config.type='mcp'"),
        (f"class_name: {__file__}:PoliteInteraction", "does not extend core.rollout.tools.BaseTool"),
        (f"class_name: {__file__}:Idle", "no execute of its own"),
        (f"class_name: {__file__}:Broken", "ZeroDivisionError: no"),
        ("class_name: core.rollout.tools:Calculator", None),
        ("{class_name: core.rollout.tools.Calculator, config: {type: native}}", "a second one is named 'calculator'"),
        (
            f"{{class_name: {__file__}:Echo, tool_schema: {{function: {{name: a, parameters: {{type: 7}}}}}}}}",
            "no JSON schema",
        ),
    ]
    found = problems_of(tmp_path, "tools:\n" + "".join(f"  - {entry}\n" for entry, _ in entries))
    expected = [(number, said) for number, (_, said) in enumerate(entries) if said is not None]
    for line, (number, said) in zip(found, expected, strict=True):
        assert f"tool_config_path={tmp_path}/file.yaml: tools[{number}]: " in line and said in line
    assert "must hold a list" in problems_of(tmp_path, "tools: []")[0]
    assert "cannot be read" in problems_of(tmp_path, "tools: [")[0]


def test_users_have_a_name_of_their_own_or_their_class_s(tmp_path):
    entry = f"class_name: {__file__}:PoliteInteraction"
    (tmp_path / "users.yaml").write_text(f"interaction:\n  - {entry}\n  - {{name: other, {entry}}}\n")
    users = load_users(tmp_path / "users.yaml")
    assert {name: user.name for name, user in users.items()} == {"polite": "polite", "other": "other"}
    said = problems_of(tmp_path, f"- {entry}\n- {entry}\n- class_name: core.rollout.tools.Calculator\n", load_users)
    assert "a second one is named 'polite'" in said[0] and "does not extend" in said[1]


def test_the_file_s_schema_stands_in_place_of_the_class_s(tmp_path):
    schema = "tool_schema: {type: function, function: {name: shout, parameters: {type: object, required: [x]}}}"
    (tmp_path / "tools.yaml").write_text(f"- class_name: {__file__}:Echo\n  {schema}\n")
    (spec,) = load_tools(tmp_path / "tools.yaml").values()
    assert spec.name == "shout" and spec.schema["function"]["name"] == "shout"
    assert spec.problem({}) and spec.problem({"x": 1}) is None


def test_an_example_chooses_its_tools(tmp_path):
    (tmp_path / "tools.yaml").write_text(f"{CALCULATOR}  - class_name: {__file__}:Echo\n")
    tools = load_tools(tmp_path / "tools.yaml")
    for extra, names in (
        ({}, ["calculator", "echo"]),
        ({"tool_selection": ["echo"]}, ["echo"]),
        ({"tool_selection": []}, []),
        ({"tools_kwargs": {"echo": {"create_kwargs": {}}, "calculator": None}}, ["calculator", "echo"]),
        ({"need_tools_kwargs": True, "tools_kwargs": {"echo": {"x": 1}, "calculator": None}}, ["echo"]),
    ):
        assert list(chosen_tools(tools, extra)) == names
    for extra in ({"tool_selection": ["other"]}, {"tool_selection": "echo"}, {"tools_kwargs": [1]}):
        with pytest.raises(ValueError, match="extra_info"):
            chosen_tools(tools, extra)


@pytest.mark.parametrize(
    "text",
    ["*".join(["9**999"] * 12), "9**9**9", "1/0", "1<<10**9", "-" * 900 + "1", "(" * 400, "1+\ud800", "1\x00", ""],
)
def test_the_calculator_computes_or_refuses(text):
    try:
        found = asyncio.run(Calculator({}).execute("0", {"expression": text}))
        assert isinstance(found, str) and len(found) <= 4300
    except ToolError as error:
        assert str(error).startswith("cannot compute that: ")


@pytest.mark.skipif(isolation().mode == "none", reason="programs cannot be isolated here")
def test_a_script_runs_in_the_sandbox_and_its_output_comes_back(tmp_path):
    (tmp_path / "tools.yaml").write_text(
        "tools:\n  - class_name: core.rollout.tools:PythonSandbox\n    config: {seconds: 1, memory_mb: 256}\n"
    )
    tool = load_tools(tmp_path / "tools.yaml")["python"]

    def run(code: str) -> str:
        return asyncio.run(tool.execute("0", {"code": code}))

    assert run("print(sum(range(10)))") == "45\n"
    for code, said in (
        ("1 / 0", "ZeroDivisionError"),
        ("while True: pass", "too long"),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "Error"),
        ("print(open('/etc/passwd').read())", "Error"),
    ):
        with pytest.raises(ToolError, match=said):
            run(code)
