"""The tool agent (``actor_rollout_ref.rollout.multi_turn.enable``): it makes a turn's calls and
adds their answers.

A call is JSON with ``name`` and ``arguments`` in ``<tool_call>``, behind a turn's thought. A turn
with calls is followed by their answers; one without goes to the example's simulated user or ends
the episode. Both are framed as the chat template writes messages of roles ``tool`` and ``user``.
Calls that cannot be made are answered with the error, and so are tools that fail or take too long.
A simulated user who fails or takes too long ends the episode, which has no score.
"""

import asyncio
import copy
import json
import logging
import traceback
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from core.config.schema import Config
from core.data import vocabulary
from core.data.parquet import Example
from core.data.vocabulary import writable
from core.errors import InputError, printable
from core.rewards.grading import finite_number
from core.rollout import tools as listed
from core.rollout.agent_loop import AgentLoop, Episode
from core.rollout.chat_frames import ChatFrames
from core.rollout.tools import BaseInteraction, BaseTool, ToolError
from core.rollout.untrusted import UntrustedCalls
from reward_scores.tags import between

log = logging.getLogger(__name__)
THOUGHT = "<think>"
MODEL = "actor_rollout_ref.model"
TRACE = 4000  # characters of a traceback
REPLY = "generate_response returns (ends: bool, text: str, score: number or None, metrics: dict)"


@dataclass(frozen=True)
class Call:
    """A call as the policy wrote it, or the ``problem`` that makes it none."""

    name: str = ""
    arguments: Any = None
    problem: str | None = None


def parse_calls(text: str, thinking: bool = False) -> list[Call]:
    """Return the calls of a turn: JSON with ``name`` and ``arguments`` in ``<tool_call>``.

    Calls count behind the closed thought, as in vLLM's and SGLang's parsers. ``thinking`` tells
    that the turn's context ends with an open ``<think>``.
    """
    calls = []
    for content in between(behind_thought(text, thinking), "tool_call"):
        try:
            call = json.loads(content)
            calls.append(Call(str(call["name"]), call.get("arguments", {})))
        except (ValueError, RecursionError) as error:
            calls.append(Call(problem=f"the call is not JSON: {error}"))
        except (TypeError, KeyError):
            calls.append(Call(problem='a call is {"name": ..., "arguments": {...}}'))
    return calls


def behind_thought(text: str, thinking: bool) -> str:
    """Return what stands behind a turn's thought: nothing if the thought is not closed."""
    _, closing_tag, behind = text.partition("</think>")
    if closing_tag:
        return behind
    is_open = thinking or text.lstrip().startswith(THOUGHT)
    return "" if is_open else text


@dataclass(eq=False, repr=False)
class Instance:
    """A tool or a simulated user in one episode.

    ``kwargs`` has the example's arguments of each method.
    """

    owner: BaseTool | BaseInteraction
    kwargs: Mapping[str, Any]
    episode: Episode
    calls: UntrustedCalls
    timeout_s: float
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    failure: Exception | None = None  # it could not begin

    async def call(self, name: str, *args: Any, counted: bool = False) -> Any:
        """Return what a method returns, or raise what it raises.

        ``counted``: it is a call that the policy made.
        """
        if self.failure is not None:
            raise self.failure
        job = partial(self.calls.call, self.bound(name, *args), self.timeout_s)
        return await self.episode.call(job, counted=counted)

    def bound(self, name: str, *args: Any) -> partial:
        """Return a method with its arguments."""
        return partial(getattr(self.owner, name), self.id, *args, **(self.kwargs.get(name) or {}))


def parse_answer(answer: Any) -> tuple[str, float | None]:
    """Return the text and the reward of a tool's answer.

    It is a text, or a tuple of a text or ToolResponse, a reward and metrics.
    """
    response = answer
    reward = None
    if isinstance(answer, tuple) and len(answer) > 1:
        response, reward = answer[:2]
    text = getattr(response, "text", response)
    if not isinstance(text, str):
        raise ValueError(f"it returned {type(text).__name__}, not text alone")
    return text, parse_number(reward, "reward")


def parse_reply(answer: Any) -> tuple[bool, str, float | None]:
    """Return whether a simulated user ends the episode, their text and their score."""
    if not isinstance(answer, tuple | list) or len(answer) < 3:
        raise ValueError(f"it returned {answer!r:.100}; {REPLY}")
    ends, text, score = answer[:3]
    if not isinstance(ends, bool | np.bool_):
        raise ValueError(f"it returned {ends!r:.100} for whether the episode ends; {REPLY}")
    if not isinstance(text, str) and not ends:
        raise ValueError(f"it returned {text!r:.100} as text; {REPLY}")
    return bool(ends), text, parse_number(score, "score")


def parse_number(value: Any, name: str) -> float | None:
    """Return a reward or a score, or None if there is none."""
    if value is None:
        return None
    number = finite_number(value)
    if number is None:
        raise ValueError(f"it returned {value!r:.100} as {name}, which is no finite number")
    return number


