"""``reproduce.sh``: every table's stages, what is refused, and how stages are worked through."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path

import pytest

from core.errors import InputError
from results import reproduce
from results.reporting.references import read_references
from results.reporting.run_scripts import Script
from results.reproduction.rows import Row, read_tables, rows_of, service_of
from results.reproduction.stages import Stage, paths, settings, stages

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("recipe", ["dapo", "grpo", "ppo", "search_r1"])
def test_every_row_of_the_references_that_can_be_repeated_has_all_stages(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    known = {row["id"]: row for row in read_references(ROOT / "results")["references"]}
    serving = service_of(recipe, ()) is not None
    for table in read_tables(recipe)["tables"]:
        for row in rows_of(recipe, table, ()):
            assert not row.named or "not_reproducible" not in known[row.name]
            found = list(stages(row, 1, (), serving))
            names = [stage.name for stage in found]
            marked = [stage.name for stage in found if stage.needs_service]
            if "eval.sh" in row.command:
                assert names[-1] == "evaluate" and set(names[:-1]) == {"data"}
                assert found[-1].command == row.command == known[row.name]["command"]
                assert marked == (["evaluate"] if "retriever.prefetch=True" in row.command else [])
                continue
            assert names[-5:] == ["train", "generate", "score", "report", "publish"] and set(
                names[:-5]
            ) == {"data"}
            script = script_of(known.get(row.name, {"command": row.command})["command"])
            made = {path for entry in read_tables(recipe)["data"] for path in paths(entry["makes"])}
            assert {
                Path(name)
                for name in (*script.config.data.train_files, *script.config.data.val_files)
            } <= made
            searches = getattr(script.config, "do_search", False)
            assert marked == (["train", "generate"] if searches else [])
            train = next(stage for stage in found if stage.name == "train")
            assert f"trainer.experiment_name={row.name}-seed1" in train.command
            assert (f"trainer.reference={row.name}" in train.command) == row.named
            own = script_of(train.command).config
            names = ("experiment_name", "reference", "seed", "default_local_dir")
            same = own.trainer.replace(
                **{name: getattr(script.config.trainer, name) for name in names}
            )
            assert own.replace(trainer=same) == script.config  # this row's command, and no other's
            assert not any(stage.done() for stage in found)


def script_of(command: str) -> Script:
    """What a row's command starts, as bash and the configuration read it."""
    words = shlex.split(command)
    return settings(words[words.index("bash") + 1 :], ())


