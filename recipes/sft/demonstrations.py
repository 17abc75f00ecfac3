"""Demonstrations: sequences of token ids, and the mask of what is trained on.

A chat is rendered by the chat template and has the ids of the whole text: tokenizers with a leading
space (Llama 2) would put one before each stretch that is encoded alone. Where a token of the whole
text reaches over the end of a prompt, prompt and answer are encoded apart, as in a rollout. The
mask of a turn ends with its end-of-sequence token: what the template writes behind it (a newline,
mostly) no policy ever writes. A turn whose message has ``weight`` or ``loss_mask`` 0 is not trained
on. A plain string and its answer need no template; the tokenizer's end-of-sequence token follows
the answer.

The files of demonstrations are read in ``demonstration_files.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from core.data.encoder import Encoder
from core.types import TrainBatch

ASSISTANT = "assistant"
IDS = ("prompt_ids", "response_ids", "response_mask")  # columns of what a policy wrote
# Keys by which a message is left out of the loss: OpenAI's, and those of ms-swift and axolotl
WEIGHTS = ("weight", "loss_mask", "loss", "train")
OTHER_TEMPLATE = "or set another chat template"


class DemonstrationError(ValueError):
    """A line that cannot be trained on; the arguments are the rule and what to do."""


@dataclass(frozen=True, eq=False)
class Demonstration:
    """One sequence to train on.

    Shapes:
        ids   [T] int32
        mask  [T] bool   trained on; never the first token, which nothing predicts
    """

    ids: np.ndarray
    mask: np.ndarray

    @classmethod
    def of(cls, stretches: Iterable[tuple[Sequence[int], bool | Sequence[bool]]]) -> Demonstration:
        """Join stretches of ids, each trained on or not, or token by token."""
        ids = []
        mask = []
        for stretch_ids, trained in stretches:
            ids += stretch_ids
            mask += [trained] * len(stretch_ids) if isinstance(trained, bool) else trained
        return cls(np.array(ids, np.int32), np.array(mask, np.bool_))

    def cut(self, length: int, side: str = "right") -> Demonstration:
        """Return the ids cut at one side to a maximum; nothing predicts the first that is left."""
        if side != "left" or len(self) <= length:
            return Demonstration(self.ids[:length], self.mask[:length])
        return Demonstration(self.ids[-length:], np.r_[False, self.mask[-length:][1:]])

    def __len__(self) -> int:
        return len(self.ids)


class Writer:
    """Turns chats and texts into demonstrations with one tokenizer.

    ``ends`` are the ids with which a model ends its answer.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any], ends: Collection[int]):
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs
        self.ends = frozenset(ends)
        asked = {"add_generation_prompt": True, "continue_final_message": False}
        answered = {**asked, "add_generation_prompt": False}
        # Chats that an assistant's turn follows, and chats as they are
        self.prompts = Encoder(tokenizer, {**template_kwargs, **asked})
        self.chats = Encoder(tokenizer, {**template_kwargs, **answered})

    def with_arguments(self, **arguments: Any) -> Writer:
        """Return a writer whose chat template gets these too. Raises DemonstrationError."""
        if not arguments:
            return self
        template = self.template_kwargs.get("chat_template")
        template = template or getattr(self.tokenizer, "chat_template", None)
        if "tools" in arguments and "tools" not in str(template):
            rule = "a row has tools (data.tools_key), and the chat template does not write them"
            raise DemonstrationError(rule, f"leave the column out, {OTHER_TEMPLATE}")
        return Writer(self.tokenizer, {**self.template_kwargs, **arguments}, self.ends)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Demonstration:
        """Return a chat whose assistant turns are trained on.

        Raises DemonstrationError, ChatError, InputError.
        """
        turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not turns:
            fix = "leave the row out: nothing in it is trained on"
            raise DemonstrationError("a chat has no assistant turn", fix)
        if turns[0] == 0:
            raise DemonstrationError("a chat begins with the assistant", "put the prompt before it")
        trains = [_is_trained(message) for message in messages]
        stretches = []
        done = ""
        for number in turns:
            before = self.prompts.render(messages[:number])
            after = self.chats.render(messages[: number + 1])
            question = self.chats.render(messages[:number])
            if after.startswith(question) and not after.startswith(before):
                opening = before.removeprefix(question)
                raise DemonstrationError(
                    f"the chat template begins an answer with {opening!r}, and writes a given "
                    "answer without it",
                    f"put it into the answers, {OTHER_TEMPLATE}",
                )
            if not (before.startswith(done) and after.startswith(before)):
                raise DemonstrationError(
                    "the chat template writes earlier turns anew once others follow, so no policy "
                    "wrote these tokens",
                    f"make a row for each assistant turn, {OTHER_TEMPLATE}",
                )
            answer = self._behind(before, after)
            trained = self._until_its_end(answer) if trains[number] else False
            stretches += [(self._behind(done, before), False), (answer, trained)]
            done = after
        return Demonstration.of(stretches)

    def answer(self, prompt: str | Sequence[Mapping[str, Any]], response: str) -> Demonstration:
        """Return a prompt and the answer to it, which ends where a model would end it."""
        if not isinstance(prompt, str):
            return self.chat([*prompt, {"role": ASSISTANT, "content": response}])
        answer = [*self._behind(prompt, prompt + response), self.tokenizer.eos_token_id]
        return Demonstration.of([(self.prompts.encode(prompt), False), (answer, True)])

    def written(self, prompt_text: str, row: Mapping[str, Sequence]) -> Demonstration:
        """Return what a policy wrote, by its ids.

        Raises DemonstrationError for those of another tokenizer.
        """
        if missing := [name for name in IDS if row[name] is None]:
            raise DemonstrationError(f"{missing[0]} is null", "fill it or leave the row out")
        prompt, response, mask = (list(row[name]) for name in IDS)
        if len(response) != len(mask):
            rule = "response_ids and response_mask differ in length"
            raise DemonstrationError(rule, "write the file anew")
        if self.tokenizer.decode(prompt) != prompt_text:
            rule = "prompt_ids are not those of this tokenizer: they do not decode to column prompt"
            fix = "fine-tune the model that wrote the answers, or leave the ids out"
            raise DemonstrationError(rule, fix)
        return Demonstration.of([(prompt, False), (response, mask)])

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _behind(self, before: str, after: str) -> list[int]:
        """Return the ids of what ``after`` adds to the text ``before``, as they stand behind it."""
        added = after[len(before) :]
        contexts = [before]
        if self._adds_a_space():
            # Where a token reaches over the end of ``before``, any other text keeps the space away
            contexts += ["\n", "."]
        for context in contexts:
            start = self._encode(context)
            whole = self._encode(context + added)
            if whole[: len(start)] == start:
                return whole[len(start) :]
        return self._encode(added)

    def _adds_a_space(self) -> bool:
        """Return whether the tokenizer puts a space before a text."""
        first = self.tokenizer.convert_ids_to_tokens(self._encode("a"))[0]
        return first.startswith("\u2581")

    def _until_its_end(self, ids: Sequence[int]) -> list[bool]:
        """Return the mask of a turn: up to its last end-of-sequence token, or all without one."""
        ends = [number for number, token_id in enumerate(ids) if token_id in self.ends]
        last = max(ends, default=len(ids) - 1)
        return [number <= last for number in range(len(ids))]


