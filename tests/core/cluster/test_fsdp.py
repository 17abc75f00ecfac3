"""Sharded over processes, the learner computes what it computes in one: losses, gradients, weights,
checkpoints."""

from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from core.cluster.workers import LocalWorkers
from core.files import file_sha256
from core.learner.batching import mini_batches
from core.learner.lora import merged_weights
from core.tracking.metric_sums import MetricSums
from tests.core import fsdp_ranks
from tests.core.ray_cluster import cluster_config, mixed_batch, write_model
from tests.optimizer_steps import update_actor, update_critic
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

CPU = torch.device("cpu")
WHOLE = "actor_rollout_ref.actor.ppo_mini_batch_size=8"  # one optimizer step
NO_ENTROPY = (
    "actor_rollout_ref.actor.use_kl_loss=False",
    "actor_rollout_ref.actor.entropy_coeff=0.0",
)
MEMORY = (
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "critic.model.fsdp_config.optimizer_offload=True",
)
ADAPTERS = ("actor_rollout_ref.model.lora_rank=4", "critic.model.lora_rank=3")
PACKED = ("actor_rollout_ref.model.use_remove_padding=True", "critic.model.use_remove_padding=True")
SPLIT = (
    *PACKED,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    "critic.ulysses_sequence_parallel_size=2",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40",  # of each of the two
)
HYBRID = ("actor_rollout_ref.actor.fsdp_config.fsdp_size=2", "critic.model.fsdp_config.fsdp_size=2")
ROOM = (
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=300",
    "critic.ppo_max_token_len_per_gpu=400",
)
SHARING = {
    "shared": (*ROOM, *MEMORY),
    "shared_split": (*SPLIT, *ROOM),
    "shared_adapters": (*ROOM, *ADAPTERS),
}
LOSS = "actor_rollout_ref.actor.policy_loss"
CLIP_COV = (f"{LOSS}.loss_mode=clip_cov", f"{LOSS}.clip_cov_ratio=0.1", f"{LOSS}.clip_cov_lb=0.01")
BF16 = "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16"


def local(config, dtype=torch.float64, ref=False):
    """The in-process backend with masters of another dtype."""
    return LocalWorkers(config, None, CPU, needs_ref=ref, needs_critic=True, master_dtype=dtype)


def train_local(config, batch, updates=1, dtype=torch.float64, load=None, ref=False):
    one = local(config, dtype, ref)
    if load:
        one.load(load)
    metrics = [
        {
            **update_critic(one, batch),
            **update_actor(one, batch),
        }
        for _ in range(updates)
    ]
    weights = {
        "actor": dict(merged_weights(one.models.actor.module)),
        "critic": dict(merged_weights(one.models.critic.module)),
    }
    log_probs, values = one.compute_log_probs(batch)[0], one.compute_values(batch)
    found = {"metrics": metrics, "weights": weights, "log_probs": log_probs, "values": values}
    return (
        {**found, "ref": one.compute_ref_log_prob(batch)} if "ref" in one.models.frozen else found
    )


def assert_same_training(found, expected, rtol=1e-9, atol=1e-9):
    for step, (one, other) in enumerate(zip(found["metrics"], expected["metrics"], strict=True)):
        assert one == pytest.approx(other, rel=max(rtol, 1e-6), abs=1e-6), f"update {step}"
        losses = [
            name for name in other if name.endswith(("pg_loss", "vf_loss", "kl_loss", "grad_norm"))
        ]
        for name in losses:
            assert one[name] == pytest.approx(other[name], rel=rtol, abs=atol), f"update {step}"
    for model, weights in expected["weights"].items():
        assert found["weights"][model].keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(
                found["weights"][model][name], value, rtol=rtol, atol=atol, msg=name
            )
    for name in ("log_probs", "ref"):
        if name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=rtol, atol=atol)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "untied": write_model(folder / "untied"),
        "tied": write_model(folder / "tied", arch="llama", tie_word_embeddings=True),
    }


