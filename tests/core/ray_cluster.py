"""A tiny model on disk, its configuration, a batch of mixed lengths, Ray: what the tests of several
ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from core.config.composition import compose
from core.config.schema import Config
from core.types import TrainBatch
from tests.padded import batch_of_padded
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer


@contextmanager
def local_ray(cpus: int) -> Iterator[None]:
    """Run Ray on this machine, with so many CPUs whatever the machine has."""
    import ray

    # "local": whatever other Ray may run on this machine
    ray.init(
        "local", num_cpus=cpus, include_dashboard=False, logging_level="ERROR", log_to_driver=False
    )
    try:
        yield
    finally:
        ray.shutdown()


def write_model(folder: Path, **overrides) -> Path:
    tiny_model(initializer_range=0.08, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def cluster_config(model: Path, *overrides: str, ranks: int = 2, recipe: str = "ppo") -> Config:
    """Two optimizer steps a batch, micro-batches by tokens, float32, KL loss and entropy bonus
    on."""
    backend = [text for text in overrides if text.startswith("trainer.backend=")][-1:]
    settings = {
        "data.train_batch_size": 8,
        "data.max_prompt_length": 16,
        "data.max_response_length": 24,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 64,
        "actor_rollout_ref.actor.optim.lr": 0.01,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.entropy_coeff": 0.01,
        "actor_rollout_ref.ref.fsdp_config.dtype": "float32",
        "critic.optim.lr": 0.01,
        "critic.ppo_max_token_len_per_gpu": 64,
        "critic.model.fsdp_config.dtype": "float32",
        "trainer.backend": "ray",
        "trainer.device": "cpu",
        "trainer.cpu_threads": 1,
        "trainer.n_gpus_per_node": 1 if backend == ["trainer.backend=local"] else ranks,
    }
    return compose(recipe, [*(f"{key}={value}" for key, value in settings.items()), *overrides])


def mixed_batch(groups: int = 8, n: int = 2, seed: int = 0, *, alike: bool = False) -> TrainBatch:
    """Rows of 4 to 40 tokens; every field is set, one row carries no loss, one group has no
    advantage.

    Only where they are ``alike`` the rows of a group begin with the same prompt.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    rows, width = groups * n, 40
    prompt = torch.from_numpy(rng.integers(2, 16, groups).repeat(n))
    length = prompt + torch.from_numpy(1 + rng.geometric(0.15, rows)).clamp(max=24)
    position = torch.arange(width)
    response = (position >= prompt[:, None]) & (position < length[:, None])
    live = torch.arange(rows) != 5

    def noise() -> torch.Tensor:
        return torch.randn((rows, width), generator=generator) * response

    group = torch.arange(groups).repeat_interleave(n)
    log_probs = -4.6 * response + 0.1 * noise()
    ids = torch.randint(4, VOCAB_SIZE, (rows, width), generator=generator)
    return batch_of_padded(
        input_ids=torch.where(position < prompt[:, None], ids[group * n], ids) if alike else ids,
        attention_mask=position < length[:, None],
        response_mask=response,
        loss_mask=response & live[:, None],
        group=group,
        reward=torch.randn(rows, generator=generator),
        in_group_stats=live,
        rollout_log_probs=log_probs,
        old_log_probs=log_probs + 0.1 * noise(),
        ref_log_prob=log_probs + 0.1 * noise(),
        values=noise(),
        advantages=noise() * (group != 2)[:, None],
        returns=noise(),
    )
