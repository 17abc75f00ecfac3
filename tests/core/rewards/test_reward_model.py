"""Model rewards: the numbers are the classifier's own, and they reach the rows that ask for
them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
import yaml
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
)

from core.cluster.ray_engine import REWARD_MODEL
from core.config.composition import compose
from core.config.schema import (
    CustomRewardFunctionConfig,
    RewardModelConfig,
    RewardModelModelConfig,
    ScoringFSDPConfig,
)
from core.data.parquet import Example
from core.errors import InputError, WorkersLost
from core.ray_trainer import RayPPOTrainer
from core.rewards.grading import Answer, Failure, model_score
from core.rewards.layer import RewardError, RewardLayer
from core.rewards.reward_model import RewardModel
from core.rewards.scorer_check import check_scorers
from core.types import Prompt
from reward_scores.score import ScoreStatus
from tests.core.ray_cluster import write_model
from tests.core.rewards.test_rewards import trajectory
from tests.dates import passing_days
from tests.tiny import tiny_config, tiny_tokenizer

CLASSIFIERS = {
    "token": AutoModelForTokenClassification,
    "sequence": AutoModelForSequenceClassification,
}
TEMPLATE = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}<eos>"


def write_classifier(folder, kind="token", arch="qwen2", template=TEMPLATE, **config):
    if arch == "bert":
        shape = dict(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            initializer_range=0.2,
        )
        made = BertConfig(
            vocab_size=100, max_position_embeddings=256, **shape, **{"num_labels": 1, **config}
        )
    else:
        made = tiny_config(arch, **{"num_labels": 1, **config})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        CLASSIFIERS[kind].from_config(made).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def settings(folder, *, input_tokenizer="policy", **given):
    sharding = ScoringFSDPConfig(dtype="float32")
    model = RewardModelModelConfig(
        path=str(folder), input_tokenizer=input_tokenizer, fsdp_config=sharding
    )
    filled = {"max_length": 200, "forward_max_token_len_per_gpu": 400, **given}
    return RewardModelConfig(enable=True, model=model, **filled)


def answers(count=9):
    rng = np.random.default_rng(0)
    chat = ({"role": "user", "content": "how many?"},)
    texts = ["".join(rng.choice(list("abcdef"), size=rng.integers(1, 60))) for _ in range(count)]
    return [
        Answer(chat, text, tuple(rng.integers(4, 100, rng.integers(2, 90)).tolist()))
        for text in texts
    ]


def run_config(folder, *overrides, steps=2):
    """A run whose rows of style model ask for the reward model, and whose others are sums."""
    rows = [
        {
            "data_source": "multiply",
            "prompt": [{"role": "user", "content": f"{at}*2"}],
            "reward_model": {
                "style": "rule" if at % 4 == 3 else "model",
                "ground_truth": str(2 * at),
            },
            "extra_info": {"index": at, "split": "train"},
        }
        for at in range(16)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    given = {
        "data.train_files": folder / "rows.parquet",
        "data.val_files": folder / "rows.parquet",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 32,
        "data.max_response_length": 8,
        "actor_rollout_ref.model.path": write_model(folder / "policy"),
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.optim.lr": 0.003,
        "reward_model.enable": True,
        "reward_model.model.path": write_classifier(folder / "judge"),
        "reward_model.model.fsdp_config.dtype": "float32",
        "trainer.total_training_steps": steps,
        "trainer.device": "cpu",
        "trainer.cpu_threads": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.default_local_dir": folder / "run",
    }
    return compose("grpo", [*(f"{key}={value}" for key, value in given.items()), *overrides])


def metrics(folder):
    return [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


CHAT = ({"role": "user", "content": "?"},)


def direct(folder, kind, ids):
    """The number of one answer alone, without padding, by transformers itself."""
    model = CLASSIFIERS[kind].from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits
    return float(logits[0, -1, 0] if kind == "token" else logits[0, 0])


# --- the model ---


@pytest.mark.parametrize(
    ("kind", "arch", "config", "packing"),
    [
        ("token", "qwen2", {}, {}),
        ("sequence", "llama", {"pad_token_id": None}, {}),
        ("sequence", "bert", {}, {"forward_max_token_len_per_gpu": 300}),
    ],
)
def test_batches_give_what_each_answer_gives_alone(tmp_path, kind, arch, config, packing):
    model = RewardModel(settings(write_classifier(tmp_path, kind, arch, **config), **packing))
    for reads_ids in (False, True):
        if reads_ids:
            model.tokenizer = None
        found = model.score(answers())
        expected = [direct(tmp_path, kind, model.encode(answer)) for answer in answers()]
        assert [one.value for one in found] == pytest.approx(expected, abs=2e-5)
        assert np.ptp(expected) > 0.02 and not any(one.parts["model_cut"] for one in found)


def test_the_answer_is_written_in_the_models_own_chat_template(tmp_path):
    model = RewardModel(settings(write_classifier(tmp_path)))
    chat = ({"role": "user", "content": "2+2?"},)
    assert (
        model.tokenizer.decode(model.encode(Answer(chat, "4", (5, 6))))
        == "[user|2+2?][assistant|4]<eos>"
    )
    prefilled = (*chat, {"role": "assistant", "content": "So="})
    assert (
        model.tokenizer.decode(model.encode(Answer(prefilled, "4", ())))
        == "[user|2+2?][assistant|So=4]<eos>"
    )
    assert prefilled[1]["content"] == "So="
    ids = RewardModel(settings(tmp_path, input_tokenizer=None)).encode(Answer(chat, "4", (5, 6)))
    assert ids == [5, 6]


def test_a_reward_models_dated_template_writes_the_date_of_the_runs_first_start(
    tmp_path, monkeypatch
):
    """Only the reward model's template writes a date; the policy's does not."""
    passing_days(monkeypatch)
    config = run_config(tmp_path, steps=1)
    write_classifier(tmp_path / "judge", template="{{ strftime_now('%d %b %Y') }}" + TEMPLATE)
    read = []
    encode = RewardModel.encode
    monkeypatch.setattr(
        RewardModel, "encode", lambda *args: read.append((args[0], encode(*args))) or read[-1][1]
    )
    for steps in (1, 2):
        changed = config.replace(trainer=config.trainer.replace(total_training_steps=steps))
        trainer = RayPPOTrainer(changed).init_workers()
        trainer.fit()
        assert trainer.run.step == steps and trainer.config.data.chat_template_date == "2026-01-01"
    assert {model.tokenizer.decode(ids)[:11] for model, ids in read} == {"01 Jan 2026"}
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert recorded["data"]["chat_template_date"] == "2026-01-01"


def test_an_answer_beyond_max_length_is_cut_at_its_end_and_says_so(tmp_path):
    model = RewardModel(settings(write_classifier(tmp_path), input_tokenizer=None, max_length=7))
    long, short = Answer((), "", tuple(range(10, 30))), Answer((), "", tuple(range(10, 17)))
    cut, whole = model.score([long, short])
    assert (cut.parts["model_cut"], whole.parts["model_cut"]) == (1.0, 0.0)
    assert cut.value == pytest.approx(whole.value, abs=1e-6)


def test_a_chat_that_the_template_refuses_costs_its_own_score_only(tmp_path):
    refuses = (
        "{% if messages[-1].content == 'x' %}{{ raise_exception('no x') }}{% endif %}" + TEMPLATE
    )
    model = RewardModel(settings(write_classifier(tmp_path, template=refuses)))
    good, bad, again = model.score([Answer(CHAT, text, ()) for text in ("a", "x", "a")])
    assert "no x" in bad.detail
    assert good.value == pytest.approx(again.value)


NO_MODELS = [
    write_model,
    partial(write_classifier, num_labels=2),
    lambda folder: folder / "nothing",
]


@pytest.mark.parametrize("make", NO_MODELS)
def test_a_folder_that_holds_no_reward_model_is_refused(tmp_path, make):
    with pytest.raises(InputError, match="reward_model.model.path"):
        RewardModel(settings(make(tmp_path)))


# --- in the reward layer ---


REFUSED = Failure(ScoreStatus.CRASH, "refused")


class Lengths:
    """A judge that counts letters, and the lists that it was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, found):
        self.calls.append([answer.response for answer in found])
        return [
            REFUSED if answer.response == "bad" else model_score(len(answer.response) / 8)
            for answer in found
        ]


