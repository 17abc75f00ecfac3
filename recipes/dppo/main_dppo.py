"""DPPO: a trust region on probabilities (arXiv:2602.04879). See README.md."""

from core import command_line

if __name__ == "__main__":
    command_line.main("dppo")
