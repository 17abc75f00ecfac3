"""Sizes of models and GPUs, known without torch, a download or a GPU. The table is ``model_shapes.yaml``."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_suffix(".yaml")


class UnknownShape(ValueError):
    """A model or GPU that the table does not hold."""


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
        """Parameters of one layer."""
        attention = 2 * self.hidden * self.q_size + 2 * self.hidden * self.kv_size
        bias = (self.q_size + 2 * self.kv_size) if self.bias else 0
        return attention + bias + 3 * self.hidden * self.mlp + 2 * self.hidden

    @property
    def ends(self) -> int:
        """Parameters outside the layers: embedding, head, last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.ends

    @property
    def critic_parameters(self) -> int:
        """The same body with one number a token instead of the vocabulary (and a bias)."""
        return self.layers * self.block + self.vocab * self.hidden + 2 * self.hidden + 1

    def adapters(self, rank: int) -> int:
        """Parameters of LoRA on every linear layer: two factors each."""
        attention = 2 * (self.hidden + self.q_size) + 2 * (self.hidden + self.kv_size)
        return self.layers * rank * (attention + 3 * (self.hidden + self.mlp))

    @property
    def matmul_parameters(self) -> int:
        """Those that a token is multiplied with: the embedding is a lookup, the head is not."""
        return self.layers * self.block + self.vocab * self.hidden

    def kv_bytes(self, width: int) -> int:
        """Bytes of key and value cache a token at ``width`` bytes a number."""
        return 2 * self.layers * self.kv_size * width


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float  # bytes
    flops: float  # bf16, dense, a second
    bandwidth: float  # bytes a second


def _table() -> Mapping[str, Any]:
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))


def known_models() -> dict[str, Shape]:
    table = _table()
    return {name + suffix: Shape(**s) for name, s in table["models"].items() for suffix in table["suffixes"]}


def shape_of(path: str, override: Mapping[str, Any] | None = None) -> Shape:
    """The shape of a hub id in the table, or of a local folder's ``config.json``.

    Raises UnknownShape with the nearest name, or where the folder is not there.
    """
    config_file = Path(path).expanduser() / "config.json"
    if config_file.exists():
        return _from_config({**json.loads(config_file.read_text(encoding="utf-8")), **(override or {})})
    models = known_models()
    if path in models:
        return models[path]
    near = difflib.get_close_matches(path, models, n=1)
    hint = f"; nearest in {TABLE.name}: {near[0]}" if near else f"; {TABLE.name} holds those that are known"
    raise UnknownShape(f"the shape of {path} is not known offline{hint}")


def _from_config(config: Mapping[str, Any]) -> Shape:
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
        raise UnknownShape(f"its config.json has no {error}: not a model of the Llama or Qwen2 shape") from error


def gpu(name: str) -> Gpu:
    """A GPU of the table. Raises UnknownShape with the names it holds."""
    gpus = _table()["gpus"]
    if name not in gpus:
        raise UnknownShape(f"--gpu={name}: not in {TABLE.name}, which holds {', '.join(gpus)}")
    return Gpu(name, gpus[name]["memory"] * 2**30, gpus[name]["tflops"] * 1e12, gpus[name]["bandwidth"] * 1e12)
