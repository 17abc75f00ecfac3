"""The command that repeats a published run, as the pages print it.

It composes what the run recorded: keys that decide the result and that the command, typed today,
would leave otherwise are appended to it (a precision that came from the environment, a default that
has changed since). What only names or watches a run is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from core.config import convert, recorded
from core.config.composition import examine
from core.config.schema import Config
from core.config.section import BOOKKEEPING
from core.tracking.run_manifest import ROOT
from results.reporting.run_reader import RecordedRun

LAB_TASKS = ("tools", "users", "figures")  # of recipes/lab/run_lab.sh
REAL = "smollm2_135m"
CONTROL_FILE = re.compile(r"data\.train_files=.*/train_(random|shuffled)\.parquet$")


def repeat(run: RecordedRun) -> str:
    """Return the command that repeats the run, as one would type it.

    The command of a run that no ``main_<recipe>`` started is returned as it was recorded.
    """
    if f" -m recipes.{run.manifest['recipe']}.main_" not in run.session["command"]:
        return run.session["command"]
    recipe, before, typed = split(run.session["command"])
    typed = [word for word in typed if decides(word, run.seed)]
    composed = replace(run, config=convert.as_json(examine(recipe, [*before, *typed]).config))
    typed += [
        f"{key}={written(value)}"
        for key, value in run.decisive.items()
        if composed.decisive.get(key) != value
    ]
    return " ".join([script(recipe, before), *typed])


def split(command: str) -> tuple[str, list[str], list[str]]:
    """Return the recipe of a recorded command, what its script gave, and what was typed."""
    module, *words = command.partition(" -m ")[2].split()
    recipe = module.split(".")[1]
    if "--" not in words:
        return recipe, words, []
    at = words.index("--")
    return recipe, words[: at + 1], words[at + 1 :]


def decides(word: str, seed: Any) -> bool:
    """Return whether a typed word has to be typed again."""
    key, _, value = word.partition("=")
    if key == "trainer.seed":
        return seed != Config().trainer.seed
    return key != "trainer.cpu_threads" and recorded.role_of(key) != BOOKKEEPING


def written(value: Any) -> str:
    """Return a value as it is typed behind a key."""
    if isinstance(value, bool) or value is None or not isinstance(value, str):
        return json.dumps(value, separators=(",", ":"))
    return value


def script(recipe: str, before: Sequence[str]) -> str:
    """Return what starts the recipe with these words: the preset's script where there is one."""
    preset = next((w.removeprefix("preset=") for w in before if w.startswith("preset=")), "")
    if preset.removeprefix("lab_") in LAB_TASKS:
        return f"bash recipes/lab/run_lab.sh {preset.removeprefix('lab_')}"
    if preset == "lab_ppo":
        return f"bash recipes/{recipe}/run_lab.sh ppo"
    if preset.startswith(REAL):
        words = [f"bash recipes/{recipe}/run_{REAL}.sh", *preset.removeprefix(REAL).split("_")[1:]]
        words += [found[1] for word in before if (found := CONTROL_FILE.match(word))]
        return " ".join(words)
    if (ROOT / "recipes" / recipe / f"run_{preset}.sh").exists():
        return f"bash recipes/{recipe}/run_{preset}.sh"
    return " ".join([f"python -m recipes.{recipe}.main_{recipe}", *before])
