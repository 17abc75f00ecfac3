"""What ``reward_model.sandbox`` and ``reward_model.sandbox_fusion`` mean to the scorers that run programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from core.config import tables

SCORERS = ("prime_code", "unit_tests")
SHARE = 0.8  # of reward_model.timeout_s that tests may take: a slow program is a wrong answer, not a failing scorer


def scorer_options(reward_model: Any) -> dict[str, dict[str, Any]]:
    """``reward_model.reward_kwargs``, with where and within which limits programs run."""
    options = {name: dict(given or {}) for name, given in (reward_model.reward_kwargs or {}).items()}
    sandbox = dataclasses.asdict(reward_model.sandbox)
    if not tables.reward_manager(reward_model).in_process:  # which knows no deadline
        sandbox["total_timeout_s"] = SHARE * reward_model.timeout_s
    for name in SCORERS:
        options[name] = {"sandbox": sandbox, **options.get(name, {})}
    if reward_model.sandbox_fusion.url:
        fusion = dataclasses.asdict(reward_model.sandbox_fusion)
        options["prime_code"] = {"sandbox_fusion": fusion, **options["prime_code"]}
    return options
