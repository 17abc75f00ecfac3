"""A scorer of a fork that imports another module of it by its full name."""

from verl.utils.reward_score.riddle_text import last_line


def compute_score(solution_str, ground_truth):
    return last_line(solution_str) == ground_truth.lower(), "compared the last line"
