"""A tiny reward model on disk, answers, and a run whose rows ask for it: what tests in process and on ranks share."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, BertConfig

from core.config import compose
from core.config.schema import RewardModelConfig, RewardModelModelConfig, ScoringFSDPConfig
from core.rewards.grading import Answer
from tests.core.ray_cluster import write_model
from tests.tiny import tiny_config, tiny_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}<eos>"


def write_classifier(folder, kind="token", arch="qwen2", template=TEMPLATE, **config):
    if arch == "bert":
        shape = dict(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, initializer_range=0.2
        )
        made = BertConfig(vocab_size=100, max_position_embeddings=256, **shape, **{"num_labels": 1, **config})
    else:
        made = tiny_config(arch, **{"num_labels": 1, **config})
    auto = {"token": AutoModelForTokenClassification, "sequence": AutoModelForSequenceClassification}[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        auto.from_config(made).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def settings(folder, *, input_tokenizer="policy", **given):
    sharding = ScoringFSDPConfig(dtype="float32")
    model = RewardModelModelConfig(path=str(folder), input_tokenizer=input_tokenizer, fsdp_config=sharding)
    filled = {"max_length": 200, "forward_max_token_len_per_gpu": 400, **given}
    return RewardModelConfig(enable=True, model=model, **filled)


def answers(count=9):
    rng = np.random.default_rng(0)
    chat = ({"role": "user", "content": "how many?"},)
    texts = ["".join(rng.choice(list("abcdef"), size=rng.integers(1, 60))) for _ in range(count)]
    return [Answer(chat, text, tuple(rng.integers(4, 100, rng.integers(2, 90)).tolist())) for text in texts]


def run_config(folder, *overrides, steps=2):
    """A run whose rows of style model ask for the reward model, and whose others are sums."""
    rows = [
        {
            "data_source": "multiply",
            "prompt": [{"role": "user", "content": f"{at}*2"}],
            "reward_model": {"style": "rule" if at % 4 == 3 else "model", "ground_truth": str(2 * at)},
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
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