def on_ranks(world, folder, jobs, start_method="spawn"):
    """Starts ``world`` processes that do all jobs, and returns what rank 0 found.

    Forked, they import nothing anew: not where Ray or vLLM ran before in this process.
    """
    ranks = {"args": (world, folder, jobs), "nprocs": world}
    mp.start_processes(fsdp_ranks.run, **ranks, start_method=start_method)
    return SimpleNamespace(
        **{name: torch.load(folder / f"{name}.pt", weights_only=True) for name in jobs}
    )


@pytest.fixture(scope="module")
def two(models, tmp_path_factory):
    """Everything that two ranks are asked, in one start."""
    folder = tmp_path_factory.mktemp("two")
    batch = mixed_batch()
    whole = local(cluster_config(models["untied"]))
    workers_save = folder / "from_local"
    (
        update_critic(whole, batch),
        update_actor(whole, batch),
    )
    whole.save(workers_save)
    jobs = {
        "untied": ("train", cluster_config(models["untied"]), {"batch": batch, "updates": 2}),
        "tied": ("train", cluster_config(models["tied"], *MEMORY), {"batch": batch}),
        "gradients": ("gradients", cluster_config(models["tied"], WHOLE), {"batch": batch}),
        "idle": ("gradients", cluster_config(models["tied"], WHOLE, *NO_ENTROPY), {"batch": batch}),
        "few": (
            "gradients",
            cluster_config(models["tied"], WHOLE),
            {"batch": mixed_batch(groups=1, n=1)},
        ),
        "saved": (
            "train",
            cluster_config(models["untied"]),
            {"batch": batch, "save": folder / "ckpt"},
        ),
        "loaded": (
            "train",
            cluster_config(models["untied"]),
            {"batch": batch, "load": folder / "ckpt"},
        ),
        "files": (
            *("train", cluster_config(models["tied"])),
            {
                "batch": batch,
                "save": folder / "files",
                "file_size": "20KB",
                "dtype": "float32",
            },
        ),
        "from_local": (
            "train",
            cluster_config(models["untied"]),
            {"batch": batch, "load": workers_save},
        ),
        "adapters": (
            *("train", cluster_config(models["tied"], *ADAPTERS)),
            {"batch": batch, "save": folder / "adapters", "ref": True},
        ),
        "split": (
            *("train", cluster_config(models["untied"], *SPLIT)),
            {"batch": truncated(batch), "ref": True},
        ),
        "clip_cov": (
            "train",
            cluster_config(models["untied"], *CLIP_COV),
            {"batch": batch},
        ),
        "clip_cov_split": (
            *("train", cluster_config(models["untied"], *CLIP_COV, *SPLIT)),
            {"batch": batch},
        ),
        "exchanged": (
            "train_by_all_to_all",
            cluster_config(models["untied"], *SPLIT),
            {"batch": batch, "ref": True},
        ),
        "split_gradients": (
            "gradients",
            cluster_config(models["tied"], WHOLE, *SPLIT),
            {"batch": batch},
        ),
        "split_few": (
            "gradients",
            cluster_config(models["tied"], WHOLE, *SPLIT),
            {"batch": mixed_batch(1, 1)},
        ),
        "bf16": ("gradients", cluster_config(models["tied"], WHOLE, BF16), {"batch": batch}),
    }
    for name, knobs in SHARING.items():
        options = {"batch": mixed_batch(n=6, alike=True), "ref": True}
        jobs[name] = ("train_sharing_prompts", cluster_config(models["untied"], *knobs), options)
    found = on_ranks(2, folder, jobs, "fork")
    found.folder = folder
    return found


@pytest.mark.parametrize(("name", "updates"), [("untied", 2), ("tied", 1)])
def test_two_ranks_train_as_one_process(two, models, name, updates):
    """The tied model has every memory knob turned, the reference none."""
    expected = train_local(cluster_config(models[name]), mixed_batch(), updates)
    assert_same_training(getattr(two, name), expected)


def truncated(batch):
    """Return the batch with kept ids for three of four tokens: their own and two others."""
    labels = batch.input_ids[batch.response_mask]
    is_cut = torch.arange(len(labels)) % 4 > 0
    counts = torch.zeros(batch.tokens, dtype=torch.int32)
    counts[batch.response_mask] = 3 * is_cut.int()
    ids = torch.stack([labels, (labels + 1) % VOCAB_SIZE, (labels + 7) % VOCAB_SIZE], 1)
    return batch.adding(kept_counts=counts, kept_ids=ids[is_cut].flatten().int())


