"""Beside a reward function whose repository is a folder of verl's, named recipe."""


def last_word(text):
    return (text.split() or [""])[-1].strip(".!")
