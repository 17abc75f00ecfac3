"""Sizes of models and GPUs, known without torch, a download or a GPU: what ``model_shapes.yaml`` holds."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from core.config.limits import FULL_PRECISION
from core.errors import InputError

SOURCE = Path(__file__).with_suffix(".yaml")
TABLE = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))


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
    tower: int = 0  # parameters of the part that reads pictures; its time and activations are not planned
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

    @property
    def matmul_parameters(self) -> int:
        """Count the parameters that multiply a token: the embedding is a lookup, the head is not."""
        return self.layers * self.block + self.vocab * self.hidden

    def kv_bytes(self, width: int) -> int:
        """Return the bytes of key and value cache a token at ``width`` bytes a number."""
        return 2 * self.layers * self.kv_size * width


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float  # bytes
    flops: float  # bf16, dense, a second
    bandwidth: float  # bytes a second
    efficiency: float = 0.35  # of the FLOP/s in training


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
    whole = read_config(path)
    config = {**whole, **(whole.get("text_config") or {}), **(override or {})}  # of what writes, not of what sees

    def size(name: str, default: int | None = None) -> int:
        value = config.get(name, default)
        value = default if value is None else value
        if value is None:
            raise InputError(f"its config.json has no '{name}': not a model of the Llama or Qwen2 shape")
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
        tower=_tower(whole, file),
    )


def _tower(config: Mapping[str, Any], file: str) -> int:
    """Count the parameters of Qwen2.5-VL's vision tower. Raises InputError for others, whose plan would lack them."""
    if "vision_config" not in config:
        return 0
    vision = config["vision_config"]
    names = ("depth", "hidden_size", "intermediate_size", "out_hidden_size", "patch_size", "temporal_patch_size")
    if config.get("model_type") != "qwen2_5_vl" or any(not isinstance(vision.get(name), int) for name in names[:4]):
        raise InputError(f"{file}: the size of its vision tower is not known; only Qwen2.5-VL's is counted")
    depth, hidden, mlp, out = (vision[name] for name in names[:4])
    patch, frames = vision.get("patch_size", 14), vision.get("temporal_patch_size", 2)
    joined = vision.get("spatial_merge_size", 2) ** 2 * hidden
    block = 4 * hidden * hidden + 4 * hidden + 3 * hidden * mlp + 2 * mlp + hidden + 2 * hidden
    merger = hidden + joined * joined + joined + joined * out + out
    return depth * block + 3 * frames * patch**2 * hidden + merger


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


def gpu(name: str) -> Gpu:
    """Return a GPU of the table. Raises InputError with the names it holds."""
    if name not in TABLE["gpus"]:
        raise InputError(f"--gpu={name}: not in {SOURCE.name}, which holds {', '.join(TABLE['gpus'])}")
    entry = TABLE["gpus"][name]
    flops, bandwidth = entry["tflops"] * 1e12, entry["bandwidth"] * 1e12
    return Gpu(name, entry["memory"] * 2**30, flops, bandwidth, entry.get("efficiency", Gpu.efficiency))


def width(dtype: str) -> int:
    """Return the bytes of a number in a configuration's ``dtype``."""
    return 4 if dtype in FULL_PRECISION else 2
