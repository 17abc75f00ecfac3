"""Whether the weights of an update are the model's, before any of them is loaded: names, shapes, tied weights.

What the values are is checked elsewhere: by checksums of the buckets, and by :mod:`core.learner.model_checks`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from core.engines.weight_buckets import Weight


def held_weights(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> tuple[list[Weight], list[Tensor]]:
    """Return the weights of this process and their values. Names that share a weight in ``model`` are one weight.

    Raises ValueError where two names of one weight come with different values.
    """
    by_name = dict(named_tensors)
    weights, values, problems = [], [], []
    for names in [*weight_names(model), *((name,) for name in by_name.keys() - model.state_dict().keys())]:
        values_given = [by_name[name] for name in names if name in by_name]
        if not values_given:
            continue
        first, *others = values_given
        if any(first.shape != x.shape or not (first.data_ptr() == x.data_ptr() or first.equal(x)) for x in others):
            problems.append(f"{' = '.join(names)}: one weight in the engine, but given with different values")
        weights.append(Weight(tuple(name for name in names if name in by_name), tuple(first.shape), first.dtype))
        values.append(first)
    _refuse(problems)
    return weights, values


def weight_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each weight, those of ``state_dict``; names that share a weight stand together."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names_of.setdefault(id(tensor), []).append(name)
    return [tuple(names) for names in names_of.values()]


def check_weights(model: nn.Module, weights: Iterable[Weight]) -> None:
    """Check that the weights are all that ``model`` has, which may be on the meta device.

    Raises ValueError with all that is wrong.
    """
    own = model.state_dict(keep_vars=True)
    expected = {name: weight for weight in weights for name in weight.names}
    problems = [f"{name}: unknown" for name in expected if name not in own]
    for name, weight in expected.items():
        if name in own and weight.shape != tuple(own[name].shape):
            problems.append(f"{name}: shape {weight.shape}, the engine's is {tuple(own[name].shape)}")
    for names in weight_names(model):
        senders = {expected[name].names for name in names if name in expected}
        if not senders:
            problems.append(f"{' = '.join(names)}: missing")
        elif len(senders) > 1:
            problems.append(f"{' = '.join(names)}: one weight in the engine, but several of the learner")
    _refuse(problems)


def _refuse(problems: list[str]) -> None:
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ValueError(f"update_weights: {len(problems)} weights do not fit, none was changed: {shown}")
