"""Files that import verl where it is not installed: what the stand-in has, and what is said of the rest."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from core.command_line import _of_extensions
from core.config import compose
from core.config.plugins import load_object
from core.extensions.verl_classes.import_check import problems
from core.extensions.verl_classes.shim import MODULES, SAID

MULTI = "actor_rollout_ref.rollout.multi_turn"
ROOT = Path(__file__).resolve().parents[4]


def written(folder: Path, text: str, name: str = "mine.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_every_name_of_the_stand_in_is_there():
    for module, names in MODULES.items():
        for name, path in names.items():
            assert load_object(path) is not None, f"{module}.{name}"


@pytest.mark.parametrize(
    "line",
    [
        "import verl.tools.base_tool as base; base.BaseTool",
        "from verl.utils.reward_score import gsm8k; gsm8k.compute_score",
        "from verl.utils.reward_score import math_dapo, default_compute_score",
        "from verl.utils.reward_score.math import last_boxed_only_string",
        "from verl.tools import base_tool",
        "from verl.tools.schemas import *; ToolResponse",
    ],
)
def test_the_ways_to_import_it(tmp_path, line):
    assert load_object(f"{written(tmp_path, line + chr(10) + 'x = 1')}:x") == 1


def test_a_file_in_a_fork_imports_its_neighbours_from_the_stand_in(tmp_path):
    folder = tmp_path / "fork" / "verl" / "tools"
    folder.mkdir(parents=True)
    text = "from .base_tool import BaseTool\nfrom .schemas import ToolResponse\nclass Mine(BaseTool):\n    pass\n"
    kind = load_object(f"{written(folder, text)}:Mine")
    assert kind.__mro__[1].__module__ == "core.extensions.verl_classes.base_tool"


def test_the_helpers_of_verl_keep_time_and_stay_on_this_machines_disks(tmp_path):
    module = load_object("core.extensions.verl_classes.utils:timeout_limit").__globals__
    for act in (lambda call: call(), lambda call: ThreadPoolExecutor(1).submit(call).result()):
        assert act(lambda: module["timeout_limit"](5)(str.upper)("a")) == "A"
        with pytest.raises(TimeoutError):
            act(lambda: module["timeout_limit"](0.05)(time.sleep)(0.5))
    with pytest.raises(ValueError, match="hdfs://a.*nothing here reads HDFS"):
        module["exists"]("hdfs://a")
    module["makedirs"](f"{tmp_path}/a/b")
    assert module["copy"](f"{tmp_path}/a", f"{tmp_path}/c") and module["exists"](f"{tmp_path}/c/b")
    values, mask = torch.tensor([[1.0, 3.0, float("nan")], [5.0, 5.0, 5.0]]), torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert module["masked_mean"](values, mask, 1).tolist() == [2.0, 0.0]
    assert module["masked_mean"](values, mask).item() == 2.0
    assert module["convert_to_regular_types"](OmegaConf.create({"a": [1, {"b": 2}]})) == {"a": [1, {"b": 2}]}
    with pytest.raises(AssertionError, match="'a' is 1 and 2"):
        module["union_two_dict"]({"a": 1}, {"a": 2})


def test_the_stand_in_is_there_for_users_files_alone_and_says_so():
    program = (
        "import core.config.plugins as plugins, sys\n"
        "try:\n    import verl\n    raise SystemExit('imported')\nexcept ModuleNotFoundError:\n    pass\n"
        "plugins.load_object(sys.argv[1] + ':NotebookTool')\n"
        "assert not {'torch', 'ray', 'vllm'} & sys.modules.keys()\n"
        "plugins.load_object('core.config.plugins:load_object')\n"
    )
    file = ROOT / "tests/core/extensions/verl_classes/public/notebook_tool.py"
    environment = {name: value for name, value in os.environ.items() if name != SAID}
    command = [sys.executable, "-c", program, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("verl is not installed: files that import it get the stand-in") == 1


@pytest.mark.parametrize(
    ("line", "what", "advice"),
    [
        (
            "from verl.experimental.agent_loop.agent_loop import AgentLoopBase",
            "verl.experimental.agent_loop",
            "AgentLoop",
        ),
        ("from verl.tools.mcp_base_tool import MCPBaseTool", "verl.tools.mcp_base_tool", "asks the MCP server itself"),
        ("from verl.utils.reward_score import lean", "verl.utils.reward_score.lean", "copy the function"),
        (
            "from verl.workers.fsdp_workers import ActorRolloutRefWorker",
            "verl.workers.fsdp_workers",
            "leave the import",
        ),
    ],
)
def test_what_it_lacks_is_an_import_error_with_what_to_write_instead(tmp_path, line, what, advice):
    with pytest.raises(ImportError) as error:
        load_object(f"{written(tmp_path, line)}:x")
    assert advice in str(error.value) or what in str(error.value)
    body = f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {line}\n    return 0.0\n"
    path = written(tmp_path, body, "lazy.py")
    (problem,) = problems(compose("grpo", [f"custom_reward_function.path={path}"]))
    assert problem.startswith(f"custom_reward_function.path={path}: line 2: {what}") and advice in problem


def test_an_import_that_a_file_can_do_without_is_no_problem(tmp_path):
    path = written(
        tmp_path,
        "from typing import TYPE_CHECKING\n"
        "try:\n    from verl.nothing import here\nexcept ImportError:\n    here = None\n"
        "if TYPE_CHECKING:\n    from verl.workers.rollout import Rollout\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n",
    )
    assert problems(compose("grpo", [f"custom_reward_function.path={path}"])) == []
    assert load_object(f"{path}:here") is None


def test_an_agent_loop_of_verls_server_manager_is_refused_before_a_start(tmp_path):
    path = written(tmp_path, "from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register\n")
    config = compose("grpo", [f"actor_rollout_ref.rollout.agent_loop={path}:Mine"])
    (problem,) = problems(config)
    assert "write the loop on core.rollout.agent_loop.AgentLoop" in problem


def test_a_dry_run_checks_the_files_of_tools_and_users(tmp_path):
    tool = written(tmp_path, "from verl.tools.base_tool import BaseTool\nclass T(BaseTool):\n    pass\n", "tool.py")
    loop = written(
        tmp_path, "from verl.tools.mcp_base_tool import MCPBaseTool\nclass M(MCPBaseTool):\n    pass\n", "m.py"
    )
    file = written(tmp_path, f"tools:\n  - class_name: {tool}:T\n  - class_name: {tool}:U\n", "tools.yaml")
    users = written(tmp_path, "interaction:\n  - class_name: core.rollout.tools.tools.Calculator\n", "users.yaml")
    options = [f"{MULTI}.enable=True", f"{MULTI}.tool_config_path={file}", f"{MULTI}.interaction_config_path={users}"]
    lines = "\n".join(_of_extensions("problems_before_start", compose("grpo", options))).splitlines()
    for part, line in zip(("has no execute of its own", "has no 'U'", "does not extend"), lines, strict=True):
        assert part in line
    file.write_text(f"tools:\n  - class_name: {loop}:M\n")
    lines = _of_extensions("problems_before_start", compose("grpo", options[:2]))
    assert any("line 1: verl.tools.mcp_base_tool is not part of the stand-in" in line for line in lines)
