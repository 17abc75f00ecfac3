"""What a chat template writes around messages: the frame of a reply, the end of a message, the next turn's beginning.

Short conversations are rendered with marks in place of texts, and what stands between the marks is the frame. A
template that refuses a role, drops its text or changes it is found here, before a run begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
Render = Callable[..., str]  # (messages, **arguments of the template) -> text; raises ChatError
MARK = "mark7c1f52e9"  # letters and digits: no template escapes or trims it
PROBE = 'a "b"\\\n<é>'  # what an answer may hold and a template may escape
WRITTEN: tuple[Callable[[str], str], ...] = (  # how templates write a text: as it is, or as JSON does (Llama 3.1)
    lambda text: text,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)
UNTIL_ASSISTANT = ({"role": "user", "content": "."}, {"role": "assistant", "content": MARK})


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
