"""The check after a weight sync: engine and learner give a fixed text the same log-probs.

What a model is checked for when it is loaded stands in ``core.learner.model_checks``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np
import torch

from core.learner.learner import Policy

log = logging.getLogger(__name__)

OUTLIERS = 0.1  # share of the probe's tokens


class WeightSyncError(RuntimeError):
    """The engine does not compute with the learner's weights."""


def probe_ids(vocab_size: int, length: int = 24) -> tuple[int, ...]:
    """Return a fixed text of random ids: it touches the embedding, every layer and the head."""
    return tuple(int(i) for i in np.random.default_rng(0).integers(0, vocab_size, length))


@torch.no_grad()
def probe_log_probs(policy: Policy) -> np.ndarray:
    """Return the learner's log-probs of the fixed text, [n - 1] float32, as :meth:`RolloutEngine.probe` gives them."""
    ids = probe_ids(policy.module.config.get_text_config().vocab_size)
    with policy.precision():
        logits = policy.module(input_ids=torch.tensor([ids], device=policy.device), use_cache=False).logits
    log_probs = logits[0, :-1].float().log_softmax(-1).cpu()
    return log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def compare_weights(sent: Mapping[str, int], held: Mapping[str, int]) -> None:
    """Compare checksums of an engine's weights, by name, with those that the learner sent. Raises WeightSyncError."""
    if wrong := [name for name, value in held.items() if sent.get(name) != value]:
        raise WeightSyncError(
            f"after the weight sync {len(wrong)} of {len(held)} weights of the engine are not those that the learner "
            f"sent ({', '.join(wrong[:3])}): some of its weights are stale or were rounded"
        )


def compare_probe(
    learner: np.ndarray, engine: np.ndarray, *, bf16: bool, is_news: Callable[[str, float], bool]
) -> float:
    """Return the largest difference of the two, [N] each. Raises WeightSyncError where more than one token in
    ten is beyond the bound of the precision; a few that are beyond it are logged where that is news, in float32.

    Rounding grows with the number that is rounded: the tokens are random ones, whose log-probs may be -50. A wrong
    weight moves nearly all of them. In bf16 on a GPU one of them is beyond the bound in undisturbed runs of a real
    model, by 0.5 to 2.5: the metric has it, and a warning would come in every run.
    """
    difference = np.abs(learner - engine)
    bound = 0.25 + np.abs(learner) / 64 if bf16 else 1e-3 + np.abs(learner) * 1e-5
    beyond = ~(difference <= bound)  # NaN too
    if not beyond.any():
        return float(difference.max())
    worst = int(np.argmax(np.nan_to_num(difference / bound, nan=np.inf)))
    found = (
        f"after the weight sync the engine's log-prob of {beyond.sum()} of {len(beyond)} tokens is not the learner's, "
        f"at worst {engine[worst]:.4g} instead of {learner[worst]:.4g} (bound of the difference {bound[worst]:.3g})"
    )
    if beyond.mean() > OUTLIERS or not np.isfinite(difference).all():
        raise WeightSyncError(f"{found}: some of its weights are stale")
    if not bf16 and is_news("probe_diff", float(difference[worst])):
        log.warning("%s: too few for a stale weight", found)
    return float(difference.max())
