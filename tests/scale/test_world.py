"""The plan's figures and the formulas of collectives against the real learner on fake ranks, and
the meter itself."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from core.plan import LOG_PROBS, UPDATE
from results.reporting.run_scripts import read_script
from tests.scale.meter import GPU, HOST, Meter
from tests.scale.world import BOUND, ROOT, SCRIPTS, SYNC, world

# Peaks; what is no estimate is exact, but for the padding of shards
ESTIMATES = (LOG_PROBS, UPDATE, SYNC)


@pytest.mark.parametrize("path", [SCRIPTS[0], pytest.param(SCRIPTS[1], marks=pytest.mark.slow)])
def test_the_plan_is_within_ten_percent_of_the_real_learner(path):
    """The published settings."""
    found = world(read_script(ROOT / path, ()))
    assert not [one for one in found if abs(one.deviation) > BOUND]
    exact = [one for one in found if one.what not in ESTIMATES]
    assert len(exact) >= 8 and not [one for one in exact if abs(one.deviation) > 1e-3]


def test_the_meter_counts_what_is_alive_and_moved():
    with FakeTensorMode() as fake, Meter(fake) as meter:
        one = torch.empty(1024, 256)
        with meter.at(HOST):
            kept = torch.empty(256, 512)
        product = one @ kept
        assert meter.now == {GPU: one.nbytes + product.nbytes, HOST: kept.nbytes}
        sizes = one.nbytes, product.nbytes
        view = product[:2]
        del product
        assert meter.now[GPU] == sum(sizes)  # the view keeps it alive
        del view
        assert meter.now[GPU] == sizes[0] and meter.peak[GPU] == sum(sizes)
        one.untyped_storage().resize_(0)
        assert meter.now[GPU] == 0
        meter.move(kept, GPU)
        assert meter.now == {GPU: kept.nbytes, HOST: 0}
        meter.reset()
        assert meter.peak[GPU] == kept.nbytes
