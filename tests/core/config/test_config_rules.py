"""Every rule between keys fires where it should, and only there; every key without effect is listed with its reason.

``rules.txt`` has the configurations: under the name of a rule the command lines that it refuses or warns of.
"""

from __future__ import annotations

import ast
import functools
import inspect
import shlex
from pathlib import Path

import pytest

from core.config import convert, examine, rules
from core.config.recipes import schema_of
from core.config.rules import View
from core.config.section import mark

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
HOOKS = {"search_r1": ("generate",)}  # what the trainer of a recipe overrides


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


PROBLEMS, WARNINGS, UNUSED, FINE = map(cases, ("problems", "warnings", "unused", "fine"))


@functools.cache
def examined(recipe, overrides):
    return examine(recipe, overrides, HOOKS.get(recipe, ()))


def reached(kind, recipe, overrides):
    """Yield rule, line of the yield and key, of each rule that fires."""
    composed = examined(recipe, overrides)
    view = View(composed.config, composed.given, HOOKS.get(recipe, ()), recipe)
    for rule in (rule for book in rules.books(recipe) for rule in getattr(book, kind)):
        generator = rule(view)
        for key, _ in generator:
            yield rule.__name__, generator.gi_frame.f_lineno, key


def statements(kind):
    """Return every yield of the rules of a kind: its rule's name and its line."""
    found = set()
    for recipe in ("ppo", "search_r1"):
        for rule in (rule for book in rules.books(recipe) for rule in getattr(book, kind)):
            lines, first = inspect.getsourcelines(rule)
            nodes = ast.walk(ast.parse("".join(lines)))
            found |= {(rule.__name__, first + node.lineno - 1) for node in nodes if isinstance(node, ast.Yield)}
    return found


@pytest.mark.parametrize("rule, recipe, overrides, named", PROBLEMS, ids=lambda x: None)
def test_a_rule_fires_alone(rule, recipe, overrides, named):
    (line,) = examined(recipe, overrides).problems
    assert line.startswith(f"{named}: ") and "; " in line and "\n" not in line
    key = named.partition("=")[0]
    assert rule == "none" or rule in {name for name, _, one in reached("problems", recipe, overrides) if one == key}


@pytest.mark.parametrize("rule, recipe, overrides, named", WARNINGS, ids=lambda x: None)
def test_a_warning_is_no_problem(rule, recipe, overrides, named):
    composed = examined(recipe, overrides)
    assert composed.problems == () and len(composed.warnings) == 1
    assert [(name, key) for name, _, key in reached("warnings", recipe, overrides)] == [(rule, named)]
    assert examined(recipe, ()).warnings == ()


@pytest.mark.parametrize("_, recipe, overrides, __", FINE, ids=lambda x: None)
def test_no_rule_fires(_, recipe, overrides, __):
    assert examined(recipe, overrides).problems == ()


@pytest.mark.parametrize("kind, lines", [("problems", PROBLEMS), ("warnings", WARNINGS)])
def test_every_rule_is_tried(kind, lines):
    tried = {(name, line) for _, recipe, given, _ in lines for name, line, _ in reached(kind, recipe, given)}
    assert statements(kind) - tried == set()


def test_a_run_without_an_engine_is_not_warned_of_its_precision():
    overrides = (f"{ROLLOUT}.dtype=bfloat16", f"{ACTOR}.fsdp_config.dtype=float32")
    (line,) = examined("sft", (*overrides, "data.val_files=questions.parquet")).warnings
    assert "precision" in line
    assert examined("sft", (*overrides, "data.val_files=null")).warnings == ()


# --- keys without effect ---


@pytest.mark.parametrize("_, recipe, overrides, key", UNUSED, ids=lambda x: None)
def test_a_key_without_effect_is_listed_with_the_reason(_, recipe, overrides, key):
    composed = examined(recipe, overrides)
    assert composed.problems == ()
    value, reason = composed.unused[key]
    assert value == composed.given[key] and reason and "{" not in reason


def test_every_condition_of_a_key_is_tried():
    reasons = {reason for _, recipe, given, _ in UNUSED for _, reason in examined(recipe, given).unused.values()}
    marks = [
        (key, reason)
        for recipe in ("ppo", "search_r1")  # DAPO's stand in tests/recipes
        for key, section in {"": schema_of(recipe), **convert.sections(schema_of(recipe))}.items()
        for name in section.model_fields
        for _, reason in mark(section, name, "used_if") or ()
    ]
    assert [(key, reason) for key, reason in marks if isinstance(reason, str) and reason not in reasons] == []


def test_a_key_with_effect_is_not_listed():
    given = (
        *("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.01", f"{ACTOR}.clip_ratio=0.1"),
        *("algorithm.gamma=0.99", "algorithm.lam=0.95", "critic.optim.lr=1e-4"),
        *(f"{REF}.log_prob_micro_batch_size_per_gpu=4", "trainer.seed=3"),
        *(f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=0.6"),
    )
    assert dict(examined("ppo", given).unused) == {}


def test_what_the_recipe_file_says_is_not_listed():
    assert dict(examined("grpo", ("preset=paper",)).unused) == {}
