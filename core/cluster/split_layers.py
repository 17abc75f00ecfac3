"""Tensor parallelism: a layer's matrices are split over neighbouring ranks.

transformers has a plan for a model (``base_model_tp_plan``): which matrices are split by columns
and which by rows. transformers puts them and their exchanges in place. FSDP2 then shards every part
over the ranks that hold the same one. What no plan names (embeddings, norms, the head) every rank
reads whole. It is a DTensor too, and matrices among it are gathered where they are read. All
parameters then lie on one mesh, which the norm of the gradients, AdamW and checkpoints need, only
the state of norms is held twice, and tied weights stay tied.
"""

import logging
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from core.config.schema import Config
from core.errors import InputError
from core.learner.models import load_critic, load_policy

# A weight that is split twice is gathered in two steps; every rank would warn of it
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
COLUMNS = "colwise"
HEAD_NORM = "replicated_with_grad_allreduce"  # a norm of single heads
EMBEDDING = "embedding_rowwise"
# The styles of Qwen2, Qwen3 and Llama; the plans of fused matrices are untried
STYLES = {COLUMNS, "rowwise", HEAD_NORM}
FIX = "set it to 1, or take a dense model such as Qwen2 or Llama"


def check_layers(config: Config) -> None:
    """Check, on models without weights, that ranks can share their layers as configured.

    Raises InputError for a model without a plan that is trained here, and for sizes that the ranks
    do not divide.
    """
    roles = config.actor_rollout_ref
    policy = partial(load_policy, roles.model, on_meta=True)
    models = [("actor_rollout_ref.actor", roles.actor, policy)]
    models.append(("actor_rollout_ref.ref", roles.ref, policy))
    if config.has_critic:
        critic = partial(load_critic, config.critic.model, config.trainer.seed, on_meta=True)
        models.append(("critic", config.critic, critic))
    for key, part, load in models:
        ranks = part.tensor_model_parallel_size
        if ranks == 1:
            continue
        name = f"{key}.tensor_model_parallel_size={ranks}"
        module = load()
        plan = plan_of(module, name)
        text = module.config.get_text_config()
        heads = text.num_attention_heads
        sizes = [
            getattr(text, "num_key_value_heads", None) or heads,
            heads,
            getattr(text, "intermediate_size", ranks),
        ]
        if COLUMNS in plan.values() and any(size % ranks for size in sizes):
            raise InputError(
                f"{name}: must divide the key-value heads, attention heads and intermediate_size "
                f"of {type(module).__name__}; take a number that divides {sizes}"
            )


def plan_of(module: nn.Module, name: str = "tensor_model_parallel_size") -> dict[str, str]:
    """Return the tensor-parallel plan of a model's layers, name with ``*`` for numbers -> style.

    Embedding and head are left out: the head's log-probs are computed in chunks of tokens, by all
    of its rows.

    Raises InputError for a model without a plan, and where the plan has a style that is not trained
    here, or leaves out weights inside a split layer: each rank would have another gradient of them.
    """
    from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

    kind = type(module).__name__
    plan = {}
    for pattern, style in (module.tp_plan or {}).items():
        if pattern.startswith(f"{module.base_model_prefix}.") and style != EMBEDDING:
            plan[pattern] = style
    if not plan:
        raise InputError(f"{name}: {kind} has no plan; {FIX}")
    if unknown := sorted({*plan.values()} - STYLES):
        rule = f"the plan of {kind} has {', '.join(unknown)}, which is not trained here"
        raise InputError(f"{name}: {rule}; {FIX}")
    patterns = {path: replace_layer_number_by_wildcard(path) for path, _ in module.named_modules()}
    columns = [path for path, pattern in patterns.items() if plan.get(pattern) == COLUMNS]
    layers = [path.rpartition(".")[0] for path in columns]
    for path, part in module.named_modules():
        inside = any(path == layer or path.startswith(f"{layer}.") for layer in layers)
        if inside and patterns[path] not in plan and dict(part.named_parameters(recurse=False)):
            rule = f"{path} of {kind} acts on a rank's part of its layer"
            raise InputError(f"{name}: {rule}, and the plan leaves it out; {FIX}")
    return plan


def split_layers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split a model without weights over the ranks of ``mesh``, before FSDP2 shards it.

    Raises InputError.
    """
    from transformers.distributed import tensor_parallel

    plan = plan_of(module)
    module.tp_plan = {name: style for name, style in plan.items() if style != HEAD_NORM}
    tensor_parallel.apply_tensor_parallelism(module, mesh)
    spread: dict[int, nn.Parameter] = {}  # id of a parameter -> its DTensor, so that ties remain
    for path, part in module.named_modules():
        names = []
        for name, value in list(part.named_parameters(recurse=False)):
            if isinstance(value, DTensor):
                continue
            names.append(name)
            if id(value) not in spread:
                place = Shard(1) if value.ndim == 2 else Replicate()
                whole = distribute_tensor(value, mesh, [place], src_data_rank=None)
                spread[id(value)] = nn.Parameter(whole, requires_grad=value.requires_grad)
            part._parameters[name] = spread[id(value)]
        if names:
            # A norm of single heads sees this rank's heads alone: its gradient is part of a sum
            style = plan.get(tensor_parallel.replace_layer_number_by_wildcard(path))
            read_whole(part, names, Partial() if style == HEAD_NORM else Replicate())


def read_whole(part: nn.Module, names: list[str], gradient: Placement) -> None:
    """Have a module's forward read these parameters whole, as plain tensors.

    The hidden states are plain tensors as well. ``gradient`` is what a rank computes of the
    parameters' gradient: all of it, as every rank that shares the layer does, or a part of a sum.
    """
    forward = part.forward

    def forward_with_whole(*args: Any, **kwargs: Any) -> Any:
        parameters = {name: part._parameters[name] for name in names}
        for name, value in parameters.items():
            part._parameters[name] = value.full_tensor(grad_placements=[gradient])
        try:
            return forward(*args, **kwargs)
        finally:
            part._parameters.update(parameters)

    part.forward = forward_with_whole
