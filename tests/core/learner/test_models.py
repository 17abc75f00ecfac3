"""Tokenizers and models are those of their files, whatever class transformers takes for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from core.config.schema import Config
from core.config.training_keys import ModelConfig
from core.errors import InputError
from core.learner.batching import MicroBatchSize
from core.learner.models import (
    config_changes,
    load_critic,
    load_policy,
    load_tokenizer,
    positions,
    same_positions,
)
from core.learner.passes import Policy
from core.learner.saving import export_hf
from core.types import TrainBatch
from tests.tiny import tiny_model, tiny_tokenizer

TEXT = (
    "Tom has 12 apples\nand buys 345 more.  Why?\n\nIt's DON'T\tcafé naïve 你好 Привет 🙂\n    x "
    "= 1\n"
)
SETTINGS = {
    "eos_token": "<|end|>",
    "pad_token": "<|end|>",
    "chat_template": "{{ messages[0].content }}",
}


def byte_level() -> Tokenizer:
    """A byte-level tokenizer that splits digits, as DeepSeek's do under the class of Llama's
    tokenizer."""
    tokenizer = Tokenizer(BPE())
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), bytes_alone]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {
        "special_tokens": ["<|end|>", "<s>"],
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    tokenizer.train_from_iterator([TEXT] * 4, trainers.BpeTrainer(vocab_size=400, **options))
    return tokenizer


def model_folder(folder: Path, arch: str, tokenizer_class: str | None) -> Path:
    tiny_model(arch, vocab_size=400).save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    settings = SETTINGS | ({"tokenizer_class": tokenizer_class} if tokenizer_class else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("arch", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize(
    "name",
    ["LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast", None],
)
def test_a_tokenizer_is_the_file_of_the_model_and_not_what_its_class_would_build(
    arch, name, tmp_path, caplog
):
    """Spaces and newlines were lost under Llama's class, digits were split otherwise under
    Qwen2's."""
    tokenizer = load_tokenizer(ModelConfig(path=str(model_folder(tmp_path, arch, name))))
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert ids == byte_level().encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == TEXT
    assert len(tokenizer) == byte_level().get_vocab_size(), "ids that the model lacks"
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("<|end|>", SETTINGS["chat_template"])
    if name == "LlamaTokenizerFast" and arch != "qwen2":
        assert tokenizer.bos_token == "<s>", "the class's own, since the settings name none"
        assert str(tmp_path) in caplog.text and "tokenizer.json is taken" in caplog.text


def test_a_tokenizer_whose_class_cannot_be_built_of_its_vocabulary_is_read_from_its_file(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizer"})
    )
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert tokenizer("a b\n1")["input_ids"] == tiny_tokenizer()("a b\n1")["input_ids"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("qwen2").save_pretrained(folder)
    return folder


def loaded(base: Path, **changes: Any) -> Any:
    config = Config().actor_rollout_ref.model.replace(path=str(base), override_config=changes)
    return load_policy(config)


def with_config(base: Path, folder: Path, dropped: tuple[str, ...] = (), **changes: Any) -> Path:
    """A copy of the base whose config.json holds the changes itself."""
    shutil.copytree(base, folder)
    fields = json.loads((base / "config.json").read_text()) | changes
    kept = {name: value for name, value in fields.items() if name not in dropped}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
THETA = {"rope_theta": 10000.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("override", "dropped", "written"),
    [
        (WINDOW, ("layer_types",), WINDOW),
        (
            {"rope_scaling": {"rope_type": "yarn", **YARN}},
            (),
            {"rope_parameters": {"rope_type": "yarn", **YARN, **THETA}},
        ),
        (
            {"rope_scaling": {"type": "yarn", **YARN}},
            (),
            {"rope_parameters": {"rope_type": "yarn", **YARN, **THETA}},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", **YARN}},
            (),
            {"rope_parameters": {"rope_type": "yarn", **YARN, **THETA}},
        ),
        (
            {"rope_theta": 100.0},
            (),
            {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        ),
        ({"num_hidden_layers": 1}, ("layer_types",), {"num_hidden_layers": 1}),
    ],
)
def test_an_override_is_what_config_json_would_make_of_it_in_the_learner_and_for_vllm(
    base, tmp_path, override, dropped, written
):
    """A window had no effect: the layers' types had been derived before. Mappings of YAML ended the
    run."""
    ids = torch.arange(30)[None]
    model = loaded(base, **override)
    expected = loaded(with_config(base, tmp_path / "written", dropped, **written))
    assert torch.equal(model(ids).logits, expected(ids).logits)
    assert not torch.equal(model(ids).logits, loaded(base)(ids).logits)
    changes = config_changes(ModelConfig(path=str(base), override_config=override))
    assert (
        type(model.config).from_dict(loaded(base).config.to_dict() | changes).to_dict()
        == model.config.to_dict()
    )


@pytest.mark.parametrize(
    "override",
    [
        {"no_such": 1},
        {"sliding_window": 4},
        {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2},
    ],
)
def test_an_override_without_effect_is_refused(base, override):
    with pytest.raises(
        InputError, match=r"^actor_rollout_ref\.model\.override_config\.(no_such|sliding_window)"
    ):
        loaded(base, **override)


def dynamic_model(kind: str) -> Any:
    rope = {"rope_type": kind, "factor": 4.0, **THETA}
    if kind == "longrope":
        rope |= {
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 16,
        }
    return tiny_model(
        "llama", max_position_embeddings=16 if kind == "dynamic" else 256, rope_parameters=rope
    )


def sequences(*lengths: int) -> TrainBatch:
    total = sum(lengths)
    mask = torch.cat([torch.arange(length) > 2 for length in lengths])
    batch = TrainBatch(torch.tensor(lengths))
    return batch.adding(
        input_ids=torch.arange(total, dtype=torch.int32) % 90,
        response_mask=mask,
        group=torch.arange(len(lengths)),
    )


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_sequence_that_would_change_the_positions_of_others_is_refused(kind):
    """Log-probs of a short sequence moved by up to 0.9 when a longer one shared its micro-batch."""
    model = dynamic_model(kind)
    policy = Policy(model, temperature=1.0)
    alone = policy.log_probs(sequences(8), MicroBatchSize(max_sequences=1))[0]
    beside = policy.log_probs(sequences(8, 16), MicroBatchSize(max_tokens=64))[0]
    assert torch.allclose(alone, beside[:8], atol=1e-5)
    with pytest.raises(InputError, match="a sequence has 17 tokens"):
        policy.log_probs(sequences(8, 17), MicroBatchSize(max_sequences=1))
    assert positions(model.config) == 16, "engines refuse it too, and vLLM takes the short factors"


def test_positions_that_do_not_depend_on_length_have_no_such_bound():
    rope = {"rope_type": "yarn", **YARN, **THETA}
    model = tiny_model("llama", rope_parameters=rope)
    assert same_positions(model.config) is None and positions(model.config) == 256
    short, both = (
        Policy(model, temperature=1.0).log_probs(
            sequences(*lengths), MicroBatchSize(max_tokens=64)
        )[0]
        for lengths in ((8,), (8, 30))
    )
    assert torch.allclose(short, both[:8], atol=1e-5)


@pytest.mark.parametrize(
    "override", [{"num_hidden_layers": "x"}, {"rope_scaling": {"rope_type": "yarn"}}]
)
def test_an_override_that_the_model_refuses_is_one_line(base, override):
    with pytest.raises(
        InputError,
        match=r"^actor_rollout_ref\.model\.override_config=.* refuses "
        r"it",
    ):
        loaded(base, **override)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"rope_scaling": {"rope_type": "yarrn", "factor": 2.0}}, "can be built with it"),
        ({"intermediate_size": 100}, "in the files, and config.json makes it"),
        ({"num_hidden_layers": 4}, "the files lack"),
        ({"model_type": "llama"}, "model_type=llama: is the kind of model"),
        ({"architectures": ["X"]}, "is the kind of model"),
    ],
)
def test_an_override_that_the_weights_do_not_bear_is_refused(base, override, said):
    with pytest.raises(InputError, match=rf"override_config[.=].*{said}|{said}.*override_config="):
        loaded(base, **override)


