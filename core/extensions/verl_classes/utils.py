"""Small helpers of ``verl.utils`` that tools, reward functions and data set classes import."""

from __future__ import annotations

import asyncio
import functools
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def rollout_trace_op(function: Any) -> Any:
    """Return the function: traces of episodes are ``trainer.trace``'s here."""
    return function


def copy_to_local(src: str, *args: Any, **kwargs: Any) -> str:
    """Return the path: files behind URLs are on this machine before a data set class is made."""
    return os.path.expanduser(src)


def deprecated(replacement: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of a function that warns, when called, of what to use instead. A class is left as it is."""

    def decorate(target: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(target, type):
            return target
        advice = f"; use {replacement}" if replacement else ""

        @functools.wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(f"{target.__qualname__} is deprecated{advice}", FutureWarning, stacklevel=2)
            return target(*args, **kwargs)

        return call

    return decorate


def get_event_loop() -> asyncio.AbstractEventLoop:
    """Return this thread's event loop, a new one where it has none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return the positions of tokens: those of padding on the left are 0. Shapes: mask and result [B, T]."""
    return (mask.cumsum(dim=-1) - 1).clip(min=0)


def postprocess_data(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask cut or padded to a length. Shapes: [B, T] -> [B, max_length].

    Raises NotImplementedError for a text that is too long with ``truncation="error"``.
    """
    from torch.nn.functional import pad

    length = input_ids.shape[-1]
    if length > max_length:
        half = max_length // 2
        kept = {
            "left": range(length - max_length, length),
            "right": range(max_length),
            "middle": [*range(half), *range(length - (max_length - half), length)],
        }
        if truncation not in kept:
            raise NotImplementedError(f"{length} tokens are more than {max_length=}, with {truncation=}")
        return input_ids[:, list(kept[truncation])], attention_mask[:, list(kept[truncation])]
    sides = (max_length - length, 0) if left_pad else (0, max_length - length)
    return pad(input_ids, sides, value=pad_token_id), pad(attention_mask, sides, value=0)
