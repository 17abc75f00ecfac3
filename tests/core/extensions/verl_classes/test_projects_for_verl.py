"""Projects that were written for verl: a list of tools names its own classes, tools share what their user sets."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.config import compose
from core.config.plugins import load_object
from core.errors import InputError
from core.extensions.verl_classes.import_check import problems
from core.rollout import outside_code
from core.rollout.tools.interactions import load_interactions
from core.rollout.tools.tools import load_tools
from tests.core.rollout.tools.test_interactions import played as conversed
from tests.core.rollout.tools.test_tool_agent import MULTI, call, played, tool_text

BASE = "from verl.tools.base_tool import BaseTool\nfrom verl.tools.schemas import ToolResponse\n"
ECHO = f"""{BASE}
class EchoTool(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="its own echo"), 0.0, {{}}
"""
SCHEMA = "{type: function, function: {name: echo, description: d, parameters: {type: object, properties: {}}}}"


def listed(kind: str, name: str = "") -> str:
    first = f"name: {name}\n    class_name: {kind}" if name else f"class_name: {kind}"
    return f"tools:\n  - {first}\n    config: {{type: native}}\n    tool_schema: {SCHEMA}\n"


def project(folder: Path, **files: str) -> Path:
    """Write a project's files, whose paths have ``__`` for slashes, and return its list of tools."""
    for path, text in {"setup__cfg": "", **files}.items():
        place = folder.joinpath(*path.split("__")[:-1], path.split("__")[-1] + ".py")
        place = folder / "setup.cfg" if path == "setup__cfg" else place
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (folder / "lists").mkdir()
    return folder / "lists" / "tools.yaml"


@pytest.mark.parametrize("root", ["", "src__", "owls__"])
def test_a_list_names_classes_of_its_own_project_by_their_modules(tmp_path, root, capfd):
    file = project(tmp_path, **{f"{root}owls__tools__echo": ECHO})
    file.write_text(listed("owls.tools.echo.EchoTool"))
    trajectory, loop = played(tmp_path, [call("echo"), "done"], yaml=listed("owls.tools.echo.EchoTool"))
    loop.close()
    assert load_tools(file)["echo"].tool.tool.__class__.__name__ == "EchoTool"
    assert "names owls.tools.echo.EchoTool: it is taken from" in capfd.readouterr().err
    assert "its own echo" in tool_text(trajectory)  # tools.yaml in the project's root, too


def test_a_list_in_a_fork_of_verl_names_the_forks_tools_and_the_stand_ins(tmp_path):
    files = {"verl____init__": "", "verl__tools__echo_tool": ECHO, "verl__tools__gsm8k_tool": "raise OSError"}
    file = project(tmp_path, **files)
    other = listed("verl.tools.gsm8k_tool.Gsm8kTool").removeprefix("tools:\n").replace("name: echo", "name: graded")
    file.write_text(listed("verl.tools.echo_tool.EchoTool") + other)
    tools = load_tools(file)
    assert type(tools["graded"].tool.tool).__module__ == "core.extensions.verl_tools.builtin_tools"
    assert type(tools["echo"].tool.tool).__module__.startswith("verl.tools.")


def test_a_class_that_neither_has_is_refused_as_before(tmp_path):
    file = project(tmp_path, owls__tools__echo=ECHO)
    file.write_text(listed("owls.tools.other.EchoTool") + listed("verl.tools.other.EchoTool").removeprefix("tools:\n"))
    with pytest.raises(InputError) as error:
        load_tools(file)
    assert "no module 'owls'" in str(error.value) and "verl.tools.other is not part of the stand-in" in str(error.value)


def test_a_dry_run_reads_the_classes_that_a_list_names_by_their_modules(tmp_path):
    file = project(tmp_path, owls__echo=f"from verl.tools.mcp_base_tool import MCPBaseTool\n{ECHO}")
    file.write_text(listed("owls.echo.EchoTool"))
    (problem,) = problems(compose("grpo", [f"{MULTI}.enable=True", f"{MULTI}.tool_config_path={file}"]))
    assert f"{tmp_path}/owls/echo.py: line 1: verl.tools.mcp_base_tool is not part of the stand-in" in problem


def test_an_entry_of_verl_may_repeat_its_name(tmp_path):
    file = project(tmp_path, owls__echo=ECHO)
    file.write_text(listed("owls.echo.EchoTool", name="echoes"))
    assert list(load_tools(file)) == ["echo"]


def test_a_user_of_the_project(tmp_path):
    user = (
        "from verl.interactions.base import BaseInteraction\n"
        "class OwlInteraction(BaseInteraction):\n"
        "    async def start_interaction(self, instance_id=None, messages=(), **kwargs):\n"
        "        self.first = messages[0]\n"
        "        return instance_id\n"
        "    async def generate_response(self, instance_id, messages, **kwargs):\n"
        "        return len(messages) > 3, f'{self.first} {sorted(kwargs)}', 1.0, {}\n"
    )
    project(tmp_path, owls__user=user)
    facts = {"interaction_kwargs": {"name": "owl", "messages": ["hoot"], "age": 3}}
    yaml = "interaction:\n  - class_name: owls.user.OwlInteraction\n"
    trajectory, loop = conversed(tmp_path, ["a", "b"], yaml=yaml, extra=facts)
    loop.close()
    said = [one.text for one in trajectory.segments if one.role == "user"]
    assert len(said) == 1 and "hoot ['age', 'name']" in said[0] and trajectory.user_scores == (1.0, 1.0)
    assert list(load_interactions(tmp_path / "users.yaml")) == ["owl"]


