"""Demonstrations as ids: those of the whole conversation, and the turns that are trained on."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from recipes.sft.demonstrations import DemonstrationError, Writer
from tests.core.data.templates import FAMILIES, pair_tokenizer_of
from tests.recipes.sft_data import tokenizer

LLAMA2 = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
SPACED = (  # a question ends with the space that an answer's first token would hold
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}</s>{% "
    "endif %}"
    "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
WORDS = "two plus two is four more again [INST] [/INST] assistant: user: x 4 ="
CHAT = [
    {"role": role, "content": text}
    for role, text in (
        ("user", "two plus two"),
        ("assistant", "four"),
        ("user", "more"),
        ("assistant", "again four"),
    )
]


@functools.cache
def spaced_tokenizer(kind: str) -> Any:
    """Return a tokenizer in the form of Llama 2's (normalizer) or of Mistral's (a scheme)."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    if kind == "normalizer":
        parts = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        backend.normalizer = normalizers.Sequence(parts)
        undone = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(undone)
    else:
        spaces = {"prepend_scheme": kind, "split": False}
        backend.pre_tokenizer = pre_tokenizers.Metaspace(**spaces)
        backend.decoder = decoders.Metaspace(**spaces)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    trainer = trainers.BpeTrainer(
        special_tokens=list(special.values()),
        vocab_size=150,
        initial_alphabet=sorted({*WORDS, "\u2581", "\n"} - {" "}),
        show_progress=False,
    )
    backend.train_from_iterator(WORDS.split() * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def decoded(words: Any, ids: list[int]) -> str:
    return "".join(words.convert_ids_to_tokens(ids)).replace("\u2581", " ")


@pytest.mark.parametrize("kind", ["normalizer", "first", "always", "never"])
def test_a_chat_has_the_ids_of_the_whole_under_tokenizers_with_a_leading_space(kind):
    words = spaced_tokenizer(kind)
    words.chat_template = LLAMA2
    one = Writer(words, {}, {words.eos_token_id}).chat(CHAT)
    whole = words.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert words.convert_ids_to_tokens(one.ids.tolist()) == words.convert_ids_to_tokens(whole)
    assert decoded(words, one.ids[one.mask].tolist()) == " four</s> again four</s>"


@pytest.mark.parametrize("kind", ["normalizer", "first", "always", "never"])
def test_an_answer_behind_a_space_has_no_second_one(kind):
    words = spaced_tokenizer(kind)
    words.chat_template = SPACED
    one = Writer(words, {}, {words.eos_token_id}).chat(CHAT)
    assert decoded(words, one.ids[one.mask].tolist()) == "four</s>again four</s>"
    plain = Writer(words, {}, {words.eos_token_id}).answer("two plus two =", "4")
    assert decoded(words, plain.ids[plain.mask].tolist()) == "4</s>"


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
def test_a_chat_has_the_ids_of_the_chat_template(name):
    words = pair_tokenizer_of(name)
    chat = [{**message, "content": f"{message['content']}.\n"} for message in CHAT]
    ends = {words.convert_tokens_to_ids(end) for end in FAMILIES[name].ends}
    one = Writer(words, {}, ends).chat(chat)
    whole = words.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert words.convert_ids_to_tokens(one.ids.tolist()) == words.convert_ids_to_tokens(whole)


def test_an_answer_that_begins_with_a_line_break_is_apart_from_the_prompt_of_a_rollout():
    words = pair_tokenizer_of("chatml")
    one = Writer(words, {}, {words.eos_token_id}).chat([CHAT[0], {**CHAT[1], "content": "\nfour"}])
    asked = words.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    assert one.ids[: len(asked)].tolist() == asked and not one.mask[: len(asked)].any()
    assert words.decode(one.ids[one.mask]) == "\nfour<|im_end|>"


def trained(*weights: dict[str, Any]) -> str:
    words = tokenizer()
    chat = [{**message, **more} for message, more in zip(CHAT, weights, strict=True)]
    one = Writer(words, {}, {words.eos_token_id}).chat(chat)
    return words.decode(one.ids[one.mask])


@pytest.mark.parametrize("key", ["weight", "loss_mask", "loss", "train"])
def test_a_turn_whose_weight_is_0_is_read_and_not_trained_on(key):
    assert trained({}, {key: 0}, {}, {}) == "again four<eos>"
    assert trained({key: 0}, {key: 1}, {key: 0}, {key: 0.0}) == "four<eos>"
    assert trained({}, {key: True}, {}, {key: None}) == "four<eos>again four<eos>"
    assert trained({}, {key: False}, {}, {key: 0}) == ""
    with pytest.raises(DemonstrationError, match=f"{key} of a message is 0.5"):
        trained({}, {key: 0.5}, {}, {})
    with pytest.raises(DemonstrationError, match=f"{key} of a message of role user is 1"):
        trained({key: 1}, {}, {}, {})
