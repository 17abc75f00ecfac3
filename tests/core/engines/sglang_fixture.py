"""The real server of SGLang for tests, where ``environment/sglang.sh`` has made its environment; it takes a minute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engines.sglang import FIXED, ON_CPU, SPARE, SGLangEngine
from core.engines.sglang_server import SGLangServer, launch, python_of
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

START_S = 1000.0
POSITIONS = 256
needs_sglang = pytest.mark.skipif(
    python_of({}) is None, reason="SGLang has no environment here: bash environment/sglang.sh makes it"
)


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[SGLangServer]:
    """Yield a server of a tiny model with random weights, and end it."""
    tiny_model(**options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    arguments = {"model_path": str(folder), "load_format": "dummy", "dtype": "float32", "max_total_tokens": 20_000}
    arguments |= {"context_length": POSITIONS + SPARE, "sampling_mask_max_tokens": VOCAB_SIZE}
    server = launch(python_of({}), {**FIXED, **ON_CPU, **arguments}, START_S, on_cpu=True)
    try:
        yield server
    finally:
        server.close()


def attached(server: SGLangServer, **options: Any) -> SGLangEngine:
    """Make an engine on a server that others started."""
    with torch.device("meta"):
        skeleton = tiny_model(**options)
    client, cpu = SGLangServer(server.url, 120.0), torch.device("cpu")
    return SGLangEngine(tiny_tokenizer(), skeleton, client, device=cpu, max_length=POSITIONS, max_rows=200)
