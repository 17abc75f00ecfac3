"""What a run writes: its checkpoints, and what a disk that refuses them ends; its records, mended
at a start."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from core.checkpoint.run_state import DriverState
from core.checkpoint.store import CheckpointStore, checkpoint_at
from core.command_line import train
from core.config.composition import examine
from core.errors import InputError, WorkersLost, WriteFailed
from core.tracking.json_lines import read_jsonl
from tests.core.scripted_run import ScriptedWorkers, configured, prepare, scripted
from tests.dates import passing_days
from tests.row_files import write_parquet


def respond(request, version):
    return str(request.seed % 5)


def start(folder: Path, *overrides: str):
    if not (folder / "model").exists():
        prepare(folder)
    return scripted()(
        configured(folder, "run", "trainer.save_freq=1", *overrides), respond
    ).init_workers()


def full_at(monkeypatch, *steps: int) -> None:
    def save(workers, folder):
        if workers.version in steps:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(workers, folder)

    write = ScriptedWorkers.save
    monkeypatch.setattr(ScriptedWorkers, "save", save)


def test_a_checkpoint_has_the_state_of_its_step(tmp_path):
    run = start(tmp_path, "trainer.total_training_steps=3", "trainer.save_freq=2")
    run.fit()
    assert run.run.saved_step == 3 and CheckpointStore(run.run.run_dir).steps() == [2, 3]
    assert json.loads((run.run.store.folder(2) / "actor" / "version.json").read_text()) == 2
    assert DriverState.load(run.run.store.folder(2), run.run.stream.prompt).step == 2


def test_a_home_folder_is_expanded_wherever_a_run_writes_or_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folders = ("trainer.default_local_dir=~/a/run", "trainer.rollout_data_dir=~/dumps")
    trainer = start(tmp_path, *folders, "trainer.total_training_steps=1")
    trainer.fit()
    assert (tmp_path / "a/run/global_step_1").is_dir() and (tmp_path / "dumps/1.jsonl").is_file()
    assert checkpoint_at("~/a/run/global_step_1", "--run").step == 1


def test_a_scorer_that_changes_the_folder_loses_nothing_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def wanders(request, version):
        os.chdir(tmp_path / "elsewhere")
        return respond(request, version)

    prepare(tmp_path)
    folders = ("trainer.default_local_dir=./a/run", "trainer.rollout_data_dir=dumps")
    settings = (*folders, "trainer.total_training_steps=2", "trainer.save_freq=1")
    trainer = scripted()(configured(tmp_path, "run", *settings), wanders).init_workers()
    trainer.fit()
    assert not [*(tmp_path / "elsewhere").iterdir()]
    assert len((tmp_path / "a/run/metrics.jsonl").read_text().splitlines()) == 2
    assert CheckpointStore(tmp_path / "a/run").steps() == [1, 2]
    assert sorted(path.name for path in (tmp_path / "dumps").iterdir()) == ["1.jsonl", "2.jsonl"]


def test_no_validation_files_are_no_validation(tmp_path):
    settings = "data.val_files=[]", "trainer.test_freq=1", "trainer.total_training_steps=2"
    run = start(tmp_path, *settings)
    run.fit()
    rows = map(json.loads, (run.run.run_dir / "metrics.jsonl").read_text().splitlines())
    assert [(row["step"], [name for name in row if name.startswith("val-")]) for row in rows] == [
        (1, []),
        (2, []),
    ]
    found = examine("grpo", [*settings, "trainer.val_only=True"])
    assert [line.partition("=")[0] for line in found.problems] == ["trainer.val_only"]
    assert "trainer.test_freq" in found.unused


def test_a_batch_beyond_the_data_and_trained_questions_that_validate_are_warned_of(
    tmp_path, caplog
):
    prepare(tmp_path)
    (row,) = pq.read_table(configured(tmp_path, "run").data.train_files[0]).slice(0, 1).to_pylist()
    chat = [{"role": "user", "content": "Another question?"}]
    other = write_parquet(tmp_path / "other.parquet", [{**row, "prompt": chat}])
    start(tmp_path, f"data.val_files={other}")
    assert not [one for one in caplog.messages if one.startswith("data.")]
    # A validation file that no training file shares a byte with
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    settings = "data.train_batch_size=4096", "trainer.resume_mode=disable"
    start(tmp_path, f"data.val_files={tmp_path}/test.jsonl", *settings)
    warned = [one.partition(":")[0] for one in caplog.messages if one.startswith("data.")]
    assert warned == ["data.val_files", "data.train_batch_size=4096"]


def test_a_write_that_fails_is_tried_again_at_the_next_save(tmp_path, monkeypatch, caplog):
    full_at(monkeypatch, 2, 3)
    run = start(tmp_path, "trainer.total_training_steps=5")
    run.fit()
    assert run.run.saved_step == 5 and CheckpointStore(run.run.run_dir).steps() == [1, 4, 5]
    assert not list(run.run.run_dir.glob(".tmp-global*"))
    for step in (2, 3):
        text = f"{run.run.run_dir}: the checkpoint of step {step} could not be written ([Errno 28]"
        assert caplog.text.count(text) == 1
    assert "GiB free" in caplog.text and "written are those of steps [1]" in caplog.text
    assert "Training goes on, and the next checkpoint is another try" in caplog.text


def test_a_last_write_that_fails_is_an_error_and_the_run_can_go_on(tmp_path, monkeypatch):
    full_at(monkeypatch, 2, 3)
    run = start(tmp_path, "trainer.total_training_steps=3")
    with pytest.raises(
        WriteFailed,
        match=r"the checkpoint of step 3 could not be written.*written are those of "
        r"steps \[1\]",
    ):
        run.fit()
    monkeypatch.undo()
    manifest = json.loads((run.run.run_dir / "manifest.json").read_text())
    assert (
        manifest["status"] == "failed"
        and "step 3 could not be written" in manifest["stopped_because"]
    )
    again = start(tmp_path, "trainer.total_training_steps=4")
    assert again.run.step == 1
    again.fit()
    assert again.run.saved_step == 4


@pytest.mark.parametrize(("frequency", "kept"), [(-1, [3]), (0, []), (2, [2, 3])])
def test_the_last_step_is_saved_unless_saving_is_off(tmp_path, caplog, frequency, kept):
    run = start(tmp_path, "trainer.total_training_steps=3", f"trainer.save_freq={frequency}")
    run.fit()
    assert (
        sorted(int(one.name.split("_")[-1]) for one in run.run.run_dir.glob("global_step_*"))
        == kept
    )
    assert ("no weights are kept" in caplog.text) == (frequency == 0)


def test_a_stop_whose_save_fails_is_no_success(tmp_path, monkeypatch):
    full_at(monkeypatch, 2)
    run = start(tmp_path, "trainer.total_training_steps=9", "trainer.save_freq=-1")
    complete = run.run.complete

    def completed(metrics, *rest):
        complete(metrics, *rest)
        if metrics.step == 2:
            run.run.stop.requested = True

    monkeypatch.setattr(run.run, "complete", completed)
    with pytest.raises(WriteFailed, match="step 2 could not be written"):
        run.fit()
    assert json.loads((run.run.run_dir / "manifest.json").read_text())["status"] == "failed"


def test_a_failed_last_write_ends_the_command_with_a_line_and_1(tmp_path, monkeypatch, capsys):
    full_at(monkeypatch, 1)
    run = start(tmp_path, "trainer.total_training_steps=1")
    with pytest.raises(SystemExit) as ended:
        train(lambda _: run, run.config)
    assert ended.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert (
        "the checkpoint of step 1 could not be written" in last
        and "GiB free" in last
        and "Make room" in last
    )


def test_the_first_line_comes_after_the_checks_of_the_data(tmp_path, capsys):
    prepare(tmp_path)
    refused = scripted()(configured(tmp_path, "run", "data.max_response_length=240"), respond)
    with pytest.raises(InputError):
        refused.init_workers()
    assert "writes to" not in capsys.readouterr().out
    start(tmp_path)
    assert f"writes to {tmp_path / 'run'}" in capsys.readouterr().out


def test_a_run_that_lost_a_process_goes_on_from_its_checkpoint(tmp_path, capsys):
    """Also where the command began anew: a restart must not train the first steps again."""
    prepare(tmp_path)
    keys = ["trainer.save_freq=1", "trainer.resume_mode=disable"]
    began = []

    class Losing(scripted()):
        def complete_step(self, groups_P, batch, metrics):
            began.append(metrics.step)
            if metrics.step == 3 and began.count(3) == 1:
                raise WorkersLost("learner rank 1 died in phase update_actor")
            super().complete_step(groups_P, batch, metrics)

    config = configured(tmp_path, "run", *keys, "trainer.max_restarts=1", steps=4)
    assert train(lambda one: Losing(one, respond), config).run.step == 4
    assert began == [1, 2, 3, 3, 4]
    began.clear()
    with pytest.raises(SystemExit) as ended:
        train(
            lambda one: Losing(one, respond),
            configured(tmp_path, "other", *keys, "trainer.max_restarts=0", steps=4),
        )
    assert ended.value.code == 1 and "trainer.max_restarts=0" in capsys.readouterr().err


@pytest.mark.parametrize("lost_in", [5, 6])
def test_a_restart_of_a_run_from_another_runs_checkpoint_begins_there_again(tmp_path, lost_in):
    """Not at step 0 from the base model, nor from what an earlier run left in the folder: step 2,
    where it is."""
    start(tmp_path, "trainer.total_training_steps=4").fit()
    start(
        tmp_path, "trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path}/new"
    ).fit()
    began = []

    class Losing(scripted()):
        def complete_step(self, groups_P, batch, metrics):
            began.append((metrics.step, self.workers.version))
            if metrics.step == lost_in and began.count(began[-1]) == 1:
                raise WorkersLost("learner rank 1 died in phase update_actor")
            super().complete_step(groups_P, batch, metrics)

    path = f"trainer.resume_from_path={tmp_path}/run/global_step_4"
    keys = (
        "trainer.resume_mode=resume_path",
        path,
        "trainer.max_restarts=1",
        "trainer.save_freq=1",
    )
    assert train(lambda one: Losing(one, respond), configured(tmp_path, "new", *keys)).run.step == 6
    assert began == ([(5, 5), (5, 5), (6, 6)] if lost_in == 5 else [(5, 5), (6, 6), (6, 6)])


def test_records_of_an_aborted_run_are_set_aside_where_another_runs_checkpoint_begins(tmp_path):
    start(tmp_path, "trainer.total_training_steps=2").fit()
    new = f"trainer.default_local_dir={tmp_path}/new"
    start(tmp_path, "trainer.total_training_steps=1", "trainer.save_freq=0", new).fit()
    shutil.rmtree(tmp_path / "new" / "global_step_1", ignore_errors=True)
    path = f"trainer.resume_from_path={tmp_path}/run/global_step_2"
    keys = ("trainer.total_training_steps=3", "trainer.resume_mode=resume_path", path, new)
    start(tmp_path, *keys).fit()
    rows = read_jsonl(tmp_path / "new" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [3]
    earlier = read_jsonl(tmp_path / "new" / "previous" / "1" / "metrics.jsonl")
    assert 1 in [row["step"] for row in earlier]
    manifest = json.loads((tmp_path / "new" / "manifest.json").read_text())
    assert manifest["sessions"][-1]["resumed_from_step"] == 2


@pytest.mark.parametrize(
    ("mode", "steps", "fix"),
    [
        ("resume_path", 0, False),
        ("resume_path", 1, True),
        ("disable", 0, False),
        ("disable", 1, True),
        ("auto", 1, False),
    ],
)
def test_a_stopped_run_names_auto_only_where_that_continues_it(tmp_path, caplog, mode, steps, fix):
    start(tmp_path, "trainer.total_training_steps=2").fit()
    path = f"trainer.resume_from_path={tmp_path}/run/global_step_2"
    keys = [f"trainer.resume_mode={mode}", *[path][: mode == "resume_path"]]
    run = start(tmp_path, *keys, f"trainer.default_local_dir={tmp_path}/new")
    first, collect = run.run.step, run.collect

    def stopped(metrics):
        run.run.stop.requested = metrics.step > first + steps
        return collect(metrics)

    run.collect = stopped
    run.fit()
    (said,) = [text for text in caplog.messages if "the same command continues" in text]
    assert ("trainer.resume_mode=auto" in said) == fix
    changed = ["trainer.resume_mode=auto"] if fix else keys
    again = start(tmp_path, *changed, f"trainer.default_local_dir={tmp_path}/new")
    assert again.run.step == again.workers.version == first + steps


DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
ENDED = "{% if add_generation_prompt %}: {% endif %}"


def test_a_chat_template_writes_the_date_of_the_first_start_ever_after(tmp_path, monkeypatch):
    def shown(*overrides):
        trainer = start(tmp_path, "data.shuffle=False", *overrides)
        trainer.fit()
        prompts = [trainer.stream.prompt(0), trainer.val_prompts[0]]
        texts = {trainer.tokenizer.decode(prompt.token_ids)[:11] for prompt in prompts}
        record = yaml.safe_load((trainer.run.run_dir / "config.yaml").read_text())
        return texts, record["data"]["chat_template_date"]

    prepare(tmp_path)
    settings = tmp_path / "model" / "tokenizer_config.json"
    template = {"chat_template": DATED + ENDED}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **template}))
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    days = passing_days(monkeypatch)
    first = {"01 Jan 2026"}, "2026-01-01"
    assert shown("trainer.total_training_steps=1") == first
    assert shown("trainer.total_training_steps=2") == first
    path = f"trainer.resume_from_path={tmp_path}/run/global_step_1"
    other = ("trainer.resume_mode=resume_path", path, f"trainer.default_local_dir={tmp_path}/other")
    assert shown("trainer.total_training_steps=3", *other) == first
    assert days.number == 1
    with pytest.raises(InputError, match="data.chat_template_date was 2026-01-01, is 2026-05-05"):
        start(tmp_path, "data.chat_template_date=2026-05-05")
    fresh = f"trainer.default_local_dir={tmp_path}/fresh"
    assert shown("trainer.total_training_steps=1", fresh) == ({"02 Jan 2026"}, "2026-01-02")


def test_a_run_whose_template_writes_no_date_records_none(tmp_path):
    trainer = start(tmp_path)
    assert trainer.config.data.chat_template_date is None