def local_gradients(config, batch):
    one = local(config, torch.float32)
    one.models.actor.mismatch, means = MetricSums(), MetricSums()
    (step,) = mini_batches(batch, prompts=8, scale_factor=24.0)
    one.models.actor.accumulate(step, means)
    return {
        key: parameter.grad for key, parameter in one.models.actor.module.named_parameters()
    }, means.sums["pg_loss"]


def distance(found, expected):
    """Per parameter, relative to the norm of all gradients together."""
    norm = torch.cat([grad.flatten() for grad in expected.values()]).norm()
    assert norm > 0.01
    return max(float((found[key] - grad).norm() / norm) for key, grad in expected.items())


@pytest.mark.parametrize(
    ("name", "extra", "batch", "rel"),
    [
        ("gradients", (), mixed_batch(), 1e-6),
        ("idle", NO_ENTROPY, mixed_batch(), 1e-6),
        ("few", (), mixed_batch(1, 1), 1e-6),
        ("split_gradients", (), mixed_batch(), 1e-5),
        ("split_few", (), mixed_batch(1, 1), 1e-5),
    ],
)
def test_fp32_gradients_of_two_ranks_are_those_of_one(two, models, name, extra, batch, rel):
    """``few`` has one row for two ranks: one of them runs empty passes only."""
    expected, loss = local_gradients(cluster_config(models["tied"], WHOLE, *extra), batch)
    found = getattr(two, name)
    assert found["loss"] == pytest.approx(loss, rel=rel)
    assert distance(found["grads"], expected) < 1e-6


