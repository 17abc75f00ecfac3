"""Of a package that is named as this repository's."""

from environment import POINTS


def points(words):
    return POINTS * len(words)
