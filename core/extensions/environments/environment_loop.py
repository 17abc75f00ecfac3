"""Episodes of an environment of the package ``verifiers`` (0.2): its protocol and rubric, this repository's sampling.

The environment plays its own rollout and calls a client for each turn of the policy. The client here is the episode:
what the environment says is framed by the chat template and appended to the one token stream, and a turn of the policy
answers. Nothing is decoded and encoded again, so an environment that rewrites earlier messages cannot be played.

The rubric scores the finished rollout; the scorer of the data source ``verifiers/...`` returns that number
(:mod:`reward_scores.environment`). Environments run in this process, between two steps of its engine: one that blocks
holds up every episode.
"""

from __future__ import annotations

import json
import logging
import math
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import verifiers as vf
from verifiers.types import Response, ResponseMessage, ToolCall, Usage

from core.config.frozen import thaw
from core.config.plugins import load_module
from core.data.chat_frames import ChatError
from core.data.dataset import Worded
from core.data.parquet import Example
from core.data.vocabulary import writable
from core.errors import InputError
from core.extensions.environments.extension import SECTION
from core.rollout.agent_loop import AgentLoop, Episode
from core.rollout.call_formats.call_formats import FORMATS, Chat
from core.safe_text.printable import printable
from core.types import Prompt, Stop
from reward_scores.environment import REWARD

if TYPE_CHECKING:
    from core.config.schema import Config

log = logging.getLogger(__name__)
KEY = f"{SECTION}.environment"


def load_environment(name: str, arguments: Mapping[str, Any]) -> vf.Environment:
    """Return the environment of an installed package, or of a file with ``load_environment``. Raises InputError."""
    try:
        if name.endswith(".py"):
            return load_module(name, f"{KEY}={name}").load_environment(**arguments)
        return vf.load_environment(name, **arguments)
    except InputError:
        raise
    except Exception as error:
        shown = traceback.format_exc(limit=-3).rstrip()
        fix = f"install it, or correct {SECTION}.environment_args"
        raise InputError(f"{KEY}={name}: it cannot be loaded ({error}); {fix}\n{shown}") from error


class EnvironmentLoop(AgentLoop):
    """Raises InputError for an environment that cannot be loaded or played."""

    def __init__(self, config: Config, tokenizer: Any):
        super().__init__(config, tokenizer)
        self.options = config.actor_rollout_ref.rollout.multi_turn
        name = self.options.environment
        self.environment = load_environment(name, thaw(self.options.environment_args))
        if not isinstance(self.environment, vf.MultiTurnEnv):
            raise InputError(f"{KEY}={name}: {type(self.environment).__name__} is no MultiTurnEnv; choose one that is")
        if self.environment.requires_group_rollouts:
            rule = "its rubric scores the answers to a prompt together, and episodes here are scored one by one"
            raise InputError(f"{KEY}={name}: {rule}; write its functions for one state each")
        self.format = FORMATS["hermes"]
        self.schemas = [_schema(tool) for tool in self.environment.tool_defs or ()]
        self.chat = Chat(tokenizer, config.data.apply_chat_template_kwargs, self.schemas)
        if not self.chat.has_template:
            fix = "set actor_rollout_ref.model.custom_chat_template, or take an instruct model's tokenizer"
            raise InputError(f"{KEY}={name}: an environment speaks in chats, and the tokenizer has no template; {fix}")
        self.counts: Counter[str] = Counter()

    async def run(self, episode: Episode) -> None:
        prompt = episode.prompt
        if self.schemas:
            episode.restart(self.chat.encoder.encode_with(self.worded(prompt), prompt.media))
        client, self.counts["episodes"] = EpisodeClient(self, episode), self.counts["episodes"] + 1
        state = None
        try:
            state = await self.environment.rollout(_input(prompt), client, "policy", {})
            await self.environment.rubric.score_rollout(state)
        except Exception as error:  # an environment's code may fail in any way
            self.note(error)
        if not episode.turns:  # it ended before the policy's first turn, or failed
            await episode.turn()
        if state is not None:
            self.keep(state, episode)

    def keep(self, state: Mapping[str, Any], episode: Episode) -> None:
        """Keep the rubric's reward and metrics for the scorer; without them it reports a failure."""
        if state.get("error") is not None:
            self.note(state["error"])
        named = {REWARD: state.get("reward"), **{f"{REWARD}/{n}": v for n, v in (state.get("metrics") or {}).items()}}
        numbers = {
            name: float(value) for name, value in named.items() if isinstance(value, Real) and math.isfinite(value)
        }
        if state.get("error") is None and REWARD in numbers:
            episode.tool_scores.update(numbers)

    def note(self, error: Exception) -> None:
        """Count an episode whose environment failed, and log the first one with its traceback."""
        self.counts["failed"] += 1
        if self.counts["failed"] == 1:
            trace = printable("".join(traceback.format_exception(error, limit=-8)))
            log.warning(
                "the environment failed: its answer has no score; further failures are counted alone\n%s", trace
            )

    def worded(self, example: Example | Prompt) -> Worded:
        """Return the prompt with what tells of the environment's tools."""
        plain = super().worded(example)
        if not self.schemas:
            return plain
        chat = [{"role": "user", "content": plain.prompt}] if isinstance(plain.prompt, str) else plain.prompt
        names = tuple(schema["function"]["name"] for schema in self.schemas)
        return Worded(*self.format.tell(chat, self.schemas), names)

    def metrics(self) -> Mapping[str, float]:
        counts, self.counts = self.counts, Counter()
        played = counts["episodes"]
        return {"agent/environment_failures": counts["failed"] / played if played else 0.0}


