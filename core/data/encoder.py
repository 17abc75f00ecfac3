"""Prompts as token ids, with one tokenizer, one chat template and one way to read pictures.

What is drawn, and in which order, is decided in ``core/data/prompts.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from core.data.vocabulary import MARK, Message, template_of
from core.errors import InputError
from core.vision.pictures import TEXT, Modality, Pictures

Text = str | Sequence[Message]  # a prompt as the data has it
OWNED = ("tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length")
NO_TEMPLATE = (
    "the tokenizer has no chat template, and the data holds chats; set actor_rollout_ref.model.custom_chat_template, "
    "take an instruct model's tokenizer, or write the prompts as plain strings"
)
_OPENED_AT_THE_END = re.compile(r"<([a-zA-Z][\w-]*)>\s*\Z")
_OPENED_AT_THE_START = re.compile(r"\s*<([a-zA-Z][\w-]*)>")
TAG_TOKENS = 16  # from the end of a prompt, in which a tag that it opens is looked for


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

    ``modality`` is how the model reads prompts. ``tools`` are the schemas that a prompt tells the policy of: the chat
    template writes them, so that a plain string becomes a user's message where there is a template.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None, modality: Modality = TEXT):
        self.tokenizer, self.modality = tokenizer, modality
        self.template_kwargs = dict(template_kwargs or {})
        self.has_template = bool(self.template_kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None))
        self._written_roles: set[str] = set()  # whose text the template is known to write
        clash = [name for name in OWNED if name in self.template_kwargs]
        if clash:
            raise InputError([f"data.apply_chat_template_kwargs: {', '.join(clash)} cannot be set here; leave it out"])

    def encode(self, prompt: Text, tools: Sequence[Any] = (), media: Pictures | None = None) -> list[int]:
        """Return the ids of a prompt, neither cut nor padded, one for each token of its media.

        Raises ChatError where the template refuses a chat, InputError where there is no template, MediaError for
        pictures without places or places without pictures.
        """
        text, plain = self.text(prompt, tools, media)
        (ids,) = self.encode_texts([text], plain)
        return ids if media is None else media.expand(ids)

    def text(self, prompt: Text, tools: Sequence[Any] = (), media: Pictures | None = None) -> tuple[str, bool]:
        """Return what is encoded of a prompt, and whether it is a plain string. Raises what :meth:`encode` raises."""
        prompt = prompt if media is None else media.mark(prompt)
        if isinstance(prompt, str) and not (tools and self.has_template):
            return prompt, True
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.render(chat, **({"tools": list(tools)} if tools and self.has_template else {})), False

    def encode_texts(self, texts: Sequence[str], plain: bool) -> list[list[int]]:
        """Return the ids of texts of :meth:`text`, all of one kind; the tokenizer spreads them over the cores."""
        # A template writes its special tokens itself: none are added to a chat.
        encoded = self.tokenizer(list(texts), add_special_tokens=plain)["input_ids"] if texts else []
        # Some tokenizers append an EOS to a plain string: the policy would have to write after its end.
        end = self.tokenizer.eos_token_id
        return [ids[:-1] if plain and ids and ids[-1] == end else ids for ids in encoded]

    def render(self, chat: Sequence[Message], **arguments: Any) -> str:
        """Return the chat as one string, ready for tokens to follow. Raises ChatError, and InputError as encode."""
        if not self.has_template:
            raise InputError([NO_TEMPLATE])
        prefilled = chat[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not prefilled, "continue_final_message": prefilled, **self.template_kwargs}
        return template_of(self.tokenizer, options)(chat, **arguments)

    def opened_tag(self, prompt: Text, ids: Sequence[int]) -> str | None:
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

    def dropped_role(self, prompt: Text) -> str | None:
        """Return a role of the chat whose text the template leaves out without an error; None where there is none."""
        for number, message in enumerate([] if isinstance(prompt, str) else prompt):
            role = message["role"]
            if role not in self._written_roles and isinstance(message.get("content"), str):
                marked = self.render([*prompt[:number], {**message, "content": MARK}, *prompt[number + 1 :]])
                if marked and MARK not in marked:  # no text at all is another problem
                    return role
                self._written_roles.add(role)
        return None
