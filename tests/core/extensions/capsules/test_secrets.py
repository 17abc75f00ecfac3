"""Secrets of a configuration in a capsule."""

from __future__ import annotations

from types import SimpleNamespace

from core.config import examine
from core.extensions.capsules.capsule_recorder import CapsuleRecorder
from core.safe_text.redaction import HIDDEN
from core.types import StepMetrics
from tests.core.test_redaction import RUNNING, SECRET


def test_a_capsule_holds_no_secret():
    told = SimpleNamespace(state_dict=dict)
    batch = SimpleNamespace(width=1, pad_id=0, device="cpu", stored={}, lengths=[])
    begun = SimpleNamespace(step=1, known=(), batch=batch, kl=told, alignment={}, weights={})
    recorder = CapsuleRecorder(examine("grpo", [*RUNNING]).config, object, 1)
    weight = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    module = SimpleNamespace(parameters=lambda: iter([weight]))
    workers = SimpleNamespace(trained={"actor": SimpleNamespace(module=module)})
    facts = recorder._facts(begun, told, StepMetrics(1), workers)
    assert SECRET not in str(facts) and HIDDEN in str(facts["config"])
