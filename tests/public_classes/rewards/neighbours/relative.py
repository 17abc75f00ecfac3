"""Imports a file beside it, relative to its package, in a function too."""

from .letters import vowels


def compute_score(solution_str, ground_truth):
    from . import letters

    return float(vowels(solution_str) == letters.vowels(ground_truth))
