"""SGLang, an engine behind HTTP: ``rollout.name=sglang``."""

from __future__ import annotations

from core.config.entries import SERVING, EngineEntry
from core.config.extensions import Extension

ENGINE = EngineEntry(
    "core.engines.sglang.sglang_engine:make",
    problems="core.engines.sglang.sglang_server:problems",
    seeded=False,
    top_p_within_top_k=False,
    reads_media=False,
    one_receiver=True,
    reads=SERVING,
)
EXTENSION = Extension(name="sglang", tables={"engines": {"sglang": ENGINE}})
