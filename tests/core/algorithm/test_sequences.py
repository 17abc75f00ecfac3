"""Masked reductions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.algorithm.sequences import masked_mean, masked_sum, masked_var, masked_whiten, mean_by_sequence


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_they_are_numpy_on_the_kept_entries(seed):
    rng = np.random.default_rng(seed)
    values, mask = rng.normal(3, 2, size=(4, 5)), rng.random((4, 5)) < 0.6
    mask[0, :2] = True
    kept, garbage = values[mask], np.where(mask, values, math.nan)
    x, m = torch.from_numpy(garbage), torch.from_numpy(mask)
    assert float(masked_sum(x, m)) == pytest.approx(kept.sum())
    assert float(masked_mean(x, m)) == pytest.approx(kept.mean())
    assert float(masked_var(x, m)) == pytest.approx(kept.var(ddof=1))
    assert float(masked_var(x, m, unbiased=False)) == pytest.approx(kept.var())
    whitened = masked_whiten(x, m)[m].numpy()
    assert whitened.mean() == pytest.approx(0, abs=1e-9) and whitened.std(ddof=1) == pytest.approx(1)
    assert masked_whiten(x, m, shift_mean=False)[m].numpy().mean() == pytest.approx(kept.mean())
    rows = [row[keep].mean() if keep.any() else 0 for row, keep in zip(values, mask, strict=True)]
    np.testing.assert_allclose(mean_by_sequence(x.flatten(), m.flatten(), torch.full((4,), 5)), rows)


def test_nothing_kept_is_zero_and_has_no_variance():
    nothing = torch.zeros(2, 3).bool()
    assert float(masked_mean(torch.ones(2, 3), nothing)) == 0
    with pytest.raises(ValueError, match="a variance over 0 tokens"):
        masked_var(torch.ones(2, 3), nothing)
