"""The text of --help: every key in words, and searches with and without a hit."""

from __future__ import annotations

import pytest

from core.command_line import explained, help_text, prepare
from core.config import convert, recipes
from core.config.section import hints, is_section


def asked(capsys, *arguments: str, recipe: str = "grpo") -> tuple[int, str, str]:
    """The exit status of a command line, and what it printed on stdout and stderr."""
    with pytest.raises(SystemExit) as end:
        prepare(recipe, arguments)
    return (end.value.code, *capsys.readouterr())


@pytest.mark.parametrize("recipe", recipes.names())
def test_every_key_is_explained(recipe):
    entries = list(explained(recipe, ()))
    keys = [head.partition("=")[0] for head, *_ in entries]
    assert keys == list(convert.all_keys(recipes.schema_of(recipe)))
    descriptions = [section.model_fields[name].description for section, name in fields(recipes.schema_of(recipe))]
    assert all(descriptions)


def fields(schema):
    for section in (schema, *convert.sections(schema).values()):
        yield from ((section, name) for name, hint in hints(section).items() if not is_section(hint))


def test_the_whole_help_has_usage_presets_and_every_key_in_120_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = asked(capsys, "--help", recipe="dapo")
    assert code == 0 and err == "" and "\x1b" not in out
    assert "usage: python -m recipes.dapo.main_dapo" in out and "DRY_RUN=1" in out
    assert "Presets: lab, " in out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 120
    assert all(any(line.startswith(f"{key}=") for line in lines) for key in convert.all_keys())
    monkeypatch.setenv("COLUMNS", "60")
    narrow = help_text("dapo", [], ["clip_ratio_low"])[0].splitlines()
    assert max(map(len, narrow)) <= 60


def test_defaults_are_the_recipes_and_follow_what_stands_before(capsys):
    assert "algorithm.adv_estimator=gae\n" in asked(capsys, "--help", "estimator", recipe="ppo")[1]
    assert "algorithm.adv_estimator=grpo\n" in asked(capsys, "-h", "estimator")[1]
    before = "actor_rollout_ref.actor.clip_ratio=0.4"
    _, out, _ = asked(capsys, before, "--", "--help", "clip_ratio_low")
    assert "clip_ratio_low=0.4\n" in out
    assert "actor_rollout_ref.rollout.n=16\n" in asked(capsys, "preset=lab", "--help", "trajectories", "prompt")[1]


def test_a_search_reads_names_comments_and_choices_in_any_case(capsys):
    code, out, _ = asked(capsys, "--help", "CLIP")
    assert code == 0 and "usage" not in out
    assert {"actor_rollout_ref.actor.clip_ratio=0.2", "critic.cliprange_value=0.5"} <= set(out.splitlines())
    assert "data.shuffle" not in out
    assert "trainer.save_freq=-1\n" in asked(capsys, "--help", "checkpoint", "steps")[1]  # words of its comment
    assert "trainer.logger=" in asked(capsys, "--help", "tensorboard")[1]  # one of its choices
    two = asked(capsys, "--help", "clip", "dual")[1].splitlines()
    assert [line.partition("=")[0] for line in two if "=" in line] == ["actor_rollout_ref.actor.clip_ratio_c"]
    assert "lr=1e-06" in asked(capsys, "--help", "optim.lr=3")[1]  # an override after it is searched for by its key


def test_a_search_without_a_hit_ends_with_1(capsys):
    code, out, err = asked(capsys, "--help", "temprature")
    assert code == 1 and out == "" and len(err.splitlines()) == 1
