"""Sizes of models and GPUs without a download, and what a model's architecture rules out.

A hub id's shape stands in ``model_shapes.yaml``, a folder's in its ``config.json``. A model that neither knows is
checked when it loads. Rules between keys alone are ``core.config``'s. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

import yaml

from core.config.problem import Problem
from core.config.registry import ENGINES, PICTURE_MODELS
from core.config.schema import Config
from core.config.sections.actor import Sharing
from core.errors import InputError

SOURCE = Path(__file__).with_suffix(".yaml")
TABLE = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
GPUS = {name: memory * 2**30 for name, memory in TABLE["gpus"].items()}  # usable bytes
MODEL = "actor_rollout_ref.model.path"
PICTURE_NAMES = re.compile(r"qwen(2|2\.5|3)-vl-(?!.*-a\d+b)", re.IGNORECASE)  # not mixtures of experts
# Words in the names of families that read images, video or sound; those of other kinds are not trained here.
SENSES = {"vl", "vision", "omni", "llava", "internvl", "paligemma", "pixtral", "idefics", "smolvlm", "multimodal"}


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped-query attention, a gated MLP and RMS norms (the Llama and Qwen2 families)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    tied: bool
    bias: bool
    head_dim: int = 0  # 0: hidden / heads
    tower: int = 0  # parameters of the part that reads pictures; its activations are not planned
    sharers: int = 1  # ranks that share embedding and head between passes

    @property
    def q_size(self) -> int:
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_size(self) -> int:
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

    @property
    def block(self) -> int:
        """Count the parameters of one layer."""
        attention = 2 * self.hidden * self.q_size + 2 * self.hidden * self.kv_size
        bias = (self.q_size + 2 * self.kv_size) if self.bias else 0
        return attention + bias + 3 * self.hidden * self.mlp + 2 * self.hidden

    @property
    def ends(self) -> int:
        """Count the parameters outside the layers: embedding, head, last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) // self.sharers + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.ends + self.tower

    @property
    def critic_parameters(self) -> int:
        """Count the parameters of the same body with one number a token instead of the vocabulary (and a bias)."""
        return self.layers * self.block + self.vocab * self.hidden // self.sharers + 2 * self.hidden + 1

    def split(self, ranks: int) -> Shape:
        """Return what each of ``ranks`` that share every layer has: fewer heads, a narrower MLP, all norms.

        Embedding and head are shared too, and gathered where they are read.
        """
        size = self.head_dim or self.hidden // self.heads
        heads, kv_heads = self.heads // ranks, self.kv_heads // ranks
        return replace(self, heads=heads, kv_heads=kv_heads, mlp=self.mlp // ranks, head_dim=size, sharers=ranks)

    def adapters(self, rank: int) -> int:
        """Count the parameters of LoRA on every linear layer: two factors each."""
        attention = 2 * (self.hidden + self.q_size) + 2 * (self.hidden + self.kv_size)
        return self.layers * rank * (attention + 3 * (self.hidden + self.mlp))

    def kv_bytes(self, width: int) -> int:
        """Return the bytes of key and value cache a token at ``width`` bytes a number."""
        return 2 * self.layers * self.kv_size * width


MODELS = {name + suffix: Shape(**s) for name, s in TABLE["models"].items() for suffix in TABLE["suffixes"]}


def shape_of(path: str, override: Mapping[str, Any] | None = None) -> Shape:
    """Return the shape of a hub id in the table, or of a folder's ``config.json``. Raises InputError for others."""
    file = config_file(path)
    if file is None:
        if path in MODELS:
            return MODELS[path]
        near = difflib.get_close_matches(path, MODELS, n=1)
        hint = f"nearest in {SOURCE.name}: {near[0]}" if near else f"{SOURCE.name} holds those that are known"
        raise InputError(f"the shape of {path} is not known offline; {hint}")
    config = read_config(path)
    if "vision_config" in config:
        raise InputError(f"{file}: the size of its vision tower is not known")
    config = {**config, **(override or {})}

    def size(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if value is None:
            raise InputError(f"{file} has no '{name}': not a model of the Llama or Qwen2 shape")
        if type(value) is not int or not 0 < value < 2**31 and value != default:
            raise InputError(
                f"{name}={value} of {file} or override_config is no size; it must be a whole number above 0"
            )
        return value

    heads = size("num_attention_heads")
    return Shape(
        hidden=size("hidden_size"),
        layers=size("num_hidden_layers"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        mlp=size("intermediate_size"),
        vocab=size("vocab_size"),
        tied=config.get("tie_word_embeddings", True),
        bias=config.get("attention_bias", config.get("model_type", "").startswith("qwen2")),
        head_dim=size("head_dim", 0),
    )


def config_file(path: str) -> str | None:
    """Return the ``config.json`` of a model's folder; None where there is none, as for a hub id."""
    file = os.path.join(os.path.expanduser(path), "config.json")  # unlike pathlib, no error for any text
    return file if os.path.isfile(file) else None


def read_config(path: str) -> dict[str, Any]:
    """Return the configuration in a model's folder. Raises InputError where it is not JSON, or no mapping."""
    file = os.path.join(os.path.expanduser(path), "config.json")
    try:
        config = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}); it must hold a model's configuration as JSON") from error
    if not isinstance(config, dict):
        raise InputError(f"{file} holds no mapping; it must hold a model's configuration as JSON")
    return config


# --- what an architecture rules out ---


def model_problems(config: Config) -> list[str]:
    """Return a line for each problem between the configuration and the architecture of its models."""
    roles = config.actor_rollout_ref
    models = {MODEL: roles.model} | ({"critic.model.path": config.critic.model} if config.critic.enable else {})
    fix = f"give a model of text alone, or of {', '.join(PICTURE_MODELS)}"
    reasons = {key: _unloadable(model.path) for key, model in models.items()}
    problems = [Problem(key, models[key].path, reason, fix) for key, reason in reasons.items() if reason]
    if not problems:
        from core.vision import modality

        problems += modality.problems(config, sees_pictures(roles.model.path))
        for key, model in models.items():
            with suppress(InputError):  # a shape that is not known, which the plan reports
                shape, policy = shape_of(model.path, model.override_config), key == MODEL
                problems += (_splits if policy else _critic_splits)(config, model.path, shape)
    return [str(problem) for problem in problems]


def sees_pictures(path: str) -> bool | None:
    """Return whether the model reads pictures; None where nothing is known of it."""
    if config_file(path) is None:
        name = path.rpartition("/")[2]
        return True if PICTURE_NAMES.match(f"{name}-") else False if path in MODELS else None
    with suppress(InputError):
        return read_config(path).get("model_type") in PICTURE_MODELS
    return None


def _unloadable(path: str) -> str:
    """Return why a model cannot be trained here, empty where it can, or where nothing is known of it."""
    if config_file(path) is None:
        words = SENSES & set(re.split(r"[^a-z]+", path.rpartition("/")[2].lower()))
        if not words or sees_pictures(path):
            return ""
        return f"a vision-language model by its name ({words.pop()}), which is not supported"
    try:
        model_config = read_config(path)
    except InputError:
        return ""
    names = [str(name) for name in model_config.get("architectures") or ()]
    kinds = [name for name in names if name.endswith("ForConditionalGeneration")]
    if model_config.get("model_type") in PICTURE_MODELS or not kinds and "vision_config" not in model_config:
        return ""
    kind = kinds[0] if kinds else "its config.json has a vision_config"
    return f"a vision-language or encoder-decoder model ({kind}), which is not supported"


def _splits(config: Config, model: str, shape: Shape) -> Iterator[Problem]:
    """Yield what is wrong with how engines split the policy's layers, and ranks its layers and sequences."""
    roles = config.actor_rollout_ref
    key, ranks = "actor_rollout_ref.rollout.tensor_model_parallel_size", roles.rollout.tensor_model_parallel_size
    split = config.needs_engine and "tensor_model_parallel_size" in ENGINES[roles.rollout.name].reads
    if split and shape.heads % ranks:
        yield Problem(key, ranks, f"must divide the {shape.heads} attention heads of {model}", _divisors(shape.heads))
    elif split and shape.kv_heads % ranks and ranks % shape.kv_heads:
        rule = f"must divide the {shape.kv_heads} key-value heads of {model}, or be a multiple of them"
        yield Problem(key, ranks, rule, _divisors(shape.kv_heads))
    yield from _shared(config, "actor_rollout_ref.actor", roles.actor, model, shape)
    yield from _shared(config, "actor_rollout_ref.ref", roles.ref, model, shape)


def _critic_splits(config: Config, model: str, shape: Shape) -> Iterator[Problem]:
    return _shared(config, "critic", config.critic, model, shape)


def _shared(config: Config, name: str, part: Sharing, model: str, shape: Shape) -> Iterator[Problem]:
    """Yield what is wrong with how learner ranks share sequences and layers."""
    if config.trainer.backend != "ray":  # in one process the keys have no effect
        return
    ranks, layers = part.ulysses_sequence_parallel_size, part.layer_ranks
    if shape.heads % ranks:
        rule = f"must divide the {shape.heads} attention heads of {model}"
        yield Problem(f"{name}.ulysses_sequence_parallel_size", ranks, rule, _divisors(shape.heads))
    key, common = f"{name}.tensor_model_parallel_size", gcd(shape.heads, shape.kv_heads, shape.mlp)
    if common % layers:
        sizes = f"{shape.heads} attention heads, {shape.kv_heads} key-value heads and MLP size {shape.mlp}"
        yield Problem(key, layers, f"must divide the {sizes} of {model}", _divisors(common))
    elif shape.heads % (ranks * layers):
        rule = f"times ulysses_sequence_parallel_size={ranks} must divide the {shape.heads} attention heads of {model}"
        yield Problem(key, layers, rule, "change one of them")


def _divisors(number: int) -> str:
    """Return the divisors as advice: ``use 1, 2, 7 or 14``."""
    *most, last = [str(one) for one in range(1, number + 1) if number % one == 0]
    return f"use {', '.join(most)} or {last}" if most else f"use {last}"
