"""On-policy distillation: a token's reward against a written-out softmax, and whole runs beside
GRPO's."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from core.config import paths
from core.config.composition import compose
from core.errors import InputError
from core.ray_trainer import RayPPOTrainer
from recipes.opd import functions
from recipes.opd.opd_ray_trainer import RayOPDTrainer
from tests.core.ray_cluster import local_ray
from tests.core.scripted_run import arguments, prepare
from tests.tiny import tiny_model, tiny_tokenizer

GROUP = ("actor_rollout_ref.rollout.n=2", "trainer.seed=3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The student of ``prepare``, and beside it a teacher of another shape and seed."""
    folder = prepare(tmp_path_factory.mktemp("opd"))
    # 4 padded ids
    tiny_model("qwen2", seed=7, hidden_size=24, vocab_size=104).save_pretrained(folder / "teacher")
    tiny_tokenizer().save_pretrained(folder / "teacher")
    return folder


def trainer(
    folder: Path, run: str, *overrides: str, recipe: str = "opd", teacher: str = "teacher"
) -> RayPPOTrainer:
    own = [f"distillation.teacher.path={folder / teacher}"] if recipe == "opd" else []
    config = compose(recipe, arguments(folder, run, *own, *GROUP, *overrides, steps=3))
    return (RayOPDTrainer if recipe == "opd" else RayPPOTrainer)(config)


def trained(
    folder: Path, run: str, *overrides: str, **options: str
) -> tuple[list[dict[str, float]], dict]:
    """Return the metrics of the steps and the weights of a whole run."""
    trainer(folder, run, *overrides, **options).init_workers().fit()
    rows = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    return rows, load_file(folder / run / "global_step_3" / "actor" / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_reward_of_a_token_is_that_of_a_softmax_written_out(folder):
    """In float64: its log-prob under the teacher less that under the student, at each one's own
    temperature."""
    one = trainer(folder, "softmax", "distillation.teacher.temperature=2.0").init_workers()
    sampled = {}

    class Stopped(Exception):
        pass

    def update(batch, metrics):
        sampled["batch"] = batch
        raise Stopped

    one.update = update
    with pytest.raises(Stopped):
        one.fit()
    batch, models = (
        sampled["batch"],
        {"student": one.workers.models.actor, "teacher": one.workers.models.frozen["teacher"]},
    )
    logp = {}
    for name, policy in models.items():
        rows = []
        for ids in batch.input_ids.long().split(batch.lengths.tolist()):
            logits = (
                policy.module.double()(input_ids=ids[None]).logits[0, :-1, :100]
                / policy.temperature
            )
            exp = torch.exp(logits - logits.max(-1, keepdim=True).values)
            share = exp / exp.sum(-1, keepdim=True)
            rows += [
                torch.zeros(1, dtype=torch.float64),
                share[torch.arange(len(ids) - 1), ids[1:]].log(),
            ]
        logp[name] = torch.cat(rows).detach()
    want = torch.where(batch.response_mask, logp["teacher"] - logp["student"], 0)
    assert models["teacher"].temperature == 2.0 and want.abs().max() > 0.1
    assert batch.advantages.double().sub(want).abs().max() < 2e-5
    assert not batch.advantages[~batch.response_mask].any()


class Stopped(Exception):
    """Ends a run before its first update."""


def first_batch(one: RayOPDTrainer):
    """Return the batch that a run's first update gets."""
    kept = []

    def update(batch, metrics):
        kept.append(batch)
        raise Stopped

    one.update = update
    with pytest.raises(Stopped):
        one.init_workers().fit()
    return kept[0]


def log_probs(policy, prompt_ids, response_ids) -> torch.Tensor:
    """Return the log-probs of a response behind a prompt, by a softmax in float64."""
    ids = torch.tensor([*prompt_ids, *response_ids])
    logits = policy.module.double()(input_ids=ids[None]).logits[0, :-1, :100] / policy.temperature
    taken = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].detach()
    return taken[len(prompt_ids) - 1 :]


