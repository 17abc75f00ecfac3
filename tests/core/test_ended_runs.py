"""What ends a run while a step collects, validates or updates, and what of it is saved."""

from __future__ import annotations

import asyncio
import json

import pytest

from core.checkpoint.store import CheckpointStore
from core.command_line import train
from core.errors import InputError, UnhealthyRun
from core.ray_trainer import RayPPOTrainer
from core.rewards.layer import RewardError
from core.rollout.collect import Exhausted
from tests.core.scripted_run import ScriptedWorkers, configured, prepare, scripted
from tests.core.test_run import respond, start
from tests.tiny import tiny_model


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("ended_by", [Exhausted, RewardError, KeyError])
def test_a_run_that_ends_while_it_collects_saves_its_complete_steps(
    tmp_path, monkeypatch, ended_by, ahead
):
    """Also where the next step's answers are drawn while a step trains: that step is completed
    first."""
    monkeypatch.setattr(ScriptedWorkers, "generates_while_learning", ahead)
    stale = ["trainer.max_staleness=1", "algorithm.rollout_correction.rollout_is=token"]
    keys = [*stale[: 2 * ahead], "reward_model.on_error=raise", "trainer.save_freq=-1"]
    config = configured(prepare(tmp_path), "run", *keys)

    class Ending(scripted()):
        async def generate(self, prompt, sample_index, sampling):
            trajectory = await super().generate(prompt, sample_index, sampling)
            if ended_by is KeyError and trajectory.policy_version == 2:
                raise KeyError("a hook's")
            return trajectory

        def keep_group(self, group):
            return ended_by is not Exhausted or group.version < 2

    bad = ended_by is RewardError
    run = Ending(
        config, lambda request, version: "x" if bad and version == 2 else respond(request, version)
    )
    with pytest.raises(ended_by):
        run.init_workers().fit()
    # With samples a step old those of policy 2 are step 4's, which are drawn while step 3 trains or
    # after it
    step = 2 + ahead
    assert run.run.step == step and run.run.store.steps() == [step] and run.workers.version == step
    assert json.loads((run.run.run_dir / "manifest.json").read_text())["status"] == "failed"
    again = scripted()(config, respond).init_workers()
    assert again.run.step == step
    again.fit()
    assert again.run.step == 6


def test_data_that_run_out_end_the_command_with_a_line(tmp_path, capsys):
    class Dropping(scripted()):
        def keep_group(self, group):
            return group.version < 1

    with pytest.raises(SystemExit) as ended:
        train(lambda config: Dropping(config, respond), configured(prepare(tmp_path), "run"))
    err = capsys.readouterr().err
    assert (
        ended.value.code == 2
        and "Traceback" not in err
        and "data.gen_batch_size" in err.splitlines()[-1]
    )
    assert CheckpointStore(tmp_path / "run").steps() == [1]