def layer(judge=None, **reward_model):
    reward = RewardModelConfig(**{"enable": True, **reward_model})
    made = RewardLayer(
        SimpleNamespace(reward_model=reward, custom_reward_function=CustomRewardFunctionConfig())
    )
    if judge:
        made.attach(judge)
    return made


def prompt(style):
    return Prompt(0, "row", (7, 8), CHAT, "72", "openai/gsm8k", {}, style)


def grade(made, *pairs):
    async def everything():
        return await asyncio.gather(
            *(made.score(prompt(style), trajectory(text)) for style, text in pairs)
        )

    return asyncio.run(everything())


def test_the_style_of_the_row_chooses_who_scores():
    judge = Lengths()
    model, rule = grade(layer(judge), ("model", "#### 72"), ("rule", "#### 72"))
    assert (model.value, dict(model.parts)) == (
        0.875,
        {"acc": 0.875, "model": 0.875, "model_cut": 0.0},
    )
    assert (rule.value, dict(rule.parts)) == (1.0, {"acc": 1.0})
    assert judge.calls == [["#### 72"]]


def test_the_weight_adds_the_model_to_the_rules():
    judge = Lengths()
    right, wrong, own = grade(
        layer(judge, weight=0.5), ("rule", "#### 72"), ("dapo-rule", "#### 7"), ("model", "#### 7")
    )
    assert (right.value, right.acc, right.parts["model"]) == (1.4375, 1.0, 0.875)
    assert (wrong.value, wrong.acc, wrong.status) == (0.375, 0.0, ScoreStatus.WRONG)
    assert own.value == 0.75
    # What waits is shown at once
    assert list(map(sorted, judge.calls)) == [["#### 7", "#### 7", "#### 72"]]


