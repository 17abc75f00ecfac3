"""Prompt -> token ids: the chat template, plain strings, truncation. Answers are never encoded here."""

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
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        clash = [name for name in OWNED if name in self.template_kwargs]
        if clash:
            raise InputError([f"data.apply_chat_template_kwargs: {', '.join(clash)} cannot be set here; leave it out"])

    def encode(self, prompts: Sequence[str | Sequence[Message]]) -> list[list[int]]:
        """Return the ids of each prompt, neither cut nor padded.

        Raises ChatError where the template refuses a chat, InputError where there is no template.
        """
        ids: list[list[int]] = [[] for _ in prompts]
        for plain in (False, True):
            indices = [index for index, prompt in enumerate(prompts) if isinstance(prompt, str) == plain]
            texts = [prompts[index] if plain else self.render(prompts[index]) for index in indices]
            # A template writes its special tokens itself: none are added to a chat.
            found = self.tokenizer(texts, add_special_tokens=plain)["input_ids"] if texts else []
            for index, value in zip(indices, found, strict=True):
                # Some tokenizers append an EOS to a plain string: the policy would have to write after its end.
                ends = plain and value and value[-1] == self.tokenizer.eos_token_id
                ids[index] = value[:-1] if ends else value
        return ids

    def render(self, chat: Sequence[Message]) -> str:
        """Return the chat as one string, ready for tokens to follow."""
        if not (self.template_kwargs.get("chat_template") or getattr(self.tokenizer, "chat_template", None)):
            raise InputError([NO_TEMPLATE])
        from jinja2 import TemplateError

        prefilled = chat[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not prefilled, "continue_final_message": prefilled, **self.template_kwargs}
        try:
            return self.tokenizer.apply_chat_template([dict(message) for message in chat], tokenize=False, **options)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ChatError(str(error)) from error
