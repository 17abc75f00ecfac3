"""What a tokenizer knows: its ids, the ids that end a turn, and what its chat template writes around messages.

Engines, episodes, learners and data all read it here, so that what ends a turn or may be sampled is decided once. Short
conversations are rendered with marks in place of texts, and what stands between the marks is the frame of a reply. A
template that refuses a role, drops its text or changes it is found so, before a run begins. How prompts become ids is
in ``core/data/encoder.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Message = Mapping[str, Any]
Render = Callable[..., str]  # (messages, **arguments of the template) -> text; raises ChatError
MARK = "mark7c1f52e9"  # letters and digits: no template escapes or trims it
PROBE = 'a "b"\\\n<é>'  # what an answer may hold and a template may escape
WRITTEN: tuple[Callable[[str], str], ...] = (  # how templates write a text: as it is, or as JSON does (Llama 3.1)
    lambda text: text,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
)
UNTIL_ASSISTANT = ({"role": "user", "content": "."}, {"role": "assistant", "content": MARK})
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


# --- the chat template ---


class ChatError(ValueError):
    """The chat template refuses a chat."""


@dataclass(frozen=True)
class Frame:
    """What stands before, between and behind the texts of messages, and how each text is written."""

    pieces: tuple[str, ...]
    written: Callable[[str], str]


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
    _, mark, after = render([*UNTIL_ASSISTANT, *messages], **arguments).partition(MARK)
    if not mark:
        raise ChatError("it drops the text of an assistant's message")
    return after


def reply_frame(render: Render, role: str, count: int = 1) -> Frame:
    """Return what the template writes around ``count`` messages of a role that follow an assistant's message.

    The first piece begins behind the assistant's text, the last one ends with the beginning of the next turn. Raises
    ChatError where the template refuses the role, drops the text, or writes it in a way that is not known.
    """

    def behind(text: str) -> list[str]:
        replies = [{"role": role, "content": text}] * count
        return written_behind(render, *replies, add_generation_prompt=True).split(MARK)

    pieces = behind(MARK)
    if len(pieces) != count + 1:
        raise ChatError(f"it writes {len(pieces) - 1} of the texts of {count} message(s) of role {role!r}")
    probed = behind(MARK + PROBE + MARK)
    for written in WRITTEN:
        if probed[1::2] == [written(PROBE)] * count:
            return Frame(tuple(pieces), written)
    became = "".join(probed[1:2])[:60]
    raise ChatError(f"it changes the text of messages of role {role!r}: {PROBE!r} becomes {became!r}")
