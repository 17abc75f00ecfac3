"""Ranks that share every layer, beside FSDP2 on the others, train what one process trains: to 1e-12
in float64."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from core.cluster.split_layers import check_layers, plan_of
from core.errors import InputError
from tests.core import fsdp_ranks
from tests.core.cluster.test_fsdp import (
    MEMORY,
    ROOM,
    SPLIT,
    assert_same_training,
    on_ranks,
    train_local,
    truncated,
)
from tests.core.ray_cluster import cluster_config, mixed_batch, write_model
from tests.tiny import tiny_model

ACTOR, SIZE = "actor_rollout_ref.actor", "tensor_model_parallel_size"
LAYERS = (f"{ACTOR}.{SIZE}=2", f"critic.{SIZE}=2")
PACKED = ("actor_rollout_ref.model.use_remove_padding=True", "critic.model.use_remove_padding=True")
PAIRS = (f"{ACTOR}.fsdp_config.fsdp_size=2", "critic.model.fsdp_config.fsdp_size=2")
OFFLOADED = (
    f"{ACTOR}.fsdp_config.offload_policy=True",
    "critic.model.fsdp_config.offload_policy=True",
)
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def config_of(model, *overrides):
    return cluster_config(model, *overrides, ranks=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """``uneven``: what a rank has of the MLP, 33 rows, is no multiple of the two ranks that shard
    it."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "uneven": write_model(folder / "uneven", intermediate_size=66),
        "tied": write_model(
            folder / "tied",
            arch="llama",
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
        ),
        "norms": write_model(folder / "norms", arch="qwen3"),  # of single heads
    }


@pytest.fixture(scope="module")
def four(models, tmp_path_factory):
    """Two pairs that share layers, in one start: every job here is in the default tests."""
    folder = tmp_path_factory.mktemp("four")
    batch, save = mixed_batch(), folder / "saved"
    few = {"batch": batch, "updates": 2}
    jobs = {
        "saved": (
            "train",
            config_of(models["uneven"], *LAYERS),
            {**few, "save": save, "ref": True},
        ),
        "sharded": ("train", config_of(models["uneven"]), {**few, "load": save}),
        "packed": (
            *("train", config_of(models["tied"], *LAYERS, *PACKED)),
            {**few, "batch": truncated(batch)},
        ),
        "shared": (
            *("train_sharing_prompts", config_of(models["uneven"], *LAYERS, *ROOM)),
            {"batch": mixed_batch(n=6, alike=True), "updates": 2, "ref": True},
        ),
    }
    found = on_ranks(4, folder, jobs)
    return SimpleNamespace(**vars(found), folder=save)


@pytest.mark.processes
def test_two_pairs_of_ranks_train_as_one_process(four, models):
    """Losses, gradient norms (which are clipped), AdamW's steps, the reference's log-probs;
    padded."""
    batch = mixed_batch()
    expected = train_local(config_of(models["uneven"]), batch, updates=2, ref=True)
    assert_same_training(four.saved, expected, **EXACT)
    norms = [
        metrics[f"{part}/grad_norm"]
        for metrics in expected["metrics"]
        for part in ("actor", "critic")
    ]
    assert max(norms) > 1.0 > min(norms), "no norm, or every norm, was clipped"
    # packed sequences, a tied head, log-probs over kept ids
    cut = train_local(config_of(models["tied"]), truncated(batch), updates=2)
    assert_same_training(four.packed, cut, **EXACT)


@pytest.mark.processes
def test_pairs_that_read_a_prompt_once_train_as_one_process_that_repeats_it(
    four, models, monkeypatch
):
    monkeypatch.setattr(Qwen2RMSNorm, "forward", fsdp_ranks.in_own_precision)
    batch = mixed_batch(n=6, alike=True)
    assert_same_training(
        four.shared, train_local(config_of(models["uneven"]), batch, updates=2, ref=True)
    )
    assert len(four.shared["shared"]) > 4 and max(four.shared["shared"]) > 6  # sequences in a pass


@pytest.mark.processes
def test_their_checkpoint_loads_on_four_shards_and_in_one_process(four, models):
    config, batch = config_of(models["uneven"]), mixed_batch()
    straight = train_local(config, batch, updates=4)
    after = {**straight, "metrics": straight["metrics"][2:]}
    assert_same_training(four.sharded, after, **EXACT)
    assert_same_training(train_local(config, batch, updates=2, load=four.folder), after, **EXACT)


@pytest.fixture(scope="module")
def more(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("more")
    few = {"batch": mixed_batch(), "updates": 2}
    jobs = {
        "split": ("train", config_of(models["uneven"], *LAYERS, *SPLIT), {**few, "ref": True}),
        "norms": ("train", config_of(models["norms"], *LAYERS, *PACKED), few),
        "pairs": ("train", config_of(models["tied"], *LAYERS, *PAIRS), few),
        "offloaded": ("train", config_of(models["tied"], *LAYERS, *MEMORY, *OFFLOADED), few),
    }
    return vars(on_ranks(4, folder, jobs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "model"),
    [("split", "uneven"), ("norms", "norms"), ("pairs", "tied"), ("offloaded", "tied")],
)
def test_other_settings_train_as_one_process(more, models, job, model):
    """Layers and sequences shared at once, norms of single heads, two copies of the model, state on
    the CPU."""
    expected = train_local(config_of(models[model]), mixed_batch(), updates=2, ref=job == "split")
    assert_same_training(more[job], expected, **EXACT)


def test_a_model_without_a_plan_or_of_another_style_is_refused():
    with pytest.raises(InputError, match="GPT2LMHeadModel has no plan"):
        plan_of(tiny_model("gpt2"))
    module = tiny_model()
    module._tp_plan["model.layers.*.mlp.experts"] = "moe_tp_experts"
    with pytest.raises(InputError, match="has moe_tp_experts, which is not trained here"):
        plan_of(module)


@pytest.mark.parametrize(
    ("kind", "more"), [("apertus", {}), ("phi", {"qk_layernorm": True}), ("phi", {}), ("qwen3", {})]
)
def test_weights_inside_a_split_layer_that_the_plan_leaves_out_are_refused(kind, more):
    """xIELU's alphas and Phi's norms of heads had wrong gradients beside the right loss."""
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**shape, **more))
    if kind == "qwen3" or (kind == "phi" and not more):
        assert plan_of(module)
        return
    with pytest.raises(InputError, match="acts on a rank's part of its layer"):
        plan_of(module)


def test_sizes_that_the_ranks_do_not_divide_are_refused_before_a_rank_starts(tmp_path):
    config = config_of(write_model(tmp_path), f"{ACTOR}.{SIZE}=4")
    with pytest.raises(InputError, match=f"{ACTOR}.{SIZE}=4: must divide the key-value heads"):
        check_layers(config)
    check_layers(config_of(tmp_path))
