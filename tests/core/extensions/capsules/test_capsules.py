"""Keeping steps and computing them again, on a run of two steps with a tiny model: what is written, and bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import InputError
from core.extensions.capsules import capsule_recorder as capsules
from core.extensions.capsules.capsule_recorder import CapsuleRecorder, digest, drop_after, pieces
from core.extensions.capsules.replay_report import changed, replay, what_if
from core.extensions.capsules.stored_step import find, read
from core.learner import saving
from core.ray_trainer import RayPPOTrainer
from core.replay import __main__ as command
from core.tracking.recorders import RecordedRun, Recorders
from core.types import StepMetrics
from tests.checkpoints import flip_bit
from tests.core import scripted_run
from tests.tiny import tiny_model

ACTOR = "actor_rollout_ref.actor"
KL = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.5", f"{ACTOR}.ppo_mini_batch_size=2")
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(sum(character in "aeiou 0123456789" for character in solution_str))
"""
IGNORED = ("timing_s/", "perf/")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = scripted_run.prepare(tmp_path_factory.mktemp("capsules"))
    tiny_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    return folder


def trained(files: Path, run: str, *overrides: str) -> Path:
    config = scripted_run.configured(files, run, *KL, *overrides, steps=2)
    RayPPOTrainer(config).init_workers().fit()
    return files / run


@pytest.fixture(scope="module")
def kept(files) -> Path:
    """A run that kept both of its steps."""
    return trained(files, "kept", "trainer.capsule_steps=[1,2]")


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def refused(call, *args) -> str:
    with pytest.raises(InputError) as error:
        call(*args)
    return str(error.value)


# --- what is kept ---


@pytest.mark.parametrize("step", [1, 2])
def test_a_kept_step_repeats(kept, step):
    done = replay(kept, step)
    assert not done.found, done
    assert done.rule.exact and "every tensor and metric is as recorded" in str(done)


def test_keeping_a_step_changes_nothing_else(kept, files):
    plain = trained(files, "plain")
    assert not (plain / "capsules").exists()
    here, there = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (kept, plain)
    )
    assert "perf/capsule_s" in here[0] and "perf/capsule_mb" not in there[0]
    for rows in (here, there):
        for row in rows:
            for name in [name for name in row if name.startswith(IGNORED)]:
                del row[name]
    assert here == there


def test_the_reference_is_stored_once_where_it_is_the_policy(kept):
    first, second = (read(find(kept, step)).facts["weights"]["kept"] for step in (1, 2))
    assert (first, second) == (["actor"], ["actor", "ref"])


def test_no_file_is_pickled_and_every_file_is_hashed(kept):
    folder = find(kept, 2)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {"capsule.json", *read(folder).facts["files"]}
    assert {Path(name).suffix for name in names} == {".json", ".safetensors"}


def test_a_piece_of_a_tensor_has_a_checksum_and_a_number():
    value = torch.arange(200.0).reshape(10, 20)
    one, starts = digest(value), pieces(200)
    assert len(starts) == 64 and one["sample"].tolist() == [float(at) for at in starts]
    value[3, 7] += 1e-3
    (at,) = (one["crc"] != digest(value)["crc"]).nonzero()[:, 0].tolist()
    assert starts[at] <= 67 < starts[at + 1]
    assert digest(torch.zeros(0))["crc"].shape == (0,) and len(pieces(3)) == 3


def test_a_step_that_has_no_room_is_not_kept(files, caplog):
    run = trained(files, "small", "trainer.capsule_steps=[1]", "trainer.capsule_max_mb=0.3")  # weights have 0.3 MB
    assert "the capsule of step 1 is not kept: it takes 0.4" in caplog.text
    assert "0.30 are its share of trainer.capsule_max_mb; set it to at least 1" in caplog.text
    assert "holds no capsules" in refused(replay, run, 1)


def test_what_cannot_be_stored_does_not_end_the_run(files, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "save_tensors", full)
    run = trained(files, "full", "trainer.capsule_steps=[1]")
    assert "the capsule of step 1 is not kept: [Errno 28] No space left" in caplog.text
    assert not list((run / "capsules").iterdir())


# --- which step ---


def test_a_step_that_was_not_kept_is_told_with_those_that_were(kept, files, tmp_path):
    assert refused(find, kept, 7) == f"--step=7: {kept} has no capsule of that step. Kept: 1, 2"
    assert refused(find, kept, None) == "--step: name one. Kept: 1, 2"
    assert find(kept / "capsules", 1) == find(kept, 1) == find(find(kept, 1), None)
    assert "no such folder" in refused(find, tmp_path / "absent", 1)
    assert "holds no capsules; keep steps with trainer.capsule_steps=[N]" in refused(find, files / "model", 1)


