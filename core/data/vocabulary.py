"""What a tokenizer knows: its ids, the ids that end a turn, and the text that it can take.

Engines, episodes, learners and data all read it here, so that what ends a turn or may be sampled is decided once. How
a chat is rendered is ``core/data/encoder.py``'s, what stands around an answer ``core/data/chat_frames.py``'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from core.data.chat_frames import MARK, ChatError, template_of, written_behind

# No tokenizer takes half a surrogate pair and no file holds one; a NUL ends the text in what reads C strings.
UNWRITABLE = re.compile("[\ud800-\udfff\x00]")
REPLACEMENT = "\ufffd"


def writable(text: str) -> str:
    """Return the text with the replacement character for each half of a surrogate pair and each NUL."""
    return UNWRITABLE.sub(REPLACEMENT, text)


def known_ids(tokenizer: Any) -> np.ndarray | None:
    """Return whether the tokenizer knows each id, [largest + 1] bool; None without a tokenizer.

    An embedding is often padded to a round size: a model then has ids that stand for no text.
    """
    if not hasattr(tokenizer, "get_vocab"):
        return None
    ids = np.fromiter(tokenizer.get_vocab().values(), np.int64)
    known = np.zeros(ids.max(initial=-1) + 1, np.bool_)
    known[ids] = True
    return known


def unknown_among(known: np.ndarray | None, size: int) -> np.ndarray:
    """Return the ids below ``size`` that are not ``known`` (of :func:`known_ids`), [unknown] int64."""
    if known is None:
        return np.zeros(0, np.int64)
    unknown = np.ones(size, np.bool_)
    unknown[: len(known)] = ~known[:size]
    return np.flatnonzero(unknown)


def count_unknown(known: np.ndarray | None, ids: np.ndarray) -> int:
    """Count the ids that the tokenizer does not know."""
    if known is None or not len(ids):
        return 0
    return int((~np.append(known, False)[np.minimum(ids, len(known))]).sum())


def end_ids(tokenizer: Any, generation: Any = None) -> frozenset[int]:
    """Return the ids that end a turn: the tokenizer's end of sequence, those of the model's generation config
    (``generation``, which may have several), and what the chat template writes behind an assistant's message.
    """
    named = (getattr(tokenizer, "eos_token_id", None), getattr(generation, "eos_token_id", None))
    lists = [ids if isinstance(ids, (list, tuple)) else [ids] for ids in named]
    return frozenset(int(i) for ids in [*lists, template_ends(tokenizer).values()] for i in ids if i is not None)


def template_ends(tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Return the tokens, with their ids, by which the chat template ends an assistant's message.

    The token behind a last message is one (``<end_of_turn>``). Where another one follows a message that is not the
    last (gpt-oss: ``<|end|>``, and ``<|return|>`` at the end), it is one too, unless it differs by who speaks next:
    then it begins the next message, as GLM's ``<|user|>`` does.
    """
    kwargs = {**(template_kwargs or {}), "add_generation_prompt": False}
    if not (kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None)):
        return {}
    tokens, render = whole_tokens(tokenizer), template_of(tokenizer, kwargs)
    try:
        ends = {first_token(written_behind(render), tokens)} - {None}
    except ChatError:
        return {}  # a template without assistant messages: reported where one is needed
    between = []
    for role in ("user", "assistant", "tool") if ends else ():
        try:
            between.append(first_token(written_behind(render, {"role": role, "content": "."}), tokens))
        except ChatError:  # many templates refuse two assistants in a row, or tools
            continue
    if len(between) > 1 and len(set(between)) == 1:
        asked = [{"role": "user", "content": MARK}]
        begins = render(asked, add_generation_prompt=True).removeprefix(render(asked))
        ends |= set(between) - {None, first_token(begins, tokens)}
    return {token: tokens[token] for token in sorted(ends)}


def whole_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the tokens that no text is split into: special and added ones."""
    added = {str(token): number for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    return {token: number for token, number in added.items() if token.strip()}


def first_token(text: str, tokens: Mapping[str, int]) -> str | None:
    """Return the token that a text begins with, whitespace aside."""
    text = text.lstrip()
    return max((token for token in tokens if text.startswith(token)), key=len, default=None)
