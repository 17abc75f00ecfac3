"""torch.compile of a model's MLPs and norms: the parts of a layer that read each token alone.

Attention stays as it is, so neither the layout of a pass nor the exchange between ranks enters a compiled part, and the
hooks of FSDP2, which lie on whole layers, stay outside. A result changes by rounding alone.
"""

from __future__ import annotations

import torch
from torch import nn

from core.errors import InputError

NAMES = ("MLP", "Norm")  # how the classes of such parts end


def compile_parts(module: nn.Module, device: torch.device) -> None:
    """Have the MLPs and norms of a model's layers compiled when they are first called, for batches of any shape.

    Raises InputError where the model has no such part, or nothing can be compiled for ``device``.
    """
    layers = set(getattr(module, "_no_split_modules", None) or ())
    blocks = [part for part in module.modules() if any(kind.__name__ in layers for kind in type(part).__mro__)]
    parts = {part for block in blocks for part in block.modules() if type(part).__name__.endswith(NAMES)}
    if not parts:
        raise InputError(
            f"use_torch_compile=True: the layers of {type(module).__name__} have no part whose class ends in "
            f"{' or '.join(NAMES)}; set it to False"
        )
    _check_compiler(device)
    for part in parts:
        part.compile(dynamic=True)


def _check_compiler(device: torch.device) -> None:
    compiled = torch.compile(lambda value: value * 2 + 1, dynamic=True)
    try:
        compiled(torch.ones(8, device=device))
    except RuntimeError as error:  # those of torch.compile are derived of it
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"use_torch_compile=True: torch.compile does not work here ({reason}); install what it names (a C++ "
            "compiler, for a GPU triton), or set it to False"
        ) from error
