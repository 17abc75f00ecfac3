"""SGLang's real server behind the contract of every engine, but for the promises that it does not make."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np
import pytest
import torch

from core.engines.sglang import SGLangEngine
from tests.core.engine_contract import HELLO, ModelEngineContract, ask, ids, run, sample_all
from tests.core.engines.sglang_fixture import attached, needs_sglang, serving

pytestmark = [pytest.mark.slow, needs_sglang]
SHAPE = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.14)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("model"), **SHAPE) as one:
        yield one


class TestSGLang(ModelEngineContract):
    """One server for all of the tests; each has an engine, and so an update group, of its own."""

    model_options = SHAPE
    seeded = top_p_within_top_k = False
    draws = 1200

    @pytest.fixture(scope="class", autouse=True)
    def shared(self, server):
        type(self).server = server

    def make(self) -> SGLangEngine:
        engine = attached(self.server, **SHAPE)
        engine.update_weights(self.model().state_dict().items(), 0)
        return engine

    # What no seed can promise
    test_two_settings_share_a_seed = test_a_replay_is_the_same_to_the_bit = None
    # What is counted inside an engine of this process; the tests below look from outside
    test_samples_of_a_prompt_share_its_prefill = test_no_row_waits_for_the_longest = None
    test_aborted_rows_are_not_computed_on = None
