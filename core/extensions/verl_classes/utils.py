"""Small helpers of ``verl.utils`` that tools, reward functions and data set classes import."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def rollout_trace_op(function: Any) -> Any:
    """Return the function: traces of episodes are ``trainer.trace``'s here."""
    return function


@contextmanager
def rollout_trace_attr(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Do nothing: traces of episodes are ``trainer.trace``'s here."""
    yield


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


def masked_sum(values: torch.Tensor, mask: torch.Tensor, axis: Any = None) -> torch.Tensor:
    """Return the sum of the values that the mask keeps; what it drops may be NaN. Shapes: both alike."""
    return values.masked_fill(~mask.bool(), 0).sum(dim=axis)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: Any = None) -> torch.Tensor:
    """Return the mean of the values that the mask keeps, 0 where it keeps none. Shapes: both alike."""
    return masked_sum(values, mask, axis) / mask.sum(dim=axis).clamp(min=1)


def hf_tokenizer(name_or_path: str, *args: Any, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """Return a tokenizer that has a token for padding."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def append_to_dict(data: MutableMapping[str, list], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Append each value to the list of its name, or add all of them where the value is a list."""
    for name, value in new_data.items():
        data.setdefault(prefix + name, []).extend(value if isinstance(value, list) else [value])


def union_two_dict(dict1: dict[Any, Any], dict2: Mapping[Any, Any]) -> dict[Any, Any]:
    """Add what the second has to the first. Raises AssertionError where they differ in a value."""
    for name, value in dict2.items():
        assert name not in dict1 or dict1[name] == value, f"{name!r} is {dict1[name]!r} and {value!r}"
        dict1[name] = value
    return dict1


def convert_to_regular_types(value: Any) -> Any:
    """Return lists and dictionaries in place of OmegaConf's and of other mappings and sequences of that kind."""
    if hasattr(value, "items"):
        return {name: convert_to_regular_types(one) for name, one in value.items()}
    many = isinstance(value, list | tuple) or type(value).__name__ == "ListConfig"
    return [convert_to_regular_types(one) for one in value] if many else value


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of a function that then raises TimeoutError after some seconds.

    In a thread, where no signal arrives, the call itself goes on: graders have a deadline that ends it.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def stop(*args: Any) -> None:
            raise TimeoutError(f"{function.__qualname__} took more than {seconds} s")

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                pool = ThreadPoolExecutor(1)
                try:
                    return pool.submit(function, *args, **kwargs).result(timeout=seconds)
                finally:
                    pool.shutdown(wait=False)
            before = signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                return function(*args, **kwargs)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)

        return call

    return decorate


@contextmanager
def simple_timer(name: str, timing_raw: MutableMapping[str, float], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Add the seconds that a block takes to those of its name."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


def print_rank_0(message: Any) -> None:
    """Print a message: users' files run in one process, or each for itself."""
    print(message, flush=True)


def log_with_rank(
    message: str, rank: int, logger: Any, level: int = logging.INFO, log_only_rank_0: bool = False
) -> None:
    if rank == 0 or not log_only_rank_0:
        logger.log(level, f"[Rank {rank}] {message}")


def set_basic_config(level: int) -> None:
    logging.basicConfig(level=level, format="%(levelname)s:%(asctime)s:%(message)s")


def _on_disk(path: str) -> str:
    if path.startswith("hdfs://"):
        raise ValueError(f"{path}: nothing here reads HDFS; give a path on this machine's disks")
    return os.path.expanduser(path)


def exists(path: str, **kwargs: Any) -> bool:
    return os.path.exists(_on_disk(path))


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = True, **kwargs: Any) -> None:
    os.makedirs(_on_disk(name), mode, exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> bool:
    """Copy a file, or a folder into one that may exist, and return True."""
    source, target = _on_disk(src), _on_disk(dst)
    copied = (
        shutil.copytree(source, target, dirs_exist_ok=True) if os.path.isdir(source) else shutil.copy(source, target)
    )
    return bool(copied)