def test_the_model_sees_the_policys_words_and_all_tokens():
    seen = []
    made = layer(lambda found: seen.extend(found) or [model_score(0.0)])
    steps = trajectory("let me look", ("tool", "SECRET"), " 72")
    assert asyncio.run(made.score(prompt("model"), steps)).value == 0.0
    assert seen == [Answer(CHAT, "let me look 72", (7, 8, 0, 1, 2), "72")]


@pytest.mark.parametrize(
    "judge", [Lengths(), lambda found: [model_score(math.inf)] * len(found)], ids=["error", "inf"]
)
def test_no_number_is_a_status_and_on_error_decides(judge):
    for style, weight in (("model", 0.0), ("rule", 1.0)):
        zero = grade(layer(judge, weight=weight), (style, "bad"))[0]
        assert (zero.value, zero.status, zero.masked) == (0.0, ScoreStatus.CRASH, False)
        assert grade(layer(judge, weight=weight, on_error="mask"), (style, "bad"))[0].masked
        with pytest.raises(RewardError, match="refused|the reward model gave inf"):
            grade(layer(judge, weight=weight, on_error="raise"), (style, "bad"))


def test_a_failure_of_the_model_itself_ends_the_step():
    async def judge(found):
        raise ConnectionError("lost")

    with pytest.raises(ConnectionError, match="lost"):
        grade(layer(judge), ("model", "a"))


def row(style, ground_truth="72", number=0):
    return Example("file", number, "openai/gsm8k", "?", ground_truth, {}, style)


def test_styles_are_checked_against_the_configuration():
    check_scorers(layer(), [row("rule"), row("model", None)])
    check_scorers(layer(weight=0.1), [row("rule")])
    check_scorers(layer(enable=False), [row("rule"), row(None)])
    with pytest.raises(
        InputError,
        match=r"reward_model.enable=False: .* in 2 rows \(file row 1, "
        r"file row 2\); ",
    ):
        check_scorers(
            layer(enable=False), [row("rule"), row("model", number=1), row("model", number=2)]
        )
    with pytest.raises(InputError, match="the model would score nothing; .*reward_model.weight"):
        check_scorers(layer(), [row("rule")])
    # No scorer is asked for
    check_scorers(layer(), [Example("file", 0, "unheard/of", "?", None, {}, "model")])


# --- whole runs ---


def test_a_policy_learns_what_the_model_likes(tmp_path):
    RayPPOTrainer(run_config(tmp_path, steps=15)).init_workers().fit()
    found = [line["reward/model/mean"] for line in metrics(tmp_path) if "reward/model/mean" in line]
    assert len(found) == 15
    spread = np.std(found[:5])
    assert np.mean(found[-5:]) > np.mean(found[:5]) + 3 * spread


@pytest.mark.processes
@pytest.mark.xdist_group("ray")
def test_an_actor_grades_as_one_process_and_a_dead_one_ends_the_step(tmp_path):
    config = run_config(tmp_path, "trainer.backend=ray")
    trainer = RayPPOTrainer(config).init_workers()
    try:
        graded = asyncio.run(trainer.workers.reward_model(answers()))
        assert graded == RewardModel(config.reward_model).score(answers())
        actor = trainer.workers.watch.actors[REWARD_MODEL]
        pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkersLost, match="reward model died"):
            asyncio.run(trainer.workers.reward_model([Answer((), "x", (5,))]))
    finally:
        trainer.workers.close()
        trainer.reward.close()
