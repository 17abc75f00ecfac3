"""Geometry3K for an agent with tools (``actor_rollout_ref.rollout.multi_turn``): the rows of
``data_preprocess.geo3k``.

    python -m data_preprocess.geo3k_multiturn_w_tool --local_dir ~/data/geo3k_tools \\
        [--local_dataset_path DIR_OR_FILES]

Each row chooses the tools of ``data_preprocess.gsm8k_multiturn_w_tool``. verl's script of this name
gives the policy a tool that tells it its own reward; none is given here.
"""

from __future__ import annotations

import sys
from typing import Any

from data_preprocess import geo3k
from data_preprocess.cli import Example, Source, run
from data_preprocess.gsm8k_multiturn_w_tool import with_tools

SYSTEM = (
    "You are a careful solver of problems about figures. Reason step by step, call a tool for "
    "every calculation, and "
    r"end with the final answer in the form \boxed{<answer>}."
)


def row(example: Example, split: str, index: int) -> dict[str, Any] | None:
    return with_tools(geo3k.row(example, split, index), SYSTEM)


SOURCE = Source(
    name="geo3k_multiturn_w_tool",
    hub=geo3k.HUB,
    config=None,
    folder="~/data/geo3k_tools",
    make_row=row,
)


if __name__ == "__main__":
    sys.exit(run(SOURCE))
