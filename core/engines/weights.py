"""Checks that the weights that are to replace an engine's are complete and fit."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def checked_weights(
    model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]
) -> list[tuple[tuple[str, ...], Tensor, Tensor]]:
    """Return (its names, the weight of ``model``, its new value) for every weight.

    Names are those of ``state_dict``; names that share a weight are one weight. ``model`` may be on the meta device.
    Raises ValueError with all that is wrong.
    """
    own = model.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names_of.setdefault(id(tensor), []).append(name)
    given = dict(named_tensors)
    problems = [f"{name}: unknown" for name in given if name not in own]
    for name, tensor in given.items():
        if name in own and tensor.shape != own[name].shape:
            problems.append(f"{name}: shape {tuple(tensor.shape)}, the engine's is {tuple(own[name].shape)}")
    weights = []
    for names in names_of.values():
        values = [given[name] for name in names if name in given]
        if not values:
            problems.append(f"{' = '.join(names)}: missing")
            continue
        first = values[0]
        if any(first.shape != x.shape or not (first.data_ptr() == x.data_ptr() or first.equal(x)) for x in values[1:]):
            problems.append(f"{' = '.join(names)}: one weight in the engine, but given with different values")
        weights.append((tuple(names), own[names[0]], values[0]))
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ValueError(f"update_weights: {len(problems)} weights do not fit, none was changed: {shown}")
    return weights