def test_a_row_that_nobody_can_repeat_and_unknown_names_are_refused_by_name():
    for words, message in (
        (["dapo", "table9"], "table=table9: is not a table of dapo; choose one of table1, "),
        (
            ["dapo", "table1", "dapo-64b"],
            "row=dapo-64b: is not in table1 of dapo; choose one of dapo-32b-r1-zero",
        ),
        (["dapo", "table1", "dapo-32b-r1-zero"], "row=dapo-32b-r1-zero: cannot be repeated: "),
        (["gspo", "table1"], "gspo: has no reproduce.yaml; choose one of dapo, grpo"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            rows_of(words[0], words[1], words[2:])
        assert reproduce.main(words) == 2


# --- the work ---


def stage(name: str, folder: Path, command: str = "", **options) -> Stage:
    """A stage that writes its name into a log, and makes a file of that name unless ``command``
    does otherwise."""
    made = folder / name
    text = f"echo {name} >> {folder}/log; {command or f'touch {made}'}"
    return Stage(name, text, made.exists, **options)


@pytest.fixture
def worked(tmp_path, monkeypatch):
    """Work through stages, and return the exit status and the names of those that ran."""

    def work(*found: Stage) -> tuple[int, list[str]]:
        monkeypatch.setattr(reproduce, "stages", lambda *_: found)
        (tmp_path / "log").write_text("")
        status = reproduce.work([Row("grpo", "a", "", "1.0")], [1], (), None)
        return status, (tmp_path / "log").read_text().split()

    return work


def test_each_stage_of_a_run_is_done_as_soon_as_its_files_are_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("results.reproduction.stages.ROOT", tmp_path)  # results/ lies there
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (row,) = rows_of("ppo", "lab", ())
    found = list(stages(row, 3, ()))
    run, target = (
        tmp_path / "outputs/ppo/lab-repeated-seed3",
        tmp_path / "results/ppo/lab-repeated-seed3",
    )
    manifest, answers = (
        {"run_id": "a", "sessions": [{}], "status": "running"},
        run / "evaluation/answers.jsonl",
    )
    finished, target = {**manifest, "status": "finished"}, target / "manifest.json"
    names = ["train", "generate", "score", "report", "publish"]
    for path, content, done in (
        (run / "manifest.json", manifest, 0),
        (run / "manifest.json", finished, 1),
        (answers.with_suffix(".manifest.json"), {"questions": 3, "samples": 2}, 1),
        (answers, "{}\n" * 5, 1),
        (answers, "{}\n" * 6, 2),
        (run / "evaluation/answers.scores-own.jsonl", "{}", 3),
        (run / "evaluation/answers.scores-own.report.json", {}, 4),
        (target, {**manifest, "run_id": "b"}, 4),
        (target, manifest, 5),
        (run / "manifest.json", {**finished, "sessions": [{}, {}]}, 4),  # it went on
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        assert [one.name for one in found if one.done()] == names[:done], path


def test_a_stage_that_is_done_is_not_repeated_and_a_dry_run_runs_none(
    worked, tmp_path, monkeypatch, capsys
):
    one, two = stage("one", tmp_path), stage("two", tmp_path)
    with monkeypatch.context() as dry:
        dry.setenv("DRY_RUN", "1")
        assert worked(one, two) == (0, [])
    assert worked(one) == (0, ["one"])
    capsys.readouterr()
    assert worked(one, two) == (0, ["two"])
    assert re.findall(r"^  (\w+): (done|to do)$", capsys.readouterr().out, re.M) == [
        ("one", "done"),
        ("two", "to do"),
    ]
    assert worked(one, two) == (0, [])


def test_a_service_that_does_not_answer_is_named_with_its_command_before_a_stage_that_needs_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        reproduce, "stages", lambda *_: [stage("one", tmp_path, needs_service=True)]
    )
    service = service_of("search_r1", ("retriever.url=http://127.0.0.1:9/retrieve",))
    assert (
        service.url == "http://127.0.0.1:9/health"
        and service_of("search_r1", ("retriever.url=null",)) is None
    )
    with pytest.raises(
        InputError,
        match=r"retriever.url=http://127.0.0.1:9/health: "
        r".*run_retriever.sh",
    ):
        reproduce.work([Row("search_r1", "a", "", "1.0")], [1], (), service)
    assert not (tmp_path / "log").exists()


def test_a_stage_that_is_interrupted_is_waited_for(worked, tmp_path):
    """SIGTERM reaches the parent alone: the command hears of it as of Ctrl-C, and ends its work
    first."""
    slow = (
        f"trap 'sleep 0.3; touch {tmp_path}/saved; exit 3' INT; kill -TERM $PPID; while :; do "
        f"sleep 0.05; done"
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job
    try:
        assert worked(stage("one", tmp_path, slow), stage("two", tmp_path)) == (130, ["one"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "saved").exists()


def test_a_stage_that_fails_or_does_not_make_what_it_should_ends_the_work(worked, tmp_path, capsys):
    for command, status, told in (
        ("exit 7", 7, "status 7"),
        ("true", 1, "status 0, and what it should have made"),
    ):
        assert worked(stage("one", tmp_path, command), stage("two", tmp_path)) == (status, ["one"])
        assert f"one ended with {told}" in capsys.readouterr().err
