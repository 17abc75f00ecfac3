"""Imports its project's package, which is not installed."""

from wordgame.rules import ALPHABET, is_chain


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    words = [word for word in solution_str.lower().split() if set(word) <= set(ALPHABET)]
    return float(len(words) > 1 and is_chain(words) and words[0] == ground_truth)
