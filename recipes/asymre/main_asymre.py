"""Asymmetric REINFORCE: a baseline below the mean (arXiv:2506.20520). See README.md."""

from core import command_line

TRAINER = "recipes.asymre.asymre_ray_trainer:RayAsymRETrainer"

if __name__ == "__main__":
    command_line.main("asymre", trainer=TRAINER)
