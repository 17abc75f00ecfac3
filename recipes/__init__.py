"""A folder a paper, and the lab: configuration, what the paper adds to the loop, run scripts."""

import core  # noqa: F401  (a missing package is reported in one line: core/installation.py)
