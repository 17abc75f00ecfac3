"""Encode texts as unit vectors: any sentence-transformers or E5-style encoder, or hashing, which
needs no model.

Encoding a whole corpus, in chunks that an interrupted call resumes, is ``dense.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from core.data.vocabulary import writable
from recipes.search_r1.index.passages import RetrievalError

HASHING = "hashing"
BATCH_TOKENS = 8192  # padding included; a memory setting


@dataclass(frozen=True)
class EncoderSettings:
    """Everything that decides a vector. The defaults are E5's, as in Search-R1; many other models
    have no prefix.

    ``model`` is a folder, a hub id, or ``hashing:N``: words and pairs of words hashed into N
    numbers, for tests.
    """

    model: str
    query_prefix: str = "query: "
    passage_prefix: str = "passage: "
    pooling: str = "mean"
    max_length: int = 256

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Encoder(Protocol):
    settings: EncoderSettings
    dim: int
    dtype: str

    def encode(self, texts: Sequence[str], prefix: str) -> np.ndarray:
        """Return unit vectors of ``prefix + text``. Shapes: [N, dim], float32."""
        ...


def add_encoder_arguments(parser: argparse.ArgumentParser, origin: str) -> None:
    """Add the arguments of an encoder. ``origin`` is what decides where none is given."""
    default = f"(default: {origin}"
    add = parser.add_argument
    add("--encoder", help="The encoder of dense back ends: a folder, a hub id, or hashing:N.")
    add("--query-prefix", help=f'The text before a query {default}, else "query: ").')
    add("--passage-prefix", help=f'The text before a passage {default}, else "passage: ").')
    pooling = f"How token vectors become one {default}, else mean)."
    add("--pooling", choices=("mean", "cls"), help=pooling)
    length = f"The tokens of a text that are read {default}, else 256)."
    add("--max-length", type=int, help=length)
    add("--device", default="cpu", help="The device: cpu, cuda, cuda:1 (default %(default)s).")
    add("--threads", type=int, help="The threads on the CPU (default: those of torch and faiss).")


def make_encoder(
    settings: EncoderSettings,
    device: str = "cpu",
    threads: int | None = None,
    dtype: str | None = None,
) -> Encoder:
    """Load an encoder. Raises RetrievalError where the model cannot be loaded.

    ``dtype`` is that of the weights: None is float32 on a CPU and float16 elsewhere. bfloat16 is
    several times as fast on CPUs that have units for it.
    """
    if settings.pooling not in ("mean", "cls"):
        raise RetrievalError(f"pooling={settings.pooling!r}: must be mean or cls")
    if settings.model.partition(":")[0] == HASHING:
        return HashingEncoder(settings)
    return TransformerEncoder(settings, device, threads, dtype)


def settings_of(model: str, **given: Any) -> EncoderSettings:
    """Return a model's settings: those given, then those of its sentence-transformers files, then
    E5's.

    A folder with ``modules.json`` is a sentence-transformers model: its prefixes (``prompts``) are
    empty unless named.
    """
    found: dict[str, Any] = {}
    folder = Path(model).expanduser()
    if (folder / "modules.json").is_file():
        found = {"query_prefix": "", "passage_prefix": ""} | _sentence_transformers(folder)
    elif model.startswith(f"{HASHING}:"):
        found = {"query_prefix": "", "passage_prefix": ""}
    return EncoderSettings(
        model, **(found | {name: value for name, value in given.items() if value is not None})
    )


def _sentence_transformers(folder: Path) -> dict[str, Any]:
    def read(name: str) -> dict[str, Any]:
        path = folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    prompts = read("config_sentence_transformers.json").get("prompts") or {}
    pooling = read("1_Pooling/config.json")
    found = {"pooling": "cls"} if pooling.get("pooling_mode_cls_token") else {}
    length = read("sentence_bert_config.json").get("max_seq_length")
    for ours, theirs in (
        ("query_prefix", "query"),
        ("passage_prefix", "passage"),
        ("passage_prefix", "document"),
    ):
        if prompts.get(theirs):
            found[ours] = prompts[theirs]
    return found | ({"max_length": length} if length else {})


class TransformerEncoder:
    """An encoder that pools the last hidden states, mean or first token, to unit length (E5, arXiv
    2212.03533)."""

    def __init__(
        self,
        settings: EncoderSettings,
        device: str = "cpu",
        threads: int | None = None,
        dtype: str | None = None,
    ):
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.settings = settings
        self._torch = torch
        self._device = device
        if threads:
            torch.set_num_threads(threads)
        self.dtype = dtype or ("float32" if device == "cpu" else "float16")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(settings.model)
            self._model = (
                AutoModel.from_pretrained(settings.model, dtype=getattr(torch, self.dtype))
                .to(device)
                .eval()
            )
        except (OSError, ValueError) as error:
            raise RetrievalError(
                f"encoder {settings.model}: it cannot be loaded ({error}); give a folder or a hub "
                f"id"
            ) from error
        self.dim = int(self._model.config.hidden_size)

    def encode(self, texts: Sequence[str], prefix: str) -> np.ndarray:
        torch = self._torch
        out = np.empty((len(texts), self.dim), np.float32)
        if not texts:
            return out
        read = [writable(prefix + text) for text in texts]
        ids = self._tokenizer(read, truncation=True, max_length=self.settings.max_length)[
            "input_ids"
        ]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        with torch.inference_mode():
            for batch in _batches(order, ids):
                out[batch] = self._vectors([ids[i] for i in batch])
        return out

    def _vectors(self, ids: list[list[int]]) -> np.ndarray:
        torch = self._torch
        batch = self._tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(self._device)
        hidden_BTD = self._model(**batch).last_hidden_state.float()
        if self.settings.pooling == "cls":
            pooled_BD = hidden_BTD[:, 0]
        else:
            mask_BT1 = batch["attention_mask"][..., None].float()
            pooled_BD = (hidden_BTD * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(pooled_BD, dim=-1).cpu().numpy()


def _batches(order: list[int], ids: list[list[int]]) -> list[list[int]]:
    """Yield texts of similar length together, at most BATCH_TOKENS with their padding (one text at
    least)."""
    batches: list[list[int]] = [[]]
    for i in order:  # by length: the last one is the longest of its batch
        if batches[-1] and (len(batches[-1]) + 1) * len(ids[i]) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(i)
    return batches


class HashingEncoder:
    """Feature hashing (Weinberger et al. 2009): each word and each pair of neighbours adds plus or
    minus one."""

    dtype = "float32"

    def __init__(self, settings: EncoderSettings):
        self.settings = settings
        size = settings.model.partition(":")[2]
        if not size.isdigit() or int(size) < 8:
            raise RetrievalError(
                f"encoder {settings.model!r}: must be hashing:N with N of at least 8"
            )
        self.dim = int(size)

    def encode(self, texts: Sequence[str], prefix: str) -> np.ndarray:
        out = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(out, texts, strict=True):
            words = re.findall(r"\w+", (prefix + text).lower())[: self.settings.max_length]
            for feature in [
                *words,
                *(" ".join(pair) for pair in zip(words, words[1:], strict=False)),
            ]:
                code = zlib.crc32(feature.encode("utf-8", "replace"))
                row[code % self.dim] += 1.0 if code & 0x80000000 else -1.0
        lengths = np.linalg.norm(out, axis=1, keepdims=True)
        return out / np.where(lengths > 0, lengths, 1.0)


def weights_hash(model: str) -> str | None:
    """Return 16 hexadecimal digits of the weights in a folder; None for a hub id or hashing, known
    by name only."""
    files = sorted(Path(model).expanduser().glob("*.safetensors")) or sorted(
        Path(model).expanduser().glob("*.bin")
    )
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
