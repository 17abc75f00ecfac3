"""Code is named on the command line: which keys can name it, and what becomes of an artefact that does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from core.config import code_keys, compose, convert, examine, recipes
from core.config.schema import Config
from core.errors import InputError

KEYS = {
    key: hint
    for _, module in (("", None), *recipes.extended())
    for key, hint in convert.all_keys(module.SCHEMA if module else Config).items()
}


def holds_text(hint: Any) -> bool:
    """Return whether a value of this type can be text of any kind, or a mapping."""
    if get_origin(hint) is Literal or hint in (int, float, bool, type(None)):
        return False
    parts = get_args(hint)[:1] if get_origin(hint) in (Annotated, tuple) else get_args(hint)
    return get_origin(hint) is Mapping or not parts or any(map(holds_text, parts))


def test_every_key_that_can_hold_text_has_a_kind():
    """A new one belongs into core/config/code_keys.yaml, or into the file of that name of its recipe."""
    table = code_keys.table()
    assert [key for key, hint in KEYS.items() if holds_text(hint) and key not in table] == []
    assert [key for key in table if key not in KEYS] == []
    assert {*table.values()} == {*code_keys.NAMES_CODE}
    consents = [key for key in KEYS if key.rpartition(".")[2].startswith(("trust", "allow"))]
    assert {table.get(key) for key in consents} == {code_keys.CONSENT}
    plugins = [key for key, hint in KEYS.items() if "your own as package.module:function" in str(hint)]
    assert len(plugins) == 4 and {table[key] for key in plugins} == {code_keys.PLUGIN}


def test_a_key_without_a_kind_counts_as_code(monkeypatch):
    class Later(Config):
        hook: str | None = None
        depth: int = 3
        kind: Literal["a", "b"] = "a"

    assert code_keys.named(Later().replace(hook="x.py:f", depth=5, kind="b")) == {"hook": "x.py:f"}


MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
CODE = {
    f"{MODEL}.trust_remote_code": True,
    f"{MODEL}.external_lib": "evil",
    f"{MODEL}.override_config": {"auto_map": {"AutoModel": "evil.Model"}},
    "critic.model.external_lib": "evil",
    "critic.model.trust_remote_code": True,
    "reward_model.model.trust_remote_code": True,
    "reward_model.sandbox.allow_unisolated": True,
    "reward_model.reward_kwargs": {"unit_tests": {"sandbox": {"allow_unisolated": 1}}},
    "reward_model.module.path": "evil.py",
    "custom_reward_function.path": "evil.py",
    "algorithm.adv_estimator": "evil.py:f",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "evil:f",
    f"{ROLLOUT}.agent_loop": "evil.py:Loop",
    f"{ROLLOUT}.multi_turn.tool_config_path": "evil.yaml",
    f"{ROLLOUT}.multi_turn.interaction_config_path": "evil.yaml",
    f"{ROLLOUT}.engine_kwargs": {"vllm": {"worker_cls": "evil.Worker", "swap_space": 3}},
    "trainer.logger": ["console", "evil.py:Logger"],
    "ray_kwargs.ray_init": {"runtime_env": {"pip": ["evil"]}},
}


@pytest.mark.parametrize("key", CODE)
def test_an_artefact_that_names_code_is_refused(key):
    config = examine("grpo", (), (), {key: CODE[key]}).config
    with pytest.raises(InputError) as refused:
        code_keys.refuse("ARTEFACT", config, "grpo")
    line = str(refused.value)
    assert line.startswith("ARTEFACT: its settings name code that would run here: ") and key in line
    append = line.rpartition("If you trust that code, append ")[2]
    import shlex

    code_keys.refuse("ARTEFACT", config, "grpo", shlex.split(append))  # as the message says
    with pytest.raises(InputError):
        code_keys.refuse("ARTEFACT", config, "grpo", ["trainer.seed=3"])


def test_the_command_line_names_the_value_and_not_the_key_alone():
    config = examine("grpo", (), (), {"custom_reward_function.path": "evil.py"}).config
    with pytest.raises(InputError):
        code_keys.refuse("ARTEFACT", config, "grpo", ["custom_reward_function.path=mine.py"])


def test_what_an_artefact_hides_in_another_key_is_text(monkeypatch):
    """An interpolation would be resolved after the check of what was given, and could read the environment."""
    monkeypatch.setenv("SECRET", "token")
    hidden = {"trainer.project_name": "evil.py:f", "algorithm.adv_estimator": "${trainer.project_name}"}
    assert "evil.py:f" not in str(code_keys.named(examine("grpo", (), (), hidden).config))
    told = {"trainer.project_name": "${oc.env:SECRET}", "data.prompt_key": "a\\${oc.env:SECRET}"}
    config = examine("grpo", (), (), told).config
    assert (config.trainer.project_name, config.data.prompt_key) == tuple(told.values())
    name = {"trainer.experiment_name": told["data.prompt_key"]}  # part of a path: refused as given, not as resolved
    (problem,) = examine("grpo", (), (), name).problems
    assert problem.startswith("trainer.experiment_name=a\\${oc.env:SECRET}: must be a name")


def test_what_is_no_code_passes():
    plain = {
        f"{MODEL}.path": "/models/x",
        f"{MODEL}.custom_chat_template": "{{ messages }}",
        f"{ROLLOUT}.engine_kwargs": {"hf": {"cache_gib": 2.0}},
        "reward_model.reward_kwargs": {"gsm8k": {"method": "flexible"}},
        "trainer.logger": ["console", "wandb"],
    }
    code_keys.refuse("ARTEFACT", examine("grpo", (), (), plain).config, "grpo")


def test_the_repositorys_own_presets_are_no_foreign_code():
    for recipe in recipes.names():
        for path in (recipes.folder(recipe) / "preset").glob("*.yaml"):
            config = examine(recipe, [f"preset={path.stem}"]).config
            code_keys.refuse("ARTEFACT", config, recipe)


def test_a_recipes_name_is_no_path():
    for recipe in ("../evil", "/tmp/evil", "a.b", "a/b", ""):
        with pytest.raises(InputError):
            recipes.trainer_of(recipe)
        assert recipes.schema_of(recipe) is Config
    assert compose("grpo", [])
