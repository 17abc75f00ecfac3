"""Every key has a role, which decides what a change of it means for a run that resumes."""

from __future__ import annotations

from core.config import convert, recipes, roles
from core.config.schema import Config

SCHEMAS = (Config, *(module.SCHEMA for _, module in recipes.extended()))
KEYS = {key for schema in SCHEMAS for key in convert.all_keys(schema)}


def covers(entry: str, key: str) -> bool:
    return entry == key or entry.endswith(f".{roles.ALL}") and key.startswith(entry.removesuffix(roles.ALL))


def test_every_key_has_one_role():
    """A new key belongs into core/config/key_roles.yaml, or into the file of that name of its recipe."""
    counts = {key: sum(covers(entry, key) for entry in roles.table()) for key in KEYS}
    assert {key: count for key, count in counts.items() if count != 1} == {}


def test_every_entry_stands_for_a_key_and_a_known_role():
    assert [entry for entry in roles.table() if not any(covers(entry, key) for key in KEYS)] == []
    assert {*roles.table().values()} == {roles.OBJECTIVE, roles.FILES, roles.EXECUTION, roles.BOOKKEEPING}


def test_roles_of_keys():
    expected = {
        "actor_rollout_ref.actor.clip_ratio_high": roles.OBJECTIVE,
        "retriever.topk": roles.OBJECTIVE,
        "reward_model.reward_kwargs.gsm8k.method": roles.OBJECTIVE,  # inside a mapping of the user's own
        "not.a.key": roles.OBJECTIVE,
        "data.train_files": roles.FILES,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": roles.EXECUTION,
        "trainer.total_training_steps": roles.EXECUTION,
        "trainer.health.entropy.bound": roles.BOOKKEEPING,
        "trainer.save_freq": roles.BOOKKEEPING,
    }
    assert {key: roles.role_of(key) for key in expected} == expected
