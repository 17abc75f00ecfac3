"""The run scripts ``recipes/*/run_*.sh``: what each would start, and the published runs that repeat it.

A script's settings are read by running it with bash, where ``exec`` is a function that prints its words: in a dry run
the last thing that each script does is to ``exec`` its Python. Nothing is started, and Python loads once for all of
them.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import Config, compose
from core.config.paths import is_local
from core.config.recipes import trainer_of
from core.errors import InputError
from core.tracking.run_manifest import ROOT
from results.reporting.run_reader import comparable, settings_of

PRINT_WORDS = """
exec() { if [[ $1 == bash ]]; then builtin exec "$@"; fi; printf '%s\\0' "$@"; exit 0; }
export -f exec
source "$0"
"""
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
        """Whether its model is a folder, not a hub id: the tiny one that the lab makes."""
        return is_local(self.config.actor_rollout_ref.model.path)

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
    return Script(path, recipe, arguments, compose(recipe, words[3:], trainer_of(recipe)[1]))


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
