"""Supervised fine-tuning on demonstrations in parquet files. See README.md.

    python -m recipes.sft.main_sft key=value ...

``DRY_RUN=1`` in the environment only checks the configuration.
"""

from core import command_line

TRAINER = "recipes.sft.sft_trainer:RaySFTTrainer"

if __name__ == "__main__":
    command_line.main("sft", trainer=TRAINER)
