"""A reward function and a tool for verl in a run over Ray: the tool makes actors of classes in its file."""

from __future__ import annotations

import json

import pytest

from tests.faults.kill_and_resume import run_uninterrupted
from tests.faults.tiny_run import command, prepare
from tests.public_classes.outcomes import FOLDER

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

TOOLS = """
tools:
  - class_name: {folder}/tools/ray_limited.py:RayLimited
    config: {{type: native, most: 1000000}}
    tool_schema:
      type: function
      function: {{name: limited, description: d, parameters: {{type: object, properties: {{}}}}}}
"""
MULTI = "actor_rollout_ref.rollout.multi_turn"


def test_files_for_verl_in_a_run_over_ray(tmp_path):
    prepare(tmp_path)
    (tmp_path / "tools.yaml").write_text(TOOLS.format(folder=FOLDER))
    options = [
        "trainer.backend=ray",
        "trainer.test_freq=-1",
        f"custom_reward_function.path={FOLDER}/rewards/tool_score.py",
        f"{MULTI}.enable=True",
        f"{MULTI}.tool_config_path={tmp_path}/tools.yaml",
    ]
    run = run_uninterrupted(command(tmp_path, "grpo", 2, *options), tmp_path / "run").folder
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "critic/score/mean" in line]
    assert len(trained) == 2 and all(0.75 <= line["critic/score/mean"] < 0.76 for line in trained)
    assert all(line["agent/tool_state_failures"] == 0 for line in trained)
