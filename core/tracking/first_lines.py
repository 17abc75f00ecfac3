"""The first lines of a run, before anything is loaded: what a step is, how long the run will be, where it writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from core.config import registry
from core.config.locations import is_url
from core.config.paths import run_folder
from core.config.schema import Config


def first_lines(config: Config) -> list[str]:
    """Return what a step is, how long the run will be, where it writes, and how to watch it."""
    return [*([_validation(config)] if config.trainer.val_only else _training(config)), *_places(config)]


def _training(config: Config) -> Iterator[str]:
    yield f"a step: {_trajectories(config)}; {_updates(config)}"
    trainer, length = config.trainer, f"{config.trainer.total_epochs} epochs of the data"
    if steps := trainer.total_training_steps:
        length = f"{steps:,} step{'s' * (steps > 1)}"
    validates = f"a validation every {trainer.test_freq} steps" if trainer.test_freq > 0 else "no validation on the way"
    saves = f"a checkpoint every {trainer.save_freq} steps" if trainer.save_freq > 0 else "no checkpoint"
    yield f"the run: {length}; {validates}; {saves}"


def _validation(config: Config) -> str:
    answers, files = config.actor_rollout_ref.rollout.val_kwargs.n, len(config.data.val_files)
    counted = f"{files} file{'s' * (files > 1)}, {answers} answer{'s' * (answers > 1)} a question"
    return f"the run: one validation on {counted}; trainer.val_only trains nothing"


def _trajectories(config: Config) -> str:
    """Return what a step collects: ``512 prompts x 16 answers = 8,192 trajectories``."""
    rollout, filters = config.actor_rollout_ref.rollout, config.algorithm.filter_groups
    prompts, answers = config.data.train_batch_size, rollout.n
    if not config.generates:
        return f"{prompts:,} demonstration{'s' * (prompts > 1)}"
    episode = f", episodes of at most {config.turns} turns" if config.turns > 1 else ""
    if rollout.agent_loop == "tool_agent":
        turns = rollout.multi_turn.max_assistant_turns
        episode = f", episodes with tools{f' of at most {turns} turns' if turns else ''}"
    elif rollout.agent_loop not in (None, registry.SINGLE_TURN) and not episode:
        episode = f", episodes of {rollout.agent_loop}"
    words = f"{prompts:,} prompt{'s' * (prompts > 1)} x {answers:,} answer{'s' * (answers > 1)}"
    text = f"{words} = {prompts * answers:,} trajectories{episode}"
    if filters.enable:
        most = filters.max_num_gen_batches * config.data.gen_batch_size
        text += f" of groups whose {filters.metric} differs, from at most {most:,} prompts drawn"
    return text


def _updates(config: Config) -> str:
    """Return the updates of a step, the critic's apart where they are others."""
    actor, critic, n = config.actor_rollout_ref.actor, config.critic, config.actor_rollout_ref.rollout.n

    def updates(mini: int, epochs: int) -> str:
        one = -(-config.data.train_batch_size // mini)
        count = f"{one * epochs:,} update{'s' * (one * epochs > 1)} of {mini * n:,}"
        return f"{count} ({epochs} epochs of {one:,})" if epochs > 1 else count

    policys = updates(actor.ppo_mini_batch_size, actor.ppo_epochs)
    critics = updates(critic.ppo_mini_batch_size, critic.ppo_epochs) if critic.enable else ""
    both = ", and as many of the critic" if critics == policys else f", and {critics} of the critic"
    return policys + (both if critics else "")


def _places(config: Config) -> Iterator[str]:
    folder, loggers = run_folder(config), config.trainer.logger
    sent = f", sent to {config.trainer.default_local_dir}" if is_url(config.trainer.default_local_dir) else ""
    yield f"writes to {folder}{sent}: metrics.jsonl has a line a step, samples.jsonl some answers of each validation"
    top = folder.parent if folder.is_absolute() else Path(*folder.parts[:1])  # of "." too, which has no parts
    curves = f"tensorboard --logdir {top}"
    if "tensorboard" not in loggers:
        shown = ",".join(dict.fromkeys([*loggers, "tensorboard"]))
        curves = f"{curves} (with trainer.logger=[{shown}])"
    console = "this log, " if "console" in loggers else ""
    yield f"to watch it: {console}tail -f {folder}/metrics.jsonl, {curves}"
