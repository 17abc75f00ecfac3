"""Classes that people wrote for verl, and the stand-in for its package: tools, simulated users, reward functions."""

from __future__ import annotations

from core.config.extensions import Extension

HERE = "core.extensions.verl_classes"
EXTENSION = Extension(
    name="verl_classes",
    functions={
        "problems_before_start": f"{HERE}.import_check:problems",
        "foreign_tool": f"{HERE}.base_tool:adapt",
        "foreign_user": f"{HERE}.base_interaction:adapt",
    },
    stand_ins={"verl": f"{HERE}.shim:module"},
    mounted=("recipe",),
)
