"""The hf and the scripted engine: the shared contract, and what is theirs alone."""

from __future__ import annotations

import torch

from core.engines.hf import HFEngine
from core.engines.scripted import ScriptedEngine
from tests.core.engine_contract import Counts, EngineContract, ModelEngineContract
from tests.tiny import tiny_tokenizer


class TestHF(ModelEngineContract):
    def make(self) -> HFEngine:
        return HFEngine(self.model(), tiny_tokenizer())

    def counts(self, engine: HFEngine) -> Counts:
        return Counts(engine.stats.prefill_tokens, engine.stats.row_steps)


class TestScripted(EngineContract):
    def make(self) -> ScriptedEngine:
        def respond(request):
            generator = torch.Generator().manual_seed(hash((request.prompt_ids, request.seed)) % 2**63)
            return torch.randint(0, 100, (256,), generator=generator).tolist()

        return ScriptedEngine(tiny_tokenizer(), respond)
