"""A module of the fork alone."""


def last_line(text):
    return text.strip().splitlines()[-1].strip().lower() if text.strip() else ""
