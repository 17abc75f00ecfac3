"""Public data sets to parquet files of the one schema (``core/data/parquet.py``): one script a data
set, and a command that checks a file."""

import core  # noqa: F401  (a missing package is reported in one line)
