"""By architecture: two ranks that share its layers have the gradients of one process in float64, or
it is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from core.cluster.split_layers import check_layers
from core.cluster.workers import LocalWorkers
from core.errors import InputError
from core.learner.batching import mini_batches
from core.tracking.metric_sums import MetricSums
from tests.core.cluster.test_fsdp import on_ranks
from tests.core.ray_cluster import cluster_config, mixed_batch
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 3,
    "initializer_range": 0.1,
}
HEADS = {"head_dim": 8}
EQUAL = {
    "llama": {},
    "qwen2": {},
    "qwen3": HEADS,  # norms of single heads
    "gemma": HEADS,
    "olmo": {},
    "granite": {},
    "phi": {},
    "gpt_neox": {},
    "seed_oss": HEADS,
    "smollm3": {},
    "starcoder2": {"sliding_window": None},
    "mistral": {"sliding_window": None},
    "arcee": {},
    "helium": HEADS,
    "ernie4_5": {},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "ministral3": HEADS,
    "jais2": {},
}
REFUSED = {
    "apertus": {},  # xIELU
    "phi": {"qk_layernorm": True},
    "cohere": {"use_qk_norm": True},
    "olmo2": {},  # norms over all heads
    "phi3": {},
    "glm4": {},
    "gpt2": {},
    "opt": {},
}
SPLIT = "actor_rollout_ref.actor.tensor_model_parallel_size=2"
WHOLE = "actor_rollout_ref.actor.ppo_mini_batch_size=8"
CPU = torch.device("cpu")


def save_model(folder, kind, **more):
    """Biases and norms are no zeros and ones: their gradients differ by what they multiply."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SHAPE, **more}))
    with torch.no_grad():
        for value in module.parameters():
            if value.ndim < 2:
                value.add_(0.1 * torch.randn_like(value))
    module.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def gradients_of_one_process(config, batch):
    options = {"needs_ref": False, "needs_critic": False, "master_dtype": torch.float64}
    actor = LocalWorkers(config, None, CPU, **options).models.actor
    actor.mismatch = MetricSums()
    (step,) = mini_batches(batch, prompts=8, scale_factor=24.0)
    actor.accumulate(step, MetricSums())
    return {name: parameter.grad for name, parameter in actor.module.named_parameters()}


@pytest.mark.processes
def test_two_ranks_have_the_gradients_of_one_process(tmp_path, subtests):
    batch = mixed_batch()
    alone, jobs = {}, {}
    for kind, more in EQUAL.items():
        folder = save_model(tmp_path / kind, kind, **more)
        alone[kind] = gradients_of_one_process(
            cluster_config(folder, WHOLE, recipe="grpo", ranks=1), batch
        )
        split = cluster_config(folder, WHOLE, SPLIT, recipe="grpo", ranks=2)
        check_layers(split)
        jobs[kind] = ("gradients", split, {"batch": batch, "dtype": "float64"})
    ranks = on_ranks(2, tmp_path, jobs)
    for kind, expected in alone.items():
        with subtests.test(kind):
            found = getattr(ranks, kind)["grads"]
            norm = (
                sum(float(value.pow(2).sum()) for value in expected.values() if value is not None)
                ** 0.5
            )
            apart = {
                name: float((found[name] - value).abs().max()) / norm
                for name, value in expected.items()
                if value is not None
            }
            assert max(apart.values()) < 1e-9, max(apart, key=apart.get)


@pytest.mark.parametrize("kind", REFUSED)
def test_an_architecture_whose_gradients_would_be_a_ranks_part_is_refused(tmp_path, kind):
    folder = save_model(tmp_path / kind, kind, **REFUSED[kind])
    with pytest.raises(InputError, match="tensor_model_parallel_size"):
        check_layers(cluster_config(folder, WHOLE, SPLIT, recipe="grpo", ranks=2))
