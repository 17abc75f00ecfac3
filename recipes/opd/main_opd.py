"""On-policy distillation: the student learns from a teacher's log-probs on its own answers.

See README.md.

    python -m recipes.opd.main_opd key=value ...

``DRY_RUN=1`` in the environment only checks the configuration.
"""

from core import command_line

TRAINER = "recipes.opd.opd_ray_trainer:RayOPDTrainer"

if __name__ == "__main__":
    command_line.main("opd", trainer=TRAINER)
