"""Parquet files of rows and the ``data`` section that reads them: ``from tests.row_files import
data_config``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DEFAULTS = dict(
    train_files="train.parquet",
    val_files="test.parquet",
    prompt_key="prompt",
    reward_fn_key="data_source",
    image_key="images",
    max_prompt_length=512,
    filter_overlong_prompts=False,
    filter_overlong_prompts_workers=1,
    truncation="error",
    shuffle=True,
    seed=None,
    train_max_samples=-1,
    val_max_samples=-1,
    apply_chat_template_kwargs={},
    chat_template_date=None,
)


def data_config(**changes: Any) -> SimpleNamespace:
    """What the stream reads of ``config.data``, with verl's defaults."""
    assert changes.keys() <= DEFAULTS.keys()
    files = {
        name: (value,)
        for name, value in changes.items()
        if name.endswith("_files") and isinstance(value, str)
    }
    return SimpleNamespace(**{**DEFAULTS, **changes, **files})


def plain_row(
    index: int, source: str = "s", text: str | None = None, **changes: Any
) -> dict[str, Any]:
    """A row whose prompt is its own number as a plain string."""
    row = {
        "data_source": source,
        "prompt": f"{source}{index}" if text is None else text,
        "reward_model": {"style": "rule", "ground_truth": str(index)},
        "extra_info": {"split": "train", "index": index},
    }
    return {**row, **changes}


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return str(path)


def rows_file(path: Path, count: int, source: str = "s") -> str:
    """``count`` rows of :func:`plain_row`."""
    return write_parquet(path, [plain_row(index, source) for index in range(count)])
