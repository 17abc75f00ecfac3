"""What a tokenizer knows: its ids, the ids that end a turn, and what its chat template writes
around messages.

Engines, episodes, learners and data all read it here, so that what ends a turn or may be sampled is
decided once. A short conversation is rendered with marks in place of texts: what stands between the
marks is the frame of a reply.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

import numpy as np

from core.errors import InputError

Message = Mapping[str, Any]
Render = Callable[..., str]  # (messages, **arguments of the template) -> text; raises ChatError
MARK = "mark7c1f52e9"  # letters and digits: no template escapes or trims it
Write = Callable[[Sequence[str]], str]  # texts of messages -> what the template makes of them
REPLACEMENT = "\ufffd"


def writable(text: str) -> str:
    """Return the text with the replacement character for half surrogate pairs and NULs.

    No tokenizer takes half a pair and no file holds one; a NUL ends the text in what reads C
    strings.
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


def check_same_ids(tokenizer: Any, other: Any, where: str) -> None:
    """Raise InputError if the ids of the policy's tokenizer mean other tokens to another model."""
    ours, theirs = (_shown_vocabulary(each) for each in (tokenizer, other))
    if ours != theirs:
        raise InputError(
            f"{where}: its tokenizer has {theirs}, the policy's {ours}; take a model with the "
            f"policy's tokenizer"
        )


def _shown_vocabulary(tokenizer: Any) -> str:
    """Return how many tokens there are, and a hash of token -> id."""
    pairs = sorted(tokenizer.get_vocab().items())
    return f"{len(pairs)} tokens (SHA-256 {hashlib.sha256(repr(pairs).encode()).hexdigest()[:12]})"


def unknown_among(known: np.ndarray | None, size: int) -> np.ndarray:
    """Return the ids below ``size`` that :func:`known_ids` does not know, [unknown] int64."""
    if known is None:
        return np.zeros(0, np.int64)
    unknown = np.ones(size, np.bool_)
    unknown[: len(known)] = ~known[:size]
    return np.flatnonzero(unknown)


def end_ids(tokenizer: Any, generation: Any = None) -> frozenset[int]:
    """Return the ids that end a turn.

    They are the tokenizer's end of sequence, those of the model's ``generation`` config, and what
    the chat template writes behind an assistant's message.
    """
    ids = list(template_ends(tokenizer).values())
    for source in (tokenizer, generation):
        eos = getattr(source, "eos_token_id", None)
        ids += eos if isinstance(eos, list | tuple) else [eos]
    return frozenset(int(token_id) for token_id in ids if token_id is not None)


def template_ends(
    tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None
) -> dict[str, int]:
    """Return token -> id of what ends an assistant's last message in the chat template, or {}."""
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
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): number for number, token in added.items() if str(token).strip()}


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the tokens, with their ids, that decoding an answer leaves out of its text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): number for number, token in added.items() if token.special}


def first_token(text: str, tokens: Mapping[str, int]) -> str | None:
    """Return the token that a text begins with, whitespace aside."""
    text = text.lstrip()
    return max((token for token in tokens if text.startswith(token)), key=len, default=None)


class ChatError(ValueError):
    """The chat template refuses a chat."""


def template_arguments(data: Any) -> dict[str, Any]:
    """Return what a ``data`` section gives to the chat template, its clock included."""
    return {**data.apply_chat_template_kwargs, **clock_arguments(data.chat_template_date)}


def clock_arguments(day: str | None) -> dict[str, Any]:
    """Return the argument that makes a chat template write this date; none without a date."""
    return {} if day is None else {"strftime_now": date.fromisoformat(day).strftime}


def policy_template(data: Any, tokenizer: Any) -> Any:
    """Return the policy's chat template: that of the ``data`` section, else the tokenizer's."""
    template = data.apply_chat_template_kwargs.get("chat_template")
    return template or getattr(tokenizer, "chat_template", None)


def with_template_date(config: Any, template: Any, recorded: str | None) -> Any:
    """Return the configuration with the date that a chat template writes, if it writes one.

    It is the configured date, else the ``recorded`` one of an earlier start, else today's. With the
    clock of the machine the prompt of an ordinal would be another one tomorrow.
    """
    if config.data.chat_template_date is not None or "strftime_now" not in str(template):
        return config
    day = recorded or date.today().isoformat()
    return config.replace(data=config.data.replace(chat_template_date=day))


def template_of(tokenizer: Any, kwargs: Mapping[str, Any]) -> Render:
    """Return the rendering of a tokenizer's chat template with these arguments."""

    def render(messages: Sequence[Message], **arguments: Any) -> str:
        chat = [dict(message) for message in messages]
        # Some templates take arguments only as the text that the data has.
        chats = [with_read_arguments(chat), chat]
        failures = []
        for calls in chats if chats[0] != chat else [chat]:
            try:
                options = {**kwargs, **arguments}
                return tokenizer.apply_chat_template(calls, tokenize=False, **options)
            except Exception as error:  # a template is a program: an index, a type, its own
                failures.append(error)
        reason = " ".join(str(failures[0]).split())[:300] or type(failures[0]).__name__
        raise ChatError(reason) from failures[0]

    return render


def with_read_arguments(chat: Sequence[Message]) -> list[Message]:
    """Return a chat whose calls have values where the data has their arguments as JSON text.

    vLLM and SGLang do so too: a template that writes arguments as JSON would encode the text anew.
    """
    return [
        {**message, "tool_calls": [_read_call(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in chat
    ]


def _read_call(call: Any) -> Any:
    """Return a call, or the function inside it, with its arguments as values."""
    if not isinstance(call, Mapping):
        return call
    if "function" in call:
        return {**call, "function": _read_call(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call  # none, values already, or another text, which the template may write as it is
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def written_behind(render: Render, *messages: Message, **arguments: Any) -> str:
    """Return what the template writes behind an assistant's text before these messages.

    Raises ChatError.
    """
    until_assistant = ({"role": "user", "content": "."}, {"role": "assistant", "content": MARK})
    _, mark, after = render([*until_assistant, *messages], **arguments).partition(MARK)
    if not mark:
        raise ChatError("it drops the text of an assistant's message")
    return after


def encode_written(tokenizer: Any, write: Write, texts: Sequence[str]) -> list[int]:
    """Return the ids of ``write(texts)``, the frame of a chat template around texts of others.

    Frame and texts are encoded as one string, as a deployment encodes them: a token may reach from
    a text into its frame. What looks like a special token inside a text stays text.
    """
    special = special_tokens(tokenizer)
    pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
    if not special or not any(re.search(pattern, text) for text in texts):
        return list(tokenizer(write(texts), add_special_tokens=False)["input_ids"])
    # Marks inside the look-alikes keep them apart from the special tokens that the frame writes.
    marked = [re.sub(pattern, lambda m: m[0][0] + MARK + m[0][1:], text) for text in texts]
    ids: list[int] = []
    for piece in re.split(f"({pattern})", write(marked)):
        if piece in special:
            ids.append(special[piece])
        elif piece:
            ids += encode_literally(tokenizer, piece.replace(MARK, ""))
    return ids


def encode_literally(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text in which what looks like a special token stays text."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
