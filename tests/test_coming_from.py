"""COMING_FROM.md: what it says stands here for a name of another project exists."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from core.config import composition, convert, recipes
from core.config.checked import validated

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "COMING_FROM.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)` \| (.+) \|$", PAGE, re.MULTILINE)
SCHEMA = recipes.schema_of("search_r1")  # the keys of core, and its own
# Metrics that none of the recorded runs has: runs without KL, critic's rows and importance weights
UNRECORDED = {  # metric -> the file that writes it, and how it stands there
    "actor/kl_loss": ("core/learner/learner.py", "kl_loss"),
    "actor/reward_kl_penalty": ("core/algorithm/kl.py", '"actor/reward_kl_penalty"'),
    "actor/reward_kl_penalty_coeff": ("core/algorithm/kl.py", '"actor/reward_kl_penalty_coeff"'),
    "rollout_corr/rollout_is_mean": ("core/algorithm/rollout_correction.py", 'f"rollout_is_{name}"'),
}


def recorded_metrics() -> set[str]:
    found = set()
    for path in ROOT.glob("results/*/*/metrics.csv"):
        with open(path, encoding="utf-8") as file:
            found |= set(next(csv.reader(file)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name, text", ROWS)
def test_what_stands_for_a_name_exists(name, text):
    assert text.startswith("nothing") or "`" in text or text.startswith("no registry"), "says nothing of here"
    quoted = re.findall(r"`([^`]+)`", text)
    for one in quoted:
        if "/" in one.partition("=")[0]:
            assert is_metric(one) or any(ROOT.glob(re.sub(r"<\w+>", "*", one))), one
        elif "." in one and not one.startswith("python "):
            key, _, value = one.partition("=")
            assert convert.known(key, SCHEMA), key
            if value:
                layers = composition.read([one], "search_r1")
                validated(SCHEMA, composition.tree(layers), layers.problems)
                assert not layers.problems, one
    for word, path in re.findall(r"`(\w+)` of `([\w/]+\.py)`", text):
        assert re.search(rf"\b{word}\b", (ROOT / path).read_text(encoding="utf-8")), f"{path} has no {word}"


def is_metric(name: str) -> bool:
    if name in UNRECORDED:
        path, written = UNRECORDED[name]
        return written in (ROOT / path).read_text(encoding="utf-8")
    pattern = re.sub(r"<source>", "[^@]+", re.sub(r"<(n|k|part)>", "[^/]+", re.escape(name).replace("\\<", "<")))
    return any(re.fullmatch(pattern, one) for one in recorded_metrics())


def test_the_page_has_rows_of_every_project():
    assert {"RayPPOTrainer", "num_generations", "--n_samples_per_prompt", "n_agent", "frac_reward_zero_std"} <= dict(
        ROWS
    ).keys()