NEST = "from contextvars import ContextVar\nNEST = ContextVar('NEST', default=None)\n"
NESTED = f"""{BASE}
from owls.nest import NEST
class NestTool(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        NEST.get().append(len(NEST.get()))
        return ToolResponse(text=f"in the nest {{NEST.get()}}"), 0.0, {{}}
"""
OWL = """
from verl.interactions.base import BaseInteraction
from owls.nest import NEST
class OwlInteraction(BaseInteraction):
    async def start_interaction(self, instance_id=None, **kwargs):
        NEST.set([kwargs["seed"]])
        return instance_id
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "", float(len(NEST.get())), {}
"""


def test_tools_read_the_context_variables_that_their_episodes_user_has_set(tmp_path):
    project(tmp_path, owls__nest=NEST, owls__tool=NESTED, owls__user=OWL)
    (tmp_path / "users.yaml").write_text("interaction:\n  - class_name: owls.user.OwlInteraction\n")
    for seed in (7, 9):
        trajectory, loop = played(
            tmp_path,
            [call("echo"), call("echo"), "done"],
            f"{MULTI}.interaction_config_path={tmp_path}/users.yaml",
            yaml=listed("owls.tool.NestTool"),
            extra={"interaction_kwargs": {"name": "owl", "seed": seed}},
        )
        loop.close()
        assert f"in the nest [{seed}, 1, 2]" in tool_text(trajectory) and trajectory.user_scores == (3.0,)


def test_an_episode_keeps_its_variables_after_a_call_that_blocks(monkeypatch):
    monkeypatch.setattr(outside_code, "GRACE_S", 0.05)
    nest = contextvars.ContextVar("nest")

    async def fill():
        nest.set("eggs")

    async def block():
        time.sleep(0.6)

    async def read():
        return nest.get("none")

    async def episode(apart):
        outside_code.SHARED.set(outside_code.SharedContext())
        await apart.run(fill)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(apart.run(block), 0.05)
        await asyncio.sleep(0.2)  # the blocked loop is left behind
        return await apart.run(read)

    async def another(apart):
        return await apart.run(read)

    apart = outside_code.ApartLoop()
    assert asyncio.run(episode(apart)) == "eggs" and asyncio.run(another(apart)) == "none"
    apart.close()


def test_a_tool_reads_the_agents_data_of_its_episode(tmp_path):
    asks = f"""{BASE}
class AskingTool(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        data = kwargs["agent_data"]
        data.extra_fields["calls"] = data.extra_fields.get("calls", 0) + 1
        given = data.tools_kwargs[self.name]["create_kwargs"]["place"]
        return ToolResponse(text=f"call {{data.extra_fields['calls']}} in {{given}}"), 0.0, {{}}
"""
    project(tmp_path, owls__asks=asks)
    extra = {"tools_kwargs": {"echo": {"create_kwargs": {"place": "oak"}}}}
    turns = [call("echo"), call("echo"), "done"]
    trajectory, loop = played(tmp_path, turns, yaml=listed("owls.asks.AskingTool"), extra=extra)
    loop.close()
    assert "call 1 in oak" in tool_text(trajectory) and "call 2 in oak" in tool_text(trajectory)


def test_a_tool_around_the_sandbox_tool_passes_the_ground_truth_by_its_place(tmp_path):
    around = f"""{BASE}
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
class AroundTool(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.inner = SandboxFusionTool({{"sandbox_fusion_url": "http://nowhere"}}, tool_schema)
    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        return await self.inner.create(instance_id, ground_truth, **kwargs)
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="around it"), 0.0, {{}}
"""
    project(tmp_path, owls__around=around)
    trajectory, loop = played(tmp_path, [call("echo"), "done"], yaml=listed("owls.around.AroundTool"))
    assert "around it" in tool_text(trajectory) and loop.metrics()["agent/tool_state_failures"] == 0
    loop.close()


def test_an_actor_gets_what_a_fork_of_verl_has_beside_the_tool(tmp_path):
    hatch = "import ray\ndef hatched(eggs):\n    return eggs + 1\nclass Worker:\n    go = staticmethod(hatched)\n"
    tool = f"import ray\n{BASE}from verl.tools.utils.hatch import Worker\n"
    project(tmp_path, verl____init__="", verl__tools__owl_tool=tool, verl__tools__utils__hatch=hatch)
    worker = load_object(f"{tmp_path}/verl/tools/owl_tool.py:Worker")
    blob = sys.modules["ray"].cloudpickle.dumps(worker)
    code = "import sys, pickle, ray; print(pickle.loads(sys.stdin.buffer.read())().go(1))"
    away = tmp_path / "lists"  # where Python has no path to the project
    done = subprocess.run([sys.executable, "-c", code], input=blob, capture_output=True, timeout=100, cwd=away)
    assert done.stdout == b"2\n", done.stderr.decode()[-500:]
