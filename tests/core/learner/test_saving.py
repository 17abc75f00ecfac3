"""Checkpoints' model folders and exports: transformers loads them and computes the same."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.checkpoint.store import CheckpointStore, DamagedCheckpoint
from core.config.composition import compose
from core.config.training_keys import ModelConfig
from core.errors import InputError
from core.export import export, find_checkpoint, main
from core.learner import saving
from core.learner.learner import Actor
from core.learner.models import load_policy, load_tokenizer
from core.learner.saving import (
    OPTIMIZER,
    export_hf,
    load_optimizer,
    load_weights,
    optimizer_tensors,
    save_files,
)
from tests.checkpoints import flip_bit
from tests.core.learner.test_learner import actor_config, one_step, random_batch
from tests.tiny import tiny_model, tiny_tokenizer

MODELS = {
    "qwen2": ("qwen2", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
}
IDS = torch.arange(4, 24)[None]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS, attention_mask=torch.ones_like(IDS)).logits


def save(root, model, step: int = 3) -> CheckpointStore:
    store = CheckpointStore(root)
    with store.writing(step) as folder:
        export_hf(model, tiny_tokenizer(), folder / "actor")
        save_files({"1.safetensors": {"x": torch.ones(2)}}, folder / "actor" / OPTIMIZER)
        (folder / "driver.pt").write_text("{}")
    return store


def test_two_matrices_that_the_configuration_ties_are_one_in_training_and_in_what_is_saved(
    tmp_path, caplog
):
    """transformers would train and save both, and an engine would compute with one."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "two")
    config = json.loads((tmp_path / "two" / "config.json").read_text()) | {
        "tie_word_embeddings": True
    }
    (tmp_path / "two" / "config.json").write_text(json.dumps(config))
    trained = load_policy(
        compose("ppo", [f"actor_rollout_ref.model.path={tmp_path / 'two'}"]).actor_rollout_ref.model
    )
    assert trained.lm_head.weight is trained.model.embed_tokens.weight
    assert torch.equal(trained.lm_head.weight, model.model.embed_tokens.weight)
    assert "tie_word_embeddings" in caplog.text
    export_hf(trained, None, tmp_path / "one")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert torch.equal(logits(loaded), logits(trained))


@pytest.mark.parametrize("name", MODELS)
def test_an_export_computes_the_same(name, tmp_path):
    arch, overrides = MODELS[name]
    model = tiny_model(arch, **overrides)
    model.generation_config.max_new_tokens = 77
    save(tmp_path / "run", model)
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.generation_config.max_new_tokens == 77
    tied = (
        loaded.get_input_embeddings().weight.data_ptr()
        == loaded.get_output_embeddings().weight.data_ptr()
    )
    assert tied == model.config.tie_word_embeddings
    tokenizer, ours = AutoTokenizer.from_pretrained(tmp_path / "out"), tiny_tokenizer()
    if arch != "qwen2":
        messages = [{"role": "user", "content": "2 + 2 = ?"}]
        texts = [one.apply_chat_template(messages, tokenize=False) for one in (tokenizer, ours)]
        assert (
            texts[0] == texts[1] and tokenizer("a b\nc")["input_ids"] == ours("a b\nc")["input_ids"]
        )
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert not (tmp_path / "out" / OPTIMIZER).exists()


@pytest.mark.parametrize("name", MODELS)
def test_weights_come_back_to_the_bit(name, tmp_path):
    arch, overrides = MODELS[name]
    model, other = tiny_model(arch, seed=1, **overrides), tiny_model(arch, seed=2, **overrides)
    export_hf(model, None, tmp_path)
    assert not torch.equal(logits(other), logits(model))
    parameters = list(other.parameters())
    load_weights(other, tmp_path)
    for (key, value), (_, loaded) in zip(
        model.state_dict().items(), other.state_dict().items(), strict=True
    ):
        assert torch.equal(value, loaded), key
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True)), (
        "the optimizer holds these"
    )
    # Of several files, and another model's refused
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    third = tiny_model(arch, seed=3, **overrides)
    load_weights(third, tmp_path / "many")
    assert (
        torch.equal(logits(third), logits(model))
        and len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    )


@pytest.mark.parametrize(
    "other", [("qwen2", {"vocab_size": 101}), ("llama", {}), ("qwen2", {"num_hidden_layers": 3})]
)
def test_weights_of_another_model_are_refused(other, tmp_path):
    export_hf(tiny_model("qwen2"), None, tmp_path)
    target = tiny_model(other[0], **other[1])
    before = logits(target)
    with pytest.raises(InputError, match="holds weights of another model"):
        load_weights(target, tmp_path)
    assert torch.equal(logits(target), before)


def test_a_published_generation_config_that_transformers_will_not_save_does_not_end_the_run(
    tmp_path,
):
    model = tiny_model()
    model.generation_config.temperature = 0.6  # with do_sample=False: loads, does not save
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        model.save_pretrained(tmp_path / "plain")
    export_hf(model, tiny_tokenizer(), tmp_path / "ours")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").generation_config
    assert saved.eos_token_id == 1 and not saved.do_sample and saved.temperature != 0.6


