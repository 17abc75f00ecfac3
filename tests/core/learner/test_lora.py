"""Adapters: only they train, engines and exports get the whole model, and the base is the
reference."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from core.checkpoint.provenance import base_of
from core.cluster.workers import LocalWorkers
from core.config.composition import compose
from core.errors import InputError
from core.export import main as export
from core.learner.lora import add_adapters, base_only, layers, merged_weights, trained_weights
from core.learner.models import load_critic, load_policy
from core.learner.passes import BasePolicy
from core.ray_trainer import RayPPOTrainer
from tests.core.ray_cluster import cluster_config, mixed_batch, write_model
from tests.faults.tiny_run import command, prepare
from tests.optimizer_steps import update_actor, update_critic
from tests.tiny import tiny_tokenizer

CPU = torch.device("cpu")
ADAPTERS = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8")
IDS = torch.arange(4, 24)[None]
MODELS = {
    "qwen2": {},
    "tied": {"arch": "llama", "tie_word_embeddings": True},
    "gpt2": {"arch": "gpt2"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: write_model(tmp_path_factory.mktemp(name), **shape) for name, shape in MODELS.items()
    }


def config(folder, *overrides):
    return cluster_config(folder, *ADAPTERS, *overrides)


def workers(folder, *overrides, critic=False):
    return LocalWorkers(
        config(folder, *overrides), tiny_tokenizer(), CPU, needs_ref=True, needs_critic=critic
    )


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def adapted(folder, *overrides, seed=1):
    """The model, and the settings of its adapters."""
    model = config(folder, *overrides).actor_rollout_ref.model
    return add_adapters(load_policy(model), model, seed)


@pytest.mark.parametrize("name", MODELS)
def test_fresh_adapters_change_nothing_and_merged_ones_are_a_model_of_the_base(folders, name):
    plain, module = (
        load_policy(config(folders[name]).actor_rollout_ref.model),
        adapted(folders[name]),
    )
    before, trained = logits(plain), trained_weights(module)
    assert (
        torch.equal(logits(module), before) and trained and all(".lora_" in key for key in trained)
    )
    count = sum(value.numel() for value in trained.values())
    assert count == sum(4 * (one.in_features + one.out_features) for one in layers(module).values())
    again, other = (trained_weights(adapted(folders[name], seed=seed)) for seed in (1, 2))
    for key, value in trained.items():
        assert torch.equal(value, again[key]) and ("lora_B" in key) == torch.equal(
            value, other[key]
        )
    with torch.no_grad():
        for value in trained.values():
            value.normal_(std=0.1, generator=torch.Generator().manual_seed(value.numel()))
    merged = dict(merged_weights(module))
    assert list(merged) == list(plain.state_dict())
    plain.load_state_dict(merged)
    torch.testing.assert_close(logits(plain), logits(module), rtol=1e-4, atol=1e-5)
    with base_only(module):
        assert torch.equal(logits(module), before)
    assert not torch.allclose(logits(module), before, atol=0.1)
    assert all(value.requires_grad for value in trained_weights(module).values())


@pytest.mark.parametrize("adapters", [True, False], ids=["adapters", "all weights"])
def test_an_update_moves_what_trains_alone_and_the_reference_stays(folders, adapters):
    """The reference of adapters is the base itself; that of all weights is a copy, without which
    the KL stays 0."""
    made = config(folders["qwen2"]) if adapters else cluster_config(folders["qwen2"])
    one, batch = (
        LocalWorkers(made, tiny_tokenizer(), CPU, needs_ref=True, needs_critic=False),
        mixed_batch(),
    )
    ref = one.models.frozen["ref"]
    assert isinstance(ref, BasePolicy) == adapters == (ref.module is one.models.actor.module)
    started = {key: value.clone() for key, value in one.models.actor.module.named_parameters()}
    first = one.compute_log_probs(batch)[0]
    assert torch.equal(one.compute_ref_log_prob(batch), first)
    for _ in range(3):
        metrics = update_actor(one, batch)
    assert metrics["actor/grad_norm"] > 0
    now = dict(one.models.actor.module.named_parameters())
    moved = {key for key, value in started.items() if not torch.equal(value, now[key])}
    assert moved == {key for key, value in now.items() if value.requires_grad}
    assert torch.equal(one.compute_ref_log_prob(batch), first)
    assert not torch.allclose(one.compute_log_probs(batch)[0], first, atol=1e-2)
    assert len(one.models.actor.stepper.optimizer.state_dict()["state"]) == len(moved)


def test_the_engine_gets_the_merged_model(folders):
    one = workers(folders["tied"])
    for version in (1, 2):
        update_actor(one, mixed_batch())
        assert one.sync_weights(version)["rollout_corr/probe_diff"] < 1e-5
    names = {name for name, _ in merged_weights(one.models.actor.module)}
    assert names == set(load_policy(config(folders["tied"]).actor_rollout_ref.model).state_dict())


def test_a_checkpoint_is_adapters_and_optimizer_and_goes_on_to_the_bit(folders, tmp_path):
    batch, straight = (
        mixed_batch(),
        workers(folders["qwen2"], "critic.model.lora_rank=2", critic=True),
    )
    for _ in range(2):
        (
            update_critic(straight, batch),
            update_actor(straight, batch),
        )
    straight.save(tmp_path)
    for part, base in (("actor", straight.models.actor), ("critic", straight.models.critic)):
        assert not (tmp_path / part / "model.safetensors").exists()
        stored = load_file(tmp_path / part / "adapter_model.safetensors")
        assert sum(v.numel() for v in stored.values()) == sum(
            v.numel() for v in trained_weights(base.module).values()
        )
        assert json.loads((tmp_path / part / "adapter_config.json").read_text())["r"] in (4, 2)
    resumed = workers(folders["qwen2"], "critic.model.lora_rank=2", critic=True)
    resumed.load(tmp_path)
    for one in (straight, resumed):
        one.found = (
            update_critic(one, batch),
            update_actor(one, batch),
        )
    assert straight.found == resumed.found
    for one, other in (
        (straight.models.actor, resumed.models.actor),
        (straight.models.critic, resumed.models.critic),
    ):
        weights = dict(other.module.named_parameters())
        assert all(torch.equal(value, weights[key]) for key, value in one.module.named_parameters())


def test_a_critic_trains_its_adapters_and_its_new_head(folders):
    one, batch = workers(folders["qwen2"], "critic.model.lora_rank=2", critic=True), mixed_batch()
    names = {
        key.split(".")[-3] if "lora" in key else key
        for key in trained_weights(one.models.critic.module)
    }
    assert names == {"lora_A", "lora_B", "score.weight", "score.bias"}
    before = one.compute_values(batch)
    update_critic(one, batch)
    assert not torch.allclose(one.compute_values(batch), before, atol=1e-3)
    merged = dict(merged_weights(one.models.critic.module))
    plain = load_critic(config(folders["qwen2"]).critic.model, seed=1)
    plain.load_state_dict(merged)
    torch.testing.assert_close(
        logits(plain), logits(one.models.critic.module), rtol=1e-4, atol=1e-5
    )


def test_target_modules_are_named_as_in_peft_and_another_rank_is_refused(folders, tmp_path):
    for override, expected in (
        ("target_modules=[q_proj,v_proj]", {"q_proj", "v_proj"}),
        ("target_modules='.*layers.1.*(up|down)_proj'", {"up_proj", "down_proj"}),
        (
            "exclude_modules=[down_proj,o_proj]",
            {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"},
        ),
    ):
        module = adapted(folders["qwen2"], f"actor_rollout_ref.model.{override}")
        assert {name.rsplit(".", 1)[-1] for name in layers(module)} == expected
    pattern = adapted(folders["qwen2"], "actor_rollout_ref.model.exclude_modules='.*down_proj'")
    critic = compose(
        "ppo",
        [
            f"critic.model.path={folders['qwen2']}",
            "critic.model.lora_rank=2",
            "critic.model.exclude_modules='.*down_proj'",
        ],
    ).critic.model
    for module in (pattern, add_adapters(load_critic(critic, seed=1), critic, seed=1)):
        ends = {name.rsplit(".", 1)[-1] for name in layers(module)}
        assert ends and not ends & {"down_proj", "score"}
    for override, said in (
        ("target_modules=[q_proj,vproj]", "target_modules: vproj is the end of no such layer"),
        ("target_modules=[vproj]", "target_modules=.*vproj.*not found"),
        ("target_modules=[all-linear,q_proj]", "all-linear is the end of no such layer"),
        ("exclude_modules=[downproj]", "exclude_modules: downproj is the end of no such layer"),
    ):
        with pytest.raises(InputError, match=said):
            adapted(folders["qwen2"], f"actor_rollout_ref.model.{override}")
    with pytest.raises(ValueError, match="the output head cannot have an adapter"):
        adapted(folders["qwen2"], "actor_rollout_ref.model.target_modules=[lm_head]")
    for name, layer in (("tied", "embed_tokens"), ("gpt2", "wte")):
        with pytest.raises(
            InputError, match="model.target_modules: the embeddings are the output head too"
        ):
            adapted(folders[name], f"actor_rollout_ref.model.target_modules=[{layer}]")
    assert layers(
        adapted(folders["qwen2"], "actor_rollout_ref.model.target_modules=[embed_tokens]")
    )
    workers(folders["qwen2"]).save(tmp_path)
    with pytest.raises(InputError, match=r"holds adapters, not a model; .* python -m core\.export"):
        adapted(tmp_path / "actor")
    with pytest.raises(InputError, match="adapters of another shape"):
        workers(folders["qwen2"], "actor_rollout_ref.model.lora_rank=8").load(tmp_path)


# -- whole runs


def trainer(folder, *overrides):
    """A run of adapters in a folder, whose files are beside it."""
    extra = (
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=True",
        *overrides,
    )
    return RayPPOTrainer(compose("grpo", command(folder.parent, "grpo", 4, *extra)(folder)[3:]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four steps in one go, and two and then two more."""
    folder = tmp_path_factory.mktemp("runs")
    prepare(folder)
    for name, steps in (("straight", 4), ("halves", 2), ("halves", 4)):
        trainer(folder / name, f"trainer.total_training_steps={steps}").init_workers().fit()
    return folder / "straight", folder / "halves"


