"""A tokenizer with one token a character, for the lab tasks.

It is a ``Qwen2Tokenizer`` with a tiny vocabulary and no merges: transformers loads the tokenizer
class that belongs to the model's architecture, whatever class a folder's files were saved by.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

PAD = "<pad>"
EOS = "<eos>"
SPACE = "Ġ"  # how a byte-level vocabulary spells a space
ALPHABET = (*string.ascii_lowercase, *string.digits, SPACE, "=", "#")


def build_tokenizer(
    alphabet: Sequence[str] = ALPHABET, words: Sequence[str] = ()
) -> Qwen2Tokenizer:
    """Every character of ``alphabet`` and every one of ``words`` is a token, any other character is
    dropped.

    Neither bos nor eos is added to a prompt.
    """
    from transformers import Qwen2Tokenizer

    vocab = {token: index for index, token in enumerate((PAD, EOS, *alphabet, *words))}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=[], pad_token=PAD, eos_token=EOS, unk_token=None, bos_token=None
    )
    if words:
        tokenizer.add_tokens(list(words))
    return tokenizer
