"""Rules of a game of words."""

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def is_chain(words):
    return all(one[-1] == other[0] for one, other in zip(words, words[1:], strict=False))
