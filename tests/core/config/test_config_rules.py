"""Every rule between keys fires where it should, and only there; every key without effect is listed
with its reason.

``rules.txt`` has the configurations: under the name of a rule the command lines that it refuses or
warns of.
"""

from __future__ import annotations

import functools
import shlex
from pathlib import Path

import pytest

from core.config import rules
from core.config.composition import examine
from core.config.unused_keys import unused

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
ULYSSES = "ulysses_sequence_parallel_size"


def cases(kind):
    """Return rule, recipe, overrides and what is named, of each line of a part of rules.txt."""
    part, rule, found = "", "", []
    for line in Path(__file__).with_name("rules.txt").read_text().splitlines():
        if line.startswith("["):
            part, rule = line.strip("[]"), ""
        elif line and not line.startswith((" ", "#")):
            rule = line
        elif part == kind and line.startswith(" "):
            typed, _, named = line.partition(" -> ")
            recipe, *overrides = shlex.split(typed)
            found.append((rule, recipe, tuple(overrides), named))
    return found


@functools.cache
def examined(recipe, overrides):
    return examine(recipe, overrides)


def fire(kind, rule, composed, recipe):
    """Return the keys that a rule of core names."""
    found = [one for one in getattr(rules, kind) if one.__name__ == rule]
    return [key for one in found for key, *_ in one(composed.config)]


def test_a_rule_fires_alone():
    for rule, recipe, overrides, named in cases("problems"):
        composed = examined(recipe, overrides)
        (line,) = composed.problems
        assert line.startswith(f"{named}: ") and "; " in line and "\n" not in line, line
        assert rule == "none" or named.partition("=")[0] in fire(
            "PROBLEMS", rule, composed, recipe
        ), (rule, overrides)


def test_a_warning_is_no_problem():
    for rule, recipe, overrides, named in cases("warnings"):
        composed = examined(recipe, overrides)
        (line,) = composed.warnings
        assert composed.problems == () and line.startswith(f"{named}="), line
        assert recipe == "dapo" or fire("WARNINGS", rule, composed, recipe) == [named]


@pytest.mark.parametrize("recipe", ["ppo", "grpo", "dapo", "search_r1", "sft"])
def test_nothing_is_wrong_by_default(recipe):
    composed = examined(recipe, ("data.train_batch_size=256",))
    assert (composed.problems, composed.warnings, dict(composed.unused)) == ((), (), {})
    given = (
        "critic.optim.lr=1e-4",
        f"{ROLLOUT}.val_kwargs.do_sample=True",
        f"{ROLLOUT}.val_kwargs.temperature=0.6",
    )
    assert recipe != "ppo" or dict(examined(recipe, given).unused) == {}


def test_no_rule_fires_without_its_cause():
    assert [
        line for _, recipe, given, _ in cases("fine") for line in examined(recipe, given).problems
    ] == []


@pytest.mark.parametrize(("kind", "part"), [("PROBLEMS", "problems"), ("WARNINGS", "warnings")])
def test_every_rule_is_tried(kind, part):
    known = {rule.__name__ for rule in getattr(rules, kind)}
    assert known - {rule for rule, *_ in cases(part)} == set()


# --- keys without effect ---


def test_a_key_without_effect_is_listed_with_the_reason():
    for _, recipe, overrides, key in cases("unused"):
        composed = examined(recipe, overrides)
        assert composed.problems == () and key in composed.unused, (overrides, composed.problems)
        value, reason = composed.unused[key]
        assert value == composed.given[key] and reason and "{" not in reason


@pytest.mark.parametrize(
    ("key", "overrides", "reason"),
    [
        ("trainer.nnodes", (), "needs trainer.backend=ray"),
        # Of its own section
        ("critic.optim.min_lr_ratio", (), "needs critic.optim.lr_scheduler_type=cosine"),
        (f"{REF}.{ULYSSES}", (), f"needs algorithm.use_kl_in_reward or {ACTOR}.use_kl_loss"),
        # One of two will do
        (f"{REF}.{ULYSSES}", (f"{ACTOR}.use_kl_loss=True", "trainer.nnodes=2"), ""),
        (
            "algorithm.lam",
            ("algorithm.adv_estimator=remax",),
            "algorithm.adv_estimator=remax does not read it, only gae",
        ),
        ("algorithm.lam", ("algorithm.adv_estimator=my.own:f",), ""),  # which may read any key
        ("data.nope", (), ""),
    ],
)
def test_the_reason_names_what_a_key_needs(key, overrides, reason):
    composed = examined("ppo", overrides)
    assert unused(composed.config, key) == reason
