"""Exact match with a reward for well-formed search episodes (Search-R1's ``qa_em_format``).

The structure is read from the whole episode, tool output included; the answer is read from what the
policy wrote, and what was retrieved from what the tool returned, so that neither can be faked in
the other's place. Without the episode's segments all three are read from the response.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reward_scores.qa_em import check_ground_truth as check_ground_truth
from reward_scores.qa_em import extract, is_gold, normalize_answer, targets
from reward_scores.qa_em import note_ground_truth as note_ground_truth
from reward_scores.score import Score, graded, no_answer
from reward_scores.tags import between, opened_tag

_SEARCHED = (
    "<think>t</think><search>q</search><information>Paris is big</information><think>u</think>"
)
EXAMPLES = (
    (f"{_SEARCHED}\n<answer>Paris</answer>", {"target": ["Paris"]}, 1.0),
    ("<think>t</think><answer>Paris</answer>", {"target": "paris"}, 1.0),
    (f"{_SEARCHED}<answer>London</answer>", {"target": ["Paris"]}, 0.0),
    (_SEARCHED, {"target": ["Paris"]}, 0.0),
)
PROMPT_END = "<|im_start|>assistant\n"
_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
# state, tag -> next state; text may stand in the states that begin with "in_" only
_NEXT = {
    ("start", "<think>"): "in_think",
    ("information", "<think>"): "in_think",
    ("in_think", "</think>"): "after_think",
    ("after_think", "<search>"): "in_search",
    ("in_search", "</search>"): "after_search",
    ("after_search", "<information>"): "in_information",
    ("in_information", "</information>"): "information",
    ("after_think", "<answer>"): "in_answer",
    ("in_answer", "</answer>"): "end",
}


def score(
    response: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    structure_format_score: float = 0.0,
    final_format_score: float = 0.0,
    retrieval_score: float = 0.0,
    correct_score: float = 1.0,
) -> Score:
    """Grade a response; ``extra_info["rollout"]["segments"]`` is the episode, where there is one.

    A ``<think>`` that the prompt opened is part of the structure.
    """
    segments = (extra_info or {}).get("rollout", {}).get("segments", ())
    episode = "".join(segment["text"] for segment in segments) or response
    returned = "".join(segment["text"] for segment in segments if segment["role"] != "policy")
    return judge(
        structure_problem(PROMPT_END + opened_tag(extra_info, "think") + episode) is None,
        is_retrieved(blocks(returned if segments else response), targets(ground_truth)),
        extract(opened_tag(extra_info, "answer") + response),
        targets(ground_truth),
        (structure_format_score, final_format_score, retrieval_score, correct_score),
    )


def judge(
    valid: bool,
    retrieved: bool,
    answer: str | None,
    golds: Any,
    rewards: tuple[float, float, float, float],
) -> Score:
    """Score by the published rule. ``rewards`` are those of structure, final format, retrieval and
    a right answer."""
    structure, final, retrieval, correct = rewards
    pred = None if answer is None else normalize_answer(answer)
    parts = {"format": float(valid), "retrieved": float(retrieved)}
    if pred is not None and any(is_gold(pred, answer, gold) for gold in golds):
        return graded(True, pred, correct if valid else correct - structure, **parts)
    value = (
        structure + (retrieval if retrieved else 0.0) if valid else (0.0 if pred is None else final)
    )
    return no_answer(value, **parts) if pred is None else graded(False, pred, value, **parts)


def structure_problem(text: str) -> str | None:
    """Return what breaks the sequence think, (search, information, think)*, answer after the
    assistant's mark."""
    start = re.search(r"<\|im_start\|>assistant\s*", text)
    if start is None:
        return "Missing assistant marker"
    content = text[start.end() :]
    for tag in ("think", "search", "information", "answer"):
        opened = content.count(f"<{tag}>")
        closed = content.count(f"</{tag}>")
        if opened != closed:
            return f"Mismatch in {tag} tags: {opened} opening vs {closed} closing tags"
    state = "start"
    for piece in filter(str.strip, _TAG.split(content)):
        if _TAG.fullmatch(piece):
            if (state, piece) not in _NEXT:
                return f"Unexpected tag {piece} in state {state}"
            state = _NEXT[state, piece]
        elif not state.startswith("in_"):
            if state == "end":
                return f"Unexpected content in state {state}"
            return f"Unexpected content '{piece.strip()}' between tags (state: {state})"
    return None if state == "end" else f"Incomplete sequence, ended in state {state}"


def blocks(text: str) -> list[str]:
    return between(text, "information")


def is_retrieved(passages: list[str], golds: Any) -> bool:
    """Return whether a gold answer stands in a passage, after normalising; one of nothing stands in
    none."""
    found = [normalize_answer(passage) for passage in passages]
    wanted = [normal for gold in golds if (normal := normalize_answer(gold))]
    return any(normal in passage for normal in wanted for passage in found)
