"""The keys that only supervised fine-tuning has: where a file holds its demonstrations. See
``core/config/recipes.py``.

Their names are those of verl's SFT trainers. A demonstration's length is bounded by the core's
``data.max_prompt_length + data.max_response_length``, by which runs are planned.
"""

from __future__ import annotations

from core.config.schema import Config
from core.config.section import files, key
from core.config.training_keys import DataConfig

PAPER = "supervised fine-tuning"


class DemonstrationConfig(DataConfig):
    """The core's section ``data``, with the columns of demonstrations."""

    val_files: tuple[str, ...] = files(
        (), "parquet files of questions that a validation answers; empty: there is none"
    )
    messages_key: str = key(
        "messages", "column that holds a whole chat, whose assistant turns are trained on"
    )
    tools_key: str = key(
        "tools", "column, where a file has it, of the tools that the chat template tells of"
    )
    enable_thinking_key: str = key(
        "enable_thinking", "column, where a file has it, of a row's enable_thinking"
    )
    response_key: str = key(
        "response",
        "column of the answers to prompt_key where a file has no chats; extra_info.answer is a "
        "field of a column",
    )


class SFTConfig(Config):
    """The core's configuration with the keys of supervised fine-tuning."""

    data: DemonstrationConfig = DemonstrationConfig()

    @property
    def generates(self) -> bool:
        """Return False: a step trains on what stands in files, and only validations generate."""
        return False

    @property
    def needs_engine(self) -> bool:
        """Return whether there are questions to answer: without them no engine is made."""
        return bool(self.data.val_files)


SCHEMA = SFTConfig
