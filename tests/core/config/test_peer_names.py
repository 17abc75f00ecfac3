"""The names of other projects: what stands for them here exists, and a search and a typed key find them."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from core.config import composition, convert, examine, help, peer_names, recipes
from core.config.unknown_keys import validated

ROOT = Path(__file__).resolve().parents[3]
TABLES = list(peer_names.tables())
TEXTS = [(f"{one.project}:{name}", text) for one in TABLES for name, text in one.names.items()]
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
@pytest.mark.parametrize("name, text", TEXTS, ids=[name for name, _ in TEXTS])
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
                layers = composition.read([one], SCHEMA)
                validated(SCHEMA, composition.tree("grpo", layers), layers.problems)
                assert not layers.problems, one
    for word, path in re.findall(r"`(\w+)` of `([\w/]+\.py)`", text):
        assert re.search(rf"\b{word}\b", (ROOT / path).read_text(encoding="utf-8")), f"{path} has no {word}"


def is_metric(name: str) -> bool:
    if name in UNRECORDED:
        path, written = UNRECORDED[name]
        return written in (ROOT / path).read_text(encoding="utf-8")
    pattern = re.sub(r"<source>", "[^@]+", re.sub(r"<(n|k|part)>", "[^/]+", re.escape(name).replace("\\<", "<")))
    return any(re.fullmatch(pattern, one) for one in recorded_metrics())


def test_a_table_has_every_name_that_the_page_promises():
    by_title = {one.title: one.names for one in TABLES}
    trl = by_title["Fields of TRL's GRPOConfig"]
    assert {
        *("num_generations", "beta", "epsilon", "epsilon_high", "scale_rewards", "loss_type", "num_iterations"),
        *("steps_per_generation", "temperature", "max_completion_length"),
    } <= trl.keys()
    assert {
        *("reward", "reward_std", "completions/mean_length", "clip_ratio/region_mean", "entropy", "kl"),
        "frac_reward_zero_std",
    } <= by_title["Metrics of TRL"].keys()


def test_a_typed_name_is_answered_and_a_metric_is_no_key():
    assert peer_names.advice("--n-samples-per-prompt") == (
        "is a name of OpenRLHF",
        "here: actor_rollout_ref.rollout.n",
    )
    assert peer_names.advice("policy_loss") is None and peer_names.advice("data.train_files") is None
    assert peer_names.advice("save_steps")[0] == "is a name of TRL and OpenRLHF"
    (line,) = examine("grpo", ["epsilon_high=0.28"]).problems
    assert line == "epsilon_high=0.28: is a name of TRL; here: actor_rollout_ref.actor.clip_ratio_high"


def test_a_search_finds_names_of_other_projects():
    text, found = help.shown("grpo", [], ["frac_reward_zero_std"])
    assert found and "frac_reward_zero_std (TRL, metric)\n    here: reward/zero_variance_share, of acc" in text
