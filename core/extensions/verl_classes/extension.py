"""Classes that people wrote for verl, and the stand-in for its package: tools, simulated users, reward functions."""

from __future__ import annotations

from core.config.extensions import Extension

HERE = "core.extensions.verl_classes"
SCORERS = ("gsm8k", "math", "math_reward", "math_dapo", "math_verify", "geo3k", "prime_math", "prime_code")
EXTENSION = Extension(
    name="verl_classes",
    functions={
        "problems_before_start": f"{HERE}.import_check:problems",
        "foreign_tool": f"{HERE}.base_tool:adapt",
        "foreign_user": f"{HERE}.base_interaction:adapt",
    },
    stand_ins={"verl": f"{HERE}.shim:module"},
    mounted=("recipe",),
    beside={
        "base": "verl.interactions.base",
        "base_tool": "verl.tools.base_tool",
        "schemas": "verl.tools.schemas",
        **{name: f"verl.utils.reward_score.{name}" for name in SCORERS},
    },
)
