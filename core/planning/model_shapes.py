"""Sizes of models and GPUs, known without torch, a download or a GPU: what ``model_shapes.yaml`` holds."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.ends

    @property
    def critic_parameters(self) -> int:
        """Count the parameters of the same body with one number a token instead of the vocabulary (and a bias)."""
        return self.layers * self.block + self.vocab * self.hidden + 2 * self.hidden + 1

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


MODELS = {name + suffix: Shape(**s) for name, s in TABLE["models"].items() for suffix in TABLE["suffixes"]}


def shape_of(path: str, override: Mapping[str, Any] | None = None) -> Shape:
    """Return the shape of a hub id in the table, or of a folder's ``config.json``. Raises InputError for others."""
    file = Path(path).expanduser() / "config.json"
    if not file.exists():
        if path in MODELS:
            return MODELS[path]
        near = difflib.get_close_matches(path, MODELS, n=1)
        hint = f"nearest in {SOURCE.name}: {near[0]}" if near else f"{SOURCE.name} holds those that are known"
        raise InputError(f"the shape of {path} is not known offline; {hint}")
    config = {**json.loads(file.read_text(encoding="utf-8")), **(override or {})}
    try:
        heads = config["num_attention_heads"]
        return Shape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            mlp=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=config.get("tie_word_embeddings", True),
            bias=config.get("attention_bias", config.get("model_type") == "qwen2"),
            head_dim=config.get("head_dim") or 0,
        )
    except KeyError as error:
        raise InputError(f"its config.json has no {error}: not a model of the Llama or Qwen2 shape") from error


def gpu(name: str) -> Gpu:
    """Return a GPU of the table. Raises InputError with the names it holds."""
    if name not in TABLE["gpus"]:
        raise InputError(f"--gpu={name}: not in {SOURCE.name}, which holds {', '.join(TABLE['gpus'])}")
    found = TABLE["gpus"][name]
    return Gpu(name, found["memory"] * 2**30, found["tflops"] * 1e12, found["bandwidth"] * 1e12)
