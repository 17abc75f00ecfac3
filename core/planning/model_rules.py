"""What a model's architecture rules out: splits that its attention heads do not allow, and models that do not load.

Rules between keys are ``core.config.rules``'; these need a model's shape, which a hub id has in ``model_shapes.yaml``
and a folder in its ``config.json``. A model that neither knows is checked when it loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from math import gcd

from core.config import extensions
from core.config.problem import Problem
from core.config.registry import ENGINES, MODALITIES
from core.config.schema import Config
from core.config.sections.actor import Sharing
from core.errors import InputError
from core.planning.model_shapes import MODELS, Shape, config_file, read_config, shape_of

MODEL = "actor_rollout_ref.model.path"
PICTURE_NAMES = re.compile(r"qwen(2|2\.5|3)-vl-(?!.*-a\d+b)", re.IGNORECASE)  # and their names; not mixtures of experts
# Words in the names of families that read images, video or sound; those of other kinds are not trained here.
SENSES = {"vl", "vision", "omni", "llava", "internvl", "paligemma", "pixtral", "idefics", "smolvlm", "multimodal"}


def model_problems(config: Config) -> list[str]:
    """Return a line for each problem between the configuration and the architecture of its models."""
    roles, problems = config.actor_rollout_ref, []
    models = [(MODEL, roles.model.path)]
    if config.critic.enable:
        models.append(("critic.model.path", config.critic.model.path))
    for key, path in models:
        if reason := _unloadable(path):
            fix = f"give a model of text alone, or of {', '.join(MODALITIES)}"
            problems.append(Problem(key, path, reason, fix))
    if not problems:
        for problems_of_model in extensions.functions("model_problems"):
            problems += problems_of_model(config, sees_pictures(roles.model.path))
        with suppress(InputError):  # a shape that is not known, which the plan reports
            problems += _splits(config, roles.model.path, shape_of(roles.model.path, roles.model.override_config))
        with suppress(InputError):
            if config.critic.enable:
                model = config.critic.model
                problems += _shared(
                    config, "critic", config.critic, model.path, shape_of(model.path, model.override_config)
                )
    return [str(problem) for problem in problems]


def sees_pictures(path: str) -> bool | None:
    """Return whether the model reads pictures; None where nothing is known of it."""
    name = path.rpartition("/")[2]
    if config_file(path) is None:
        return True if PICTURE_NAMES.match(f"{name}-") else False if path in MODELS else None
    with suppress(InputError):
        return read_config(path).get("model_type") in MODALITIES
    return None


def _unloadable(path: str) -> str:
    """Return why a model cannot be trained here, empty where it can, or where nothing is known of it."""
    if config_file(path) is None:
        words = SENSES & set(re.split(r"[^a-z]+", path.rpartition("/")[2].lower()))
        known = sees_pictures(path)
        return (
            f"a vision-language model by its name ({words.pop()}), which is not supported"
            if words and not known
            else ""
        )
    try:
        model_config = read_config(path)
    except InputError:
        return ""
    names = [str(name) for name in model_config.get("architectures") or ()]
    kinds = [name for name in names if name.endswith("ForConditionalGeneration")]
    if model_config.get("model_type") in MODALITIES or not kinds and "vision_config" not in model_config:
        return ""
    kind = kinds[0] if kinds else "its config.json has a vision_config"
    return f"a vision-language or encoder-decoder model ({kind}), which is not supported"


def _splits(config: Config, model: str, shape: Shape) -> Iterator[Problem]:
    """Yield what is wrong with how engines split the policy's layers, and ranks its sequences."""
    roles = config.actor_rollout_ref
    key, ranks = "actor_rollout_ref.rollout.tensor_model_parallel_size", roles.rollout.tensor_model_parallel_size
    split = config.needs_engine and "tensor_model_parallel_size" in ENGINES[roles.rollout.name].reads
    if split and shape.heads % ranks:
        yield Problem(key, ranks, f"must divide the {shape.heads} attention heads of {model}", _fix(shape.heads))
    elif split and shape.kv_heads % ranks and ranks % shape.kv_heads:
        rule = f"must divide the {shape.kv_heads} key-value heads of {model}, or be a multiple of them"
        yield Problem(key, ranks, rule, _fix(shape.kv_heads))
    yield from _shared(config, "actor_rollout_ref.actor", roles.actor, model, shape)
    yield from _shared(config, "actor_rollout_ref.ref", roles.ref, model, shape)


def _shared(config: Config, name: str, part: Sharing, model: str, shape: Shape) -> Iterator[Problem]:
    if config.trainer.backend != "ray":  # in one process the keys have no effect
        return
    ranks, layers = part.ulysses_sequence_parallel_size, part.layer_ranks
    if shape.heads % ranks:
        rule = f"must divide the {shape.heads} attention heads of {model}"
        yield Problem(f"{name}.ulysses_sequence_parallel_size", ranks, rule, _fix(shape.heads))
    common = gcd(shape.heads, shape.kv_heads, shape.mlp)
    if common % layers:
        sizes = f"{shape.heads} attention heads, {shape.kv_heads} key-value heads and MLP size {shape.mlp}"
        yield Problem(f"{name}.tensor_model_parallel_size", layers, f"must divide the {sizes} of {model}", _fix(common))
    elif shape.heads % (ranks * layers):
        rule = f"times ulysses_sequence_parallel_size={ranks} must divide the {shape.heads} attention heads of {model}"
        yield Problem(f"{name}.tensor_model_parallel_size", layers, rule, "change one of them")


def _fix(number: int) -> str:
    """Return the divisors as advice: ``use 1, 2, 7 or 14``."""
    *most, last = [str(one) for one in range(1, number + 1) if number % one == 0]
    return f"use {', '.join(most)} or {last}" if most else f"use {last}"
