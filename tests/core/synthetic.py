"""A run folder without a run: what a tracker would have written, from a seeded generator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from core.config import convert
from core.config.defaults import resolve
from core.config.schema import Config
from core.tracking.tracker import Tracker
from core.tracking.validation import ValRecord, validation_metrics
from core.types import StepMetrics

LAB = {
    "trainer.logger": ("jsonl",),
    "trainer.experiment_name": "lab",
    "data.train_files": ("train.parquet",),
    "data.val_files": ("test.parquet",),
    "data.max_response_length": 16,
    "actor_rollout_ref.model.path": "outputs/lab/base",
    "algorithm.adv_estimator": "grpo",
}


def configured(changes: Mapping[str, Any] | None = None) -> Config:
    """A resolved configuration with these keys (flat) changed."""
    return resolve(convert.replaced(Config(), {**LAB, **(changes or {})}), "grpo")


def step_metrics(step: int, seed: int, *, rate: float = 0.2, critic: bool = False) -> StepMetrics:
    """Curves that climb and flatten, with noise, under the names that the loop logs."""
    noise = np.random.default_rng([seed, step]).normal(0, 1, 8)
    learnt = 1 - math.exp(-rate * step)
    metrics = StepMetrics(step)
    metrics.add(
        {
            "critic/score/mean": 0.45 + 0.5 * learnt + 0.01 * noise[0],
            "critic/rewards/mean": 0.45 + 0.5 * learnt + 0.01 * noise[0],
            "reward/acc/mean": 0.45 + 0.5 * learnt + 0.01 * noise[0],
            "response_length/mean": 6.2 + 1.5 * learnt + 0.1 * noise[1],
            "response_length/clip_ratio": max(0.0, 0.08 * (1 - learnt) + 0.005 * noise[2]),
            "actor/entropy": 0.6 * (1 - 0.7 * learnt) + 0.01 * noise[3],
            "actor/pg_clipfrac": max(0.0, 0.05 + 0.01 * noise[4]),
            "actor/pg_clipfrac_lower": 0.001,
            "actor/grad_norm": 0.8 + 0.1 * noise[5],
            "actor/ppo_kl": abs(2e-3 + 5e-4 * noise[6]),
            "actor/kl_loss": 0.02 * learnt,
            "rollout_corr/logp_diff_mean": 1e-7,
            "timing_s/gen": 0.6 + 0.05 * noise[7],
            "timing_s/old_log_prob": 0.1,
            "timing_s/update_actor": 0.4,
            "timing_s/step": 1.15 + 0.05 * noise[7],
            "timing_s/whole": 1.15 + 0.05 * noise[7],
        }
    )
    if critic:
        metrics.add(
            {"critic/vf_clipfrac": 0.1, "critic/grad_norm": 2.0, "critic/vf_explained_var": learnt}
        )
        metrics.add({"timing_s/update_critic": 0.3})
    return metrics


def records(
    step: int, seed: int, questions: int, *, rate: float = 0.2, source: str = "lab/hops"
) -> list[ValRecord]:
    """Questions of fixed difficulty: the easy ones are learnt first, in every run."""
    difficulty = np.random.default_rng(0).uniform(0, 1, questions)
    learnt = 0.45 + 0.5 * (1 - math.exp(-rate * step))
    right = difficulty + np.random.default_rng([seed, step, 1]).normal(0, 0.1, questions) < learnt
    return [
        ValRecord(f"{source}/{i}", source, {"acc": (float(ok),), "reward": (float(ok),)})
        for i, ok in enumerate(right)
    ]


def sample_rows(step: int, questions: int = 4) -> list[dict]:
    answers = ("#q", "cfkp#p") if step else ("#q", "#x")
    return [
        {
            "input": "fk mb cf bm pz zq qa ac =c3=",
            "output": answers[i % 2],
            "gts": "p",
            "score": (right := float(answers[i % 2].endswith("p"))),
            "acc": right,
            "uid": f"lab/hops/{i}",
        }
        for i in range(questions)
    ]


def make_run(
    folder: Path,
    config: Config | None = None,
    *,
    steps: int = 20,
    questions: int = 200,
    test_every: int = 5,
    rate: float = 0.2,
    critic: bool = False,
    status: str = "finished",
) -> Path:
    """Writes the run folder and returns it."""
    config = config or configured()
    seed = config.trainer.seed
    tracker = Tracker(folder, config)
    tracker.set_total(steps)
    for step in range(steps + 1):
        metrics = step_metrics(step, seed, rate=rate, critic=critic) if step else StepMetrics(0)
        if step % test_every == 0:
            rows = records(step, seed, questions, rate=rate)
            metrics.add(validation_metrics(rows))
            metrics.add({"timing_s/testing": 2.0})
            tracker.log_validation(step, rows)
            tracker.log_samples(step, sample_rows(step))
        tracker.log(metrics)
    tracker.close(status)
    return folder
