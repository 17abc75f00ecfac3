"""Imports its neighbour by the place that its repository has in verl's."""

from recipe.riddle.words import last_word


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(last_word(solution_str) == ground_truth)
