"""Search-R1 (arXiv:2503.09516): language models that learn to search. See README.md.

    python -m recipes.search_r1.main_search_r1 key=value ...

``DRY_RUN=1`` in the environment only checks the configuration.
"""

from core import command_line

TRAINER = "recipes.search_r1.search_r1_ray_trainer:SearchR1Trainer"

if __name__ == "__main__":
    command_line.main("search_r1", trainer=TRAINER)
