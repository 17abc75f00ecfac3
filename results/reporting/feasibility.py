"""Which run scripts run on what: each ``recipes/*/run_*.sh`` planned for other GPUs, beside the published runs.

A script's settings are read by running it with bash, where ``exec`` is a function that prints its words: in a dry run
the last thing that each script does is to ``exec`` its Python. Nothing is started, and Python loads once for all of
them. What is counted is what ``core.planning`` counts; a lab's time is that of its published runs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from core.config import Config, compose, examine
from core.errors import InputError
from core.extensions.planning.estimate import Plan, advice, hooks_of
from core.extensions.planning.first_lines import duration, small
from core.extensions.planning.model_rules import model_problems
from core.extensions.planning.model_shapes import gpu
from core.tracking.memory_knobs import pass_tokens
from core.tracking.run_manifest import ROOT
from results.reporting.pages import Table, markdown_table
from results.reporting.run_reader import comparable, settings_of

PRINT_WORDS = """
exec() { if [[ $1 == bash ]]; then builtin exec "$@"; fi; printf '%s\\0' "$@"; exit 0; }
export -f exec
source "$0"
"""
NODE = 8  # GPUs of a node
NUMBERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # of GPUs, which are tried where the asked one does not do
REPEATS = ("trainer.seed", "trainer.cpu_threads")  # a run that changes only these repeats its script
Summary = Mapping[str, Any]  # of a published run
ESTIMATORS = {"gae": "PPO", "grpo": "GRPO"}  # names that people use


@dataclass(frozen=True)
class Script:
    """A run script: the recipe that it starts, its own arguments, and its configuration."""

    path: Path
    recipe: str
    arguments: tuple[str, ...]
    config: Config

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def lab(self) -> bool:
        """Whether it trains a tiny model on a CPU."""
        return small(self.config)

    @property
    def gpus(self) -> int:
        trainer = self.config.trainer
        return trainer.nnodes * trainer.n_gpus_per_node if trainer.backend == "ray" else 1

    @property
    def least(self) -> int:
        """The GPUs that its settings split one thing over: a layer of an engine, or what learner ranks share."""
        roles, critic = self.config.actor_rollout_ref, self.config.critic
        parallel = (roles.actor, roles.ref, *([critic] if critic.enable else []))
        return max(roles.rollout.tensor_model_parallel_size, *(one.together for one in parallel))

    @property
    def model(self) -> str:
        return "a tiny one" if self.lab else self.config.actor_rollout_ref.model.path.rpartition("/")[2]

    @property
    def method(self) -> str:
        name = self.config.algorithm.adv_estimator
        label = ESTIMATORS.get(name, name)
        text = label if self.recipe == label.lower() else f"{self.recipe} ({label})"
        return f"{text}, LoRA" if self.config.actor_rollout_ref.model.lora_rank else text


@dataclass(frozen=True)
class Verdict:
    """Whether a script runs on so many GPUs: its plan, and what there is to be noted or changed."""

    fits: bool
    note: str = ""
    plan: Plan | None = None


# --- scripts ---


def scripts(recipes: Path = ROOT / "recipes") -> list[Script]:
    """Return the run scripts that train, sorted by name."""
    return [one for path in sorted(recipes.glob("*/run_*.sh")) if (one := read_script(path)) is not None]


def read_script(path: Path, typed: Sequence[str] = ()) -> Script | None:
    """Return what a script starts with these arguments; None where that is no training run.

    Raises:
        InputError: the script fails, or its configuration has problems.
    """
    environment = {**os.environ, "DRY_RUN": "1"}
    done = subprocess.run(
        ["bash", "-c", PRINT_WORDS, str(path), *typed],
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    words = done.stdout.split("\0")[:-1]
    if done.returncode or words[1:2] != ["-m"]:
        raise InputError(f"{path}: its dry run does not end in exec python -m ...: {done.stderr.strip()[:200]}")
    package, _, module = words[2].rpartition(".")
    recipe = package.rpartition(".")[2]
    if module != f"main_{recipe}":
        return None
    arguments = tuple(word for word in words[3:] if word != "--")
    # After -- a preset beats the script's own keys.
    return Script(path, recipe, arguments, compose(recipe, words[3:], hooks_of(recipe)))


# --- plans ---


def nodes_of(count: int) -> tuple[int, int]:
    """Return nodes and GPUs a node. Raises InputError where they would not be equal."""
    if count > NODE and count % NODE:
        raise InputError(f"N={count}: more than {NODE} GPUs are nodes of {NODE}; give a multiple of {NODE}")
    return max(1, count // NODE), min(count, NODE)


def verdict(script: Script, name: str, count: int) -> Verdict:
    """Return whether a script runs on ``count`` GPUs of this name, and the knob or number that would do if not."""
    found = _planned(script, name, count)
    if found.fits:
        return found
    if found.plan is not None:
        for knob in _knobs(script, found.plan):
            if _planned(script, name, count, *knob).fits:
                return replace(found, note=f"with {' '.join(knob)} it would fit")
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
    composed = examine(script.recipe, [*script.arguments, *size, *overrides], hooks_of(script.recipe))
    if problems := composed.problems or model_problems(composed.config):
        return Verdict(False, problems[0].partition("; ")[0].partition(" (")[0])  # without its fix
    plan = Plan(composed.config, gpu(name))
    return Verdict(plan.fits, plan=plan)


def _knobs(script: Script, plan: Plan) -> Iterator[tuple[str, ...]]:
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


# --- runs that were published ---


def read_summaries(results: Path) -> list[Summary]:
    """Return the published summaries, with what tells experiments apart (:func:`comparable`)."""
    paths = sorted(results.glob("*/*/summary.json"))
    return [comparable(settings_of(path.parent), json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def repeats(script: Script, summaries: Sequence[Summary]) -> list[Summary]:
    """Return the published runs of this script as it stands: other seeds, the same settings."""
    # The machine's paths are not in a published command, and where Ray is missing a lab runs in one process.
    own = {each for each in script.arguments if not each.startswith("trainer.backend=") and "/" not in each}
    found = []
    for summary in summaries:
        words = summary["command"].partition(f" -m recipes.{script.recipe}.main_{script.recipe} ")[2].split()
        at = words.index("--") if "--" in words else len(words)
        typed = {word.partition("=")[0] for word in words[at + 1 :]}
        if words and own <= set(words[:at]) and typed <= set(REPEATS):
            found.append(summary)
    return found


def status(runs: Sequence[Summary]) -> str:
    return f"ran here ({len(runs)} seed{'s' * (len(runs) > 1)})" if runs else "never run"


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