@pytest.mark.parametrize("last", [False, True])
def test_a_stop_during_a_validation_saves_the_step_and_the_next_start_validates(tmp_path, last):
    """Of the last step too, whose numbers are the run's; the validation that hangs does not delay
    the stop."""
    config = configured(
        prepare(tmp_path),
        "run",
        "trainer.test_freq=2",
        "trainer.save_freq=-1",
        steps=2 if last else 4,
    )

    class Stopping(scripted()):
        async def generate(self, prompt, sample_index, sampling):
            if sampling is self.val_sampling and self.stops:
                self.run.stop.requested = True
                await asyncio.sleep(3600)
            return await super().generate(prompt, sample_index, sampling)

    run = Stopping(config, respond)
    run.stops = True
    run.init_workers().fit()
    manifest = json.loads((run.run.run_dir / "manifest.json").read_text())
    assert run.run.step == 2 and run.run.store.steps() == [2] and manifest["status"] == "stopped"
    lines = [
        json.loads(line) for line in (run.run.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2] and not any(
        "val-core" in name for name in lines[1]
    )
    run = Stopping(config, respond)
    run.stops = False
    run.init_workers().fit()
    lines = [
        json.loads(line) for line in (run.run.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    validated = [
        line["step"] for line in lines if any(name.startswith("val-core/") for name in line)
    ]
    assert validated == ([2] if last else [2, 4])
    assert [line["step"] for line in lines] == list(range(1, 3 if last else 5))
    assert lines[1]["critic/score/mean"] > 0


def test_a_validation_that_fails_costs_the_finished_step_nothing(tmp_path):
    class Failing(scripted()):
        def validate(self, metrics):
            raise RewardError("no answer could be graded")

    run = Failing(
        configured(prepare(tmp_path), "run", "trainer.test_freq=2", "trainer.save_freq=-1"), respond
    )
    with pytest.raises(RewardError):
        run.init_workers().fit()
    assert run.run.store.steps() == [2]


def test_an_error_in_an_update_saves_no_weights_between_two_steps(tmp_path):
    config = configured(prepare(tmp_path), "run", "trainer.save_freq=-1")
    run = scripted()(config, respond).init_workers()
    update = run.workers.update_actor

    def failing(batch, lr_multiplier):
        metrics = update(batch, lr_multiplier)
        if run.run.step == 2:
            raise KeyError("a loss of the user's")
        return metrics

    run.workers.update_actor = failing
    with pytest.raises(KeyError):
        run.fit()
    assert run.run.step == 2 and run.run.store.steps() == []


@pytest.mark.parametrize("broken", ["nan", "out of range"])
def test_weights_that_are_not_finite_end_the_run_and_are_never_saved(tmp_path, broken):
    """One line with the key; the checkpoint of the last healthy step is the only one, and stays."""
    keys = ("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1")
    trainer = RayPPOTrainer(configured(prepare(tmp_path), "run", *keys)).init_workers()
    update = trainer.workers.update_actor

    def spoilt(batch, lr_multiplier):
        actor = trainer.workers.models.actor
        if trainer.run.step == 2 and broken == "nan":  # of a token that no fixed text holds
            actor.module.get_input_embeddings().weight.data[5, 3] = float("nan")
        metrics = update(batch, lr_multiplier)
        if trainer.run.step == 2 and broken == "out of range":
            actor.module.get_output_embeddings().weight.data *= 1e38
        return metrics

    trainer.workers.update_actor = spoilt
    with pytest.raises(
        UnhealthyRun,
        match=r"stopped in step 3: "
        r"actor_rollout_ref\.actor\.optim\.lr.*step 2",
    ) as ended:
        trainer.fit()
    assert "\n" not in str(ended.value)
    assert trainer.run.store.steps() == [2] and trainer.run.store.latest().step == 2


def test_weights_that_a_model_comes_with_are_finite(tmp_path):
    prepare(tmp_path)
    model = tiny_model("llama", hidden_size=16, intermediate_size=16)
    model.model.norm.weight.data[0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match=r"model\.path: .* not finite"):
        RayPPOTrainer(configured(tmp_path, "run")).init_workers()


@pytest.mark.parametrize(
    ("first", "then", "key"),
    [
        ([], ["lora_rank=4"], "lora_rank"),
        (["lora_rank=4"], ["lora_rank=8"], "lora_rank"),
        (["lora_rank=4"], [], "lora_rank"),
        (["lora_rank=4"], ["lora_rank=4", "target_modules=[q_proj]"], "target_modules"),
    ],
)
def test_a_run_that_resumes_with_other_adapters_is_refused_before_a_model_loads(
    tmp_path, first, then, key
):
    model = "actor_rollout_ref.model."
    start(tmp_path, *(model + one for one in first), "trainer.total_training_steps=1").fit()
    with pytest.raises(
        InputError, match=rf"actor_rollout_ref\.model\.{key} was .* core\.export"
    ) as refused:
        start(tmp_path, *(model + one for one in then), "trainer.resume_with_changes=True")
    assert len(refused.value.problems) == 1
    # Neither changes which weights a checkpoint holds: without adapters no module is a target
    harmless = "lora_alpha=3" if first else "target_modules=[q_proj]"
    same_adapters = [model + key for key in first]
    start(tmp_path, *same_adapters, "trainer.resume_with_changes=True", model + harmless)
