"""What passes from phase to phase of a step: the update trains on the estimator's output, the
controller on its KL."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from core import ray_trainer
from core.config.composition import compose
from core.errors import InputError
from core.ray_trainer import RayPPOTrainer
from results.reporting.run_reader import load_run
from tests.core.scripted_run import configured, prepare, scripted
from tests.core.test_run import respond
from tests.faults import tiny_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize(
    "overrides", [(), ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.5")]
)
def test_the_update_trains_on_what_the_estimator_returned_whatever_is_masked(folder, overrides):
    """Groups with an answer that could not be graded too: it has no advantage, and the others have
    those of GRPO."""
    seen = []

    class Watching(scripted()):
        def make_workers(self, device):
            workers = super().make_workers(device)
            # A KL of 0
            workers.compute_ref_log_prob = lambda batch: batch.rollout_log_probs.clone()
            return workers

        def update(self, batch, metrics):
            seen[-1].update(batch=batch)
            super().update(batch, metrics)

        def compute_advantages(self, batch, metrics):
            estimate = self.estimator
            self.estimator = lambda inputs: seen[-1].setdefault("estimated", estimate(inputs))
            seen.append({})
            batch, self.estimator = super().compute_advantages(batch, metrics), estimate
            return batch

    keys = (
        "actor_rollout_ref.rollout.n=4",
        "reward_model.on_error=mask",
        "trainer.health.scorer_errors.bound=null",
    )
    config = configured(folder, f"masked-{len(overrides)}", *keys, *overrides, steps=3)
    Watching(
        config, lambda request, version: "x" if request.seed % 5 == 4 else str(request.seed % 5)
    ).init_workers().fit()
    masked = 0
    for step in seen:
        batch, (advantages, returns) = step["batch"], step["estimated"]
        assert torch.equal(batch.advantages, advantages) and torch.equal(batch.returns, returns)
        for group in batch.group.unique():
            rows = (batch.group == group) & batch.in_group_stats
            masked += int(((batch.group == group) & ~batch.in_group_stats).any())
            rewards = batch.reward[rows]
            wanted = torch.zeros(len(batch))
            if len(rewards) > 1:
                wanted[rows] = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for row in (batch.group == group).nonzero()[:, 0].tolist():
                (span,) = batch.spans(torch.tensor([row]))
                found = batch.advantages[span][batch.response_mask[span]]
                torch.testing.assert_close(found, wanted[row].expand(len(found)))
    assert masked >= 3


def test_each_steps_kl_moves_the_coefficient_of_the_next_step(folder):
    """Six steps against the controller written out (arXiv:1909.08593, section 2.2)."""
    kl = [0.02, 0.3, 0.11, 0.0, 0.085, 0.5]

    class Apart(scripted()):
        def make_workers(self, device):
            workers = super().make_workers(device)
            workers.compute_ref_log_prob = lambda batch: batch.rollout_log_probs - kl[self.run.step]
            return workers

    control = ("type=adaptive", "kl_coef=0.4", "target_kl=0.1", "horizon=40")
    keys = (
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_penalty=kl",
        *(f"algorithm.kl_ctrl.{key}" for key in control),
    )
    config = configured(folder, "controller", *keys, steps=6)
    Apart(config, lambda request, version: str(request.seed % 5)).init_workers().fit()
    lines = (folder / "controller/metrics.jsonl").read_text().splitlines()
    found = [
        SimpleNamespace(
            **{name.rpartition("/")[2]: value for name, value in json.loads(line).items()}
        )
        for line in lines
    ]
    coefficient, expected = 0.4, []
    for one in kl:
        expected.append(coefficient)
        coefficient *= 1 + min(max(one / 0.1 - 1, -0.2), 0.2) * 8 / 40  # eight sequences a step
    assert [one.reward_kl_penalty for one in found] == pytest.approx(kl, abs=1e-6)
    assert [one.reward_kl_penalty_coeff for one in found] == pytest.approx(expected, rel=1e-6)


def test_each_step_trains_at_the_rate_of_its_own_place_in_the_schedule(folder):
    """Three steps of a half cosine, of actor and critic: a schedule read a step late would start or
    end elsewhere."""
    cosine = ("lr_scheduler_type=cosine", "lr_warmup_steps=0", "min_lr_ratio=0.1")
    keys = [
        f"{part}.optim.{key}" for part in ("actor_rollout_ref.actor", "critic") for key in cosine
    ]
    keys += [
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "critic.optim.lr=2e-3",
        "critic.ppo_mini_batch_size=4",
    ]
    config = configured(
        folder, "schedule", *keys, f"critic.model.path={folder / 'model'}", steps=3, recipe="ppo"
    )
    RayPPOTrainer(config).init_workers().fit()
    lines = [
        json.loads(line) for line in (folder / "schedule/metrics.jsonl").read_text().splitlines()
    ]
    rates = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 3)) for step in range(3)]
    assert [line["actor/lr"] for line in lines] == pytest.approx([1e-3 * rate for rate in rates])
    assert [line["critic/lr"] for line in lines] == pytest.approx([2e-3 * rate for rate in rates])


def test_the_policy_begins_to_train_in_the_step_of_critic_warmup_with_its_own_warm_up(folder):
    """As in verl 0.6.1: ``critic_warmup <= global_steps``, and the policy's schedule moves when it
    trains."""
    keys = (
        "trainer.critic_warmup=3",
        "critic.ppo_mini_batch_size=4",
        f"critic.model.path={folder / 'model'}",
    )
    rates = ("optim.lr=1e-3", "optim.lr_warmup_steps=2")
    keys += tuple(
        f"{part}.{rate}" for part in ("actor_rollout_ref.actor", "critic") for rate in rates
    )
    config = configured(folder, "warmup", *keys, steps=4, recipe="ppo")
    RayPPOTrainer(config).init_workers().fit()
    lines = [
        json.loads(line) for line in (folder / "warmup/metrics.jsonl").read_text().splitlines()
    ]
    assert [line.get("actor/lr") for line in lines] == [None, None, 0.5e-3, 1e-3]
    assert [line["critic/lr"] for line in lines] == [0.5e-3, 1e-3, 1e-3, 1e-3]


def test_a_critic_that_reads_other_ids_is_refused_before_a_model_loads(folder, tmp_path):
    critic = tmp_path / "critic"
    shutil.copytree(folder / "model", critic)
    keys = (f"critic.model.path={critic}", "critic.ppo_mini_batch_size=4")
    config = configured(folder, "critic", *keys, steps=1, recipe="ppo")
    RayPPOTrainer(config).load_data()
    read = json.loads((critic / "tokenizer.json").read_text())
    (one, first), (two, second), *_ = read["model"]["vocab"].items()
    read["model"]["vocab"] |= {one: second, two: first}
    (critic / "tokenizer.json").write_text(json.dumps(read))
    with pytest.raises(InputError, match="critic.model.path=.*the policy's .* tokens"):
        RayPPOTrainer(config).load_data()
    for file in critic.glob("*token*"):
        file.unlink()
    RayPPOTrainer(config).load_data()  # nothing to compare


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_is_read_at_the_temperature_of_the_policy(folder, rank):
    """Before a weight has moved their KL is 0 at any temperature, whether the reference is a copy
    or the base."""
    keys = ("actor.use_kl_loss=True", f"model.lora_rank={rank}", "rollout.temperature=0.7")
    config = configured(
        folder, f"reference-{rank}", *(f"actor_rollout_ref.{key}" for key in keys), steps=1
    )
    RayPPOTrainer(config).init_workers().fit()
    (line,) = [
        json.loads(line)
        for line in (folder / f"reference-{rank}/metrics.jsonl").read_text().splitlines()
    ]
    assert abs(line["actor/kl_loss"]) < 1e-9 and line["actor/entropy"] > 1


def test_no_pass_over_the_data_trains_on_a_validation_question(folder, tmp_path):
    """Three passes over eight examples: each has every example once, and none of the others."""
    table = pq.read_table(folder / "train.parquet")
    pq.write_table(table.slice(0, 8), tmp_path / "train.parquet")
    pq.write_table(table.slice(8), tmp_path / "val.parquet")
    epochs = [[] for _ in range(3)]

    class Watching(scripted()):
        def complete_step(self, groups_P, batch, metrics):
            epochs[(metrics.step - 1) // 2] += [
                group.prompt.messages[0]["content"] for group in groups_P
            ]
            super().complete_step(groups_P, batch, metrics)

    files = (f"data.train_files={tmp_path}/train.parquet", f"data.val_files={tmp_path}/val.parquet")
    keys = (
        *files,
        "data.val_max_samples=-1",
        "trainer.test_freq=2",
        "trainer.val_before_train=True",
    )
    Watching(
        configured(folder, "epochs", *keys), lambda request, _: str(request.seed % 5)
    ).init_workers().fit()
    examples = [row[0]["content"] for row in table.slice(0, 8)["prompt"].to_pylist()]
    assert [sorted(epoch) for epoch in epochs] == [sorted(examples)] * 3


def test_without_a_critic_no_step_waits_for_its_warm_up(folder):
    run = scripted()(
        configured(folder, "none", "trainer.critic_warmup=5", steps=2), lambda *_: "1"
    ).init_workers()
    run.fit()
    assert run.workers.version == 2


def test_truncated_samples_are_replayed_over_the_ids_that_were_kept(tmp_path):
    """Without them the log-probs of engine and learner differ, and with them by rounding alone."""
    tiny_run.prepare(tmp_path)
    keys = [f"actor_rollout_ref.rollout.{key}" for key in ("top_p=0.9", "top_k=60", "n=6")]
    keys += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.val_files=[]"]
    differences = {}
    for kept_sets in (True, False):
        more = [f"actor_rollout_ref.rollout.kept_sets={kept_sets}", *keys]
        line = tiny_run.command(tmp_path, "grpo", 3, *more)(tmp_path / f"run-{kept_sets}")
        run = RayPPOTrainer(compose("grpo", line[3:])).init_workers()
        run.fit()
        rows = load_run(run.run.run_dir).metrics
        differences[kept_sets] = [row["rollout_corr/logp_diff_mean"] for row in rows]
        assert all(("rollout_corr/entropy_gap_z" in row) == kept_sets for row in rows)
        assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert max(differences[True]) < 1e-6 and min(differences[False]) > 0.05


def test_the_progress_of_a_step_counts_the_groups_that_pass(tmp_path, monkeypatch):
    counted = []

    @contextlib.contextmanager
    def progress(what, total, unit):
        counted.append(0)

        def count():
            counted[-1] += 1

        yield count

    class Dropping(scripted()):
        def keep_group(self, group):
            return group.prompt.ordinal % 3 != 0

    monkeypatch.setattr(ray_trainer, "progress", progress)
    keys = ["data.gen_batch_size=1"]  # one at a time: none is begun in vain
    Dropping(configured(prepare(tmp_path), "run", *keys, steps=2), respond).init_workers().fit()
    assert counted == [4, 4]


def test_the_reference_has_a_number_format_of_its_own_in_one_process(folder):
    dtype = "actor_rollout_ref.ref.fsdp_config.dtype"
    for keys, expected in ((f"{dtype}=bfloat16",), torch.bfloat16), ((), None):
        use = "actor_rollout_ref.actor.use_kl_loss=True"
        config = configured(folder, f"dtype-{len(keys)}", use, *keys, steps=1)
        models = RayPPOTrainer(config).init_workers().workers.models
        assert models.frozen["ref"].compute_dtype is expected and models.actor.compute_dtype is None
