"""Tensor parallelism: a layer's matrices split over neighbouring ranks, by the plan that
transformers has for a model.

The plan (``base_model_tp_plan``, what ``DistributedConfig`` applies) says which matrices are split
by columns and which by rows. transformers puts them and their exchanges in place; FSDP2 then shards
every part over the ranks that hold the same one. What no plan names (embeddings, norms, the head)
every rank reads whole. It is a DTensor too, and matrices are gathered where they are read: all
parameters then lie on one mesh, which the norm of the gradients, AdamW and checkpoints need, no
state is held twice but that of norms, and tied weights stay tied.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

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

from core.errors import InputError
from core.learner.models import load_critic, load_policy

if TYPE_CHECKING:
    from core.config.schema import Config

# That a weight which is split twice is gathered in two steps is known, and would be told by every
# rank.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
COLUMNS, OWN_HEADS, EMBEDDING = "colwise", "replicated_with_grad_allreduce", "embedding_rowwise"
# Those of Qwen2, Qwen3 and Llama; the plans of fused matrices are untried
STYLES = {COLUMNS, "rowwise", OWN_HEADS}


def check_layers(config: Config) -> None:
    """Check on models without weights that ranks can share their layers as configured; the
    reference is the policy.

    Raises InputError for a model without a plan that is trained here, and for sizes that the ranks
    do not divide.
    """
    roles = config.actor_rollout_ref
    parts = [("actor_rollout_ref.actor", roles.actor), ("actor_rollout_ref.ref", roles.ref)]
    for key, part in parts + [("critic", config.critic)] * config.has_critic:
        if (ranks := part.tensor_model_parallel_size) == 1:
            continue
        name = f"{key}.tensor_model_parallel_size={ranks}"
        if key == "critic":
            module = load_critic(config.critic.model, config.trainer.seed, on_meta=True)
        else:
            module = load_policy(roles.model, on_meta=True)
        plan, text = plan_of(module, name), module.config.get_text_config()
        heads = text.num_attention_heads
        sizes = [
            getattr(text, "num_key_value_heads", None) or heads,
            heads,
            getattr(text, "intermediate_size", ranks),
        ]
        if COLUMNS in plan.values() and any(size % ranks for size in sizes):
            kinds = (
                f"key-value heads, attention heads and intermediate_size of {type(module).__name__}"
            )
            raise InputError(f"{name}: must divide the {kinds}; take a number that divides {sizes}")


def plan_of(module: nn.Module, name: str = "tensor_model_parallel_size") -> dict[str, str]:
    """Return the tensor-parallel plan of a model's layers, name with ``*`` for numbers -> style.

    Embedding and head are left out: the head's log-probs are computed in chunks of tokens, by all
    of its rows.

    Raises InputError for a model without a plan, and where the plan has a style that is not trained
    here, or leaves out weights inside a split layer: each rank would have another gradient of them.
    """
    from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

    body, kind = f"{module.base_model_prefix}.", type(module).__name__
    whole = (module.tp_plan or {}).items()
    plan = {part: style for part, style in whole if part.startswith(body) and style != EMBEDDING}
    odd = sorted({*plan.values()} - STYLES)
    if odd or not plan:
        has = (
            f"the plan of {kind} has {', '.join(odd)}, which is not trained here"
            if odd
            else f"{kind} has no plan"
        )
        raise InputError(
            f"{name}: {has}; set it to 1, or take a dense model such as Qwen2 or Llama"
        )
    patterns = {path: replace_layer_number_by_wildcard(path) for path, _ in module.named_modules()}
    split = [
        path.rpartition(".")[0]
        for path, pattern in patterns.items()
        if plan.get(pattern) == COLUMNS
    ]
    for path, part in module.named_modules():
        inside = any(path == layer or path.startswith(f"{layer}.") for layer in split)
        if inside and patterns[path] not in plan and dict(part.named_parameters(recurse=False)):
            rule = (
                f"{path} of {kind} acts on a rank's part of its layer, and the plan leaves it out"
            )
            raise InputError(
                f"{name}: {rule}; set it to 1, or take a dense model such as Qwen2 or Llama"
            )
    return plan


def split_layers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split a weightless model over the ranks of ``mesh``. What FSDP2 does comes after it. Raises
    InputError."""
    from transformers.distributed.tensor_parallel import (
        apply_tensor_parallelism,
        replace_layer_number_by_wildcard,
    )

    plan = plan_of(module)
    module.tp_plan = {name: style for name, style in plan.items() if style != OWN_HEADS}
    apply_tensor_parallelism(module, mesh)
    whole: dict[int, nn.Parameter] = {}  # of what is tied there is one
    for name, part in module.named_modules():
        own = {
            key: value
            for key, value in part.named_parameters(recurse=False)
            if not isinstance(value, DTensor)
        }
        if not own:
            continue
        for key, value in own.items():
            if id(value) not in whole:
                place = Shard(1) if value.ndim == 2 else Replicate()
                spread = distribute_tensor(value, mesh, [place], src_data_rank=None)
                whole[id(value)] = nn.Parameter(spread, requires_grad=value.requires_grad)
            part._parameters[key] = whole[id(value)]
        # A norm of single heads sees this rank's heads alone: its gradient is a part of a sum.
        style = plan.get(replace_layer_number_by_wildcard(name))
        _read_plainly(part, tuple(own), Partial() if style == OWN_HEADS else Replicate())


def _read_plainly(part: nn.Module, names: tuple[str, ...], gradient: Placement) -> None:
    """Have a module's forward read these parameters whole, as plain tensors: the hidden states are
    plain as well.

    ``gradient`` says what a rank computes of theirs: all of it, as every rank that shares the layer
    does, or a part.
    """
    forward = part.forward

    def read(*args: Any, **kwargs: Any) -> Any:
        parameters = {name: part._parameters[name] for name in names}
        whole = {
            name: value.full_tensor(grad_placements=[gradient])
            for name, value in parameters.items()
        }
        part._parameters.update(whole)
        try:
            return forward(*args, **kwargs)
        finally:
            part._parameters.update(parameters)

    part.forward = read
