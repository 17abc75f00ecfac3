"""A data set class for verl: its rows are a file of the schema, written once and read like any other data."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.config import compose, examine
from core.data.stream import PromptStream, agent_names, data_of_run, load_val_prompts
from core.errors import InputError
from tests.tiny import tiny_tokenizer

PUBLIC = Path(__file__).parents[1] / "verl_classes" / "public" / "word_problems.py"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def words():
    made = tiny_tokenizer()
    made.chat_template = TEMPLATE
    return made


def configured(folder: Path, rows: list[dict], name: str, *options: str):
    path = folder / "own.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    files = [f"data.train_files={path}", f"data.val_files={path}", f"trainer.default_local_dir={folder}/run"]
    return compose("grpo", [*files, f"data.custom_cls.path={PUBLIC}", f"data.custom_cls.name={name}", *options])


OWN = [{"problem": f"{n} + {n}?", "solution": 2 * n, "number": n} for n in range(3)]
ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "two?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 7},
    }
]


def test_rows_of_other_columns_become_prompts(tmp_path, words, capsys):
    config = configured(tmp_path, OWN, "WordProblems", "data.shuffle=False")
    data = data_of_run(config, words)
    assert "WordProblems made 3 rows of" in capsys.readouterr().out
    stream = PromptStream(data, words, 1)
    first = stream.prompt(1)
    assert first.messages[0]["content"] == "1 + 1? Think first." and first.ground_truth == "2"
    assert (first.uid, first.agent_name) == ("openai/gsm8k/-/1", "single_turn_agent")
    assert len(load_val_prompts(data, words)) == 3 and agent_names(data) == {"single_turn_agent"}
    assert config.data.train_files != data.train_files, "the configuration names what was given"


def test_what_was_made_once_is_read_again(tmp_path, words, capsys):
    config = configured(tmp_path, OWN, "WordProblems")
    made = data_of_run(config, words).train_files
    capsys.readouterr()
    assert data_of_run(config, words).train_files == made and capsys.readouterr().out == ""
    other = data_of_run(configured(tmp_path, OWN[:2], "WordProblems"), words).train_files
    assert other != made and pq.read_table(other[0]).num_rows == 2


def test_a_class_that_changes_messages_alone(tmp_path, words):
    (prompt,) = load_val_prompts(data_of_run(configured(tmp_path, ROWS, "WithSystem"), words), words)
    assert [one["content"] for one in prompt.messages] == ["Be brief.", "two?"]
    assert prompt.extra_info["tools_kwargs"]["calculator"]["create_kwargs"] == {"n": 0}
    assert prompt.extra_info["index"] == 7


def test_what_cannot_be_taken_in_is_refused(tmp_path, words):
    with pytest.raises(InputError, match="its row 0 has no 'raw_prompt'"):
        data_of_run(configured(tmp_path, ROWS, "Tensors"), words)
    with pytest.raises(InputError, match="has no 'Nothing'"):
        data_of_run(configured(tmp_path, ROWS, "Nothing"), words)
    (problem,) = examine("grpo", [f"data.custom_cls.path={PUBLIC}"]).problems
    assert "needs data.custom_cls.name" in problem
