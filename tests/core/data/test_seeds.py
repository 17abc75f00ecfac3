import numpy as np

from core.data.draw_order import derive_seed, sampling_seed


def test_a_million_samples_get_a_million_seeds_that_are_no_neighbours():
    seeds = np.array([sampling_seed(1, ordinal, sample) for ordinal in range(-1000, 61_500) for sample in range(16)])
    assert len(seeds) == 1_000_000
    assert seeds.min() >= 0
    gaps = np.diff(np.sort(seeds))
    assert gaps.min() > 64  # an engine that expands a seed into seed, seed + 1, ... meets no other sample's


def test_every_argument_and_the_purpose_count():
    changed = [
        sampling_seed(*values) for values in ((1, 2, 3, 4), (2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5))
    ]
    assert len({*changed, sampling_seed(1, -2, 3, 4), sampling_seed(12, 3, 4), derive_seed("order", 1, 2, 3, 4)}) == 8


def test_seeds_never_change():
    """Recorded: runs resume with the seeds that they began with."""
    assert sampling_seed(1, 0, 0) == 2936282811276623825
    assert 0 <= sampling_seed(2**70, -(2**70), 0) < 2**63
