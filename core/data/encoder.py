"""From a prompt to token ids: chat templates, begun answers, tools and places of pictures."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from core.data.vocabulary import MARK, ChatError, Message, has_template, template_of
from core.errors import InputError
from core.vision.pictures import Pictures

Text = str | Sequence[Message]  # a prompt as the data has it
FIRST_TAG = re.compile(r"\s*<([a-zA-Z][\w-]*)>")
LAST_TAG = re.compile(r"<([a-zA-Z][\w-]*)>\s*\Z")
CLOSED_TAG_AT_END = re.compile(r"</[a-zA-Z][\w-]*>\s*\Z")
TAG_TOKENS = 16  # a tag that a prompt opens is looked for in so many tokens of its end


def chat_of(prompt: Text) -> tuple[Message, ...]:
    """Return a prompt as messages: a plain string is the user's words."""
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    return tuple(prompt)


class Encoder:
    """Turns prompts into ids with one tokenizer and one set of template arguments.

    A chat goes through the chat template with a generation prompt. If its last message is the
    assistant's, the policy goes on with that message instead (a prefilled beginning such as
    ``<think>``). A plain string is encoded as it is, with the special tokens that the tokenizer
    adds by default (BOS, if it has one).
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.has_template = has_template(tokenizer, self.template_kwargs)
        # Roles whose text the template is known to write
        self._written_roles: set[str] = set()

    def encode(
        self, prompt: Text, tools: Sequence[Any] = (), media: Pictures | None = None
    ) -> list[int]:
        """Return the ids of a prompt, not cut, with one placeholder for each token of its media.

        The chat template describes ``tools`` to the policy, so with tools a plain string becomes a
        user's message.

        Raises:
            ChatError: the template refuses the chat.
            InputError: there is no template.
            MediaError: pictures without places, or places without pictures.
        """
        text = prompt if media is None else media.mark(prompt)
        describes_tools = bool(tools) and self.has_template
        is_plain = isinstance(text, str) and not describes_tools
        if not is_plain:
            arguments = {"tools": list(tools)} if describes_tools else {}
            text = self.render(chat_of(text), **arguments)
        # A template writes its special tokens itself: none are added to a chat
        start = self.tokenizer.bos_token
        adds = is_plain and not (start and text.startswith(start))  # it may have been rendered
        ids = self.tokenizer(text, add_special_tokens=adds)["input_ids"]
        if is_plain and ids and ids[-1] == self.tokenizer.eos_token_id:
            # Some tokenizers append it: the policy would have to write after its end
            ids = ids[:-1]
        return ids if media is None else media.expand(ids)

    def render(self, chat: Sequence[Message], **arguments: Any) -> str:
        """Return the chat as one string, ready for tokens to follow. Raises as encode does."""
        if not self.has_template:
            raise InputError(
                "the tokenizer has no chat template, and the data holds chats; set "
                "actor_rollout_ref.model.custom_chat_template, or write the prompts as plain "
                "strings"
            )

        def rendered(messages: Sequence[Message], *, continues: bool) -> str:
            options = {"add_generation_prompt": not continues, "continue_final_message": continues}
            render = template_of(self.tokenizer, {**options, **self.template_kwargs})
            return render(messages, **arguments)

        last = chat[-1]
        is_begun = last["role"] == "assistant"
        is_decided = "continue_final_message" in self.template_kwargs
        has_text = isinstance(last.get("content"), str)
        if not is_begun or is_decided or len(chat) == 1 or not has_text:
            return rendered(chat, continues=is_begun)
        try:
            continued = rendered(chat, continues=True)
        except ChatError:
            continued = ""  # the template drops the beginning, as R1's does a closed thought
        question = rendered(chat[:-1], continues=False)
        return begin_answer(question, last["content"], continued)

    def opened_tag(self, prompt: Text, ids: Sequence[int]) -> str | None:
        """Return the tag, such as ``<think>``, that a prompt opens for the policy to close.

        A template or a plain string opens one by ending with it, a begun answer by beginning with
        it. None if no tag is open.
        """
        match = LAST_TAG.search(self.tokenizer.decode(list(ids[-TAG_TOKENS:])))
        if match is None and len(prompt) > 1 and not isinstance(prompt, str):
            begun = prompt[-1].get("content") or ""
            if prompt[-1]["role"] == "assistant":
                match = FIRST_TAG.match(begun) or LAST_TAG.search(self.render(prompt[:-1]))
            if match is not None and f"</{match[1]}>" in begun:
                return None
        return f"<{match[1]}>" if match else None

    def check_roles(self, prompt: Text) -> None:
        """Raise ChatError if the template silently leaves out the text of a role of the chat."""
        if isinstance(prompt, str):
            return
        for number, message in enumerate(prompt):
            role = message["role"]
            if role in self._written_roles or not isinstance(message.get("content"), str):
                continue
            marked_message = {**message, "content": MARK}
            text = self.render([*prompt[:number], marked_message, *prompt[number + 1 :]])
            if text and MARK not in text:  # no text at all is another problem
                raise ChatError(f"it leaves out the text of role {role}")
            self._written_roles.add(role)


def begin_answer(question: str, begun: str, continued: str) -> str:
    """Return the prompt that ends with the beginning of an answer.

    ``question`` is the chat up to the answer, ``continued`` what the chat template makes of both.
    That stands unless it leaves out either, or writes a closed thought in front of the beginning
    (Qwen3, GLM 4.5). Then the beginning follows ``question``, as if the policy had written it.
    """
    between = continued[len(question) : len(continued) - len(begun)]
    is_whole = continued.startswith(question) and continued.endswith(begun)
    if is_whole and not CLOSED_TAG_AT_END.search(between):
        return continued
    begun_tag = FIRST_TAG.match(begun)
    question_tag = LAST_TAG.search(question)
    if begun_tag and question_tag and begun_tag[1] == question_tag[1]:  # both open it
        question = question[: question_tag.start()]
    return question + begun
