"""What is said of a model when it is loaded."""

from __future__ import annotations

import pytest
import torch

from core.learner.learner import LearnerModel
from core.learner.model_checks import check_speed
from tests.tiny import tiny_model


@pytest.mark.parametrize(
    "dtype, supported, warns",
    [(torch.bfloat16, False, True), (torch.bfloat16, True, False), (None, False, False)],
)
def test_bf16_on_a_processor_without_instructions_for_it_is_said(monkeypatch, caplog, dtype, supported, warns):
    check_speed.cache_clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    LearnerModel(tiny_model(), compute_dtype=dtype)
    assert ("no instructions for bfloat16" in caplog.text and "rollout.dtype" in caplog.text) == warns


def test_it_is_said_once_a_process(monkeypatch, caplog):
    check_speed.cache_clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    for _ in range(2):
        LearnerModel(tiny_model(), compute_dtype=torch.bfloat16)
    assert caplog.text.count("no instructions") == 1
