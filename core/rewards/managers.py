"""Reward managers: which process grades an answer (``reward_model.reward_manager``), or a user's own code for it.

The processes themselves are :mod:`core.rewards.pool`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from core.config import tables
from core.config.tables import load_object
from core.errors import InputError
from core.rewards.custom import users_code, without_scheme
from core.rewards.grading import Failure, InProcess, Job, RewardManager, Scorers, as_result
from core.rewards.pool import Pool
from reward_scores.score import Score

if TYPE_CHECKING:
    from core.config.schema import RewardModelConfig


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


def pool(reward: RewardModelConfig, scorers: Scorers) -> Pool:
    limits = {name: getattr(reward, name) for name in ("num_workers", "timeout_s", "memory_limit_mb")}
    return Pool(scorers, **limits)


def make_manager(reward: RewardModelConfig, scorers: Scorers) -> RewardManager:
    """Make the manager that ``reward_model`` names: one of the table, or with ``source=importlib`` the user's own.

    A user's is a class (or function) ``module.name`` of ``module.path``. It is called with ``reward_model`` and the
    :class:`Scorers` of the run (so that it can use an :class:`InProcess` or a :class:`Pool`), and what it returns
    has ``async run(job)`` and ``close()``. Raises InputError.
    """
    if reward.source == "register":
        return load_object(tables.reward_manager(reward.reward_manager, reward.source).function)(reward, scorers)
    where = without_scheme(reward.module.path or "")
    with users_code(f"reward_model.module.path={where}", "loading it"):
        made = load_object(f"{where}:{reward.module.name or ''}", "reward_model.module.path")(reward, scorers)
    if lacks := [name for name in ("run", "close") if not callable(getattr(made, name, None))]:
        raise InputError(f"reward_model.module.name={reward.module.name}: has no {' and no '.join(lacks)}()")
    return UsersOwn(made)
