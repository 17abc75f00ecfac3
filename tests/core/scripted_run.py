"""The whole trainer without a model: a scripted engine answers, scripted workers train.

Answers are numbers, and an answer's score is the number: ``respond(request, version)`` gives the
text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from core.config.composition import compose
from core.engines.engine import SampleRequest
from core.ray_trainer import RayPPOTrainer
from core.types import TrainBatch
from tests.scripted_engine import ScriptedEngine
from tests.tiny import command_words, tiny_model, tiny_tokenizer

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "x":
        raise ValueError("x")
    try:
        return float(solution_str)
    except ValueError:
        return 0.0
"""
Values = Mapping[str, float]


def prepare(folder: Path, rows: int = 40) -> Path:
    """Writes tokenizer, the shape of a model, data and the reward function."""
    tiny_model("llama", hidden_size=16, intermediate_size=16).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rng = random.Random(0)
    made = [
        {
            "data_source": "tests/numbers",
            "prompt": [{"role": "user", "content": "".join(rng.choices("abcd", k=6))}],
            "ability": "numbers",
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": index, "split": "train"},
        }
        for index in range(rows)
    ]
    pq.write_table(pa.Table.from_pylist(made), folder / "train.parquet")
    return folder


def configured(folder: Path, run: str, *overrides: str, steps: int = 6, recipe: str = "grpo"):
    return compose(recipe, arguments(folder, run, *overrides, steps=steps))


def arguments(folder: Path, run: str, *overrides: str, steps: int = 6) -> list[str]:
    settings = {
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.val_max_samples": 1,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 64,
        "data.max_response_length": 6,
        "custom_reward_function.path": folder / "reward.py",
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.use_kl_loss": False,
        "trainer.total_training_steps": steps,
        "trainer.n_gpus_per_node": 1,
        "trainer.device": "cpu",
        "trainer.cpu_threads": 1,
        "trainer.logger": "[jsonl]",
        "trainer.val_before_train": False,
        "trainer.default_local_dir": folder / run,
    }
    return command_words(settings, overrides)


class ScriptedWorkers:
    """The phases of :class:`core.cluster.workers.LocalWorkers` without weights.

    ``report(step)`` gives what the update adds to the metrics; ``differ(step)`` is the learner's
    log-prob less the engine's.
    """

    ranks, threads, generates_while_learning, reward_model = 1, 1, False, None

    def __init__(
        self, config, engine: ScriptedEngine, report: Callable[[int], Values] = lambda step: {}
    ):
        self.config, self.engine, self.report = config, engine, report
        self.version = 0

    def compute_log_probs(self, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.rollout_log_probs.clone(), torch.zeros_like(batch.rollout_log_probs)

    def update_actor(self, steps: Iterable[TrainBatch], lr_multiplier: float) -> dict[str, float]:
        self.version += 1
        batch = list(steps)[-1]
        metrics = {
            "actor/pg_loss": 0.0,
            "actor/grad_norm": 1.0,
            "actor/skipped_updates": 0.0,
            "actor/entropy": 1.0,
        }
        if batch.has("old_log_probs"):
            del metrics["actor/entropy"]
        return {**metrics, **self.report(self.version)}

    def sync_weights(self, version: int) -> dict[str, float]:
        self.engine.update_weights([], version)
        return {"rollout_corr/probe_diff": 0.0}

    def save(self, folder: Path) -> dict[str, str]:
        (folder / "actor").mkdir(parents=True)
        (folder / "actor" / "version.json").write_text(json.dumps(self.version))
        return {}

    def load(self, folder: Path) -> None:
        self.version = json.loads((folder / "actor" / "version.json").read_text())

    def close(self) -> None:
        self.engine.close()


def scripted(base: type[RayPPOTrainer] = RayPPOTrainer) -> type[RayPPOTrainer]:
    """The trainer class over scripted workers: ``scripted()(config, respond, latency, report)``."""

    class ScriptedTrainer(base):
        def __init__(self, config, respond, latency=None, report=lambda step: {}):
            super().__init__(config)
            self.respond, self.latency, self.report = respond, latency, report
            # Ordinals and versions of each step
            self.trained: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

        def make_workers(self, device):
            def respond(request: SampleRequest) -> str:
                return self.respond(request, engine.policy_version)

            engine = ScriptedEngine(self.tokenizer, respond, self.latency)
            return ScriptedWorkers(self.config, engine, self.report)

        def complete_step(self, groups_P, batch, metrics):
            versions = {t.policy_version for group in groups_P for t in group.trajectories}
            self.trained.append(
                (tuple(group.prompt.ordinal for group in groups_P), tuple(sorted(versions)))
            )
            super().complete_step(groups_P, batch, metrics)

    return ScriptedTrainer
