"""The extensions that tests name in the marker ``needs``, which leaves them out where its folder was deleted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

# All that this repository has, so that a misspelt name is told from that of a deleted folder.
EXTENSIONS = (
    *("call_formats", "environments", "evaluation", "judge", "planning", "remote", "sglang"),
    *("tensor_parallel", "tools", "trace", "variants", "verl_classes", "verl_data", "verl_keys", "verl_tools"),
    "vision",
)

REWARD = "enable|weight|judge|model|max_length|nnodes|n_gpus_per_node|use_dynamic_bsz|micro_batch|forward_max"
KERNELS = r"gae$|grpo$|vanilla$|.*[.:]"  # estimators and losses, and a path
ASKED_BY = {  # what an override of a test holds that asks for the extension
    "environments": r"multi_turn\.environment|=verifiers$",
    "judge": rf"^\+?reward_model\.({REWARD})",
    "remote": r"s3://",
    "sglang": "sglang",
    "tensor_parallel": r"(actor|ref|critic)\.tensor_model_parallel_size",
    "tools": r"multi_turn\.(enable|max_|tool_|interaction_|format)",
    "trace": r"trainer\.trace",
    "variants": rf"correction\.rollout_|(estimator|loss_mode)=(?!{KERNELS})|\.tau_|_loss\.(clip|kl|ppo)_",
    "verl_data": r"custom_cls",
}


def asked_by(overrides: Iterable[str]) -> list[str]:
    """Return the extensions that have a key, or a value, of these overrides."""
    return [name for name, text in ASKED_BY.items() if any(re.search(text, override) for override in overrides)]


def marked(case: tuple[Any, ...], overrides: Iterable[str]) -> Any:
    """Return the parameters of a test with the mark for what its overrides ask for."""
    return pytest.param(*case, marks=pytest.mark.needs(*asked_by(overrides)))


def needing(extension: str, *cases: Any) -> list[Any]:
    """Return cases of a test, one value or a tuple of several each, with the mark."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.needs(extension)) for case in tuples]
