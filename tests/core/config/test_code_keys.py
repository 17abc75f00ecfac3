"""Code is named on the command line: which keys can name it, and what becomes of an artefact that
does."""

from __future__ import annotations

import shlex

import pytest

from core.command_line import choices
from core.config import composition, convert, recipes, recorded
from core.config.composition import compose, examine
from core.config.paths import OWN_FUNCTIONS
from core.config.schema import Config
from core.config.section import OWN_CODE_HINT
from core.errors import InputError

KEYS = {key: schema for schema in recorded.schemas() for key in convert.all_keys(schema)}


def test_the_keys_that_can_name_code():
    ends = (
        "tool_config_path",
        "interaction_config_path",
        "override_config",
        "engine_kwargs",
        "ray_init",
    )
    ends += (
        "trust_remote_code",
        "allow_unisolated",
        "rollout.agent.command",
        "custom_reward_function.path",
        "custom_reward_function.name",
    )
    assert {key for key in KEYS if recorded.CODE.search(key)} == {
        key for key in KEYS if key.endswith(ends)
    }
    own = {
        key
        for key, schema in KEYS.items()
        if OWN_CODE_HINT in choices(convert.all_keys(schema)[key])
    }
    assert own == {*OWN_FUNCTIONS}


MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
CODE = {
    f"{MODEL}.trust_remote_code": True,
    f"{MODEL}.override_config": {"auto_map": {"AutoModel": "evil.Model"}},
    "critic.model.trust_remote_code": True,
    "reward_model.model.trust_remote_code": True,
    "reward_model.sandbox.allow_unisolated": True,
    "reward_model.reward_kwargs": {"unit_tests": {"sandbox": {"allow_unisolated": 1}}},
    "custom_reward_function.path": "evil.py",
    "algorithm.adv_estimator": "evil.py:f",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "evil:f",
    f"{ROLLOUT}.agent_loop": "evil.py:Loop",
    f"{ROLLOUT}.agent.path": "evil.py:run",
    f"{ROLLOUT}.agent.command": "evil",
    f"{ROLLOUT}.multi_turn.tool_config_path": "evil.yaml",
    f"{ROLLOUT}.multi_turn.interaction_config_path": "evil.yaml",
    f"{ROLLOUT}.engine_kwargs": {"vllm": {"worker_cls": "evil.Worker", "swap_space": 3}},
    "trainer.logger": ["console", "evil.py:Logger"],
    "ray_kwargs.ray_init": {"runtime_env": {"pip": ["evil"]}},
}


def test_an_artefact_that_names_code_is_refused():
    for key, value in CODE.items():
        config = examine("grpo", (), {key: value}).config
        with pytest.raises(InputError) as refused:
            composition.refuse_code("ARTEFACT", config, "grpo", ["trainer.seed=3"])
        line = str(refused.value)
        assert (
            line.startswith("ARTEFACT: its settings name code that would run here: ")
            and key in line
        )
        append = line.rpartition("If you trust that code, append ")[2]
        # As the message says
        composition.refuse_code("ARTEFACT", config, "grpo", shlex.split(append))
    with pytest.raises(InputError):  # the value has to be named, and not the key alone
        composition.refuse_code("ARTEFACT", config, "grpo", [f"{key}=mine"])
    plain = {"actor_rollout_ref.model.path": "/models/x", "trainer.logger": ["console", "wandb"]}
    composition.refuse_code("ARTEFACT", examine("grpo", (), plain).config, "grpo")


def test_what_an_artefact_hides_in_another_key_is_text(monkeypatch):
    """An interpolation would be resolved after the check of what was given, and could read the
    environment."""
    monkeypatch.setenv("SECRET", "token")
    hidden = {
        "trainer.project_name": "evil.py:f",
        "algorithm.adv_estimator": "${trainer.project_name}",
    }
    assert "evil.py:f" not in str(recorded.code_in(examine("grpo", (), hidden).config))
    told = {"trainer.project_name": "${oc.env:SECRET}", "data.prompt_key": "a\\${oc.env:SECRET}"}
    config = examine("grpo", (), told).config
    assert (config.trainer.project_name, config.data.prompt_key) == tuple(told.values())
    # Part of a path: refused as given, not as resolved
    name = {"trainer.experiment_name": told["data.prompt_key"]}
    (problem,) = examine("grpo", (), name).problems
    assert problem.startswith("trainer.experiment_name=a\\${oc.env:SECRET}: must be a name")


def test_a_recipes_name_is_no_path():
    for recipe in ("../evil", "/tmp/evil", "a.b", "a/b", ""):
        with pytest.raises(InputError):
            recipes.trainer_of(recipe)
        assert recipes.schema_of(recipe) is Config
    assert compose("grpo", [])
