"""Every key has a role, which decides what a change of it means for a run that resumes."""

from __future__ import annotations

from core.config import recorded
from core.config.section import BOOKKEEPING, EXECUTION, FILES, IDENTITY


def test_roles_of_keys():
    expected = {
        "actor_rollout_ref.actor.clip_ratio_high": IDENTITY,
        "retriever.topk": IDENTITY,
        "retriever.url": EXECUTION,
        "reward_model.reward_kwargs.gsm8k.method": IDENTITY,  # inside a mapping of the user's own
        "not.a.key": IDENTITY,
        "data.train_files": FILES,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": EXECUTION,
        "trainer.total_training_steps": EXECUTION,
        "trainer.health.entropy.bound": BOOKKEEPING,  # the section's
        "trainer.save_freq": BOOKKEEPING,
    }
    assert {key: recorded.role_of(key) for key in expected} == expected