def test_adapters_train_on_two_ranks_and_their_checkpoint_goes_on_in_one_process(two, models):
    """And the reference is the base, whatever was trained."""
    config, batch = cluster_config(models["tied"], *ADAPTERS), mixed_batch()
    assert_same_training(two.adapters, train_local(config, batch, ref=True))
    untrained = train_local(config, batch, updates=0)
    torch.testing.assert_close(two.adapters["ref"], untrained["log_probs"], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(two.adapters["log_probs"], untrained["log_probs"], atol=1e-2)
    straight = train_local(config, batch, updates=2)
    after = train_local(config, batch, load=two.folder / "adapters")
    assert_same_training(after, {**straight, "metrics": straight["metrics"][1:]})


def test_two_ranks_that_split_each_sequence_train_as_one_process(two, models):
    """Policy, reference and critic, against padded rows and no split. Their log-probs are over
    kept ids."""
    batch = truncated(mixed_batch())
    expected = train_local(cluster_config(models["untied"]), batch, ref=True)
    whole = train_local(cluster_config(models["untied"]), mixed_batch(), ref=True)
    assert not torch.allclose(expected["ref"], whole["ref"], atol=0.1)
    assert_same_training(two.split, expected)
    torch.testing.assert_close(two.split["values"], expected["values"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["clip_cov", "clip_cov_split"])
def test_clip_cov_drops_as_many_unclipped_tokens_on_two_ranks_as_in_one_process(two, models, name):
    """Each update has a second optimizer step, where some of the tokens drawn before are
    clipped."""
    expected = train_local(cluster_config(models["untied"], *CLIP_COV), mixed_batch())
    assert_same_training(getattr(two, name), expected)
    assert all(metrics["actor/cov_selected"] > 0 for metrics in expected["metrics"])


@pytest.mark.parametrize("name", list(SHARING))
def test_ranks_that_read_a_prompt_once_train_as_one_process_that_repeats_it(
    two, models, monkeypatch, name
):
    """Policy, reference and critic: padded, packed, with sequences that ranks split, with adapters.
    Ranks and micro-batches cut groups."""
    monkeypatch.setattr(Qwen2RMSNorm, "forward", fsdp_ranks.in_own_precision)
    adapters = ADAPTERS if name == "shared_adapters" else ()
    config, batch = cluster_config(models["untied"], *adapters), mixed_batch(n=6, alike=True)
    found = getattr(two, name)
    assert_same_training(found, train_local(config, batch, ref=True))
    assert len(found["shared"]) > 4 and max(found["shared"]) > 6  # sequences in a pass


def test_the_all_to_all_of_a_gpu_trains_as_one_process(two, models):
    """On a CPU DTensor would gather and cut; this is the branch that NCCL gets, over gloo."""
    assert two.exchanged["exchanges"] > 0
    assert_same_training(
        two.exchanged, train_local(cluster_config(models["untied"]), mixed_batch(), ref=True)
    )


def test_bf16_passes_have_float32_masters_and_gradients(two, models):
    expected, _ = local_gradients(cluster_config(models["tied"], WHOLE), mixed_batch())
    assert {str(grad.dtype) for grad in two.bf16["grads"].values()} == {"torch.float32"}
    assert 1e-6 < distance(two.bf16["grads"], expected) < 0.05


def test_checkpoints_load_on_another_number_of_ranks(two, models, tmp_path):
    """Two ranks save after 1 of 2 updates; two ranks, one rank and the in-process backend end at
    the same weights."""
    batch, config = mixed_batch(), cluster_config(models["untied"])
    straight = train_local(config, batch, updates=2)
    assert_same_training(two.saved, train_local(config, batch))
    job = {"one": ("train", config, {"batch": batch, "load": two.folder / "ckpt"})}
    after = {**straight, "metrics": straight["metrics"][1:]}
    assert_same_training(two.loaded, after)
    assert_same_training(on_ranks(1, tmp_path, job, "fork").one, after)
    assert_same_training(train_local(config, batch, load=two.folder / "ckpt"), after)


def test_every_rank_writes_files_of_its_own_in_the_format_of_transformers(two, models):
    folder = two.folder / "files"
    by_rank = [torch.load(f"{folder}_rank_{rank}.pt", weights_only=True) for rank in (0, 1)]
    for rank, written in enumerate(by_rank):
        assert {name: file_sha256(folder / name) for name in written} == written
        for part in ("actor", "critic"):
            assert sum(name.startswith(f"{part}/model-") for name in written) >= 2
            own = [name for name in written if name.startswith(f"{part}/optimizer/")]
            assert own == [f"{part}/optimizer/{rank + 1:05}-of-00002.safetensors"]
    assert not by_rank[0].keys() & by_rank[1].keys()
    everything = {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix == ".safetensors"
    }
    assert everything == by_rank[0].keys() | by_rank[1].keys()
    model = AutoModelForCausalLM.from_pretrained(folder / "actor")
    expected = two.files["weights"]["actor"]
    assert len(expected) > 10
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    config = cluster_config(models["tied"])
    one = LocalWorkers(
        config, tiny_tokenizer(), torch.device("cpu"), needs_ref=False, needs_critic=True
    )
    one.load(folder)
    for name, value in one.models.actor.module.state_dict().items():
        assert torch.equal(value, expected[name]), name
    one.close()


def test_a_checkpoint_of_the_in_process_backend_loads_on_two_ranks(two, models):
    straight = train_local(cluster_config(models["untied"]), mixed_batch(), updates=2)
    assert_same_training(two.from_local, {**straight, "metrics": straight["metrics"][1:]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "extra"),
    [(1, ()), (4, ()), (4, HYBRID), (4, (*SPLIT, *HYBRID))],
    ids=["1", "4", "4 in pairs", "2 x 2"],
)
def test_one_and_four_ranks_train_as_one_process(models, tmp_path, world, extra):
    """In pairs: two groups of two ranks that hold the whole model each; 2 x 2: and split each
    sequence by two."""
    batch = mixed_batch()
    jobs = {
        "it": ("train", cluster_config(models["untied"], *extra, ranks=world), {"batch": batch}),
        "gradients": (
            "gradients",
            cluster_config(models["tied"], WHOLE, *extra, ranks=world),
            {"batch": batch},
        ),
    }
    found = on_ranks(world, tmp_path, jobs)
    assert_same_training(found.it, train_local(cluster_config(models["untied"]), batch))
    expected, loss = local_gradients(cluster_config(models["tied"], WHOLE), batch)
    assert found.gradients["loss"] == pytest.approx(loss, rel=1e-5)
    assert distance(found.gradients["grads"], expected) < 1e-6
