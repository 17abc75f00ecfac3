"""Imports modules of its project that this repository has names of too."""

from core.points import points


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    import environment

    found = [word for word in solution_str.split() if word == ground_truth]
    return min(points(found), 2 * environment.POINTS)
