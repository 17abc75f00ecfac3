"""Prompts as token ids, with one tokenizer, one chat template and one way to read pictures.

What is drawn, and in which order, is decided in ``core/data/prompts.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.data.chat_frames import ChatError, dropped_roles, rendered, template_of
from core.data.parquet import Example, Message
from core.errors import InputError
from core.vision.modality import TEXT, Modality
from core.vision.pictures import Pictures

OWNED = ("tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length")
NO_TEMPLATE = (
    "the tokenizer has no chat template, and the data holds chats; set actor_rollout_ref.model.custom_chat_template, "
    "take an instruct model's tokenizer, or write the prompts as plain strings"
)
_OPENED_AT_THE_END = re.compile(r"<([a-zA-Z][\w-]*)>\s*\Z")
_OPENED_AT_THE_START = re.compile(r"\s*<([a-zA-Z][\w-]*)>")
TAG_TOKENS = 16  # from the end of a prompt, in which a tag that it opens is looked for


@dataclass(frozen=True)
class Worded:
    """A prompt as the policy reads it: the example's, or what an agent loop makes of it to tell of tools.

    ``arguments`` are for the chat template, beside the configuration's. Loops word equal prompts alike where ``tools``,
    the names of those that it tells of, are equal.
    """

    prompt: str | Sequence[Message]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[str, ...] = ()


Word = Callable[[Example], Worded]


def truncate(ids: Sequence[int], limit: int, mode: str) -> list[int]:
    """Return the ids cut to ``limit``: ``left`` keeps the tail, ``right`` the head, ``middle`` both ends.

    ``middle`` keeps ``limit // 2`` of the head (verl's ``postprocess_data``). Raises ValueError for ``error``.
    """
    if len(ids) <= limit:
        return list(ids)
    heads = {"left": 0, "right": limit, "middle": limit // 2}
    if mode not in heads:
        raise ValueError(f"a prompt of {len(ids)} tokens is longer than {limit}")
    head = heads[mode]
    return [*ids[:head], *ids[len(ids) - (limit - head) :]]


class Encoder:
    """Turns prompts into ids with one tokenizer and one set of template arguments.

    A chat goes through the chat template with a generation prompt. If its last message is the assistant's, the
    policy goes on with that message instead (a prefilled beginning such as ``<think>``). A plain string is encoded
    as it is, with the special tokens that the tokenizer adds by default (BOS, where it has one).

    ``modality`` is how the model reads prompts.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any] | None = None,
        modality: Modality = TEXT,
    ):
        self.tokenizer, self.modality = tokenizer, modality
        self.template_kwargs = dict(template_kwargs or {})
        self._written_roles: set[str] = set()  # whose text the template is known to write
        clash = [name for name in OWNED if name in self.template_kwargs]
        if clash:
            raise InputError([f"data.apply_chat_template_kwargs: {', '.join(clash)} cannot be set here; leave it out"])

    def encode(self, prompts: Sequence[str | Sequence[Message]], **arguments: Any) -> list[list[int]]:
        """Return the ids of each prompt, neither cut nor padded. ``arguments`` are the chat template's.

        Raises ChatError where the template refuses a chat, InputError where there is no template.
        """
        ids: list[list[int]] = [[] for _ in prompts]
        for plain in (False, True):
            indices = [index for index, prompt in enumerate(prompts) if isinstance(prompt, str) == plain]
            texts = [prompts[index] if plain else self.render(prompts[index], **arguments) for index in indices]
            # A template writes its special tokens itself: none are added to a chat.
            encoded = self.tokenizer(texts, add_special_tokens=plain)["input_ids"] if texts else []
            for index, value in zip(indices, encoded, strict=True):
                # Some tokenizers append an EOS to a plain string: the policy would have to write after its end.
                ends = plain and value and value[-1] == self.tokenizer.eos_token_id
                ids[index] = value[:-1] if ends else value
        return ids

    def encode_example(
        self, example: Example, worded: Worded | None = None, *, decode: bool = False
    ) -> tuple[list[int], Pictures | None]:
        """Return the ids of an example's prompt, one for each token of its media, and the media if it has any.

        ``worded`` is the prompt as an agent loop words it. ``decode`` tries all of each file and not its size alone.
        Raises MediaError and what :meth:`encode` raises.
        """
        media = self.modality.read_media(example.media, decode=decode)
        return self.encode_with(worded or Worded(example.prompt), media), media or None

    def encode_with(self, worded: Worded, media: Pictures | None) -> list[int]:
        """Return the ids of a prompt, one for each token of its media. Raises what :meth:`encode_example` raises.

        What measures prompts and what plays episodes both call it, so that they count the same tokens.
        """
        prompt = worded.prompt if media is None else media.mark(worded.prompt)
        (ids,) = self.encode([prompt], **worded.arguments)
        return ids if media is None else media.expand(ids)

    def opened_tag(self, prompt: str | Sequence[Message], ids: Sequence[int]) -> str | None:
        """Return the tag, such as ``<think>``, that a prompt opens for the policy to close; None without one.

        A template or a plain string opens one by ending with it, a begun answer by beginning with it.
        """
        match = _OPENED_AT_THE_END.search(self.tokenizer.decode(list(ids[-TAG_TOKENS:])))
        if match is None and not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            begun = prompt[-1].get("content") or ""
            match = _OPENED_AT_THE_START.match(begun)
            if match is not None and f"</{match[1]}>" in begun:
                return None
        return f"<{match[1]}>" if match else None

    def dropped_role(self, worded: Worded) -> str | None:
        """Return a role of the chat whose text the template leaves out, without a word; None where there is none."""
        roles = set() if isinstance(worded.prompt, str) else {message["role"] for message in worded.prompt}
        if roles <= self._written_roles:
            return None
        try:
            if not self.render(worded.prompt, **worded.arguments):  # no text at all is another message
                return None
            dropped = dropped_roles(self.render, worded.prompt, **worded.arguments)
        except (ChatError, InputError):  # which encoding reports
            return None
        self._written_roles |= roles - set(dropped)
        return dropped[0] if dropped else None

    def render(self, chat: Sequence[Message], **arguments: Any) -> str:
        """Return the chat as one string, ready for tokens to follow."""
        if not (self.template_kwargs.get("chat_template") or getattr(self.tokenizer, "chat_template", None)):
            raise InputError([NO_TEMPLATE])
        prefilled = chat[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not prefilled, "continue_final_message": prefilled, **self.template_kwargs}
        return rendered(template_of(self.tokenizer, options), chat, **arguments)
