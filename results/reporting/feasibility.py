"""Which run scripts fit on which hardware: each ``recipes/*/run_*.sh``, planned (``core/plan.py``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from core.config import examine
from core.config.recipes import trainer_of
from core.model_shapes import model_problems
from core.plan import Plan
from results.reporting.pages import Table, markdown_table
from results.reporting.run_scripts import Script, Summary, read_summaries, repeats, scripts

NODE = 8  # GPUs of a node


def fits(script: Script, name: str, count: int) -> bool:
    """Return whether a script runs on ``count`` GPUs of this name, a multiple of 8 where they are more."""
    if count < script.least:
        return False
    size = (f"trainer.nnodes={max(1, count // NODE)}", f"trainer.n_gpus_per_node={min(count, NODE)}")
    composed = examine(script.recipe, [*script.arguments, *size], trainer_of(script.recipe)[1])
    if composed.problems or model_problems(composed.config):
        return False
    return Plan(composed.config, name).fits


def hardware_table(summaries: Sequence[Summary], name: str = "H100", numbers: Sequence[int] = (1, 8, 128)) -> Table:
    """Return the README's table: a laptop and numbers of GPUs, each with the scripts that are made for no more."""
    found = scripts()
    labs, left = [one for one in found if one.lab], [one for one in found if not one.lab]
    names = ", ".join(f"`{one.name}`" for one in labs)
    rows = [["a laptop (2 cores)", names, _status(labs, summaries)]]
    for count in numbers:
        here = [one for one in left if one.gpus <= count and fits(one, name, count)]
        left = [one for one in left if one not in here]
        rows.append([f"{count} x {name}", _grouped(here), _status(here, summaries)])
    return Table(["hardware", "scripts in `recipes/` that need no more and fit", "status"], rows)


def render_hardware(results: Path) -> str:
    """Return what stands between the README's markers ``hardware``."""
    return markdown_table(hardware_table(read_summaries(results)))


def _grouped(found: Sequence[Script]) -> str:
    """Return the scripts' names; several of a folder as one pattern, where it fits no script beside them."""
    texts, left = [], [one.path for one in found]
    while left:
        folder, paths = left[0].parent, [path for path in left if path.parent == left[0].parent]
        for prefix in (os.path.commonprefix([path.name for path in paths]), paths[0].stem):
            fitting = sorted(folder.glob(f"{prefix}*.sh"))
            if len(fitting) > 1 and set(fitting) <= set(paths):
                texts.append(f"`{folder.name}/{prefix}*.sh` ({len(fitting)})")
                break
        else:
            fitting = paths[:1]
            texts.append(f"`{folder.name}/{paths[0].name}`")
        left = [path for path in left if path not in fitting]
    return ", ".join(texts)


def _status(found: Sequence[Script], summaries: Sequence[Summary]) -> str:
    ran = sum(bool(repeats(one, summaries)) for one in found)
    return "ran here" if ran == len(found) else f"{ran} of {len(found)} ran here" if ran else "never run"
