"""GRPO (DeepSeekMath, arXiv:2402.03300): advantages from the answers to one prompt, no critic.

See README.md. The recipe overrides no hook: it is the core trainer with ``config/grpo.yaml``.

    python -m recipes.grpo.main_grpo key=value ...

``DRY_RUN=1`` in the environment only checks the configuration.
"""

from core import command_line

if __name__ == "__main__":
    command_line.main("grpo")
