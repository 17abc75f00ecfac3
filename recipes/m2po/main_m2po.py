"""M2PO: a bound on the second moment of the log-ratio (arXiv:2510.01161). See README.md."""

from core import command_line

if __name__ == "__main__":
    command_line.main("m2po")