class EpisodeClient(vf.Client):
    """The client of one rollout: it appends what the environment says and answers with a turn of the policy."""

    def __init__(self, loop: EnvironmentLoop, episode: Episode):
        super().__init__(episode)
        self.loop, self.episode = loop, episode
        self.said: list[tuple[str, str]] = [_plain(one) for one in episode.prompt.messages]  # that stand in the stream

    async def get_response(
        self, prompt: Sequence[Any], model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
    ) -> Response:
        """Return the policy's turn after ``prompt``, which begins with all that was said before.

        Raises OverlongPromptError where no turn has room, which ends a rollout as truncated.
        """
        messages = [_plain(one) for one in prompt]
        if messages[: len(self.said)] != self.said:
            raise vf.ModelError("the environment changed what was said before, and an episode is one stream of tokens")
        new = messages[len(self.said) :]
        if self.episode.over or (new and not self._add(new)):
            raise vf.OverlongPromptError(f"the response is full: {self.episode.limits.response} tokens")
        turn = await self.episode.turn()
        calls = [] if not tools else _tool_calls(self.loop.format.parse(turn.text))
        self.said = [*messages, ("assistant", turn.text)]
        reason = "length" if turn.stop is Stop.LENGTH else "tool_calls" if calls else "stop"
        message = ResponseMessage(
            content=turn.text, tool_calls=calls or None, finish_reason=reason, is_truncated=turn.stop is Stop.LENGTH
        )
        spent = len(self.episode.prompt_ids), self.episode.limits.response - self.episode.left
        usage = Usage(prompt_tokens=spent[0], reasoning_tokens=0, completion_tokens=spent[1], total_tokens=sum(spent))
        return Response(id=uuid.uuid4().hex, created=int(time.time()), model=model, usage=usage, message=message)

    def _add(self, new: Sequence[tuple[str, str]]) -> bool:
        """Append messages of one role, and return whether a turn has room behind them."""
        roles = {role for role, _ in new}
        if len(roles) > 1:
            raise vf.ModelError(f"the environment answers in several roles at once ({', '.join(sorted(roles))})")
        (role,), texts = roles, [writable(text) for _, text in new]
        try:
            pieces = self.loop.chat.messages(role, texts, self.episode)
        except ChatError as error:
            raise vf.ModelError(f"the chat template does not write the role {role!r}: {error}") from error
        ids: list[int] = []
        for text, is_answer in pieces:
            ids += (
                self.episode.encode(text) if is_answer else self.loop.tokenizer.encode(text, add_special_tokens=False)
            )
        return self.episode.add_ids(ids, "".join(text for text, _ in pieces), role)

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError("the client is an episode")

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def get_native_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any):
        raise NotImplementedError("get_response answers")

    async def raise_from_native_response(self, response: Any) -> None:
        """Do nothing: an episode's turn is always one."""

    async def from_native_response(self, response: Any) -> Any:
        return response

    async def close(self) -> None:
        """Do nothing: the engine is the run's."""


def _input(prompt: Prompt) -> dict[str, Any]:
    """Return an example as the environment's own data set had it."""
    facts = prompt.extra_info
    return {
        **json.loads(facts.get("example") or "{}"),
        "prompt": [dict(message) for message in prompt.messages],
        "answer": "" if prompt.ground_truth is None else prompt.ground_truth,
        "example_id": facts.get("index", prompt.ordinal),
    }


def _plain(message: Any) -> tuple[str, str]:
    """Return a message's role and text. Raises ModelError for one with pictures or sound."""
    role = message["role"] if isinstance(message, Mapping) else message.role
    content = message.get("content") if isinstance(message, Mapping) else message.content
    parts = [content] if isinstance(content, str | None) else content
    texts = [one if isinstance(one, str) else getattr(one, "text", None) for one in parts if one is not None]
    if None in texts:
        raise vf.ModelError("the environment's messages hold more than text")
    return role, "".join(texts)


def _schema(tool: Any) -> dict[str, Any]:
    """Return a tool of the environment as a chat template reads it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _tool_calls(calls: Sequence[Any]) -> list[ToolCall]:
    """Return the calls of a turn; one that cannot be read has arguments that the environment refuses."""
    return [
        ToolCall(
            id=f"call_{number}",
            name=call.name or "unreadable",
            arguments=json.dumps(call.arguments) if call.problem is None else f"not readable: {call.problem}",
        )
        for number, call in enumerate(calls)
    ]
