"""Chats, a tokenizer with a template that ends turns, files and configurations: what the tests of
fine-tuning share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from core.cluster.workers import LocalWorkers
from core.config.composition import compose
from core.config.schema import Config
from core.tracking.metric_sums import MetricSums
from recipes.sft.demonstrations import Demonstration, demonstration_batch
from tests.optimizer_steps import update_actor
from tests.tiny import tiny_model, tiny_tokenizer

# Ends a turn with the end-of-sequence token, as chat templates do, and writes a newline behind it,
# which no policy does
TEMPLATE = (
    "{% for m in messages %}{{ '<bos>' + m['role'] + ': ' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<eos>' }}{% endgeneration %}{% else %}{{ m['content'] "
    "}}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<bos>assistant: ' }}{% endif %}"
)


def tokenizer() -> Any:
    found = tiny_tokenizer()
    found.chat_template = TEMPLATE
    return found


def chats(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Return chats of one to three answers, of very different lengths."""
    rng = random.Random(seed)

    def text(longest: int) -> str:
        return "".join(rng.choices("abcdef ", k=rng.randint(1, longest))) + "."

    return [
        [
            {"role": role, "content": text(longest)}
            for _ in range(rng.randint(1, 3))
            for role, longest in (("user", 12), ("assistant", 20))
        ]
        for _ in range(count)
    ]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def write_model(folder: Path, **overrides: Any) -> Path:
    tiny_model(
        "llama", hidden_size=16, intermediate_size=16, initializer_range=0.08, **overrides
    ).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def settings(folder: Path, *overrides: str) -> list[str]:
    """Return the keys of a run on ``folder/chats.parquet`` with ``folder/model``: 13 chats, 4 a
    step."""
    keys = {
        "data.train_files": folder / "chats.parquet",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 64,
        "data.max_response_length": 128,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 256,
        "actor_rollout_ref.actor.optim.lr": 0.003,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "trainer.total_training_steps": 6,
        "trainer.n_gpus_per_node": 1,
        "trainer.device": "cpu",
        "trainer.cpu_threads": 1,
        "trainer.save_freq": 2,
        "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.logger": "[jsonl]",
    }
    return [*(f"{key}={value}" for key, value in keys.items()), *overrides]


def prepare(folder: Path) -> Path:
    """Write model and chats into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    write_rows(folder / "chats.parquet", [{"messages": chat} for chat in chats(13)])
    return folder


def configured(folder: Path, *overrides: str) -> Config:
    return compose("sft", settings(folder, *overrides))


def learner_gradients(
    config: Config, demonstrations: Sequence[Demonstration], dtype: torch.dtype
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Return the loss, the gradients and the metrics of one update in this process, with masters of
    a dtype."""
    options = {"needs_ref": False, "needs_critic": False, "master_dtype": dtype}
    workers = LocalWorkers(config, None, torch.device("cpu"), **options)
    found = {}

    def step(sums: MetricSums) -> None:
        found.update(
            {name: p.grad.clone() for name, p in workers.models.actor.module.named_parameters()}
        )
        workers.models.actor.stepper.update_sums.merge(sums)

    workers.models.actor.stepper.step = step
    metrics = update_actor(workers, demonstration_batch(demonstrations, 0))
    return metrics["actor/pg_loss"], found, metrics