def test_a_run_that_goes_on_drops_what_it_repeats(kept, tmp_path):
    run = copied(kept, tmp_path / "run")
    (run / "capsules/step_000001.partial").mkdir()
    drop_after(run, 1)
    assert [path.name for path in (run / "capsules").iterdir()] == ["step_000001"]


@pytest.mark.parametrize("moment", ["the second file", "the description", "the name"])
def test_a_kill_while_a_capsule_is_written_leaves_a_readable_run(kept, files, tmp_path, moment, monkeypatch):
    config = scripted_run.configured(files, str(tmp_path / "run"), *KL, "trainer.capsule_steps=[1,2]", steps=2)
    run = RayPPOTrainer(config).init_workers()
    _, recorder = run.recorders.each  # the first are the checks
    copied(kept / "capsules/step_000001", tmp_path / "run/capsules/step_000001")
    stored = read(find(kept, 2))
    tensors = {name: value for name, value in stored.tensors.items() if not name.startswith("groups/")}
    weights = {name: dict(part) for name, part in saving.state_of(run.workers).items()}
    begun = capsules.Begun(
        2, stored.groups, stored.batch(), run.kl_controller, weights, {}, frozenset(), tensors=tensors
    )
    if (child := os.fork()) == 0:
        points = {"the second file": (capsules, "_publish"), "the description": (capsules, "write_durably")}
        owner, name = points.get(moment, (Path, "rename"))
        setattr(owner, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        recorder._write(begun, run.kl_controller, StepMetrics(2), run.workers)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert [path.name for path in sorted((tmp_path / "run/capsules").iterdir())] == [
        "step_000001",
        "step_000002.partial",
    ]
    assert "--step=2: its capsule is half written" in refused(find, tmp_path / "run", 2)
    assert "Kept: 1" in refused(find, tmp_path / "run", 2) and find(tmp_path / "run", 1)
    recorder._write(begun, run.kl_controller, StepMetrics(2), run.workers)
    assert read(find(tmp_path / "run", 2)).step == 2


# --- damaged, or of another version ---


def test_a_damaged_capsule_names_the_file(kept, tmp_path):
    folder = copied(find(kept, 2), tmp_path / "step_000002")
    flip_bit(folder / "actor/model.safetensors")
    assert refused(read, folder).startswith(f"{folder}/actor/model.safetensors: was altered or cut short; copy")
    (folder / "actor/model.safetensors").unlink()
    assert "model.safetensors: is missing" in refused(read, folder)
    (folder / "capsule.json").write_text('{"format": 1')
    assert "cannot be read as a capsule (JSONDecodeError" in refused(read, folder)


@pytest.mark.parametrize(
    "change, told", [({"format": 2}, "has format 2, and this code reads 1"), ({}, "(trainer.new)")]
)
def test_a_capsule_of_another_version_is_refused(kept, tmp_path, change, told):
    folder = copied(find(kept, 1), tmp_path / "step_000001")
    facts = {**json.loads((folder / "capsule.json").read_text()), **change}
    facts["config"]["trainer"]["new"] = 1
    (folder / "capsule.json").write_text(json.dumps(facts))
    assert told in refused(replay, folder)


def test_a_capsule_names_no_code(kept, tmp_path):
    """Its description has no hash, and may come from anybody: what it names runs where the caller names it, too."""
    folder, trainer = copied(find(kept, 1), tmp_path / "step_000001"), f"{tmp_path}/evil.py:Trainer"
    (tmp_path / "evil.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
        "from core.algorithm.advantages import grpo\nfrom core.algorithm.padded import works_on_flat_tokens\n"
        "from core.ray_trainer import RayPPOTrainer as Trainer\nf = works_on_flat_tokens(grpo)\n"
    )
    facts = json.loads((folder / "capsule.json").read_text())
    said, estimator = f"algorithm.adv_estimator={tmp_path}/evil.py:f", f"{tmp_path}/evil.py:f"
    for told, change in (
        (f"--trainer {trainer}", lambda: facts.update(trainer=trainer)),
        (said, lambda: facts["config"]["algorithm"].update(adv_estimator=estimator)),
    ):
        change()
        (folder / "capsule.json").write_text(json.dumps(facts))
        assert told in refused(replay, folder) and told in refused(what_if, folder, 1, [f"{ACTOR}.clip_ratio=0.1"])
        assert not (tmp_path / "ran").exists()
    facts["config"]["actor_rollout_ref"]["model"].update(external_lib="evil", trust_remote_code=True)
    (folder / "capsule.json").write_text(json.dumps(facts))
    line = refused(replay, folder)
    assert "actor_rollout_ref.model.external_lib=evil actor_rollout_ref.model.trust_remote_code=true" in line
    assert "names no code of this capsule" in refused(lambda: replay(folder, code=["trainer.seed=3"]))
    assert not (tmp_path / "ran").exists()
    facts["config"]["actor_rollout_ref"]["model"].update(external_lib=None, trust_remote_code=False)
    (folder / "capsule.json").write_text(json.dumps(facts))
    assert command.main([str(folder), "--phase", "advantages", "--trainer", trainer, said]) == 0
    assert (tmp_path / "ran").exists()


def test_what_was_recorded_otherwise_is_named_with_its_place(kept, tmp_path, capsys):
    """Recorded tensors are changed instead of the code: the comparison is the same."""
    folder = copied(find(kept, 2), tmp_path / "step_000002")
    tensors = load_file(folder / "step.safetensors")
    tensors["advantages/advantages"][int(tensors["lengths"][0]) + 3] += 1e-3
    tensors["after/actor/lm_head.weight/crc"][5] += 1
    save_file(tensors, folder / "step.safetensors")
    facts = json.loads((folder / "capsule.json").read_text())
    facts["files"]["step.safetensors"] = capsules.file_sha256(folder / "step.safetensors")
    facts["metrics"]["actor/unknown"] = 1.0
    (folder / "capsule.json").write_text(json.dumps(facts))
    names = [str(one).partition(" of shape")[0].partition(": rec")[0] for one in replay(folder).found]
    assert names[0] == "advantages: advantages at token 3 of trajectory 1 (group 0)"
    assert names[-1] == "step: actor/unknown was recorded, and is not computed now"
    assert command.main([str(folder), "--phase", "update"]) == 1
    assert "first difference: update: actor/" in capsys.readouterr().out


# --- what if ---


@pytest.mark.parametrize(
    "change, told",
    [
        (f"{ACTOR}.clip_ration=0.1", f"the nearest known key is {ACTOR}.clip_ratio"),
        ("trainer.logger=[]", "is a key of bookkeeping and does not decide what is trained"),
        ("trainer.cpu_threads=2", "is a key of execution"),
        ("data.train_files=x.parquet", "is a key of files"),
        ("actor_rollout_ref.rollout.n=4", "a capsule begins after that; try it in a run of its own"),
        ("algorithm.filter_groups.enable=True", "a capsule begins after that"),
        (f"{ACTOR}.clip_ratio", "write key=value"),
        (f"{ACTOR}.clip_ratio=many", "must be a number"),
        (f"{ACTOR}.loss_agg_mode=mean", "must be one of"),
        ("algorithm.lam=0.9", "has no effect: "),
    ],
)
def test_a_key_that_cannot_be_tried_is_refused(kept, change, told):
    assert told in refused(changed, read(find(kept, 2)), [change])


def test_a_critic_that_the_step_did_not_have_is_refused(kept):
    told = refused(what_if, kept, 2, ["algorithm.adv_estimator=gae"])
    assert "this needs a critic, and the step had none" in told


def test_another_clip_on_the_same_batch(kept, capsys):
    assert command.main([str(kept), "--step", "2", "--with", f"{ACTOR}.clip_ratio=1e-6"]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()[3:]}
    assert f"{ACTOR}.clip_ratio=1e-6" in shown.splitlines()[2]
    assert float(rows["actor/pg_clipfrac"][1]) > float(rows["actor/pg_clipfrac"][0])
    assert "actor/lr" not in rows and "critic/advantages/max" not in rows, "what is the same is counted alone"


def test_the_old_value_makes_no_difference(kept):
    assert "makes no difference to this step" in what_if(kept, 2, [f"{ACTOR}.clip_ratio=0.2"])


def test_exit_codes(kept, capsys):
    assert command.main([str(kept), "--step", "2", "--phase", "advantages"]) == 0
    assert command.main([str(kept), "--step", "3"]) == 2
    assert command.main([str(kept), "--step", "2", "--phase", "batch", "--with", f"{ACTOR}.clip_ratio=0.1"]) == 2
    assert "core.replay: --phase=batch: compares with the record" in capsys.readouterr().err


def test_a_run_that_names_no_step_has_no_recorder(files):
    run = RecordedRun(scripted_run.configured(files, "off"), None, RayPPOTrainer, 2)
    assert Recorders.of(run).each == ()
    named = RecordedRun(scripted_run.configured(files, "on", "trainer.capsule_steps=[1]"), None, RayPPOTrainer, 2)
    assert [type(one) for one in Recorders.of(named).each] == [CapsuleRecorder]
