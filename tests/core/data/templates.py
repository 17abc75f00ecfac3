"""Chat templates in the form of public models', each with its end of a sequence and the tokens that
it writes whole.

They are written anew, as short as they can be with the same frames, roles and refusals.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_tokenizer

QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% "
    "endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must "
    "alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim "
    "}}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
GLM4 = (
    "[gMASK]{% for m in messages %}"
    "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}<|{{ m.role }}|>\n{{ "
    "m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MISTRAL = (
    "<bos>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}{% else %}{{ "
    "raise_exception('Only user!') }}"
    "{% endif %}{% endfor %}"
)
GPT_OSS = (
    "<|start|>system<|message|>You are.<|end|>{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('a tool message follows a call') }}"
    "{% elif m.role == 'assistant' and loop.last and not add_generation_prompt %}"
    "<|start|>assistant<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
LLAMA3 = (  # answers of tools as JSON text, other texts trimmed
    "<bos>{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ (m.content | tojson) + '<|eot_id|>' }}"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ (m.content | trim) + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}\n<|im_start|>{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)


class Family(NamedTuple):
    """A template with its ``eos`` and the other tokens that it writes whole; ``ends`` are those
    that end a turn."""

    template: str
    eos: str
    tokens: tuple[str, ...]
    ends: frozenset[str]


def family(template: str, eos: str, tokens: str, ends: str) -> Family:
    return Family(template, eos, tuple(tokens.split()), frozenset(ends.split()))


FAMILIES = {
    "chatml": family(
        CHATML, "<|im_end|>", "<|im_start|> <tool_response> </tool_response>", "<|im_end|>"
    ),
    "base with chatml": family(CHATML, "<|endoftext|>", "<|im_start|> <|im_end|>", "<|im_end|>"),
    "gemma": family(GEMMA, "<eos>", "<start_of_turn> <end_of_turn>", "<end_of_turn>"),
    "phi3": family(PHI3, "<|endoftext|>", "<|end|> <|user|> <|assistant|> <|system|>", "<|end|>"),
    "glm4": family(GLM4, "<|endoftext|>", "[gMASK] <|user|> <|assistant|> <|observation|>", ""),
    "mistral": family(MISTRAL, "</s>", "[INST] [/INST] [TOOL_RESULTS] [/TOOL_RESULTS]", "</s>"),
    "gpt-oss": family(GPT_OSS, "<|return|>", "<|start|> <|message|> <|end|>", "<|return|>"),
    "llama3": family(LLAMA3, "<|eot_id|>", "<|start_header_id|> <|end_header_id|>", "<|eot_id|>"),
    "plain": family(PLAIN, "<eos>", "<|im_start|>", ""),
}


def tokenizer_of(name: str) -> Any:
    """Return the tiny tokenizer with a family's template and tokens."""
    return _with_family(tiny_tokenizer(), name)


def pair_tokenizer_of(name: str) -> Any:
    """Return a family's tokenizer whose tokens reach over a text's end, as those of Qwen do.

    Punctuation and the line breaks behind it are one token, and so are two line breaks.
    """
    joined = [*(mark + "Ċ" for mark in '.}"])>'), "ĊĊ", "ĠĠ"]
    alphabet = sorted(ByteLevel.alphabet())
    tokens = ["<pad>", "<unk>", "<bos>", *alphabet, *joined]
    vocab = {token: place for place, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab, [tuple(pair) for pair in joined]))
    backend.pre_tokenizer = Sequence(
        [Split(Regex(QWEN_WORDS), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>")
    return _with_family(made, name)


def _with_family(made: Any, name: str) -> Any:
    one = FAMILIES[name]
    made.chat_template = one.template
    made.add_special_tokens({"eos_token": one.eos, "additional_special_tokens": list(one.tokens)})
    return made
