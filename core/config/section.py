"""The base class of the configuration's sections, and what a field says of its key.

A section is a pydantic model: frozen, strict, without unknown keys, without NaN. What YAML and the command line write
in another form than the type (``1e3`` for a count, one text for a list of one) is brought into it before validation.
:func:`build` makes a configuration of an untyped tree and reports every value that is refused.

A field is :func:`key`: its default, its description (``--help``), its role (what a change of it means for a run), which
code it may name, and when it has an effect.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from core.config import limits


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


MAPPING = "a mapping, as in {name: value}"
TEXT = "text (quote what looks like something else: key=\"'1e-6'\")"
RULES = {  # error type of pydantic -> what completes "must be ..."
    **{"bool_type": "True or False", "int_type": "a whole number", "int_from_float": "a whole number"},
    **{"float_type": "a number", "finite_number": "a number", "string_type": TEXT},
}


def _mapping(value: Any) -> FrozenDict:
    if not isinstance(value, Mapping):
        raise PydanticCustomError("limit", "{rule}", {"rule": MAPPING})
    return freeze(value)


Open = Annotated[Mapping[str, Any], PlainValidator(_mapping)]  # keys that are another library's, or the user's own


# What a change of a key means for a run that is resumed, or compared with another
IDENTITY = "identity"  # it decides what is trained, or how it is measured: another value makes another run
FILES = "files"  # it names what lies elsewhere: the content counts, whose hash a run records
EXECUTION = "execution"  # where, how fast and how long: no other objective, but rounding and timing may differ
BOOKKEEPING = "bookkeeping"  # what is recorded, watched and kept: no number of the run depends on it

# Which values of a key name code that runs; only a command line may give them (core/config/recorded_settings.py)
CODE = "code"  # any text: a module, a file of code, a name in it, or a file that names classes
CONSENT = "consent"  # true lets code run, in a mapping anywhere under a name of that kind
ARGUMENTS = "arguments"  # of a library that imports what some of them name: any text or true

Condition = tuple[Callable[[Any], Any], str | Callable[[Any], str]]  # of a View: whether the key is used; why not


def condition(holds: Callable[[Any], Any], reason: str | Callable[[Any], str]) -> tuple[Condition]:
    """Return a condition under which a key has an effect, with what is said where it has none."""
    return ((holds, reason),)


def key(
    default: Any, text: str = "", used_if: tuple = (), *, role: str | None = None, code: str = "", follows: str = ""
) -> Any:
    """Return the field of a key. A role that is not given is that of the section around it, at last IDENTITY.

    ``follows`` is the key whose value a null stands for; what else a null becomes is in ``defaults.py``.
    """
    marks = {"role": role, "code": code, "used_if": used_if, "follows": follows}
    return Field(default, description=f"{text}; null: {follows}" if follows else text, json_schema_extra=marks)


files = functools.partial(key, role=FILES)
execution = functools.partial(key, role=EXECUTION)
bookkeeping = functools.partial(key, role=BOOKKEEPING)


def mark(section: type[Section], name: str, which: str) -> Any:
    """Return what a field is marked with: ``role``, ``code``, ``used_if`` or ``follows``."""
    return (section.model_fields[name].json_schema_extra or {}).get(which)


class Section(BaseModel):
    """A section of the configuration; a subclass lists its keys, each with its type and :func:`key`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _in_the_form_of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        return _typed(hints(cls)[info.field_name], value)

    def replace(self, **changes: Any) -> Section:
        """Return the section with other values for these fields, which are not validated again."""
        return self.model_copy(update=changes)


@functools.cache
def hints(section: type[Section]) -> dict[str, Any]:
    """Return field name -> type, of one section, in the order of its definition."""
    types = get_type_hints(section, include_extras=True)
    return {name: types[name] for name in section.model_fields}


def is_section(hint: Any) -> bool:
    """Return whether a type is that of a section."""
    return isinstance(hint, type) and issubclass(hint, Section)