def _is_trained(message: Mapping[str, Any]) -> bool:
    """Return whether a turn is trained on: the assistant's are, unless a key of theirs is 0.

    Raises DemonstrationError for a key that would train on another role, or by a part.
    """
    by_assistant = message["role"] == ASSISTANT
    values = {key: message[key] for key in WEIGHTS if message.get(key) is not None}
    for key, value in values.items():
        if value not in (0, 1):
            rule = f"{key} of a message is {value!r}, and a turn is trained on or not"
            raise DemonstrationError(rule, "set 0 or 1, or leave the key out")
        if value and not by_assistant:
            rule = f"{key} of a message of role {message['role']} is {value!r}"
            fix = "set 0 or leave the key out: only the assistant's turns are trained on"
            raise DemonstrationError(rule, fix)
    return by_assistant and all(values.values())


def demonstration_batch(demonstrations: Sequence[Demonstration], pad_id: int) -> TrainBatch:
    """Return the demonstrations as a batch of a step.

    Each is a group of its own, with the advantage 1 at every token.
    """
    lengths = torch.tensor([len(demonstration) for demonstration in demonstrations])
    ids = np.concatenate([demonstration.ids for demonstration in demonstrations])
    masks = np.concatenate([demonstration.mask for demonstration in demonstrations])
    mask = torch.from_numpy(masks)
    return TrainBatch(lengths, pad_id).adding(
        input_ids=torch.from_numpy(ids),
        response_mask=mask,
        loss_mask=mask,
        group=torch.arange(len(demonstrations)),
        advantages=mask.float(),
    )
