"""Two ranks train on pictures as one process does, also where only one of them has a picture in a
pass."""

from __future__ import annotations

import pytest
import torch

from core.cluster.workers import LocalWorkers
from core.learner.batching import mini_batches
from core.tracking.metric_sums import MetricSums
from core.types import TrainBatch
from tests.core.cluster.test_fsdp import WHOLE, distance, on_ranks
from tests.core.ray_cluster import cluster_config
from tests.core.vision.test_vision import prompt, sampled
from tests.pictures import picture, save_vision_model, vision_model

FROZEN = "actor_rollout_ref.actor.freeze_vision_tower=True"
PACKED = "actor_rollout_ref.model.use_remove_padding=True"
ALONE = ("actor_rollout_ref.actor.use_kl_loss=False", "algorithm.adv_estimator=grpo")


def batch() -> TrainBatch:
    """Four prompts: one has two pictures, one a picture, two have none; then what the update
    reads."""
    asked = [
        prompt(0, "<image> and <image>?", picture(1), picture(2)),
        prompt(1, "no picture, but many more words"),
    ]
    asked += [prompt(2, "a <image>", picture(3)), prompt(3, "none")]
    made = sampled(vision_model(), asked, n=2)
    draw = torch.Generator().manual_seed(0)
    advantages = torch.randn(made.tokens, generator=draw) * made.response_mask
    return made.adding(advantages=advantages, old_log_probs=made.rollout_log_probs)


@pytest.mark.processes
def test_gradients_of_two_ranks_are_those_of_one(tmp_path):
    """Also of one sequence on two ranks: one of them runs empty passes alone, and its tower for
    nothing."""
    folder, whole = save_vision_model(tmp_path / "model"), batch()
    few = whole.rows([0, 2])  # a sequence with pictures, and one without
    few = few.adding(group=torch.tensor([0, 1]))
    few = TrainBatch(few.lengths, 0, {0: whole.media[0]}).adding(**few.stored)
    cases = {
        "whole": (whole, ()),
        "few": (few, ()),
        "frozen": (few, (FROZEN,)),
        "packed": (whole, (PACKED,)),
    }
    config = {
        name: cluster_config(folder, WHOLE, *ALONE, *keys) for name, (_, keys) in cases.items()
    }
    jobs = {name: ("gradients", config[name], {"batch": part}) for name, (part, _) in cases.items()}
    found = on_ranks(2, tmp_path, jobs)
    for name, (part, keys) in cases.items():
        one = LocalWorkers(
            config[name], None, torch.device("cpu"), needs_ref=False, needs_critic=False
        )
        one.models.actor.mismatch = MetricSums()
        (step,) = mini_batches(part, prompts=8, scale_factor=24.0)
        one.models.actor.accumulate(step, MetricSums())
        expected = {
            key: p.grad for key, p in one.models.actor.module.named_parameters() if p.requires_grad
        }
        assert any("visual" in key for key in expected) == (FROZEN not in keys)
        assert distance(getattr(found, name)["grads"], expected) < 1e-5, name