def test_a_privileged_teacher_scores_the_same_answer_behind_its_own_prompt(folder):
    text = "'{question}, and the answer is {ground_truth}'"
    one = trainer(folder, "privileged", f"distillation.privileged_prompt={text}")
    batch = first_batch(one)
    student, teacher = one.workers.models.actor, one.workers.models.frozen["teacher"]
    want = []
    for group in one.groups_P:
        question = group.prompt.messages[-1]["content"]
        chat = [{"role": "user", "content": f"{question}, and the answer is 1"}]
        seen = one.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)
        seen = seen["input_ids"] if not isinstance(seen, list) else seen
        assert len(seen) > len(group.prompt.token_ids)
        for answer in group.trajectories:
            own = log_probs(student, group.prompt.token_ids, answer.response_ids)
            want.append(log_probs(teacher, seen, answer.response_ids) - own)
    found = batch.advantages[batch.response_mask].double()
    assert found.sub(torch.cat(want)).abs().max() < 2e-5 < torch.cat(want).abs().max()
    assert not batch.advantages[~batch.response_mask].any()


def test_a_privileged_prompt_that_a_pass_cannot_hold_is_refused_before_a_model_loads(folder):
    text = "'" + "{question} " * 9 + "'"
    keys = (f"distillation.privileged_prompt={text}",)
    longest = compose("opd", arguments(folder, "long", *GROUP, steps=3)).longest_sequence
    budget = f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={longest}"
    one = trainer(folder, "long", *keys, budget)
    with pytest.raises(InputError, match=f"ppo_max_token_len_per_gpu={longest}: behind the long"):
        one.init_workers()


def test_each_example_has_the_teacher_that_its_column_names(folder):
    """A second teacher is the student itself: the answers that it scores have no reward."""
    made = pq.read_table(folder / "train.parquet").to_pylist()
    for at, example in enumerate(made):
        example["extra_info"]["subject"] = ("itself", "other")[at % 3 == 0]
    pq.write_table(pa.Table.from_pylist(made), folder / "subjects.parquet")
    keys = (
        f"distillation.teachers={{itself: {folder / 'model'}, other: {folder / 'teacher'}}}",
        "distillation.teacher_column=subject",
        f"data.train_files={folder / 'subjects.parquet'}",
    )
    one = trainer(folder, "several", *keys)
    batch = first_batch(one)
    assert set(one.workers.models.frozen) == {"teacher of itself", "teacher of other"}
    other = one.workers.models.frozen["teacher of other"]
    want = []
    for group in one.groups_P:
        for answer in group.trajectories:
            asked = group.prompt.token_ids, answer.response_ids
            reward = log_probs(other, *asked) - log_probs(one.workers.models.actor, *asked)
            want.append(reward * (group.prompt.extra_info["subject"] == "other"))
    assert 0 < sum(bool(each.any()) for each in want) < len(want)
    assert batch.advantages[batch.response_mask].double().sub(torch.cat(want)).abs().max() < 2e-5


def test_an_example_without_a_teacher_is_refused_before_a_model_loads(folder):
    keys = f"distillation.teachers={{mathematics: {folder / 'teacher'}}}"
    with pytest.raises(InputError, match="distillation.teacher_column=data_source.*tests/numbers"):
        trainer(folder, "without", keys).init_workers()


def test_without_coefficient_and_with_the_tasks_reward_it_is_grpo_to_the_bit(folder):
    rows, weights = trained(folder, "task", "distillation.coef=0", "distillation.reward_weight=1")
    grpo, same = trained(folder, "grpo", "actor_rollout_ref.actor.ppo_epochs=1", recipe="grpo")
    assert equal(weights, same)
    assert [row["critic/score/mean"] for row in rows] == [row["critic/score/mean"] for row in grpo]
    _, taught = trained(folder, "taught")
    assert not equal(weights, taught)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_student_that_is_its_teacher_learns_nothing(folder, temperature):
    """At any temperature of the rollout: the teacher's follows it."""
    keys = (
        "actor_rollout_ref.actor.optim.weight_decay=0",
        f"actor_rollout_ref.rollout.temperature={temperature}",
    )
    rows, _ = trained(folder, f"itself-{temperature}", *keys, teacher="model")
    assert [row["distillation/reverse_kl"] for row in rows] == [0.0] * 3
    assert [row["actor/grad_norm"] for row in rows] == [0.0] * 3


