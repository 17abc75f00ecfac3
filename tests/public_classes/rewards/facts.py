"""Reads the row's facts, some of which may be missing."""


def compute_reward(data_source, solution_str, ground_truth, extra_info=None):
    extra_info = extra_info or {}
    question, choices = extra_info.get("question", ""), extra_info.get("choices") or []
    said = solution_str.removeprefix(question).strip()
    penalty = 0.1 * max(extra_info.get("num_turns", 2) - 2, 0)
    return (1.0 if said.endswith(ground_truth) and (not choices or ground_truth in choices) else 0.0) - penalty
