"""A dict that nobody can change: what a configuration holds where the keys are the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn


class FrozenDict(dict):
    """Hashable where its values are, picklable, equal to a dict of the same items."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the configuration cannot be changed once it is resolved")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Return mappings as FrozenDict with text keys, sequences as tuples, all the way down."""
    if isinstance(value, Mapping):
        return FrozenDict({str(key): freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def thaw(value: Any) -> Any:
    """Return the reverse of :func:`freeze`: dicts and lists, as YAML and OmegaConf require them."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [thaw(item) for item in value]
    return value
