"""DAPO (arXiv:2503.14476): clip-higher, dynamic sampling, token-level loss, overlong shaping.

See README.md.

    python -m recipes.dapo.main_dapo key=value ...

``DRY_RUN=1`` in the environment only checks the configuration.
"""

from core import command_line

TRAINER = "recipes.dapo.dapo_ray_trainer:RayDAPOTrainer"

if __name__ == "__main__":
    command_line.main("dapo", trainer=TRAINER)
