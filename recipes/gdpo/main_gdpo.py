"""GDPO: each part of a score is normalised by itself (arXiv:2601.05242). See README.md."""

from core import command_line

TRAINER = "recipes.gdpo.gdpo_ray_trainer:RayGDPOTrainer"

if __name__ == "__main__":
    command_line.main("gdpo", trainer=TRAINER)
