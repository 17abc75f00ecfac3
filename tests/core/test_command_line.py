"""What a dry run opens, and what of a user's ends a command: their code's failure, a Ctrl-C before
the first step."""

from __future__ import annotations

import os

import pyarrow.parquet as pq
import pytest

from core import command_line
from core.ray_trainer import RayPPOTrainer
from tests.core.scripted_run import arguments, configured, prepare, scripted

KEYS = "tests.core.test_command_line"


class Strict(RayPPOTrainer):
    def keep_group(self, group):
        return "yes"


def dry(
    folder, monkeypatch, capsys, trainer="core.ray_trainer:RayPPOTrainer", *overrides, recipe="grpo"
):
    """The exit status of a dry run, its output and its errors."""
    monkeypatch.setenv("DRY_RUN", "1")
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        command_line.prepare(recipe, arguments(folder, "run", *overrides), trainer)
    return (end.value.code, *capsys.readouterr())


def test_a_dry_run_opens_what_is_here_and_writes_nothing(tmp_path, monkeypatch, capsys):
    before = sorted(prepare(tmp_path).rglob("*"))
    status, out, err = dry(tmp_path, monkeypatch, capsys)
    assert status == 0 and err == "" and "not on this machine" not in out
    assert [
        path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)
    ] == before
    elsewhere = "never.imported:T", "actor_rollout_ref.model.path=org/name"
    status, out, _ = dry(tmp_path, monkeypatch, capsys, *elsewhere)
    assert status == 0 and "not on this machine: actor_rollout_ref.model.path=org/name" in out
    drop_column(tmp_path)
    status, out, err = dry(tmp_path, monkeypatch, capsys, *elsewhere)
    assert status == 2 and "no column 'data_source'" in err


def test_a_dry_run_asks_no_server_and_lists_it(tmp_path, monkeypatch, capsys):
    """The lab's script makes one, and starts the server after it: also where data and model are
    there already."""
    prepare(tmp_path)
    search = "recipes.search_r1.search_r1_ray_trainer:SearchR1Trainer"
    url = "http://127.0.0.1:9/retrieve"
    keys = (
        f"retriever.url='{url}'",
        "retriever.client={give_up_s: 1}",
        "data.max_start_length=64",
        "data.max_prompt_length=700",
        "actor_rollout_ref.model.override_config={max_position_embeddings: 2048}",
    )
    status, out, err = dry(tmp_path, monkeypatch, capsys, search, *keys, recipe="search_r1")
    assert (status, err) == (0, "") and f"server: retriever.url={url} answers" in out


def test_a_dry_run_reports_what_is_wrong_with_each_file(tmp_path, monkeypatch, capsys):
    """One problem a call would cost a call for each."""
    table = pq.read_table(prepare(tmp_path) / "train.parquet")
    pq.write_table(table.slice(0, 0), tmp_path / "empty.parquet")
    drop_column(tmp_path)
    write_reward("import not_there")(tmp_path)
    wrong = (
        f"data.val_files={tmp_path}/empty.parquet",
        f"custom_reward_function.path={tmp_path}/reward.py",
    )
    status, _, err = dry(tmp_path, monkeypatch, capsys, "core.ray_trainer:RayPPOTrainer", *wrong)
    assert (
        status == 2
        and "no column 'data_source'" in err
        and "has no rows" in err
        and ("install not_there") in err
    )


def drop_column(folder):
    table = pq.read_table(folder / "train.parquet")
    pq.write_table(table.drop_columns(["data_source"]), folder / "train.parquet")


def spoil_row(folder):
    table = pq.read_table(folder / "train.parquet")
    rows = table.to_pylist()
    rows[3]["prompt"] = []
    pq.write_table(table.from_pylist(rows, table.schema), folder / "train.parquet")


def drop_tokenizer(folder):
    for path in (folder / "model").glob("tokenizer*"):
        path.unlink()


def write_reward(text):
    return lambda folder: (folder / "reward.py").write_text(text)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (drop_column, "train.parquet: no column 'data_source'"),
        (spoil_row, "train.parquet"),
        (drop_tokenizer, "actor_rollout_ref.model.path="),
        (write_reward("import nobody_has_this\n"), "custom_reward_function.path="),
        (
            write_reward("def compute_score(*args, **kwargs):\n    return 1 / 0\n"),
            "ZeroDivisionError",
        ),
        (write_reward("def other():\n    pass\n"), "custom_reward_function"),
    ],
)
def test_a_dry_run_refuses_what_a_start_would(tmp_path, monkeypatch, capsys, spoil, named):
    spoil(prepare(tmp_path))
    status, out, err = dry(tmp_path, monkeypatch, capsys)
    assert status == 2 and named in err and "is valid" not in out
    assert err.count("Traceback") <= 1


