"""What a tokenizer knows: its ids, the ids that end a turn, and what its chat template writes around messages.

Engines, episodes, learners and data all read it here, so that what ends a turn or may be sampled is decided once. A
short conversation is rendered with marks in place of texts: what stands between the marks is the frame of a reply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Message = Mapping[str, Any]
Render = Callable[..., str]  # (messages, **arguments of the template) -> text; raises ChatError
MARK = "mark7c1f52e9"  # letters and digits: no template escapes or trims it
REPLACEMENT = "\ufffd"


def writable(text: str) -> str:
    """Return the text with the replacement character for each half of a surrogate pair and each NUL.

    No tokenizer takes half a pair and no file holds one; a NUL ends the text in what reads C strings.
    """
    return re.sub("[\ud800-\udfff\x00]", REPLACEMENT, text)


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


def end_ids(tokenizer: Any, generation: Any = None) -> frozenset[int]:
    """Return the ids that end a turn: the tokenizer's end of sequence, those of the model's generation config
    (``generation``, which may have several), and what the chat template writes behind an assistant's message.
    """
    named = (getattr(tokenizer, "eos_token_id", None), getattr(generation, "eos_token_id", None))
    lists = [ids if isinstance(ids, (list, tuple)) else [ids] for ids in named]
    return frozenset(int(i) for ids in [*lists, template_ends(tokenizer).values()] for i in ids if i is not None)


def template_ends(tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Return the token, with its id, by which the chat template ends a last message of the assistant; {} without."""
    kwargs = {**(template_kwargs or {}), "add_generation_prompt": False}
    if not has_template(tokenizer, kwargs):
        return {}
    tokens = whole_tokens(tokenizer)
    try:
        end = first_token(written_behind(template_of(tokenizer, kwargs)), tokens)
    except ChatError:
        return {}  # a template without assistant messages: reported where one is needed
    return {} if end is None else {end: tokens[end]}


def has_template(tokenizer: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer, or the template's arguments, have a chat template."""
    return bool(kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None))


def whole_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the tokens that no text is split into: special and added ones."""
    added = {str(token): number for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    return {token: number for token, number in added.items() if token.strip()}


def first_token(text: str, tokens: Mapping[str, int]) -> str | None:
    """Return the token that a text begins with, whitespace aside."""
    text = text.lstrip()
    return max((token for token in tokens if text.startswith(token)), key=len, default=None)


class ChatError(ValueError):
    """The chat template refuses a chat."""


def template_of(tokenizer: Any, kwargs: Mapping[str, Any]) -> Render:
    """Return the rendering of a tokenizer's chat template with these arguments."""

    def render(messages: Sequence[Message], **arguments: Any) -> str:
        chat, options = [dict(message) for message in messages], {**kwargs, **arguments}
        try:
            return tokenizer.apply_chat_template(chat, tokenize=False, **options)
        except Exception as error:  # a template is a program: it raises what it does (an index, a type, its own)
            raise ChatError(" ".join(str(error).split())[:300] or type(error).__name__) from error

    return render


def written_behind(render: Render, *messages: Message, **arguments: Any) -> str:
    """Return what the template writes behind an assistant's text that these messages follow. Raises ChatError."""
    until_assistant = ({"role": "user", "content": "."}, {"role": "assistant", "content": MARK})
    _, mark, after = render([*until_assistant, *messages], **arguments).partition(MARK)
    if not mark:
        raise ChatError("it drops the text of an assistant's message")
    return after


def reply_frame(render: Render, role: str, count: int = 1) -> tuple[str, ...]:
    """Return what the template writes before, between and behind ``count`` messages of a role after the assistant's.

    The first piece begins behind the assistant's text, the last one ends with the beginning of the next turn. Raises
    ChatError where the template refuses the role or drops the text.
    """
    replies = [{"role": role, "content": MARK}] * count
    pieces = written_behind(render, *replies, add_generation_prompt=True).split(MARK)
    if len(pieces) != count + 1:
        raise ChatError(f"it writes {len(pieces) - 1} of the texts of {count} message(s) of role {role!r}")
    return tuple(pieces)
