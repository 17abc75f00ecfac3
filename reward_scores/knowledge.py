"""The lab's search task: exact match of the answer (``qa_em``), with the number of searches beside
it.

A search earns nothing by itself. ``recipes/search_r1/knowledge.py`` makes the questions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reward_scores import qa_em
from reward_scores.qa_em import check_ground_truth as check_ground_truth
from reward_scores.qa_em import note_ground_truth as note_ground_truth
from reward_scores.score import Score

EXAMPLES = (
    ("<search> boss bavu</search><answer> keli</answer>", {"target": ["keli"]}, 1.0),
    ("<answer> bavu</answer>", {"target": ["keli"]}, 0.0),
    (" keli", {"target": ["keli"]}, 0.0),
)


def score(response: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> Score:
    """Return 1 for a gold answer. ``searches`` counts the calls of the episode; it is no part of
    the value."""
    exact = qa_em.score(response, ground_truth, extra_info, max_tags=None)
    searches = float((extra_info or {}).get("rollout", {}).get("num_tool_calls", 0))
    return dataclasses.replace(exact, parts={**exact.parts, "searches": searches})
