"""MaxRL: maximum likelihood by reinforcement learning (arXiv:2602.02710). See README.md."""

from core import command_line

if __name__ == "__main__":
    command_line.main("maxrl")
