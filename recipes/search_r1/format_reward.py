"""The rewards of the follow-up paper (arXiv:2505.15117): format and retrieval beside exact match.

``preset=format`` names this function. With the scores of the published scripts (structure 0.2,
final format 0.1, retrieval 0) a right answer in a well-formed episode earns 1, in a malformed one
0.8, a wrong one 0.2 or 0.1. ``acc``, which validation reports, is exact match alone.
``reward_scores/qa_em_format.py`` reads each part where it stands: the answer from what the policy
wrote, the passages from what the tool returned, the structure from both in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_scores import qa_em_format
from reward_scores.qa_em_format import check_ground_truth as check_ground_truth
from reward_scores.score import Score


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    **scores: float,
) -> Score:
    """Grade an episode; ``scores`` are
    ``{structure_format,final_format,retrieval,correct}_score``."""
    return qa_em_format.score(solution_str, ground_truth, extra_info, **scores)
