"""Imports a file beside it by its bare name, as a script does."""

import letters


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1 - min(1, abs(letters.vowels(solution_str) - letters.vowels(ground_truth)) / 4)
