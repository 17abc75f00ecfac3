"""What ``data.val_files`` of verl's fine-tuning lines are here."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.command_line import open_files
from core.config.composition import examine
from recipes.sft.main_sft import TRAINER
from tests.recipes.sft_data import chats, prepare, settings, write_rows


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("sft"))


VERLS_LINES = {
    "gsm8k": (
        {"question": {"q": "2+2?"}, "answer": {"a": "4"}},
        ["data.prompt_key=question", "data.response_key=answer"]
        + ["data.prompt_dict_keys=['q']", "+data.response_dict_keys=['a']"],
    ),
    "plain": (
        {"question": "2+2?", "answer": "4"},
        ["data.prompt_key=question", "data.response_key=answer"],
    ),
    "multiturn": (
        {"messages": chats(1)[0]},
        ["data.multiturn.enable=true", "data.multiturn.messages_key=messages"],
    ),
}


@pytest.mark.parametrize("name", VERLS_LINES)
def test_validation_files_of_demonstrations_are_refused_with_the_way_to_train_without(
    files, tmp_path, name
):
    row, keys = VERLS_LINES[name]
    path = write_rows(tmp_path / "rows.parquet", [row] * 5)
    line = settings(files, f"data.train_files={path}", f"data.val_files={path}", *keys)
    composed = examine("sft", line)
    assert not composed.problems
    (problem,) = open_files(TRAINER, composed.config)
    assert (
        problem.startswith(f"data.val_files={path}: it holds demonstrations")
        and "\n" not in problem
    )
    remedy = "data.val_files=[]"
    assert remedy in problem and not open_files(TRAINER, examine("sft", [*line, remedy]).config)
