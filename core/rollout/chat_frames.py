"""Messages of others behind a turn of the policy, framed as the chat template writes them.

The tool agent and the endpoint of outside agents both add messages here, so that a tool's answer
has the same tokens whoever plays the episode.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from core.data import vocabulary
from core.data.vocabulary import MARK, ChatError, Message
from core.types import Stop


class ChatFrames:
    """Writes and encodes messages that follow a turn of the policy.

    ``arguments`` of the methods are further ones of the chat template, such as ``tools``.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any]):
        self.tokenizer = tokenizer
        self.whole_tokens = vocabulary.whole_tokens(tokenizer)
        self.ends = vocabulary.template_ends(tokenizer, template_kwargs)
        self.has_template = vocabulary.has_template(tokenizer, template_kwargs)
        self.render = vocabulary.template_of(tokenizer, template_kwargs)

    def written(self, messages: Sequence[Message], **arguments: Any) -> str:
        """Return what stands between a turn of the policy and its next one. Raises ChatError."""
        if not self.has_template:
            texts = (message["content"] for message in messages)
            return "".join(f"<tool_response>{text}</tool_response>" for text in texts)
        return vocabulary.written_behind(
            self.render, *messages, add_generation_prompt=True, **arguments
        )

    def check(self, messages: Sequence[Message], **arguments: Any) -> None:
        """Raise ChatError if messages of these roles cannot be written.

        Without a chat template only a tool's can.
        """
        if not self.has_template and {message["role"] for message in messages} == {"tool"}:
            return
        marked = [{**message, "content": MARK} for message in messages]
        arguments["add_generation_prompt"] = True
        count = vocabulary.written_behind(self.render, *marked, **arguments).count(MARK)
        if count != len(marked):
            roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages))
            rule = f"of the texts of {len(marked)} message(s) of role {roles}"
            raise ChatError(f"it writes {count} {rule}")

    def encode(
        self, messages: Sequence[Message], last_id: int, stop: Stop | None, **arguments: Any
    ) -> tuple[str, list[int]]:
        """Return text and ids of messages behind a turn, and of the beginning of the next turn.

        The end of the policy's turn is left out if the policy wrote it itself, as ``last_id``. What
        is in a message is text, whatever it looks like. Raises ChatError.
        """

        def write(texts: Sequence[str]) -> str:
            replies = [
                {**message, "content": text} for message, text in zip(messages, texts, strict=True)
            ]
            return self.written(replies, **arguments)

        texts = [message["content"] for message in messages]
        text = write(texts)
        ids = vocabulary.encode_written(self.tokenizer, write, texts)
        end = vocabulary.first_token(text, self.whole_tokens)
        is_written = end is not None and last_id == self.whole_tokens[end]
        # The policy may also have ended its turn with another of the tokens that end turns
        if is_written or (end in self.ends and stop is Stop.EOS):
            text = text.lstrip()[len(end) :]
            ids = ids[ids.index(self.whole_tokens[end]) + 1 :]
        return text, ids
