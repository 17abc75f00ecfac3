"""A whole training run, small enough to be killed many times: random model, rows about nothing,
arbitrary reward."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

from tests.row_files import plain_row, write_parquet
from tests.tiny import command_words, tiny_model, tiny_tokenizer

# No verdict but a number that differs from answer to answer, so that every step has gradients
REWARD = """
import signal
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(ord(character) % 7 for character in solution_str) / 42

def parity(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 2

def with_an_alarm(data_source, solution_str, ground_truth, extra_info):
    before = signal.signal(signal.SIGALRM, lambda *_: None)  # refused outside of the main thread
    signal.setitimer(signal.ITIMER_REAL, 30)
    try:
        return compute_score(data_source, solution_str, ground_truth, extra_info)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

def slowly(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.05)
    return compute_score(data_source, solution_str, ground_truth, extra_info)
"""
PROMPTS = 4  # a step


def prepare(folder: Path, hidden_size: int = 16) -> None:
    """Writes model, tokenizer, data and reward function into ``folder``."""
    model = tiny_model("llama", hidden_size=hidden_size, intermediate_size=16)
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rng = random.Random(0)
    for name, count in (("train", 13), ("test", 4)):  # 13 rows, 4 a step: epochs end within steps
        rows = []
        for index in range(count):
            chat = [{"role": "user", "content": "".join(rng.choices("abcd", k=rng.randint(2, 9)))}]
            rows.append(
                plain_row(
                    index, "tests/letters", prompt=chat, extra_info={"index": index, "split": name}
                )
            )
        write_parquet(folder / f"{name}.parquet", rows)


def command(folder: Path, recipe: str, steps: int, *overrides: str) -> Callable[[Path], list[str]]:
    """A command factory for the kill harness: ``steps`` steps of ``recipe`` on what :func:`prepare`
    wrote."""
    settings = {
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "test.parquet",
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 64,
        "data.max_response_length": 6,
        "custom_reward_function.path": folder / "reward.py",
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.n": 3,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 512,
        "actor_rollout_ref.actor.optim.lr": 0.003,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.ref.fsdp_config.dtype": "float32",
        "critic.model.fsdp_config.dtype": "float32",
        "trainer.total_training_steps": steps,
        "trainer.n_gpus_per_node": 1,
        "trainer.device": "cpu",
        "trainer.cpu_threads": 1,
        "trainer.save_freq": 2,
        "trainer.test_freq": 3,
        "trainer.max_actor_ckpt_to_keep": 2,
    }
    arguments = command_words(settings, overrides)
    module = f"recipes.{recipe}.main_{recipe}"
    return lambda run: [
        sys.executable,
        "-m",
        module,
        *arguments,
        f"trainer.default_local_dir={run}",
    ]
