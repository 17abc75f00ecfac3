"""Sizes of models: the table of ``model_shapes.yaml``, and ``config.json`` of folders.

Nothing is downloaded: a hub id that is not in the table has no shape here.
"""

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from core.errors import InputError

SOURCE = Path(__file__).with_name("model_shapes.yaml")
TABLE = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped-query attention, a gated MLP and RMS norms, as Llama and Qwen2."""

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

    @property
    def q_size(self) -> int:
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_size(self) -> int:
        return self.q_size // self.heads * self.kv_heads

    @property
    def block(self) -> int:
        """Count the parameters of one layer."""
        attention = 2 * self.hidden * (self.q_size + self.kv_size)
        bias = (self.q_size + 2 * self.kv_size) if self.bias else 0
        return attention + bias + 3 * self.hidden * self.mlp + 2 * self.hidden

    @property
    def ends(self) -> int:
        """Count the parameters outside the layers: embedding, head, last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.ends + self.tower

    @property
    def critic_parameters(self) -> int:
        """Count the parameters of the same body with a head of one number and a bias."""
        return self.layers * self.block + self.vocab * self.hidden + 2 * self.hidden + 1

    def adapters(self, rank: int) -> int:
        """Count the parameters of LoRA on every linear layer: two factors each."""
        sizes = 7 * self.hidden + 2 * self.q_size + 2 * self.kv_size + 3 * self.mlp
        return self.layers * rank * sizes

    def kv_bytes(self, width: int) -> int:
        """Return the bytes of key and value cache per token at ``width`` bytes a number."""
        return 2 * self.layers * self.kv_size * width


MODELS = {
    name + suffix: Shape(**sizes)
    for name, sizes in TABLE["models"].items()
    for suffix in TABLE["suffixes"]
}
# Field of Shape -> name in config.json
SIZES = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "mlp": "intermediate_size",
    "vocab": "vocab_size",
    "head_dim": "head_dim",
}


def shape_of(path: str, override: Mapping[str, Any] | None = None) -> Shape:
    """Return the shape of a hub id in the table, or of a folder's ``config.json``.

    Raises InputError for others.
    """
    saved = read_config(path)
    if saved is None:
        if path in MODELS:
            return MODELS[path]
        near = difflib.get_close_matches(path, MODELS, n=1)
        raise InputError(
            f"the shape of {path} is not known offline; nearest in {SOURCE.name}: {near or 'none'}"
        )
    config = {**saved, **(override or {})}
    config.setdefault("head_dim", 0)
    config.setdefault("num_key_value_heads", saved.get("num_attention_heads"))
    sizes = {field: config.get(name) or 0 for field, name in SIZES.items()}
    wrong = [
        SIZES[field]
        for field, size in sizes.items()
        if type(size) is not int or size < 0 or (size == 0 and field != "head_dim")
    ]
    if wrong or "vision_config" in saved:
        names = ", ".join(wrong) or "vision_config"
        raise InputError(
            f"{path}/config.json: no model of text of Llama's or Qwen's shape by its {names}; only "
            "these are planned, and other models train without a plan"
        )
    bias = config.get("attention_bias", config.get("model_type", "").startswith("qwen2"))
    return Shape(**sizes, tied=config.get("tie_word_embeddings", True), bias=bias)


def read_config(path: str) -> dict[str, Any] | None:
    """Return the ``config.json`` of a model's folder, or None if there is none, as for a hub id.

    Raises InputError.
    """
    file = Path(os.path.expanduser(path)) / "config.json"
    if not file.is_file():
        return None
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}/config.json: cannot be read ({error}); it must hold a model's settings"
        ) from error
