"""GSM8K for an agent with tools (``actor_rollout_ref.rollout.multi_turn``): the questions of
``data_preprocess.gsm8k``.

    python -m data_preprocess.gsm8k_multiturn_w_tool --local_dir ~/data/gsm8k_tools \\
        [--local_dataset_path DIR_OR_FILES]

Each row chooses the tools ``calculator`` and ``python`` of ``recipes/lab/tools.yaml``. verl's
script of this name gives the policy a tool that tells it its own reward; none is given here.
"""

from __future__ import annotations

import sys
from typing import Any

from data_preprocess import gsm8k
from data_preprocess.cli import Example, Source, run

TOOLS = ("calculator", "python")
SYSTEM = (
    "You are a careful solver of math problems. Reason step by step, call a tool for every "
    "calculation, and end with "
    "the final answer in the form `#### <answer>`."
)


def with_tools(row: dict[str, Any] | None, system: str) -> dict[str, Any] | None:
    """Return a row that chooses the tools, with a system's message before its prompt."""
    if row is None:
        return None
    chat = [{"role": "system", "content": system}, *row["prompt"]]
    facts = {**row["extra_info"], "tool_selection": list(TOOLS)}
    return {**row, "prompt": chat, "extra_info": facts}


def row(example: Example, split: str, index: int) -> dict[str, Any] | None:
    return with_tools(gsm8k.row(example, split, index), SYSTEM)


SOURCE = Source(
    name="gsm8k_multiturn_w_tool",
    hub=gsm8k.HUB,
    config="main",
    folder="~/data/gsm8k_tools",
    make_row=row,
)


if __name__ == "__main__":
    sys.exit(run(SOURCE))
