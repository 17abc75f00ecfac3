"""How a policy writes a tool call and how the answer is written behind it (``multi_turn.format``): hermes and react.

A format is four things beside each other: the strings that end a turn, the reading of calls, how the prompt tells of
the tools, and the frame of answers. Whatever is not a call that can be made comes back as a :class:`Call` with a
``problem``, which the tool agent answers. No tool is called here.

hermes is the chat template's own form: JSON with ``name`` and ``arguments`` in ``<tool_call>``, and the template writes
the answers. react (arXiv:2210.03629) is text of one assistant message::

    Thought: I need a product.
    Action: calculator
    Action Input: {"expression": "47 * 86"}
    Observation: 4042
    Thought: ...
    Final Answer: 4042

The turn ends at ``Observation:``, which the policy writes and the tool continues. A turn without an action ends the
episode. A policy that ends its message after the action input is answered by a user's message, ``Observation: ...``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.data.chat_frames import Frame, reply_frame, template_of
from core.data.vocabulary import end_ids, first_token, template_ends, whole_tokens
from core.types import Stop

if TYPE_CHECKING:
    from core.rollout.agent_loop import Episode

OBSERVATION = "Observation:"
ANSWERED = {"hermes": ("tool", ""), "react": ("user", f"{OBSERVATION} ")}  # multi_turn.format -> role, text before
Piece = tuple[str, bool]  # text, and whether it is an answer's: what looks like a special token in one is text
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """A call as the policy wrote it; ``problem`` says why it is none."""

    name: str = ""
    arguments: Any = None
    problem: str | None = None


class Chat:
    """What the chat template writes behind the policy's turn."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any], schemas: Sequence[Mapping[str, Any]] = ()):
        from core.data.encoder import Encoder

        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer, template_kwargs)
        self.has_template = bool(template_kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None))
        self.whole_tokens = whole_tokens(tokenizer)
        self.ends, self.own_ends = end_ids(tokenizer), template_ends(tokenizer, template_kwargs)
        kwargs = {**self.encoder.template_kwargs, **({"tools": list(schemas)} if schemas else {})}
        self.template = template_of(tokenizer, kwargs)  # with tools: some tokenizers have one of its own for them
        self._frames: dict[tuple[str, int, str], Frame] = {}

    def frame(self, role: str, count: int, before: str = "") -> Frame:
        """Return what stands around replies of a role. Raises ChatError where the template has no use for it."""
        key = (role, count, before)
        if key not in self._frames:
            self._frames[key] = reply_frame(self.template, *key)
        return self._frames[key]

    def messages(self, role: str, texts: Sequence[str], episode: Episode, before: str = "") -> list[Piece]:
        """Return messages of a role, each ``before`` and a text, and the beginning of the policy's next turn.

        Raises ChatError where the template does not write that role.
        """
        frame = self.frame(role, len(texts), before)
        pieces = [(self._goes_on(frame.pieces[0], episode), False)]
        for text, behind in zip(texts, frame.pieces[1:], strict=True):
            pieces += [(frame.written(text), True), (behind, False)]
        return pieces

    def _goes_on(self, first: str, episode: Episode) -> str:
        """Return a frame's beginning without an end of the turn that the policy has written already.

        The policy may have ended its turn with that token, or with another one that ends turns.
        """
        begins = first.lstrip()
        end = first_token(begins, self.whole_tokens)
        written = end is not None and episode.last_token == self.whole_tokens[end]
        if written or (end in self.own_ends and (episode.last_token in self.ends or episode.stop is Stop.EOS)):
            return begins[len(end) :]
        return first


@dataclass(frozen=True)
class CallFormat:
    """A format: an entry of FORMATS."""

    stop: tuple[str, ...]  # strings that end a turn, beside the end of the sequence
    parse: Callable[[str], list[Call]]  # text of a turn -> its calls
    # messages of the prompt, the tools' schemas -> messages, and arguments of the chat template
    tell: Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], tuple[Sequence[Message], dict[str, Any]]]
    frame: Callable[[Chat, Sequence[str], Episode], list[Piece]]  # the answers of a turn, as they stand behind it


# --- hermes ---


