"""A tokenizer and models small enough for unit tests, built in code: ``from tests.tiny import
tiny_model``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

SPECIALS = ("<pad>", "<eos>", "<unk>", "<bos>")
CHARACTERS = tuple(chr(code) for code in range(32, 127)) + ("\n",)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<bos>' + m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant: ' }}{% endif %}"
)
VOCAB_SIZE = len(SPECIALS) + len(CHARACTERS)  # 100


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character (printable ASCII and the newline), decoded without loss; pad 0, eos 1,
    unk 2, bos 3.

    No token is added by ``encode``; the chat template writes ``<bos>role: content`` and a newline
    per message.
    """
    vocab = {token: index for index, token in enumerate(SPECIALS + CHARACTERS)}
    backend = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        bos_token="<bos>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(arch: str = "qwen2", **overrides: Any) -> Any:
    """Hidden 32, 2 layers, 4 heads (2 of keys and values), vocabulary 100. ``arch``: qwen2, qwen3,
    llama or gpt2."""
    shape = dict(
        vocab_size=VOCAB_SIZE, bos_token_id=3, eos_token_id=1, pad_token_id=0, initializer_range=0.2
    )
    if arch == "gpt2":
        return GPT2Config(
            **{**shape, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, **overrides}
        )
    shape |= dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False)
    shape |= {"head_dim": 8} if arch == "qwen3" else {}
    return {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}[arch](
        **{**shape, **overrides}
    )


def tiny_model(arch: str = "qwen2", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random causal LM in fp32 and eval mode; equal seeds give equal weights, the global RNG is
    left alone.

    The weights are wide enough (std 0.2) for the next-token distribution to differ clearly from
    uniform.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            tiny_config(arch, **overrides), dtype=torch.float32
        )
    return model.eval()


def command_words(settings: Mapping[str, Any], overrides: Iterable[str] = ()) -> list[str]:
    """Return ``key=value`` of settings and what is typed over them; a key with two values would be
    refused."""
    words = [*(f"{key}={value}" for key, value in settings.items()), *overrides]
    return list({word.partition("=")[0].lstrip("+"): word for word in words}.values())
