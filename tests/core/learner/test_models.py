"""Tokenizers and models are those of their files, whatever class transformers takes for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from core.config.training_keys import ModelConfig
from core.learner.models import load_tokenizer
from tests.tiny import tiny_model, tiny_tokenizer

TEXT = "Tom has 12 apples\nand buys 345 more.  Why?\n\nIt's DON'T\tcafé naïve 你好 Привет 🙂\n    x = 1\n"
SETTINGS = {"eos_token": "<|end|>", "pad_token": "<|end|>", "chat_template": "{{ messages[0].content }}"}


def byte_level() -> Tokenizer:
    """A byte-level tokenizer that splits digits, as DeepSeek's do under the class of Llama's tokenizer."""
    tokenizer = Tokenizer(BPE())
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_alone])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<|end|>", "<s>"], "initial_alphabet": alphabet, "show_progress": False}
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
    "name", ["LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast", None]
)
def test_a_tokenizer_is_the_file_of_the_model_and_not_what_its_class_would_build(arch, name, tmp_path, caplog):
    """Spaces and newlines were lost under Llama's class, digits were split otherwise under Qwen2's."""
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
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizer"}))
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert tokenizer("a b\n1")["input_ids"] == tiny_tokenizer()("a b\n1")["input_ids"]
