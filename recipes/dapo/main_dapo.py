"""DAPO (arXiv:2503.14476): clip-higher, dynamic sampling, token-level loss, overlong shaping. See README.md.

The core trainer has each technique behind its key; the recipe is their configuration.

python -m recipes.dapo.main_dapo key=value ...    DRY_RUN=1 in the environment only checks the configuration
"""

from core import launch

if __name__ == "__main__":
    launch.main("dapo")