@pytest.mark.parametrize(
    "key", ["algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"]
)
def test_a_dry_run_imports_a_user_s_functions(tmp_path, monkeypatch, capsys, key):
    prepare(tmp_path)
    (tmp_path / "mine.py").write_text("import nobody_has_this\n")
    trainer = "core.ray_trainer:RayPPOTrainer"
    keys = (f"{key}={tmp_path}/mine.py:mine",)
    status, _, err = dry(tmp_path, monkeypatch, capsys, trainer, *keys)
    assert status == 2 and "nobody_has_this" in err


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (["data.max_response_length=240"], "data.max_prompt_length"),  # a model of 256 positions
        (
            ["data.train_batch_size=44", "trainer.total_training_steps=null"],
            "data.train_batch_size",
        ),
        (["trainer.logger=[jsonl,wandb]"], "trainer.logger"),
    ],
)
def test_a_dry_run_measures_the_data_and_looks_for_loggers(
    tmp_path, monkeypatch, capsys, keys, key
):
    monkeypatch.setattr("core.tracking.loggers.find_spec", lambda name: None)
    before = sorted(prepare(tmp_path).rglob("*"))
    status, _, err = dry(tmp_path, monkeypatch, capsys, "core.ray_trainer:RayPPOTrainer", *keys)
    assert status == 2 and {line.partition("=")[0] for line in err.splitlines()} == {key}
    after = [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)]
    assert after == before


def test_without_the_data_a_dry_run_compares_the_lengths_with_the_models_positions(
    tmp_path, monkeypatch, capsys
):
    prepare(tmp_path)
    (tmp_path / "train.parquet").rename(tmp_path / "away.parquet")
    monkeypatch.setenv("DRY_RUN", "1")
    words = arguments(tmp_path, "run", "data.max_response_length=240")
    words = [word for word in words if "_files=" not in word]
    for more, notes in (([], 1), (["data.max_prompt_length=16"], 0)):
        with pytest.raises(SystemExit) as end:
            command_line.prepare("grpo", [*words, *more])
        assert end.value.code == 0
        assert capsys.readouterr().out.count("max_position_embeddings=256") == notes


def test_a_dry_run_calls_the_hooks(tmp_path, monkeypatch, capsys):
    status, _, err = dry(prepare(tmp_path), monkeypatch, capsys, f"{KEYS}:Strict")
    assert status == 2 and "keep_group returned str" in err


def test_a_failure_of_the_users_code_is_its_traceback_once_and_a_line(tmp_path, capsys):
    folder = prepare(tmp_path)
    (folder / "estimator.py").write_text("def mine(inputs):\n    return inputs.nothing\n")
    config = configured(folder, "run", f"algorithm.adv_estimator={folder}/estimator.py:mine")
    with pytest.raises(SystemExit) as end:
        command_line.train(
            lambda made: scripted()(made, lambda request, version: str(request.seed % 5)), config
        )
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("Traceback") == 1 and "core/" not in err
    assert err.splitlines()[-1].startswith(f"{folder}/estimator.py: mine raised AttributeError")


def test_a_failure_of_our_code_keeps_its_traceback(tmp_path):
    def respond(request, version):
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        command_line.train(
            lambda made: scripted()(made, respond), configured(prepare(tmp_path), "run")
        )


def test_a_ctrl_c_before_the_first_step_is_a_line(tmp_path, capsys, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(RayPPOTrainer, "init_workers", interrupted)
    config = configured(prepare(tmp_path), "run")
    monkeypatch.setattr(command_line, "prepare", lambda *arguments: config)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        command_line.main("grpo", trainer="core.ray_trainer:RayPPOTrainer")
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 130 and "before the first step" in line


def test_threads_wait_passively_unless_the_user_says_otherwise(monkeypatch, capsys):
    """On a busy laptop spinning threads made a lab of a minute take eleven."""
    monkeypatch.setattr("sys.argv", ["main_grpo", "--help", "first"])
    for before, after in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.setenv("OMP_WAIT_POLICY", before or "")
        if before is None:
            monkeypatch.delenv("OMP_WAIT_POLICY")
        with pytest.raises(SystemExit):
            command_line.main("grpo")
        assert os.environ["OMP_WAIT_POLICY"] == after
