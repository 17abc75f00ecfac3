"""Which run scripts run on what: each ``recipes/*/run_*.sh`` planned for other GPUs, beside the published runs.

Memory and time are those of ``core/planning``; a lab's time is that of its published runs.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from core.config import examine
from core.config.recipes import trainer_of
from core.errors import InputError
from core.planning.estimate import Plan, advice
from core.planning.model_rules import model_problems
from core.planning.model_shapes import gpu
from core.tracking.memory_settings import pass_tokens
from results.reporting.numbers import duration
from results.reporting.pages import Table, markdown_table
from results.reporting.run_scripts import Script, Summary, read_summaries, repeats, scripts, status

NODE = 8  # GPUs of a node
NUMBERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # of GPUs, which are tried where the asked one does not do


@dataclass(frozen=True)
class Verdict:
    """Whether a script runs on so many GPUs: its plan, and what there is to be noted or changed."""

    fits: bool
    note: str = ""
    plan: Plan | None = None


# --- plans ---


def nodes_of(count: int) -> tuple[int, int]:
    """Return nodes and GPUs a node. Raises InputError where they would not be equal."""
    if count > NODE and count % NODE:
        raise InputError(f"N={count}: more than {NODE} GPUs are nodes of {NODE}; give a multiple of {NODE}")
    return max(1, count // NODE), min(count, NODE)


def verdict(script: Script, name: str, count: int) -> Verdict:
    """Return whether a script runs on ``count`` GPUs of this name, or which settings or number of GPUs would do."""
    found = _planned(script, name, count)
    if found.fits:
        return found
    if found.plan is not None:
        for settings in _memory_settings(script, found.plan):
            if _planned(script, name, count, *settings).fits:
                return replace(found, note=f"with {' '.join(settings)} it would fit")
    nearest = [*(one for one in NUMBERS if one > count), *(one for one in reversed(NUMBERS) if one < count)]
    enough = next((one for one in nearest if _planned(script, name, one).fits), None)
    tips = [] if found.plan is None else [tip for tip in advice(found.plan) if not tip.startswith("checkpoints")]
    reason = found.note or f"it would take more than one change: {'; '.join(tips)}"
    return replace(found, note=f"{reason}; {enough} x {name} would do" if enough else reason)


def _planned(script: Script, name: str, count: int, *overrides: str) -> Verdict:
    if count < script.least:
        return Verdict(False, f"its settings need at least {script.least} GPUs")
    nodes, per_node = nodes_of(count)
    size = (f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={per_node}")
    composed = examine(script.recipe, [*script.arguments, *size, *overrides], trainer_of(script.recipe)[1])
    if problems := composed.problems or model_problems(composed.config):
        return Verdict(False, problems[0].partition("; ")[0].partition(" (")[0])  # without its fix
    plan = Plan(composed.config, gpu(name))
    return Verdict(plan.fits, plan=plan)


def _memory_settings(script: Script, plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield the changes of memory settings to try, one after another."""
    critic, actor = script.config.critic.enable, script.config.actor_rollout_ref.actor
    offload = "fsdp_config.offload_policy=True"
    yield (f"actor_rollout_ref.actor.{offload}", *([f"critic.model.{offload}"] if critic else []))
    _, share = pass_tokens(plan.config, actor)
    if actor.use_dynamic_bsz:
        yield (f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={share}",)
    else:
        yield ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",)
    for tenth in (9, 8, 7, 6, 5, 4, 3):
        yield (f"actor_rollout_ref.rollout.gpu_memory_utilization=0.{tenth}",)


# --- tables ---


def table(name: str, count: int, summaries: Sequence[Summary]) -> list[tuple[list[str], str]]:
    """Return a row for each script, with a note that stands below it; the first row is the header."""
    gpu(name), nodes_of(count)  # what is wrong with them is reported before anything is planned
    header = ["script", "model", "method", "made for", f"on {count} x {name}", "time", "host memory", "disk", "status"]
    rows = [(header, "")]
    for script in scripts():
        runs = repeats(script, summaries)
        cells = [script.name, script.model, script.method]
        if script.lab:
            rows.append(([*cells, "a laptop", "a CPU does", lab_time(runs), "", "", status(runs)], ""))
            continue
        found = verdict(script, name, count)
        costs = [_time(found.plan), _host(found.plan), _disk(found.plan)] if found.fits else [""] * 3
        made_for = f"{script.gpus} GPU{'s' * (script.gpus > 1)}"
        rows.append(([*cells, made_for, "fits" if found.fits else "NO", *costs, status(runs)], found.note))
    return rows


def lab_time(runs: Sequence[Summary]) -> str:
    """Return the mean time of recorded runs on the hardware that they name."""
    if not runs:
        return "not recorded"
    return f"about {duration(statistics.fmean(run['seconds'] for run in runs))}"


def _time(plan: Plan) -> str:
    step, steps = sum(plan.seconds.values()), plan.config.trainer.total_training_steps
    return duration(step * steps) if steps else f"{duration(step)} a step"


def _host(plan: Plan) -> str:
    """Return what a node keeps in its own memory for its GPUs: offloaded state, and the copy that a checkpoint is."""
    mine = min(plan.gpus, NODE)
    size = plan.host_bytes * mine + (plan.checkpoint_bytes * mine / plan.gpus if plan.checkpoints != 0 else 0.0)
    return f"{_gib(size)} a node" if size else ""


def _disk(plan: Plan) -> str:
    if plan.checkpoints == 0:
        return "none"
    return f"{_gib(plan.checkpoint_bytes * (plan.checkpoints or 1))}{'' if plan.checkpoints else ' a checkpoint'}"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.0f} GiB" if size >= 10 * 2**30 else f"{size / 2**30:.1f} GiB"


def hardware_table(summaries: Sequence[Summary], name: str = "H100", numbers: Sequence[int] = (1, 8, 128)) -> Table:
    """Return the README's table: a laptop and numbers of GPUs, each with the scripts that are made for no more."""
    found = scripts()
    labs = [(one, repeats(one, summaries)) for one in found if one.lab]
    times = [statistics.fmean(run["seconds"] for run in runs) for _, runs in labs if runs]
    names = ", ".join(f"`{one.name}`" for one, _ in labs)
    rows = [["a laptop (2 cores)", names, f"a run {_range(times)}", _statuses([runs for _, runs in labs])]]
    left = [one for one in found if not one.lab]
    for count in numbers:
        plans = {one: _planned(one, name, count) for one in left if one.gpus <= count}
        here = [one for one, planned in plans.items() if planned.fits]
        left = [one for one in left if one not in here]
        steps = [sum(plans[one].plan.seconds.values()) for one in here]
        done = _statuses([repeats(one, summaries) for one in here])
        rows.append([f"{count} x {name}", _grouped(here), f"a step {_range(steps)}, estimated", done])
    return Table(["hardware", "scripts in `recipes/` that need no more and fit", "time", "status"], rows)


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


def _range(seconds: Sequence[float]) -> str:
    ends = list(dict.fromkeys(duration(one) for one in (min(seconds), max(seconds)))) if seconds else ["not recorded"]
    return " to ".join(ends)


def _statuses(runs: Sequence[Sequence[Any]]) -> str:
    ran = sum(map(bool, runs))
    return "ran here" if ran == len(runs) else f"{ran} of {len(runs)} ran here" if ran else "never run"
