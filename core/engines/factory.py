"""From ``actor_rollout_ref.rollout.name`` to an engine: what :data:`core.config.registry.ENGINES` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from core.config import registry
from core.config.limits import FULL_PRECISION
from core.config.plugins import load_object
from core.engines import RolloutEngine
from core.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from core.config.schema import Config


Model = Callable[[], "nn.Module"]


def make_engine(config: Config, model: Model | None, tokenizer: Any, device: torch.device) -> RolloutEngine:
    """Make the engine that ``actor_rollout_ref.rollout.name`` names, on ``device``.

    ``model`` gives the policy, which becomes the engine's own; vLLM makes its own and needs the first
    ``update_weights`` before it samples. Without ``model``, where nothing learns, the engine itself reads the weights
    of ``actor_rollout_ref.model.path``, in its own number format, and may sample at once. Options beyond verl's are
    ``rollout.engine_kwargs.hf.*``, the keyword arguments of :class:`core.engines.hf.HFEngine`, and
    ``rollout.engine_kwargs.vllm.*``, vLLM's engine arguments; an engine of an extension has its own.
    Raises InputError for an engine that cannot be had.
    """
    name = config.actor_rollout_ref.rollout.name
    if name not in registry.ENGINES:
        raise InputError(f"actor_rollout_ref.rollout.name={name}: there are {' and '.join(registry.ENGINES)}")
    return load_object(registry.ENGINES[name].function)(config, model, tokenizer, device)


def hf_engine(config: Config, model: Model | None, tokenizer: Any, device: torch.device) -> RolloutEngine:
    import torch

    from core.engines.hf import HFEngine
    from core.learner.models import load_policy

    rollout = config.actor_rollout_ref.rollout
    options = {"max_batch_rows": rollout.max_num_seqs, "max_prefill_tokens": rollout.max_num_batched_tokens}
    options |= rollout.engine_kwargs.get("hf", {})
    dtype = torch.float32 if rollout.dtype in FULL_PRECISION else torch.bfloat16
    policy = model() if model is not None else load_policy(config.actor_rollout_ref.model, dtype).to(device)
    return HFEngine(policy, tokenizer, dtype=dtype, adopt=True, **options)


def vllm_engine(config: Config, model: Model | None, tokenizer: Any, device: torch.device) -> RolloutEngine:
    from core.engines import vllm
    from core.learner.models import load_policy

    if device.type != vllm.DEVICE:
        raise InputError(
            f"actor_rollout_ref.rollout.name=vllm: the installed vLLM computes on {vllm.DEVICE}, the run is on "
            f"{device.type}: set trainer.device={vllm.DEVICE}, install the other build, or use rollout.name=hf"
        )
    skeleton = load_policy(config.actor_rollout_ref.model, on_meta=True)
    arguments = vllm.engine_arguments(config, skeleton)
    if model is None:  # and nothing else needs the GPU in its turn
        arguments |= {"load_format": "auto", "enable_sleep_mode": False}
    return vllm.VLLMEngine(tokenizer, skeleton, **arguments)