def parse_hermes(text: str) -> list[Call]:
    """Return the calls of a turn: JSON with ``name`` and ``arguments`` between ``<tool_call>`` and ``</tool_call>``."""
    from reward_scores.tags import between

    return [_parse_call(content) for content in between(text, "tool_call")]


def _parse_call(content: str) -> Call:
    try:
        said = json.loads(content)
    except (ValueError, RecursionError) as error:
        return Call(problem=f"the call is not JSON: {error}")
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return Call(problem='a call is {"name": ..., "arguments": {...}}')
    return Call(said["name"], said.get("arguments", {}))


def tell_hermes(
    messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]
) -> tuple[Sequence[Message], dict[str, Any]]:
    """Leave the schemas to the chat template."""
    return messages, {"tools": list(schemas)}


def frame_hermes(chat: Chat, answers: Sequence[str], episode: Episode) -> list[Piece]:
    """Return messages of role ``tool``; without a template, the answers between ``<tool_response>`` tags."""
    if chat.has_template:
        role, before = ANSWERED["hermes"]
        return chat.messages(role, answers, episode, before)
    tags = ("<tool_response>", False), ("</tool_response>", False)
    return [piece for text in answers for piece in (tags[0], (text, True), tags[1])]


# --- react ---

ACTION = re.compile(r"^[ \t]*Action:[ \t]*(.*?)[ \t]*$", re.MULTILINE)
NEXT = r"^[ \t]*(?:Thought|Action|Action Input|Observation|Final Answer):"
INPUT = re.compile(rf"^[ \t]*Action Input:(.*?)(?={NEXT}|\Z)", re.MULTILINE | re.DOTALL)
FINAL = re.compile(r"^[ \t]*Final Answer:", re.MULTILINE)
INSTRUCTIONS = """You may use these tools:
{tools}

Write in this form, and stop after Observation:, which is then filled in:
Thought: what to do
Action: the name of one tool
Action Input: its arguments as a JSON object
Observation: what the tool answered
(as often as needed)
Thought: I know the answer
Final Answer: the answer"""


def parse_react(text: str) -> list[Call]:
    """Return the turn's call, ``Action: name`` and ``Action Input: {...}``; none where it has no line ``Action:``."""
    actions, inputs = ACTION.findall(text), INPUT.findall(text)
    if not actions:
        if not inputs:
            return []
        return [Call(problem="Action Input: stands without a line Action: before it")]
    if FINAL.search(text):
        return [Call(problem="a turn has an Action: or a Final Answer:, not both")]
    if len(actions) > 1 or len(inputs) != 1:
        counts = f"here are {len(actions)} and {len(inputs)}"
        return [Call(problem=f"a turn has one line Action: and one Action Input: after it, {counts}")]
    try:
        arguments = json.loads(inputs[0])
    except (ValueError, RecursionError) as error:
        return [Call(problem=f"Action Input: is not JSON: {error}")]
    if not isinstance(arguments, dict):
        return [Call(problem='Action Input: is a JSON object of arguments, as in {"name": "value"}')]
    return [Call(actions[0], arguments)]


def tell_react(
    messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]
) -> tuple[Sequence[Message], dict[str, Any]]:
    """Put the tools and the form into the first message: behind a system's text, before a user's."""
    functions = (schema["function"] for schema in schemas)
    instructions = INSTRUCTIONS.format(
        tools="\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    )
    first, *rest = messages
    parts = (first["content"], instructions) if first["role"] == "system" else (instructions, first["content"])
    return [{**first, "content": "\n\n".join(parts)}, *rest], {}


def frame_react(chat: Chat, answers: Sequence[str], episode: Episode) -> list[Piece]:
    """Return the answer behind the policy's ``Observation:``, or with it in a user's message where the turn ended."""
    if episode.stop is Stop.STOP_STRING:
        return [(" ", False), (answers[0], True), ("\n", False)]
    if chat.has_template:
        role, before = ANSWERED["react"]
        return chat.messages(role, answers, episode, before)
    return [(f"\n{OBSERVATION} ", False), (answers[0], True), ("\n", False)]


FORMATS = {  # actor_rollout_ref.rollout.multi_turn.format
    "hermes": CallFormat((), parse_hermes, tell_hermes, frame_hermes),
    "react": CallFormat((OBSERVATION,), parse_react, tell_react, frame_react),
}
