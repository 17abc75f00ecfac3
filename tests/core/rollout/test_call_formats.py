"""Frames of replies, by templates in the form of public models'."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from core.data.chat_frames import ChatError, template_of
from core.rollout.call_formats import Chat
from core.types import Stop
from tests.core.data.templates import tokenizer_of
from tests.core.data.test_chat_frames import CHAT


def text_behind(name, role, last, texts=("REPLY",), stop=Stop.EOS):
    words = tokenizer_of(name)
    episode = SimpleNamespace(last_token=words.convert_tokens_to_ids(last), stop=stop)
    return last + "".join(text for text, _ in Chat(words, {}).messages(role, list(texts), episode))


@pytest.mark.parametrize(
    ("name", "role", "last", "expected"),
    [
        (
            "gemma",
            "user",
            "<end_of_turn>",
            "<end_of_turn>\n<start_of_turn>user\nREPLY<end_of_turn>\n<start_of_turn>model\n",
        ),
        ("gemma", "user", "<eos>", "<eos>\n<start_of_turn>user\nREPLY<end_of_turn>\n<start_of_turn>model\n"),
        ("phi3", "user", "<|end|>", "<|end|>\n<|user|>\nREPLY<|end|>\n<|assistant|>\n"),
        ("phi3", "user", "<|endoftext|>", "<|endoftext|>\n<|user|>\nREPLY<|end|>\n<|assistant|>\n"),
        ("glm4", "user", "<|user|>", "<|user|>\nREPLY<|assistant|>\n"),
        ("glm4", "tool", "<|observation|>", "<|observation|>\nREPLY<|assistant|>\n"),
        ("glm4", "tool", "<|endoftext|>", "<|endoftext|><|observation|>\nREPLY<|assistant|>\n"),
        ("mistral", "user", "</s>", "</s>[INST] REPLY [/INST]"),
        ("gpt-oss", "user", "<|return|>", "<|return|><|start|>user<|message|>REPLY<|end|><|start|>assistant"),
        ("gpt-oss", "user", "<|end|>", "<|end|><|start|>user<|message|>REPLY<|end|><|start|>assistant"),
        (
            "base with chatml",
            "user",
            "<|endoftext|>",
            "<|endoftext|>\n<|im_start|>user\nREPLY<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_the_end_of_a_turn_is_written_once(name, role, last, expected):
    assert text_behind(name, role, last) == expected


def test_a_turn_that_was_cut_gets_its_end():
    expected = "x<|im_end|>\n<|im_start|>user\nREPLY<|im_end|>\n<|im_start|>assistant\n"
    assert text_behind("chatml", "user", "x", stop=Stop.STOP_STRING) == expected


def test_replies_of_several_calls_stand_in_one_frame():
    framed = text_behind("chatml", "tool", "<|im_end|>", ("A", "B"))
    answers = "\n<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response>"
    assert framed == f"<|im_end|>\n<|im_start|>user{answers}<|im_end|>\n<|im_start|>assistant\n"


def test_a_text_is_written_as_the_template_would_write_it():
    """Llama 3.1 writes a tool's answer as JSON."""
    words, said = tokenizer_of("llama3"), 'a "b"\n<é>'
    whole = template_of(words, {})([CHAT, {"role": "assistant", "content": "x"}, {"role": "tool", "content": said}])
    assert whole.endswith(
        text_behind("llama3", "tool", "<|eot_id|>", (said,)).partition("<|start_header_id|>assistant")[0]
    )
    assert '\\n<é>"<|eot_id|>' in text_behind("llama3", "tool", "<|eot_id|>", (said,))


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("{% if m.role == 'tool' %}{{ raise_exception('no tools!') }}{% endif %}{{ m.content }}", "no tools!"),
        ("{{ m.content if m.role != 'tool' }}", "writes 0 of the texts of 1 message"),
        ("{{ m.content }}{{ m.content if m.role == 'tool' }}", "writes 2 of the texts"),
        ("{{ m.content | e if m.role == 'tool' else m.content }}", "it changes the text"),
        ("{{ m.content[:20] }}", "it changes the text"),
        ("{{ m.content if loop.first }}", "drops the text of an assistant's message"),
        ("{{ m.content.x.y }}", "has no attribute"),
    ],
)
def test_a_template_without_use_for_a_tool_s_turn_is_refused_with_the_reason(written, reason):
    words = tokenizer_of("plain")
    words.chat_template = f"{{% for m in messages %}}{written}{{% endfor %}}"
    with pytest.raises(ChatError, match=reason):
        Chat(words, {}).frame("tool", 1)
