"""A file of the user's own, named as in Hydra."""

from __future__ import annotations

import pytest

from core.config import examine

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: ['file://verl/trainer/config']}\ndefaults: [ppo_trainer, _self_]\n"
        "data: {max_prompt_length: 1024, return_raw_chat: True}\n"
        "actor_rollout_ref: {rollout: {n: 6, n_val: 4, val_temperature: 0.7, temperature: 0.9}}\n"
        "trainer: {experiment_name: '${data.max_prompt_length}-tokens'}\n"
    )
    (tmp_path / "over_recipe.yaml").write_text("defaults: [grpo, _self_]\ndata: {max_prompt_length: 99}\n")
    return tmp_path


def test_a_file_takes_the_recipes_place_and_typed_keys_win(folder):
    options = [f"--config-path={folder}", "--config-name=mine"]
    composed = examine("grpo", [*options, f"{ROLLOUT}.temperature=0.8", "algorithm.adv_estimator=gae"])
    config = composed.config
    assert composed.problems == ()
    assert (config.data.max_prompt_length, config.actor_rollout_ref.rollout.n) == (1024, 6)
    assert config.actor_rollout_ref.rollout.temperature == 0.8
    assert config.trainer.experiment_name == "1024-tokens-seed1"  # as a preset's
    assert "data.return_raw_chat" in composed.unused  # keys of other versions are read as typed ones are
    assert composed.read[f"{ROLLOUT}.n_val"][0] == 4 and config.actor_rollout_ref.rollout.val_kwargs.n == 4
    assert examine("grpo", options).config.algorithm.adv_estimator == "gae"  # the recipe's grpo is not named


def test_a_defaults_list_may_name_the_recipe(folder):
    config = examine("grpo", ["--config-path", str(folder), "--config-name", "over_recipe.yaml"]).config
    assert (config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n) == ("grpo", 5)
    assert config.data.max_prompt_length == 99


@pytest.mark.parametrize(
    "options, said",
    [
        (["--config-path=nowhere/at/all", "--config-name=x"], "there is no such folder, and the keys of its file"),
        (["--config-path={folder}", "--config-name=absent"], "mend or name a file of"),
        (["--config-path={folder}", "--config-name=broken"], "mend or name a file of"),
    ],
)
def test_what_is_not_there_is_one_line(folder, options, said):
    if "broken" in options[1]:
        (folder / "broken.yaml").write_text("defaults: [no_such_file, _self_]\n")
    (line,) = examine("grpo", [text.replace("{folder}", str(folder)) for text in options]).problems
    assert said in line and "\n" not in line