def test_the_newest_complete_checkpoint_is_exported(tmp_path, caplog):
    store = save(tmp_path / "run", tiny_model(seed=1), step=1)
    save(tmp_path / "run", tiny_model(seed=2), step=2)
    flip_bit(store.folder(2) / "actor" / "model.safetensors")
    assert find_checkpoint(tmp_path / "run").step == find_checkpoint(store.folder(1)).step == 1
    assert "global_step_2: actor/model.safetensors was altered" in caplog.text
    export(tmp_path / "run", tmp_path / "out")
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(tiny_model(seed=1))
    )


def test_the_command_explains_what_is_wrong(tmp_path, capsys):
    store = save(tmp_path / "run", tiny_model())
    (tmp_path / "full").mkdir()
    for source, out, message in (("run", "full", "full exists"), ("nowhere", "out", "nowhere: ")):
        assert main([str(tmp_path / source), str(tmp_path / out)]) == 2
        assert message in capsys.readouterr().err
    flip_bit(store.folder(3) / "actor" / "config.json")
    for source in (tmp_path / "run", store.folder(3)):
        assert main([str(source), str(tmp_path / "out")]) == 2
        assert "config.json was altered" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", MODELS)
def test_files_are_divided_and_named_as_transformers_does(name, tmp_path, monkeypatch):
    arch, overrides = MODELS[name]
    model = tiny_model(arch, **overrides)
    monkeypatch.setattr(saving, "FILE_SIZE", "20KB")
    files = saving.weight_files(model)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {name: file for file, names in files.items() for name in names} == index["weight_map"]
    monkeypatch.setattr(saving, "FILE_SIZE", "5GB")
    assert list(saving.weight_files(model)) == ["model.safetensors"]
    # One file needs none
    saving.write_index(model, saving.weight_files(model), tmp_path / "nowhere")


def test_an_optimizer_comes_back_from_files_of_several_ranks_and_none_is_refused(tmp_path):
    """As two ranks write it, each the tensors of every other weight; the next step is the same to
    the bit."""
    config = actor_config(optim=SimpleNamespace(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0))
    parts = [Actor(tiny_model(), config, temperature=1.0) for _ in range(2)]
    step = one_step(random_batch())
    parts[0].update([step], 1.0)
    parts[1].module.load_state_dict(parts[0].module.state_dict())
    with pytest.raises(DamagedCheckpoint, match="no optimizer"):
        load_optimizer(parts[1], tmp_path)
    stored = list(optimizer_tensors(parts[0]))
    for rank in (0, 1):
        own = {name: value for tensors in stored[rank::2] for name, value in tensors.items()}
        save_files({f"{rank}.safetensors": own}, tmp_path / OPTIMIZER)
    load_optimizer(parts[1], tmp_path)
    for part in parts:
        part.update([step], 1.0)
    for one, other in zip(*(part.module.parameters() for part in parts), strict=True):
        assert torch.equal(one, other)
    save_files({"0.safetensors": {"elsewhere.weight:step": torch.ones(())}}, tmp_path / OPTIMIZER)
    with pytest.raises(DamagedCheckpoint, match="of another model, with elsewhere.weight"):
        load_optimizer(parts[1], tmp_path)


def test_an_export_has_every_file_of_the_base_byte_for_byte_but_weights_and_config(tmp_path):
    """transformers writes tokenizer files of its own, which other readers take for another
    tokenizer."""
    base, tokenizers = tmp_path / "base", tmp_path / "tokenizer"
    for folder in (base, tokenizers):
        tiny_model("llama").save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    settings = json.loads((base / "tokenizer_config.json").read_text()) | {
        "tokenizer_class": "LlamaTokenizerFast"
    }
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6}')
    for name in (
        "vocab.json",
        "video_preprocessor_config.json",
        "LICENSE",
        "pytorch_model.bin.index.json",
    ):
        (base / name).write_text(f"{name} of the base")
    (tokenizers / "tokenizer_config.json").write_text(
        json.dumps(settings | {"padding_side": "left"})
    )

    def exported(name: str, **keys: str) -> dict[str, bytes]:
        config = ModelConfig(path=str(base), **keys)
        export_hf(load_policy(config), load_tokenizer(config), tmp_path / name)
        return {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}

    plain = exported("plain")
    kept = {file.name: file.read_bytes() for file in base.iterdir()}
    kept.pop("pytorch_model.bin.index.json")
    assert plain.keys() == kept.keys()
    assert {name for name in kept if plain[name] != kept[name]} <= {
        "config.json",
        "model.safetensors",
    }
    other = exported("other", tokenizer_path=str(tokenizers))
    assert other["tokenizer_config.json"] == (tokenizers / "tokenizer_config.json").read_bytes()
    assert other["LICENSE"] == kept["LICENSE"] and "vocab.json" not in other
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    written = exported("template", custom_chat_template=template)
    assert written["chat_template.jinja"] == template.encode()
