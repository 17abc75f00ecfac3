"""Sizes are those of the models; a model that cannot be split or loaded as configured is refused before a start."""

from __future__ import annotations

import json

import pytest

from core import plan
from core.command_line import prepare
from core.config import compose
from core.errors import InputError
from core.model_shapes import MODEL, MODELS, Shape, model_problems, shape_of
from results.reporting.run_scripts import scripts
from tests.pictures import save_vision_model

TENSOR = "actor_rollout_ref.rollout.tensor_model_parallel_size"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size=7"
RAY = ("trainer.backend=ray", "actor_rollout_ref.rollout.name=vllm")
SMALL = f"{MODEL}=Qwen/Qwen2.5-0.5B-Instruct"  # 14 heads, 2 key-value heads
# billions of parameters that the model cards give
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 0.494,
    "Qwen/Qwen2.5-1.5B": 1.544,
    "Qwen/Qwen2.5-3B": 3.086,
    "Qwen/Qwen2.5-7B": 7.616,
    "Qwen/Qwen2.5-14B": 14.770,
    "Qwen/Qwen2.5-32B": 32.764,
    "deepseek-ai/deepseek-llm-7b": 6.910,
}
SMALL_SHAPE = Shape(hidden=8, layers=3, heads=4, kv_heads=2, mlp=16, vocab=32, tied=False, bias=True)


# --- shapes ---


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name):
    assert shape_of(name).parameters / 1e9 == pytest.approx(PUBLISHED[name], abs=0.002)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "deepseek-ai/deepseek-llm-7b"])
