"""This command has moved; it prints its new name (``core.MOVED`` lists all that have)."""

import sys

from core import moved

if __name__ == "__main__":
    sys.exit(moved("core.report"))
