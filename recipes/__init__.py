"""A folder a paper, and the lab: configuration, what the paper adds to the loop, run scripts.

A folder ``recipes/`` without ``__init__.py`` elsewhere on Python's path adds its own recipes.
"""

from pkgutil import extend_path

import core  # noqa: F401  (a missing package is reported in one line)

__path__ = extend_path(__path__, __name__)
