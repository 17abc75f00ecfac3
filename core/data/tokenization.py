"""Prompt -> token ids: the chat template, plain strings, truncation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.data.parquet import Message
from core.errors import InputError

OWNED = ("tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length")
NO_TEMPLATE = (
    "the tokenizer has no chat template, and the data holds chats; set actor_rollout_ref.model.custom_chat_template, "
    "take an instruct model's tokenizer, or write the prompts as plain strings"
)


class ChatError(ValueError):
    """The chat template refuses a chat."""


def truncate(ids: Sequence[int], limit: int, mode: str) -> list[int]:
    """The ids cut to ``limit``: ``left`` keeps the tail, ``right`` the head, ``middle`` both ends.

    ``middle`` keeps ``limit // 2`` of the head (verl's ``postprocess_data``). Raises ValueError for ``error``.
    """
    if len(ids) <= limit:
        return list(ids)
    if mode == "left":
        return list(ids[len(ids) - limit :])
    if mode == "right":
        return list(ids[:limit])
    if mode == "middle":
        head = limit // 2
        return [*ids[:head], *ids[len(ids) - (limit - head) :]]
    raise ValueError(f"a prompt of {len(ids)} tokens is longer than {limit}")


class Encoder:
    """Turns prompts into ids with one tokenizer and one set of template arguments.

    A chat goes through the chat template with a generation prompt. If its last message is the assistant's, the
    policy goes on with that message instead (a prefilled beginning such as ``<think>``). A plain string is encoded
    as it is, with the special tokens that the tokenizer adds by default (BOS, where it has one).
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        clash = [name for name in OWNED if name in self.template_kwargs]
        if clash:
            raise InputError([f"data.apply_chat_template_kwargs: {', '.join(clash)} cannot be set here; leave it out"])

    def encode(self, prompts: Sequence[str | Sequence[Message]]) -> list[list[int]]:
        """Ids of each prompt, neither cut nor padded.

        Raises ChatError where the template refuses a chat, InputError where there is no template.
        """
        chats = [index for index, prompt in enumerate(prompts) if not isinstance(prompt, str)]
        plain = [index for index, prompt in enumerate(prompts) if isinstance(prompt, str)]
        ids: list[list[int]] = [[] for _ in prompts]
        for index, value in zip(chats, self._batch([self.render(prompts[i]) for i in chats], False), strict=True):
            ids[index] = value
        for index, value in zip(plain, self._batch([prompts[i] for i in plain], True), strict=True):
            ids[index] = self._open_ended(value)
        return ids

    def render(self, chat: Sequence[Message]) -> str:
        """The chat as one string, ready for tokens to follow."""
        if not (self.template_kwargs.get("chat_template") or getattr(self.tokenizer, "chat_template", None)):
            raise InputError([NO_TEMPLATE])
        from jinja2 import TemplateError

        prefilled = chat[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not prefilled, "continue_final_message": prefilled, **self.template_kwargs}
        try:
            return self.tokenizer.apply_chat_template([dict(message) for message in chat], tokenize=False, **options)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ChatError(str(error)) from error

    def _batch(self, texts: list[str], special: bool) -> list[list[int]]:
        """A template writes its special tokens itself; none are added to what it rendered."""
        return self.tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []

    def _open_ended(self, ids: list[int]) -> list[int]:
        """Without the EOS that some tokenizers append: the policy would be asked to write after its end."""
        eos = self.tokenizer.eos_token_id
        return ids[:-1] if ids and eos is not None and ids[-1] == eos else ids
