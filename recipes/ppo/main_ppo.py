"""PPO (arXiv:1707.06347) on language models: a learnt critic, GAE, a clipped objective.

See README.md. The recipe overrides no hook: it is the core trainer with ``config/ppo.yaml``.

    python -m recipes.ppo.main_ppo key=value ...

``DRY_RUN=1`` in the environment only checks the configuration.
"""

from core import command_line

if __name__ == "__main__":
    command_line.main("ppo")