def test_distillation_brings_the_student_to_its_teacher(folder):
    lr = (
        "actor_rollout_ref.actor.optim.lr=0.02",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=8",
    )
    rows, _ = trained(folder, "towards", *lr)
    assert rows[-1]["distillation/reverse_kl"] < 0.8 * rows[0]["distillation/reverse_kl"]


def test_tokens_of_others_have_no_reward():
    mask = torch.tensor([False, True, False, True])
    reward = functions.log_ratio(
        torch.tensor([-1.0, -1.0, -1.0, -2.0]), torch.tensor([-3.0, -0.5, 9.0, -4.0]), mask
    )
    assert reward.tolist() == [0.0, 0.5, 0.0, -2.0]


def test_what_log_ratio_is_compared_with_written_out():
    generator = torch.Generator().manual_seed(5)
    student_N = -torch.rand(40, generator=generator, dtype=torch.float64)
    teacher_N = -torch.rand(40, generator=generator, dtype=torch.float64)
    mask = torch.arange(40) % 4 > 0  # 30 tokens
    written = mask.nonzero()[:, 0].tolist()
    gaps = {n: float(teacher_N[n] - student_N[n]) for n in written}
    named = {
        name: function(student_N, teacher_N, mask)
        for name, function in functions.TOKEN_REWARDS.items()
    }
    assert all(not reward[~mask].any() for reward in named.values())
    assert [named["sign"][n] for n in written] == [1 if gaps[n] > 0 else -1 for n in written]
    shuffled = [float(named["shuffled"][n]) for n in written]
    assert sorted(shuffled) == sorted(gaps.values())
    assert sum(a == b for a, b in zip(shuffled, gaps.values(), strict=True)) < 6
    assert named["shuffled"].equal(functions.shuffled(student_N, teacher_N, mask))
    least_likely = sorted(written, key=lambda n: student_N[n])[:6]
    assert named["unlikely"].nonzero()[:, 0].tolist() == sorted(least_likely)
    assert named["unlikely"].equal(functions.unlikely(student_N, teacher_N + 1, mask))


def test_token_reward_decides_what_trains(folder):
    signs = first_batch(trainer(folder, "signs", "distillation.token_reward=sign"))
    assert set(signs.advantages[signs.response_mask].tolist()) <= {-1.0, 0.0, 1.0}
    assert signs.advantages.abs().max() == 1 and not signs.advantages[~signs.response_mask].any()


def test_a_teacher_with_another_tokenizer_is_refused_before_it_loads(folder):
    """Also one with a token more: both hashes are named."""
    other = tiny_tokenizer()
    other.add_tokens(["<teach>"])
    other.save_pretrained(folder / "other")
    tiny_model("llama").save_pretrained(folder / "other")
    with pytest.raises(
        InputError,
        match=r"distillation\.teacher\.path=.*101 tokens "
        r".*SHA-256.*100 tokens .*SHA-256",
    ):
        trainer(folder, "refused", teacher="other").init_workers()
    absent = paths.missing(trainer(folder, "absent", teacher="absent").config)
    assert [problem.key for problem in absent] == ["distillation.teacher.path"]


def test_an_adapted_student_has_a_teacher_beside_its_reference(folder):
    """The teacher's shape is another one; the reference is the student without its adapters."""
    adapted = (
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.optim.lr=0.01",
    )
    one = trainer(folder, "lora", *adapted).init_workers()
    one.fit()
    rows = [
        json.loads(line) for line in (folder / "lora" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows[0]["actor/kl_loss"] == 0 < rows[-1]["actor/kl_loss"]
    assert rows[0]["distillation/reverse_kl"] > 0 and set(one.workers.models.frozen) == {
        "ref",
        "teacher",
    }


@pytest.mark.processes
@pytest.mark.xdist_group("ray")
def test_two_ranks_over_ray_are_taught_what_one_process_is(folder):
    """The teacher is sharded as the reference is, and answers are rewarded alike."""
    two = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    with local_ray(8):
        over_ray, _ = trained(folder, "ray", "trainer.backend=ray", *two)
    alone, _ = trained(folder, "alone")
    for one, other in zip(over_ray, alone, strict=True):
        assert one["distillation/reverse_kl"] == pytest.approx(
            other["distillation/reverse_kl"], abs=1e-5
        )
