"""Reward managers: which process grades an answer (``reward_model.reward_manager``), or a user's own code for it.

The processes themselves are :mod:`core.rewards.graders`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from core.config import code_by_path, registry
from core.config.code_by_path import load_module, load_object
from core.errors import InputError
from core.rewards.custom_reward import users_code, without_scheme
from core.rewards.graders import GraderPool
from core.rewards.grading import Failure, InProcess, Job, RewardManager, Scorers, as_result
from reward_scores.score import Score

if TYPE_CHECKING:
    from core.config.sections.reward import RewardModelConfig


class UsersOwn:
    """A user's manager: what it returns is read like a reward function's result, and what it raises is a crash."""

    def __init__(self, manager: Any):
        self.manager = manager

    async def run(self, job: Job) -> Score | Failure:
        return await as_result(self.manager.run, job)

    def close(self) -> None:
        self.manager.close()


def naive(reward: RewardModelConfig, scorers: Scorers) -> InProcess:
    return InProcess(scorers, pool(reward, scorers))


def pool(reward: RewardModelConfig, scorers: Scorers) -> GraderPool:
    limits = {name: getattr(reward, name) for name in ("num_workers", "timeout_s", "memory_limit_mb")}
    if reward.sandbox_fusion.url:  # a server that restarts must not cost an answer: its time is not the scorer's
        limits["timeout_s"] += reward.sandbox_fusion.give_up_s
    return GraderPool(scorers, **limits)


KEY, MODULE = "reward_model.reward_manager", "reward_model.module.path"


def register(name: str) -> Callable[[Any], Any]:
    """Return a decorator that names a manager: ``reward_model.reward_manager=name``, in the module of ``module.path``.

    Raises InputError for a name that is taken.
    """
    return code_by_path.registering(KEY, registry.REWARD_MANAGERS, name)


def make_manager(reward: RewardModelConfig, scorers: Scorers) -> RewardManager:
    """Make the manager that ``reward_model`` names: one of the table, or the user's own.

    A user's is a class (or function) in ``module.path``, which names it by :func:`register`; with ``source=importlib``
    it is ``module.name`` there. It is called with ``reward_model`` and the :class:`Scorers` of the run (so that it can
    use an :class:`InProcess` or a :class:`GraderPool`), and what it returns has ``async run(job)`` and ``close()``.
    Raises InputError.
    """
    name, own = reward.reward_manager, registry.own_manager(reward.reward_manager, reward.source)
    if not own:
        return load_object(registry.reward_manager(name, reward.source).function)(reward, scorers)
    where, key = without_scheme(reward.module.path or ""), f"{KEY}={name}"
    with users_code(f"{MODULE}={where}", "loading it"):
        if reward.source == "importlib":
            key = f"reward_model.module.name={reward.module.name}"
            maker = load_object(f"{where}:{reward.module.name or ''}", MODULE)
        else:
            load_module(where, f"{MODULE}={where}")
            names = code_by_path.registered(KEY)
            if name not in names:
                has = f"it has {', '.join(names)}" if names else "it has no name"
                raise InputError(
                    f'{key}: {where} registers no such name, {has}; write @register("{name}") over the class'
                )
            maker = names[name]
        manager = maker(reward, scorers)
    if lacks := [name for name in ("run", "close") if not callable(getattr(manager, name, None))]:
        raise InputError(f"{key}: has no {' and no '.join(lacks)}()")
    return UsersOwn(manager)
