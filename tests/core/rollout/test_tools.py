"""The files of tools and users, and what an example chooses of them."""

from __future__ import annotations

import pytest

from core.errors import InputError
from core.rollout.tools import BaseInteraction, BaseTool, chosen_tools, load_listed

CALCULATOR = "tools:\n  - class_name: recipes.lab.tools:Calculator\n"


class Echo(BaseTool):
    tool_schema = {"type": "function", "function": {"name": "echo"}}

    async def execute(self, instance_id, parameters, **kwargs):
        return "echo"


class Broken(Echo):
    def __init__(self, config, tool_schema):
        raise ZeroDivisionError("no")


class Exits(Echo):
    def __init__(self, config, tool_schema):
        raise SystemExit(0)


class PoliteInteraction(BaseInteraction):
    async def start_interaction(self, instance_id=None, **kwargs):
        return instance_id


def problems_of(tmp_path, text: str, base=BaseTool) -> list[str]:
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(InputError) as error:
        load_listed(tmp_path / "file.yaml", base)
    return error.value.problems


def test_all_problems_of_a_file_come_together(tmp_path):
    schema = "tool_schema: {function: {name: a, parameters: {type: 7}}}"
    entries = [
        ("class_name: core.rollout.tools:Nothing", "no 'Nothing'"),
        ("config: {}", "class_name Field required"),
        ("{class_name: recipes.lab.tools.Calculator, timeout_s: 5}", "timeout_s Extra inputs"),
        (
            f"class_name: {__file__}:PoliteInteraction",
            "does not extend core.rollout.tools.BaseTool",
        ),
        (f"class_name: {__file__}:Broken", "ZeroDivisionError: no"),
        (f"class_name: {__file__}:Exits", "SystemExit: 0"),  # status 0: the run would look finished
        ("class_name: recipes.lab.tools:Calculator", None),
        ("class_name: recipes.lab.tools.Calculator", "a second one is named 'calculator'"),
        (f"{{class_name: {__file__}:Echo, {schema}}}", "SchemaError"),
    ]
    found = problems_of(tmp_path, "tools:\n" + "".join(f"  - {entry}\n" for entry, _ in entries))
    expected = [(number, said) for number, (_, said) in enumerate(entries) if said is not None]
    for line, (number, said) in zip(found, expected, strict=True):
        assert f"tool_config_path={tmp_path}/file.yaml: tools[{number}]: " in line and said in line
    assert "cannot be read" in problems_of(tmp_path, "tools: [")[0]
    twice = f"tools:\n  - class_name: {__file__}:Echo\n"
    assert "found duplicate key 'tools'" in problems_of(tmp_path, twice * 2)[0]
    (tmp_path / "latin.yaml").write_bytes(b"tools: [\xe9]")
    with pytest.raises(InputError, match="latin.yaml: cannot be read.*write YAML in UTF-8"):
        load_listed(tmp_path / "latin.yaml", BaseTool)
    (unread,) = problems_of(
        tmp_path, f"- class_name: {__file__}:PoliteInteraction\n", BaseInteraction
    )
    assert "PoliteInteraction.start_interaction" in unread


def test_the_file_s_schema_stands_in_place_of_the_class_s(tmp_path):
    schema = (
        "tool_schema: {type: function, function: {name: shout, parameters: {type: object, "
        "required: [x]}}}"
    )
    (tmp_path / "tools.yaml").write_text(f"- class_name: {__file__}:Echo\n  {schema}\n")
    (spec,) = load_listed(tmp_path / "tools.yaml", BaseTool).values()
    assert spec.name == "shout" and spec.problem({}) and spec.problem({"x": 1}) is None


def test_an_example_chooses_its_tools(tmp_path):
    (tmp_path / "tools.yaml").write_text(f"{CALCULATOR}  - class_name: {__file__}:Echo\n")
    tools = load_listed(tmp_path / "tools.yaml", BaseTool)
    for extra, names in (
        ({}, ["calculator", "echo"]),
        ({"tool_selection": ["echo"]}, ["echo"]),
        ({"tool_selection": []}, []),
        (
            {"tools_kwargs": {"echo": {"create_kwargs": {}}, "calculator": None}},
            ["calculator", "echo"],
        ),
    ):
        assert list(chosen_tools(tools, extra)) == names
    for extra in (
        {"tool_selection": ["other"]},
        {"tool_selection": "echo"},
        {"tool_selection": 5},
        {"tool_selection": [{"name": "echo"}]},
        {"tools_kwargs": [1]},
        {"tools_kwargs": {"ecko": {"create_kwargs": {}}}},
        {"tools_kwargs": {"echo": "x"}},
        {"tools_kwargs": {"echo": {"create_kwarg": {}}}},
        {"tools_kwargs": {"echo": {"create_kwargs": "x"}}},
    ):
        with pytest.raises(ValueError, match="extra_info"):
            chosen_tools(tools, extra)
