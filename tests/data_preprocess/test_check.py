import shutil
from pathlib import Path

import pytest

from core.files import file_sha256
from data_preprocess import gsm8k
from data_preprocess.check import main
from data_preprocess.cli import run
from tests.row_files import plain_row, rows_file, write_parquet
from tests.tiny import tiny_tokenizer

SLICES = Path(__file__).parents[1] / "data"
GRADED = {"source": "openai/gsm8k"}


@pytest.fixture
def files(tmp_path):
    """Parquet files of the GSM8K slices."""
    (tmp_path / "raw").mkdir()
    for split in ("train", "test"):
        shutil.copy(SLICES / f"gsm8k_{split}.jsonl", tmp_path / "raw" / f"{split}.jsonl")
    run(gsm8k.SOURCE, ["--local_dir", str(tmp_path), "--local_dataset_path", str(tmp_path / "raw")])
    return str(tmp_path / "train.parquet"), str(tmp_path / "test.parquet")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def checked(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


def test_a_good_file(files, tokenizer, capsys):
    train, test = files
    capsys.readouterr()
    code, out = checked(capsys, train, test, "--tokenizer", tokenizer, "--max_prompt_length", 250)
    assert code == 0
    first = out[: out.index(test)].split("\n")
    assert first[:5] == [
        train,
        f"  sha256        {file_sha256(train)}",
        "  rows          8",
        "  data sources  openai/gsm8k 8",
        "  prompts       chat 8; 8 different",
    ]
    # The template adds <bos>user: , a newline and <bos>assistant: , 20 tokens in all.
    characters, tokens = (
        [int(word) for word in line.partition(";")[0].split() if word.isdigit()]
        for line in first[5:7]
    )
    assert len(tokens) == 5 and tokens == [count + 20 for count in characters]
    assert first[6].endswith("; 4 longer than 250")
    assert first[7] == "  problems      none"


def test_a_row_is_checked_as_the_run_will_score_it(tmp_path, capsys):
    by_model = {"reward_model": {"style": "model", "ground_truth": ""}}
    rows = [plain_row(0, "mine", **by_model), plain_row(1, "mine", **by_model)]
    assert checked(capsys, write_parquet(tmp_path / "model.parquet", rows))[0] == 0
    written = {"reward_model": {"style": "rule", "ground_truth": "1,000"}}
    file = write_parquet(tmp_path / "rule.parquet", [plain_row(0, **GRADED, **written)])
    assert checked(capsys, file)[0] == 1
    assert checked(capsys, file, "--method", "robust")[0] == 0


def test_problems_of_every_kind_end_with_1(tmp_path, capsys):
    bad = write_parquet(
        tmp_path / "bad.parquet",
        [
            plain_row(0, **GRADED),
            plain_row(1, **GRADED, reward_model={"style": "rule", "ground_truth": "  "}),
            plain_row(2, "openai/gsm8"),
            plain_row(3, **GRADED, text=""),
            plain_row(4, **GRADED, reward_model={"style": "rule", "ground_truth": "no number"}),
        ],
    )
    good = rows_file(tmp_path / "good.parquet", 2, "openai/gsm8k")
    # The first hides neither other
    code, out = checked(capsys, tmp_path / "none.parquet", bad, good)
    assert code == 1 and "none.parquet: the file does not exist" in out
    assert "prompt must not be empty in 1 row (3)" in out
    assert "the ground truth is empty in 1 row (1)" in out
    assert "no scorer for data_source='openai/gsm8'; nearest: openai/gsm8k in 1 row (2)" in out
    assert "the scorer of openai/gsm8k cannot grade a row in 1 row (4: " in out
    assert out.count("  problem       ") == 5 and out.count("  problems      none") == 1


def test_an_odd_ground_truth_is_read_or_named_with_row_and_field(tmp_path, capsys, subtests):
    for source, gold, code, line in [
        ("nq", {"target": 1984}, 0, "problems      none"),
        ("nq", {"target": [None]}, 1, "(0: target[0] must be a text or a number, got None)"),
        ("nq", {"target": ["A"]}, 0, "note          reward_model.ground_truth: "),
        (
            "countdown",
            {"target": 5, "numbers": "2 3"},
            1,
            "(0: numbers must be a list of whole numbers, got '2 3')",
        ),
        ("math_dapo", "None", 1, "(0: reads 'None', which is how a missing value looks as text)"),
        (
            "codecontests",
            {"inputs": ["1"], "outputs": [None]},
            1,
            "(0: outputs[0] must be a text, a number, or a list",
        ),
    ]:
        with subtests.test(source=source, gold=gold, code=code, line=line):
            rows = [plain_row(0, source, reward_model={"style": "rule", "ground_truth": gold})]
            assert checked(capsys, write_parquet(tmp_path / "odd.parquet", rows))[0] == code
            out = checked(capsys, tmp_path / "odd.parquet")[1]
            assert line in out and ("reward_model.ground_truth" in out) == ("none" not in line)


def test_copies_and_disputes_are_notes(tmp_path, capsys):
    rows = [plain_row(n, **GRADED) for n in range(4)]
    other = plain_row(3, **GRADED, reward_model={"style": "rule", "ground_truth": "77"})
    one = write_parquet(tmp_path / "one.parquet", [*rows, rows[0], rows[0], other])
    two = write_parquet(tmp_path / "two.parquet", [rows[1], plain_row(1, **GRADED, text="another")])
    code, out = checked(capsys, one, two)
    assert code == 0
    assert "  prompts       plain string 7; 4 different" in out
    assert "  note          3 rows repeat an earlier prompt" in out
    assert "  note          1 prompts have more than one ground truth or data source" in out
    assert (
        out.count("  note          1 names (source/split/index) stand for different questions") == 2
    )
    assert f"  note          1 prompts are also in {one}" in out


def test_a_chat_that_the_template_refuses_is_a_problem(tmp_path, tokenizer, capsys):
    no_template = tiny_tokenizer()
    no_template.chat_template = "{{ raise_exception('roles must alternate') }}"
    no_template.save_pretrained(tmp_path / "refusing")
    chat = write_parquet(
        tmp_path / "a.parquet", [plain_row(0, **GRADED, prompt=[{"role": "user", "content": "x"}])]
    )
    code, out = checked(capsys, chat, "--tokenizer", tmp_path / "refusing")
    assert (
        code == 1 and "the chat template refuses a prompt in 1 row (0: roles must alternate)" in out
    )
