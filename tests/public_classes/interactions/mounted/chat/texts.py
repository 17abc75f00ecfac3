"""Beside a simulated user whose repository is a folder of verl's, named recipe."""


def ask(turn):
    return f"and turn {turn + 1}?"