def optional(hint: Any) -> tuple[Any, bool]:
    """Return the type without None, and whether None is a value of it."""
    if get_origin(hint) in (Union, types.UnionType):
        (alone,) = (part for part in get_args(hint) if part is not type(None))
        return alone, True
    return hint, False


def is_mapping(hint: Any) -> bool:
    """Return whether a type is a mapping of the user's own."""
    return optional(hint)[0] is Open


def is_choice(hint: Any) -> bool:
    """Return whether a key's values are fixed: one of some names, or none."""
    return get_origin(optional(hint)[0]) is Literal


def _typed(hint: Any, value: Any) -> Any:
    """Return a value as its type writes it, where that is clear; pydantic judges the rest."""
    hint, _ = optional(hint)
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if value is None:
        return None
    if get_origin(hint) is tuple:  # a single value stands for a list of one
        items = value if isinstance(value, list | tuple) else (value,)
        return tuple(_typed(get_args(hint)[0], item) for item in items)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int and number and value == value // 1:  # 1e3 is a count too
        if abs(value) >= 2**63:  # tensors and files hold no larger ones, and no float overflows in a plan
            raise PydanticCustomError("limit", "{rule}", {"rule": "a whole number below 2**63"})
        return int(value)
    if hint is float and number:
        try:
            return float(value)
        except OverflowError:
            raise PydanticCustomError("limit", "{rule}", {"rule": "a number"}) from None
    if hint is str and isinstance(value, int) and not isinstance(value, bool):  # trainer.experiment_name=7
        return str(value)
    return value


# ---------------------------------------------------------------- from an untyped tree

Refused = tuple[str, Any, str]  # key, value, what it must be; for an unknown key the last is empty


def build(schema: type[Section], tree: Any) -> tuple[Any, list[Refused]]:
    """Return the typed configuration of a tree and what was refused; a refused key keeps its default."""
    refused: list[Refused] = []
    while True:
        try:
            return schema.model_validate(tree), refused
        except ValidationError as error:
            paths = []
            for one in error.errors(include_url=False):
                path = _path(schema, one["loc"])
                if path not in paths:
                    paths.append(path)
                    refused.append((".".join(map(str, path)), _at(tree, path), _rule(schema, path, one)))
            if not all(paths):  # the whole is no mapping
                return schema(), refused
            for path in paths:
                tree = _without(tree, path)


def _path(schema: type[Section], loc: Sequence[int | str]) -> tuple[str, ...]:
    """Return the part of an error's location that names a key: items of lists and the like are left out."""
    path: list[str] = []
    for name in loc:
        path.append(str(name))
        hint = hints(schema).get(str(name))
        if not is_section(hint):
            break
        schema = hint
    return tuple(path)


def _rule(schema: type[Section], path: Sequence[str], error: ErrorDetails) -> str:
    """Return what the value must be; nothing for an unknown key."""
    if error["type"] == "extra_forbidden":
        return ""
    hint: Any = schema
    for name in path:
        hint = hints(hint)[name]
    if is_section(hint):
        return MAPPING
    alone, none_too = optional(hint)
    while get_origin(alone) is tuple or get_origin(alone) is Annotated and get_origin(get_args(alone)[0]) is tuple:
        alone = get_args(alone)[0]  # what an item of a list must be
    choice = next((one.rule for one in get_args(alone)[1:] if isinstance(one, limits.Limit)), "")
    if error["type"] == "literal_error":
        rule = f"one of {', '.join(get_args(alone))}"
    elif error["type"] == "string_type" and choice.startswith("one of "):  # the list of names says more than the type
        rule = choice
    else:
        rule = RULES.get(error["type"], error["msg"])
    return f"{rule}, or null" if none_too else rule


def _at(tree: Any, path: Sequence[str]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _without(tree: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    name, *rest = path
    if rest:
        return {**tree, name: _without(tree[name], rest)}
    return {key: value for key, value in tree.items() if str(key) != name}
