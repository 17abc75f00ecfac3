"""DAPO (arXiv:2503.14476), at the paper's scale and smaller (README.md here)."""

PREPARE = "bash recipes/dapo/prepare_dapo_data.sh"
MAKES = {"dapo_math": PREPARE, "aime2024": PREPARE}