def test_a_run_goes_on_to_the_bit(runs):
    for name in ("adapter_model.safetensors", "optimizer/00001-of-00001.safetensors"):
        one, other = ((run / "global_step_4" / "actor" / name).read_bytes() for run in runs)
        assert one == other
    lines = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in runs
    ]
    last = [
        {k: v for k, v in line[-1].items() if not k.startswith(("timing", "perf"))}
        for line in lines
    ]
    assert last[0] == last[1] and last[0]["actor/kl_loss"] > 0


@pytest.fixture
def bases(runs, tmp_path):
    """The base of the runs, one with a number changed, and the same weights cut into other
    files."""
    model = runs[0].parent / "model"
    copy = AutoModelForCausalLM.from_pretrained(model)
    copy.save_pretrained(tmp_path / "moved", max_shard_size="20KB")
    with torch.no_grad():
        copy.get_output_embeddings().weight[-1, -1] += 1e-3
    copy.save_pretrained(tmp_path / "other")
    for name in ("moved", "other"):
        tiny_tokenizer().save_pretrained(tmp_path / name)
    assert len(list((tmp_path / "moved").glob("*.safetensors"))) > 1
    return model, tmp_path / "other", tmp_path / "moved"


def test_adapters_are_resumed_on_their_own_base_alone(runs, bases):
    model, other, moved = bases
    with pytest.raises(InputError) as caught:
        trainer(runs[0], f"actor_rollout_ref.model.path={other}").init_workers()
    said = str(caught.value)
    assert f"actor_rollout_ref.model.path was {model} " in said
    assert all(base_of(str(folder))[:12] in said for folder in (other, model))
    run = trainer(runs[0], f"actor_rollout_ref.model.path={moved}").init_workers()
    assert run.run.step == 4
    run.workers.close()


def test_an_export_is_the_merged_model_on_the_same_base_alone(runs, bases, tmp_path, capsys):
    straight, (model, other, moved) = runs[0], bases
    assert export([str(straight), str(tmp_path / "bad"), "--base", str(other)]) == 2
    said = capsys.readouterr().err
    assert (
        f"--base={other} " in said
        and f"another base, {model} " in said
        and not (tmp_path / "bad").exists()
    )
    assert export([str(straight), str(tmp_path / "here")]) == 0
    assert export([str(straight), str(tmp_path / "there"), "--base", str(moved)]) == 0
    one, same = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("here", "there")
    )
    assert torch.equal(logits(one), logits(same))
    base = AutoModelForCausalLM.from_pretrained(model)
    plain = logits(base)
    expected = logits(PeftModel.from_pretrained(base, straight / "global_step_4" / "actor"))
    torch.testing.assert_close(logits(one), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain, expected, atol=1e-3)
