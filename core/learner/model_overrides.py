"""``override_config``: fields of a model's ``config.json`` that a run changes."""

from collections.abc import Mapping
from typing import Any

from core.errors import InputError

OVERRIDES = "actor_rollout_ref.model.override_config"
ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")


def overridden(config: Any, path: str, changes: dict[str, Any]) -> Any:
    """Return the configuration that a ``config.json`` with these changes would give.

    Raises InputError.
    """
    kind = type(config)
    rope = getattr(config, "rope_parameters", None)
    rope_fields = ROPE_FIELDS if rope else ()
    for name in changes:
        if not (hasattr(config, name) or name in rope_fields):
            raise InputError(f"{OVERRIDES}.{name}: {kind.__name__} has no such field")
    fields, _ = kind.get_config_dict(path)
    # The pattern of layers is written back only if it is not derived from the window's fields
    pattern = fields.pop("layer_types", None)
    if pattern and getattr(kind.from_dict(dict(fields)), "layer_types", None) != pattern:
        fields["layer_types"] = pattern
    of_rope = {name: value for name, value in changes.items() if name in rope_fields}
    others = {name: value for name, value in changes.items() if name not in rope_fields}
    if of_rope:
        fields = {name: value for name, value in fields.items() if name not in ROPE_FIELDS}
        fields["rope_parameters"] = _rope_parameters(rope, of_rope)
    for name, value in others.items():
        before = fields.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            value = {**before, **value}
        fields[name] = value
    try:
        result = kind.from_dict(fields)
    except Exception as error:  # each class checks its fields in its own way
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{OVERRIDES}={changes}: {kind.__name__} refuses it ({reason}); give what its "
            "config.json may hold"
        ) from error
    result.name_or_path = path
    _check_overrides(result, others)
    return result


def _check_overrides(result: Any, changes: Mapping[str, Any]) -> None:
    """Raise InputError for a change that the configuration did not take over."""
    kind = type(result).__name__
    for name in {"model_type", "architectures"} & changes.keys():
        raise InputError(
            f"{OVERRIDES}.{name}={changes[name]}: is the kind of model that the weights are of; "
            f"give another model's path instead"
        )
    for name, value in changes.items():
        if not isinstance(value, dict) and getattr(result, name, value) != value:
            raise InputError(
                f"{OVERRIDES}.{name}={value}: {kind} makes {getattr(result, name)} of it; set the "
                "field that it depends on too (sliding_window needs use_sliding_window)"
            )
    window = changes.get("sliding_window")
    kinds_of_layers = getattr(result, "layer_types", None)
    if window and kinds_of_layers and "sliding_attention" not in kinds_of_layers:
        raise InputError(
            f"{OVERRIDES}.sliding_window={window}: no layer of {kind} has a window; lower "
            "max_window_layers too"
        )


def _rope_parameters(rope: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of rotary positions.

    ``rope_scaling`` replaces all of them except the base and the share of a head that is rotated.
    """
    parameters = changes.get("rope_parameters", changes.get("rope_scaling", rope))
    parameters = dict(parameters or {"rope_type": "default"})
    if any(isinstance(value, Mapping) for value in rope.values()):
        if parameters.keys() != rope.keys() or "rope_theta" in changes:
            raise InputError(
                f"{OVERRIDES}: positions differ by kind of layer here ({', '.join(rope)}); give "
                "rope_parameters with each of them"
            )
        return parameters
    if "type" in parameters:  # the name in older files
        parameters["rope_type"] = parameters.pop("type")
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            parameters.setdefault(name, rope[name])
    if "rope_theta" in changes:
        parameters["rope_theta"] = changes["rope_theta"]
    return parameters
