"""The reward of the tasks with room: 1 for the right sign after the last ``#``, and a little for any other sign.

That little is what guessing collects: a policy can earn it without following anything.
"""

from __future__ import annotations

from typing import Any

WELL_FORMED = 0.2


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, well_formed: float = WELL_FORMED
) -> dict[str, float]:
    """Return ``score``, which trains, ``acc``, which validation reports, and whether one sign stands after ``#``.

    ``well_formed`` is what any sign earns; a run sets it with ``custom_reward_function.reward_kwargs``.
    """
    _, mark, sign = solution_str.rpartition("#")
    formed = float(bool(mark) and len(sign.strip()) == 1)
    right = float(formed and sign.strip() == ground_truth)
    return {"score": max(right, well_formed * formed), "acc": right, "well_formed": formed}
