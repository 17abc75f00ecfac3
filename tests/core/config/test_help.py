"""The text of --help: every key in words, and searches with and without a hit."""

from __future__ import annotations

import pytest

from core.command_line import explained, prepare
from core.config import convert, recipes
from core.config.section import hints, is_section


def asked(capsys, *arguments: str, recipe: str = "grpo") -> tuple[int, str, str]:
    """The exit status of a command line, and what it printed on stdout and stderr."""
    with pytest.raises(SystemExit) as end:
        prepare(recipe, arguments)
    return (end.value.code, *capsys.readouterr())


@pytest.mark.parametrize("recipe", recipes.names())
def test_every_key_is_explained(recipe):
    schema = recipes.schema_of(recipe)
    assert [head.partition("=")[0] for head, *_ in explained(recipe, ())] == list(
        convert.all_keys(schema)
    )
    for section in (schema, *convert.sections(schema).values()):
        plain = [name for name, hint in hints(section).items() if not is_section(hint)]
        assert all(section.model_fields[name].description for name in plain)


def test_the_whole_help_has_usage_presets_and_every_key(capsys):
    code, out, err = asked(capsys, "--help", recipe="dapo")
    assert code == 0 and err == "" and "\x1b" not in out
    assert "usage: python -m recipes.dapo.main_dapo" in out and "Presets: lab, " in out
    lines = out.splitlines()
    assert all(any(line.startswith(f"{key}=") for line in lines) for key in convert.all_keys())
    code, out, err = asked(capsys, "--help", "temprature")  # a search without a hit
    assert code == 1 and out == "" and len(err.splitlines()) == 1


def test_defaults_are_the_recipes_and_follow_what_stands_before(capsys):
    assert "algorithm.adv_estimator=gae\n" in asked(capsys, "--help", "estimator", recipe="ppo")[1]
    assert "algorithm.adv_estimator=grpo\n" in asked(capsys, "-h", "estimator")[1]
    before = "actor_rollout_ref.actor.clip_ratio=0.4"
    _, out, _ = asked(capsys, before, "--", "--help", "clip_ratio_low")
    assert "clip_ratio_low=0.4\n" in out
    assert (
        "actor_rollout_ref.rollout.n=16\n"
        in asked(capsys, "preset=lab", "--help", "trajectories", "prompt")[1]
    )


def test_a_search_reads_names_comments_and_choices_in_any_case(capsys):
    code, out, _ = asked(capsys, "--help", "CLIP")
    assert code == 0 and "usage" not in out
    assert {"actor_rollout_ref.actor.clip_ratio=0.2", "critic.cliprange_value=0.5"} <= set(
        out.splitlines()
    )
    assert "data.shuffle" not in out
    # Words of its comment
    assert "trainer.save_freq=-1\n" in asked(capsys, "--help", "checkpoint", "steps")[1]
    assert "trainer.logger=" in asked(capsys, "--help", "tensorboard")[1]  # one of its choices
    two = asked(capsys, "--help", "clip", "dual")[1].splitlines()
    assert [line.partition("=")[0] for line in two if "=" in line] == [
        "actor_rollout_ref.actor.clip_ratio_c"
    ]
    # An override after it is searched for by its key
    assert "lr=1e-06" in asked(capsys, "--help", "optim.lr=3")[1]


def test_the_keys_of_a_first_run_are_fifteen_and_ranked(capsys):
    code, out, _ = asked(capsys, "preset=lab", "--help", "first")
    heads = [line.split(". ", 1)[1] for line in out.splitlines() if line[0].isdigit()]
    keys = [head.partition("=")[0] for head in heads]
    assert code == 0 and len(keys) == 15 and set(keys) <= set(convert.all_keys())
    assert keys[0] == "actor_rollout_ref.model.path"
    assert keys.index("actor_rollout_ref.actor.optim.lr") < 5
    assert "actor_rollout_ref.actor.optim.lr=0.0001" in heads  # of the preset


@pytest.mark.parametrize("recipe", recipes.names())
def test_a_first_run_of_a_recipe_is_told_of_its_own_keys_alone(recipe, capsys):
    code, out, err = asked(capsys, "--help", "first", recipe=recipe)
    assert code == 0 and err == "" and "actor_rollout_ref.actor.optim.lr=" in out
    assert ("rollout.n=" in out) == (recipe != "sft")
