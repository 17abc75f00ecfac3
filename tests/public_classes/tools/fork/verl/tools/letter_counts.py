"""A module of the fork alone."""

from collections import Counter


def counts(word):
    return dict(Counter(word))
