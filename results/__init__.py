"""Recorded runs, and the tables and reports that are made of them."""

import core  # noqa: F401  (a missing package is reported in one line)
