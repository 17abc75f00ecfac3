"""A judge behind a URL and a reward model: ``reward_model.enable``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from core.config.extensions import Extension
from core.config.locations import is_url
from core.rewards.judge.keys import ModelKeys, rules

if TYPE_CHECKING:
    from core.config.schema import Config

HERE = "core.rewards.judge"


def _judge_folder(config: Config) -> str | None:
    from core.config.paths import run_folder

    folder = config.trainer.default_local_dir  # its text is part of what recorded runs are known by
    return f"{run_folder(config) if is_url(folder) else folder}/judge" if config.reward_model.judged else None


def _files(config: Config) -> Iterator[tuple[str, str]]:
    reward, path = config.reward_model, config.reward_model.model.path
    if reward.loads_model and (path.startswith(("/", ".", "~")) or is_url(path)):
        yield "reward_model.model.path", path
    if reward.judged:
        files = {name: getattr(reward.judge, name) for name in ("template", "json_schema", "canaries")}
        yield from ((f"reward_model.judge.{name}", path) for name, path in files.items() if path)


def _checked_at_start(config: Config) -> Iterator[str]:
    reward = config.reward_model
    if reward.judged:
        yield f"judge: {reward.judge.url} has the model {reward.judge.model} and agrees with the canaries"
    if reward.loads_model:
        yield f"reward model: {reward.model.path} is a classifier with one label; its chat template"


EXTENSION = Extension(
    name="judge",
    keys={"reward_model": ModelKeys},
    rules=rules,
    view={"judge": "reward_model.judge"},
    derived=(
        ("reward_model.model.external_lib", lambda config: config.actor_rollout_ref.model.external_lib),
        ("reward_model.use_dynamic_bsz", lambda config: config.reward_model.micro_batch_size_per_gpu is None),
        ("reward_model.forward_max_token_len_per_gpu", lambda config: config.critic.ppo_max_token_len_per_gpu),
        ("reward_model.max_length", lambda config: config.data.max_prompt_length + config.data.max_response_length),
        ("reward_model.judge.cache_dir", _judge_folder),
    ),
    files=_files,
    checked_at_start=_checked_at_start,
    functions={
        "judge": f"{HERE}.judge:Judge",
        "reward_model": f"{HERE}.reward_model:RewardModel",
        "shared_reward_model": f"{HERE}.shared_reward_model:shared_reward_model",
    },
)
