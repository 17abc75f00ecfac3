"""Public data sets -> parquet rows of the one schema (``core/data/parquet.py``), one script a data set, and a check
command."""