def test_weights_that_the_files_lack_are_not_drawn_at_random(base, tmp_path):
    for name, change in (
        ("lacks", lambda weights: {k: v for k, v in weights.items() if "1.mlp.down" not in k}),
        ("ddp", lambda weights: {f"module.{k}": v for k, v in weights.items()}),
    ):
        shutil.copytree(base, tmp_path / name)
        weights = load_file(base / "model.safetensors")
        save_file(change(weights), tmp_path / name / "model.safetensors", {"format": "pt"})
        with pytest.raises(InputError, match=rf"model\.path=.*{name}: the files lack \d+ weights"):
            loaded(tmp_path / name)
    load_critic(ModelConfig(path=str(base)), seed=1)  # its head is new
    with pytest.raises(InputError, match="the files lack 1 weights"):
        load_critic(ModelConfig(path=str(tmp_path / "lacks")), seed=1)


SHAPE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
NOISY = {
    "opt": {
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "layerdrop": 0.5,
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
    },
    "biogpt": {
        "hidden_dropout_prob": 0.2,
        "attention_probs_dropout_prob": 0.2,
        "activation_dropout": 0.2,
        "layerdrop": 0.5,
    },
    "mixtral": {"router_jitter_noise": 0.5, "num_local_experts": 4, "num_key_value_heads": 2},
    "seed_oss": {"residual_dropout": 0.5, "attention_dropout": 0.5, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("kind", NOISY)
def test_nothing_random_is_left_in_training_and_an_export_has_the_base_s_settings(kind, tmp_path):
    config = CONFIG_MAPPING[kind](
        **SHAPE, max_position_embeddings=64, pad_token_id=0, **NOISY[kind]
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    model = loaded(tmp_path / "base")
    ids = torch.arange(4, 24)[None]
    assert model.training and torch.equal(
        model(ids, use_cache=False).logits, model(ids, use_cache=False).logits
    )
    export_hf(model, None, tmp_path / "out")
    kept = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: kept[name] for name in NOISY[kind]} == NOISY[kind]
    assert torch.equal(model(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("cap", [30.0, 500.0, None])
def test_a_soft_cap_is_refused_while_logits_are_still_small(cap):
    """Trained logits grow into the cap, which the chunked head does not compute."""
    config = CONFIG_MAPPING["gemma2"](
        **SHAPE,
        num_key_value_heads=2,
        head_dim=8,
        attn_logit_softcapping=None,
        final_logit_softcapping=cap,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if cap is None:
        Policy(model, temperature=1.0)
        return
    with pytest.raises(InputError, match="changes its logits after the head"):
        Policy(model, temperature=1.0)