def test_parameters_are_those_that_transformers_makes(name):
    import torch
    import transformers

    shape = shape_of(name)
    kind = "Qwen2" if shape.bias else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        **{"hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "intermediate_size": shape.mlp},
        **{"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab},
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        config.num_labels = 1
        critic = getattr(transformers, f"{kind}ForTokenClassification")(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.critic_parameters == sum(p.numel() for p in critic.parameters())


def test_a_local_folder_is_read_and_an_unknown_name_has_a_nearest(tmp_path):
    fields = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {**fields, "intermediate_size": 16, "vocab_size": 32, "tie_word_embeddings": False, "model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(str(tmp_path)) == SMALL_SHAPE
    assert shape_of(str(tmp_path), {"num_hidden_layers": 5}).layers == 5
    assert shape_of("Qwen/Qwen2.5-7B-Instruct") == shape_of("Qwen/Qwen2.5-7B") and "Qwen/Qwen2.5-32B" in MODELS
    with pytest.raises(InputError, match=r"nearest in model_shapes.yaml: Qwen/Qwen2.5-7B"):
        shape_of("Qwen/Qwen25-7B")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="num_attention_heads"):
        shape_of(str(tmp_path))


# --- what an architecture rules out ---


def problems(*keys: str, recipe: str = "grpo") -> list[str]:
    return model_problems(compose(recipe, [*RAY, *keys]))


def test_an_engine_is_split_as_the_attention_heads_allow():
    (told,) = problems(SMALL, f"{TENSOR}=4")
    rule = "must divide the 14 attention heads of Qwen/Qwen2.5-0.5B-Instruct; use 1, 2, 7 or 14"
    assert told == f"{TENSOR}=4: {rule}"
    assert not problems(SMALL, f"{TENSOR}=2") and not problems(f"{MODEL}=Qwen/Qwen2.5-7B", f"{TENSOR}=4")
    seven = problems(
        f"{MODEL}=Qwen/Qwen2.5-7B", f"{TENSOR}=7", "trainer.n_gpus_per_node=7", "data.train_batch_size=7", MINI
    )
    assert len(seven) == 1 and "must divide the 4 key-value heads" in seven[0] and seven[0].endswith("use 1, 2 or 4")
    repeated = problems(f"{MODEL}=Qwen/Qwen2.5-3B", f"{TENSOR}=8")  # 16 heads; 2 key-value heads, each four times
    assert repeated == []
    # the default engine is not split, whatever the key holds
    assert not model_problems(compose("grpo", [SMALL, f"{TENSOR}=4"]))


@pytest.mark.parametrize("part", ["actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"])
def test_a_sequence_is_split_as_the_attention_heads_allow(part):
    keys = [f"{part.split('.')[0]}.model.use_remove_padding=True", f"{part}.ulysses_sequence_parallel_size=8"]
    keys += [] if part == "critic" else ["actor_rollout_ref.actor.use_kl_loss=True"]
    found = problems(SMALL, f"{TENSOR}=1", *keys, recipe="ppo" if part == "critic" else "grpo")
    assert any(line.startswith(f"{part}.ulysses_sequence_parallel_size=8: must divide the 14 atten") for line in found)
    large = [f"{MODEL}=Qwen/Qwen2.5-32B", f"{TENSOR}=1", "critic.model.path=Qwen/Qwen2.5-32B", *keys]
    assert not problems(*large, recipe="ppo" if part == "critic" else "grpo")
    if part != "critic":  # one process does not split sequences, whatever the key holds
        assert not problems(SMALL, *keys, "trainer.backend=local", "actor_rollout_ref.rollout.name=hf")


@pytest.mark.parametrize("part", ["actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"])
def test_a_layer_is_split_as_heads_and_mlp_allow(part):
    key, recipe = f"{part}.tensor_model_parallel_size", "ppo" if part == "critic" else "grpo"
    keys = [] if part == "critic" else ["actor_rollout_ref.actor.use_kl_loss=True"]
    found = problems(SMALL, f"{TENSOR}=1", *keys, f"{key}=4", recipe=recipe)
    says = f"{key}=4: must divide the 14 attention heads, 2 key-value heads and MLP size 4864 of Qwen/Qwen2.5-0.5B"
    assert any(line.startswith(says) and line.endswith("use 1 or 2") for line in found)
    large = [f"{MODEL}=Qwen/Qwen2.5-32B", f"{TENSOR}=1", "critic.model.path=Qwen/Qwen2.5-32B", *keys]
    assert not problems(*large, f"{key}=8", recipe=recipe)
    packed = [f"{part.split('.')[0]}.model.use_remove_padding=True", f"{part}.ulysses_sequence_parallel_size=2"]
    eight = ["trainer.nnodes=2", *packed, f"{key}=8"]
    told = [line for line in problems(*large, *eight, recipe=recipe) if line.startswith(f"{key}=8")]
    assert told and "times ulysses_sequence_parallel_size=2 must divide the 40 attention heads" in told[0]
    if part != "critic":  # one process shares no layers, whatever the key holds
        assert not problems(SMALL, *keys, f"{key}=4", "trainer.backend=local", "actor_rollout_ref.rollout.name=hf")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-VL-30B-A3B", "OpenGVLab/InternVL3-8B", "x/Llama-3.2-11B-Vision"])
def test_a_vision_language_model_of_another_family_is_refused_by_its_name(name):
    (told,) = problems(f"{MODEL}={name}")
    assert told.startswith(f"{MODEL}={name}: a vision-language model by its name") and "qwen2_5_vl" in told


def test_what_does_not_read_pictures_yet_is_refused_with_a_model_that_does():
    model, alone = (
        f"{MODEL}=Qwen/Qwen2.5-VL-7B-Instruct",
        ("trainer.backend=local", "actor_rollout_ref.rollout.name=hf"),
    )
    assert not problems(model, *alone)
    ranks = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    (told,) = problems(model, f"{TENSOR}=1", ranks, "actor_rollout_ref.model.use_remove_padding=True")
    assert told.startswith(f"{ranks}: does not split the sequences of a model that reads pictures yet")
    layers = "actor_rollout_ref.actor.tensor_model_parallel_size=2"
    (told,) = problems(model, f"{TENSOR}=1", layers)
    assert told.startswith(f"{layers}: does not split the layers of a model that reads pictures yet")
    for key in (
        "algorithm.adv_estimator=gae",
        "reward_model.enable=true",
        "actor_rollout_ref.model.fp32_lm_head=true",
    ):
        rest = ("reward_model.model.path=x/y",) * ("reward_model" in key)
        found = problems(model, *alone, key, *rest)
        assert [line.split(": ")[0] for line in found] == [key], found
    (told,) = problems(model, *alone, "actor_rollout_ref.rollout.name=sglang")
    assert told.startswith("actor_rollout_ref.rollout.name=sglang: sends no pictures")
    (told,) = problems(model, *alone, recipe="sft")
    assert told.startswith(f"{model}: fine-tuning does not train a model that reads pictures yet")
    tools = "actor_rollout_ref.rollout.multi_turn"
    assert not problems(model, *alone, f"{tools}.enable=true", f"{tools}.tool_config_path=recipes/lab/tools.yaml")
    frozen = "actor_rollout_ref.actor.freeze_vision_tower=true"
    assert not problems(model, *alone, frozen)
    (told,) = problems(SMALL, f"{TENSOR}=2", frozen)
    assert told.startswith(f"{frozen}: the model reads text alone")


def test_the_size_of_a_model_that_reads_pictures_is_the_real_one(tmp_path):
    assert MODELS["Qwen/Qwen2.5-VL-7B-Instruct"].parameters == 8_292_166_656  # of the published weights
    save_vision_model(tmp_path)
    with pytest.raises(InputError, match="the size of its vision tower is not known"):
        shape_of(str(tmp_path))


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B", "nobody/novla-7B", "nobody/revision-2", "./outputs/no/vl/folder"])
def test_other_names_are_not(name):
    assert not problems(f"{MODEL}={name}")


def test_a_folder_is_judged_by_its_architecture_and_not_by_its_name(tmp_path):
    folder = tmp_path / "Some-VL-Model"
    folder.mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8}
    file, sizes = folder / "config.json", sizes | {"vocab_size": 9}
    for extra, words in (
        ({"architectures": ["LlavaForConditionalGeneration"]}, "(LlavaForConditionalGeneration)"),
        ({"architectures": ["AnyModel"], "vision_config": {}}, "vision_config"),
        ({"architectures": ["Qwen2ForCausalLM"]}, ""),
        ({}, ""),
    ):
        file.write_text(json.dumps(sizes | extra))
        found = problems(f"{MODEL}={folder}", f"{TENSOR}=1")
        assert [words in line for line in found] == ([True] if words else [])
    file.write_text("no JSON")
    assert not problems(f"{MODEL}={folder}")  # loading it says what is wrong


@pytest.mark.parametrize("dry", ["1", ""])
def test_a_start_and_a_dry_run_end_with_the_problems(dry, monkeypatch, capsys):
    monkeypatch.setenv("DRY_RUN", dry)
    files = [] if dry else ["data.train_files=README.md", "data.val_files=README.md"]
    with pytest.raises(SystemExit) as ended:
        prepare("grpo", [*RAY, *files, SMALL, f"{TENSOR}=4"])
    assert ended.value.code == 2 and "must divide the 14 attention heads" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        prepare("grpo", [*files, f"{MODEL}=x/Llama-3.2-11B-Vision"])
    assert ended.value.code == 2 and "a vision-language model" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", ['{"hidden_size": 0}', "", "[]", "{", "\udcff"])
def test_a_damaged_configuration_of_a_model_is_named(sizes, tmp_path):
    (tmp_path / "config.json").write_text(sizes, errors="surrogateescape")
    with pytest.raises(InputError, match="config.json"):
        shape_of(str(tmp_path))
    with pytest.raises(InputError, match="not known offline"):
        shape_of("~no_such_user/" + "x" * 300)


def test_a_plan_ends_with_the_problems(capsys):
    assert plan.main(["grpo", *RAY, SMALL, f"{TENSOR}=4"]) == 2
    assert "must divide the 14 attention heads" in capsys.readouterr().err


def test_no_run_script_has_such_a_problem():
    assert not [line for script in scripts() for line in model_problems(script.config)]
