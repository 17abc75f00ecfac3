"""The log-probs of a head in float64 numpy, written apart from the code they check."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def head(
    hidden: Array, weight: Array, labels: Array, temperature: float, bias: Array | None
) -> tuple[Array, Array]:
    """(log-probs, entropies) by an explicit softmax."""
    logits = (hidden @ weight.T + (0 if bias is None else bias)) / temperature
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    return np.log(probs[np.arange(len(labels)), labels]), -(probs * np.log(probs)).sum(-1)
