"""Text that somebody else wrote, as a terminal and a log may show it."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Return the text with escapes for what a terminal cannot show: line breaks, controls, broken characters."""
    return printable(text, but="")


# Spaces of other widths, and what joins and parts letters of several scripts, change nothing but how a text looks
SHOWN = "\n\t\u00a0\u2002\u2003\u2009\u200c\u200d\u202f\u3000"


def printable(text: str, but: str = SHOWN) -> str:
    """Return the text as a terminal may show it: its control characters are escapes, and none acts.

    A model's text may hold sequences that clear the screen, write to the clipboard (OSC 52) or change the order of
    what stands beside them. Characters in ``but`` stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in but else ascii(c)[1:-1] for c in text)
