"""Negative and positive samples apart (arXiv:2506.01347). See README.md."""

from core import command_line

if __name__ == "__main__":
    command_line.main("nsr")