class ToolAgentLoop(AgentLoop):
    """Alternates the policy with tools and simulated users.

    Raises InputError for a broken file of tools or users, for a chat template that cannot write
    their turns, and for a tokenizer that hides calls.
    """

    tags = (THOUGHT, "</think>", "<tool_call>", "</tool_call>")

    def __init__(self, config: Config, tokenizer: Any):
        super().__init__(config, tokenizer)
        self.options = config.actor_rollout_ref.rollout.multi_turn
        options = self.options
        self.tools = listed.load_listed(options.tool_config_path, BaseTool)
        self.users = listed.load_listed(options.interaction_config_path, BaseInteraction)
        owners = (*self.tools.values(), *self.users.values())
        self.calls = {id(owner): UntrustedCalls() for owner in owners}
        self.counts: Counter[str] = Counter()
        self.traced: set[str] = set()  # tools whose first failure was logged
        self.frames = ChatFrames(tokenizer, vocabulary.template_arguments(config.data))
        # Some tokenizers have a template of its own for chats with tools
        schemas = [tool.schema for tool in self.tools.values()]
        self.described_tools = {"tools": schemas} if schemas else {}
        if self.users or self.frames.has_template:
            self.check_template()

    def check_template(self) -> None:
        """Raise InputError if the chat template cannot write the replies of tools or users."""
        replies = [("user", 1)] if self.users else []
        if self.tools:
            most = self.options.max_parallel_calls
            replies = [("tool", count) for count in range(1, most + 1)] + replies
        for role, count in replies:
            try:
                self.frames.check([{"role": role, "content": ""}] * count, **self.described_tools)
            except vocabulary.ChatError as error:
                where = f"{MODEL}.path={self.config.actor_rollout_ref.model.path}"
                rule = f"the chat template cannot write {count} message(s) of role {role!r}"
                fix = f"set {MODEL}.custom_chat_template to one that does"
                raise InputError(f"{where}: {rule} after an answer ({error}); {fix}") from error

    def check(self, example: Example) -> str | None:
        try:
            listed.chosen_tools(self.tools, example.extra_info)
            listed.chosen_user(self.users, example.extra_info)
        except ValueError as error:
            return str(error)
        return None

    def tools_of(self, example: Example) -> list[Mapping[str, Any]]:
        if self.check(example):  # a start reports it for every example
            return []
        tools = listed.chosen_tools(self.tools, example.extra_info)
        return [tool.schema for tool in tools.values()]

    async def run(self, episode: Episode) -> None:
        extra_info = episode.prompt.extra_info
        all_arguments = extra_info.get("tools_kwargs") or {}
        tools = {}
        for name, tool in listed.chosen_tools(self.tools, extra_info).items():
            arguments = all_arguments.get(name) or {}
            kwargs = {key.removesuffix("_kwargs"): value for key, value in arguments.items()}
            tools[name] = self.instance(tool, kwargs, episode)
        user = None
        chosen_user = listed.chosen_user(self.users, extra_info)
        if chosen_user is not None:
            kwargs = {"generate_response": extra_info["interaction_kwargs"]}
            user = self.instance(chosen_user, kwargs, episode)
        try:
            await asyncio.gather(*(self.attempt(tool, "create") for tool in tools.values()))
            await self.take_turns(tools, user, episode)
        except BaseException:
            # A step or a run ends: it does not wait for tools
            for tool in tools.values():
                tool.calls.begin(tool.bound("release"))
            raise
        began = [tool for tool in tools.values() if tool.failure is None]
        await asyncio.gather(*(self.attempt(tool, "release") for tool in began))

    def instance(
        self, owner: BaseTool | BaseInteraction, kwargs: Mapping[str, Any], episode: Episode
    ) -> Instance:
        own_kwargs = copy.deepcopy(dict(kwargs))  # a tool may change what it is given
        calls = self.calls[id(owner)]
        return Instance(owner, own_kwargs, episode, calls, self.options.tool_timeout_s)

    async def attempt(self, tool: Instance, method: str) -> None:
        """Call a tool's method at the begin or end of an episode. What it raises is its failure."""
        try:
            await tool.call(method)
        except Exception as error:
            self.note(tool, error, "tool_state_failures")
            tool.failure = error

    def note(self, tool: Instance, error: Exception, count: str) -> None:
        """Count a failure of a tool or a user, and log the first one with its traceback."""
        self.counts[count] += 1
        name = tool.owner.name
        if name not in self.traced:
            self.traced.add(name)
            trace = "".join(traceback.format_exception(error, limit=-8))[-TRACE:]
            text = "%s failed; further failures are counted alone\n%s"
            log.warning(text, name, printable(trace))

    async def take_turns(
        self, tools: Mapping[str, Instance], user: Instance | None, episode: Episode
    ) -> None:
        """Alternate with the policy: tools answer its calls, the user any other turn."""
        messages = list(episode.prompt.messages)
        thinking = episode.prompt.opened_tag == THOUGHT
        while not episode.over:
            turn = await episode.turn()
            calls = parse_calls(turn.text, thinking)
            is_last = episode.turns == self.options.max_assistant_turns
            user_replies = user is not None and not episode.over
            if is_last or not (calls or user_replies):
                return
            messages.append({"role": "assistant", "content": turn.text})
            if calls:
                role = "tool"
                answers = await self.answers(calls, tools, episode)
            else:
                role = "user"
                answers = await self.reply(user, messages, episode)
            replies = [{"role": role, "content": text} for text in answers]
            messages += replies
            if not answers or not self.add(role, answers, episode):
                return
            written = self.frames.written(replies, **self.described_tools)
            thinking = written.rstrip().endswith(THOUGHT)

    async def answers(
        self, calls: Sequence[Call], tools: Mapping[str, Instance], episode: Episode
    ) -> list[str]:
        """Make the calls of a turn at the same time. Return their answers in their order."""
        permitted = calls[: self.options.max_parallel_calls]
        answers = await asyncio.gather(*(self.outcome(call, tools, episode) for call in permitted))
        episode.tool_rewards += [reward for _, reward in answers if reward is not None]
        return [self.cut(writable(text)) for text, _ in answers]

    async def outcome(
        self, call: Call, tools: Mapping[str, Instance], episode: Episode
    ) -> tuple[str, float | None]:
        """Return a call's answer and reward, or the error that the policy reads in its place."""
        if problem := self.problem(call, tools, episode):
            self.counts["invalid"] += 1
            return f"error: {problem}", None
        self.counts["made"] += 1
        try:
            answer = await tools[call.name].call("execute", call.arguments, counted=True)
            return parse_answer(answer)
        except ToolError as error:
            self.counts["refused"] += 1
            return f"error: {error}", None
        except Exception as error:
            self.note(tools[call.name], error, "failed")
            return f"error: the tool failed: {listed.one_line_of(error)}", None

    def problem(self, call: Call, tools: Mapping[str, Instance], episode: Episode) -> str | None:
        """Return why a call cannot be made, or None."""
        if call.problem is not None:
            return call.problem
        if call.name not in tools:
            return f"there is no tool {call.name!r}; there are {', '.join(tools) or 'none'}"
        most = self.options.max_tool_calls
        if most is not None and episode.tool_calls >= most:
            return f"no call is left: an episode has {most}"
        return self.tools[call.name].problem(call.arguments)

    async def reply(
        self, user: Instance, messages: Sequence[Mapping[str, Any]], episode: Episode
    ) -> list[str]:
        """Return the user's text and keep their score; nothing if they end the episode or fail."""
        self.counts["user_turns"] += 1
        try:
            answer = await user.call("generate_response", [dict(message) for message in messages])
            ends, text, score = parse_reply(answer)
        except Exception as error:
            self.note(user, error, "failed_user_turns")
            name = f"the simulated user {user.owner.name}"
            episode.failure = f"{name} failed: {listed.one_line_of(error)}"
            return []
        if score is not None:
            episode.user_scores.append(score)
        return [] if ends else [writable(text)]

    def cut(self, text: str) -> str:
        """Return at most ``max_tool_response_length`` characters of a text.

        ``tool_response_truncate_side`` decides which side is kept, by verl's rule.
        """
        most = self.options.max_tool_response_length
        if len(text) <= most:
            return text
        kept_at_head = {"left": most, "middle": most // 2, "right": 0}
        head = kept_at_head[self.options.tool_response_truncate_side]
        before = text[:head]
        behind = text[len(text) - most + head :]
        return f"{before}{'...' if before else ''}(truncated){'...' if behind else ''}{behind}"

    def add(self, role: str, texts: Sequence[str], episode: Episode) -> bool:
        """Append messages of a role and the beginning of the policy's next turn.

        Return whether the policy can go on.
        """
        replies = [{"role": role, "content": text} for text in texts]
        text, ids = self.frames.encode(
            replies, episode.last_id, episode.stop, **self.described_tools
        )
        return episode.add(text, role, ids)

    def metrics(self) -> Mapping[str, float]:
        counts = self.counts
        self.counts = Counter()
        calls = counts["made"] + counts["invalid"]
        metrics = {
            "agent/calls": float(calls),
            "agent/tool_state_failures": float(counts["tool_state_failures"]),
            "agent/user_turns": float(counts["user_turns"]),
        }
        for outcome in ("invalid", "refused", "failed"):
            metrics[f"agent/{outcome}_calls"] = counts[outcome] / max(calls, 1)
        if self.users:
            failed = counts["failed_user_turns"]
            metrics["agent/failed_user_turns"] = failed / max(counts["user_turns"], 1)
        return metrics

    def close(self) -> None:
        asyncio.run(self._close_tools())
        for calls in self.calls.values():
            calls.close()

    async def _close_tools(self) -> None:
        async def close(tool: BaseTool) -> None:
            try:
                await self.calls[id(tool)].call(tool.close, self.options.tool_timeout_s)
            except Exception:  # how the run ended must not be hidden by it
                log.warning("%s cannot be closed", tool.name, exc_info=True)

        await asyncio.gather(*map(close, self.tools.values()))
