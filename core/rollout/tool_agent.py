"""The tool agent (``actor_rollout_ref.rollout.multi_turn.enable``): it makes a turn's calls and adds their answers.

A call is JSON with ``name`` and ``arguments`` in ``<tool_call>``. A turn with calls is followed by their answers; one
without goes to the example's simulated user or ends the episode. Both are framed as the chat template writes messages
of roles ``tool`` and ``user``. Calls that cannot be made (unreadable, no such tool, wrong arguments, none left) are
answered with the error, and so are tools and users that fail: what their code raises or returns never ends a run. They
share the run's event loop: one that blocks it (``time.sleep``, ``requests``) holds up every sample.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import traceback
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from core.data.parquet import Example
from core.data.vocabulary import (
    ChatError,
    Frame,
    end_ids,
    first_token,
    reply_frame,
    template_ends,
    template_of,
    whole_tokens,
    writable,
)
from core.errors import InputError, printable
from core.rollout.agent_loop import AgentLoop, Episode
from core.rollout.tools import (
    USERS_KEY,
    BaseInteraction,
    BaseTool,
    ToolError,
    chosen_tools,
    chosen_user,
    load_tools,
    load_users,
)
from core.types import Prompt, Stop
from reward_scores.tags import between

if TYPE_CHECKING:
    from core.config.schema import Config

log = logging.getLogger(__name__)
TRACE = 4000  # characters of a traceback
Piece = tuple[str, bool]  # text, and whether it is an answer's: what looks like a special token in one is text


# --- calls ---


@dataclass(frozen=True)
class Call:
    """A call as the policy wrote it; ``problem`` says why it is none."""

    name: str = ""
    arguments: Any = None
    problem: str | None = None


def parse_calls(text: str) -> list[Call]:
    """Return the calls of a turn: JSON with ``name`` and ``arguments`` between ``<tool_call>`` and ``</tool_call>``."""
    return [_parse_call(content) for content in between(text, "tool_call")]


def _parse_call(content: str) -> Call:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        return Call(problem=f"the call is not JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call(problem='a call is {"name": ..., "arguments": {...}}')
    return Call(found["name"], found.get("arguments", {}))


# --- tools and users ---


class Instance:
    """A tool or a simulated user in one episode. ``kwargs`` has the example's arguments of each method."""

    def __init__(
        self, owner: BaseTool | BaseInteraction, kwargs: Mapping[str, Any], episode: Episode, timeout_s: float
    ):
        self.owner, self.episode, self.timeout_s = owner, episode, timeout_s
        self.kwargs = copy.deepcopy(dict(kwargs))  # a tool may change what it is given
        self.id = str(uuid.uuid4())
        self.failure: Exception | None = None  # it could not begin

    async def call(self, method: str, *args: Any, counted: bool = False) -> Any:
        """Return what a method returned. ``counted``: it is a call that the policy made. Raises what it raises."""
        if self.failure is not None:
            raise self.failure
        job = partial(getattr(self.owner, method), self.id, *args, **(self.kwargs.get(method) or {}))
        try:
            return await (self.episode.call if counted else self.episode.wait)(job, self.timeout_s)
        except TimeoutError:
            raise TimeoutError(f"no answer in {self.timeout_s:g} s") from None


def read_answer(answer: Any) -> tuple[str, float | None]:
    """Return the text and the reward of a tool's answer: a text, or a text or ToolResponse with reward and metrics."""
    response, reward, *_ = answer if isinstance(answer, tuple) and len(answer) > 1 else (answer, None)
    text = response if isinstance(response, str) else getattr(response, "text", response)
    if getattr(response, "image", None) or getattr(response, "video", None) or not isinstance(text, str):
        raise ValueError(f"it returned {type(text).__name__}, not text alone")
    return text, _finite(reward)


def read_reply(reply: Any) -> tuple[bool, str, float | None]:
    """Return whether a user ends the episode, their text and their score of the policy's turn."""
    if not isinstance(reply, tuple) or len(reply) < 3 or not (reply[0] or isinstance(reply[1], str)):
        raise ValueError(f"it returned {reply!r:.60}, not (whether it ends, text, score, metrics)")
    return bool(reply[0]), reply[1], _finite(reply[2])


def described(error: Exception) -> str:
    """Return an error's type and text in one line."""
    return " ".join(f"{type(error).__name__}: {error}"[:1000].split())[:200]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _finite(value: Any) -> float | None:
    if value is not None and not _is_number(value):
        raise ValueError(f"it returned {value!r:.60} as reward, which is no finite number")
    return None if value is None else float(value)


# --- the loop ---


class ToolAgentLoop(AgentLoop):
    """Raises InputError for a broken file of tools or users, and for a chat template that cannot write their turns."""

    def __init__(self, config: Config, tokenizer: Any):
        super().__init__(config, tokenizer)
        self.options = config.actor_rollout_ref.rollout.multi_turn
        tools, users = self.options.tool_config_path, self.options.interaction_config_path
        self.tools = load_tools(tools) if tools else {}
        self.users = load_users(users) if users else {}
        self.counts: Counter[str] = Counter()
        self.traced: set[str] = set()  # tools and users whose first failure was logged
        kwargs = config.data.apply_chat_template_kwargs
        self.has_template = bool(kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None))
        self.whole_tokens = whole_tokens(tokenizer)
        self.ends, self.own_ends = end_ids(tokenizer), template_ends(tokenizer, kwargs)
        schemas = [tool.schema for tool in self.tools.values()]  # some tokenizers have a template of its own for them
        self.template = template_of(tokenizer, {**kwargs, **({"tools": schemas} if schemas else {})})
        self._frames: dict[tuple[str, int], Frame] = {}
        self.check_template()

    def check_template(self) -> None:
        """Render what episodes will add. Raises InputError for a template that has no use for it."""
        model = self.config.actor_rollout_ref.model
        where, fix = f"actor_rollout_ref.model.path={model.path}", "set actor_rollout_ref.model.custom_chat_template"
        if not self.has_template and self.users:
            raise InputError(f"{USERS_KEY}: a user's turn is framed by the chat template, and there is none; {fix}")
        uses = [("tool", count) for count in sorted({1, self.options.max_parallel_calls})] if self.tools else []
        for role, count in [*uses, *([("user", 1)] if self.users else [])] if self.has_template else []:
            try:
                self.frame(role, count)
            except ChatError as error:
                rule = f"the chat template cannot write {count} message(s) of role {role!r} after an answer: {error}"
                raise InputError(f"{where}: {rule}; {fix} to one that does") from error
        if self.tools and self.has_template:
            shown = self.template([{"role": "user", "content": "."}])
            if untold := [name for name in self.tools if name not in shown]:
                what = "the chat template does not write the schemas of tools (%s): the policy knows them only if the "
                log.warning(f"{what}data tells of them; {fix}", ", ".join(untold))

    def check(self, example: Example | Prompt) -> str | None:
        try:
            chosen_tools(self.tools, example.extra_info)
            chosen_user(self.users, example.extra_info)
        except ValueError as error:
            return str(error)
        return None

    def tools_of(self, example: Example) -> list[Mapping[str, Any]]:
        try:
            return [tool.schema for tool in chosen_tools(self.tools, example.extra_info).values()]
        except ValueError:  # which check reports, of every example and before a start
            return []

    async def run(self, episode: Episode) -> None:
        facts, timeout_s = episode.prompt.extra_info, self.options.tool_timeout_s
        tools, user = {}, chosen_user(self.users, facts)
        for name, tool in chosen_tools(self.tools, facts).items():
            given = (facts.get("tools_kwargs") or {}).get(name) or {}
            kwargs = {key.removesuffix("_kwargs"): value for key, value in given.items()}
            tools[name] = Instance(tool, kwargs, episode, timeout_s)
        if user is not None:
            methods = ("start_interaction", "generate_response", "finalize_interaction")
            user = Instance(user, dict.fromkeys(methods, facts["interaction_kwargs"]), episode, timeout_s)
        begun: list[Instance] = []
        try:
            for one in [*tools.values(), *([user] if user else [])]:
                began = await self.attempt(one, "start_interaction" if one is user else "create")
                if isinstance(began, Exception):
                    one.failure = began
                else:
                    begun.append(one)
            await self.take_turns(tools, user, episode)
        finally:
            for one in begun:
                if one is not user and _is_number(reward := await self.attempt(one, "calc_reward")):
                    episode.tool_scores[one.owner.name] = float(reward)
                await self.attempt(one, "finalize_interaction" if one is user else "release")

    async def attempt(self, one: Instance, method: str) -> Any:
        """Return what a method at the beginning or end of an episode returned, or what it raised, which is noted."""
        try:
            return await one.call(method)
        except Exception as error:
            self.note(one, error, "user_failures" if isinstance(one.owner, BaseInteraction) else "tool_state_failures")
            return error

    def note(self, one: Instance, error: Exception, count: str) -> None:
        """Count a failure of outside code, and log the first one of each tool and user with its traceback."""
        self.counts[count] += 1
        if one.owner.name not in self.traced:
            self.traced.add(one.owner.name)
            trace = "".join(traceback.format_exception(error, limit=-8))[-TRACE:]
            log.warning("%s failed; further failures are counted alone\n%s", one.owner.name, printable(trace))

    async def take_turns(self, tools: Mapping[str, Instance], user: Instance | None, episode: Episode) -> None:
        """Alternate with the policy: tools answer a turn with calls, the user, where there is one, any other."""
        messages, answered = list(episode.prompt.messages), 0
        while not episode.over:
            turn = await episode.turn()
            calls = parse_calls(turn.text)
            last = episode.turns == self.options.max_assistant_turns or answered == self.options.max_user_turns
            if last or not (calls or (user and not episode.over)):
                return
            messages.append({"role": "assistant", "content": turn.text})
            if calls:
                role, answers = "tool", await self.answers(calls, tools, episode)
            else:
                reply = await self.reply(user, messages, episode)
                if reply is None:
                    return
                role, answers = "user", [writable(reply)]
            messages += [{"role": role, "content": text} for text in answers]
            answered += 1
            if not self.add(self.framed(role, answers, episode), role, episode):
                return

    async def answers(self, calls: Sequence[Call], tools: Mapping[str, Instance], episode: Episode) -> list[str]:
        """Make the calls of a turn, all at the same time, and return their results in the order of the calls."""
        permitted = calls[: self.options.max_parallel_calls]
        answers = await asyncio.gather(*(self.outcome(call, tools, episode) for call in permitted))
        episode.tool_rewards += [float(reward) for _, reward in answers if reward is not None]
        return [self.cut(writable(text)) for text, _ in answers]

    async def outcome(self, call: Call, tools: Mapping[str, Instance], episode: Episode) -> tuple[str, float | None]:
        """Return a call's answer and reward, or the error that the policy reads in its place."""
        if problem := self.problem(call, tools, episode):
            self.counts["invalid"] += 1
            return f"error: {problem}", None
        self.counts["made"] += 1
        try:
            return read_answer(await tools[call.name].call("execute", call.arguments, counted=True))
        except (ToolError, TimeoutError) as error:
            self.counts["refused" if isinstance(error, ToolError) else "timeout"] += 1
            return f"error: {error}", None
        except Exception as error:
            self.note(tools[call.name], error, "failed")
            return f"error: the tool failed: {described(error)}", None

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

    async def reply(self, user: Instance, messages: Sequence[Mapping[str, Any]], episode: Episode) -> str | None:
        """Return the user's text and keep their score; None where they end the episode.

        It ends as truncated where no reply came in time. What is no reply becomes an error that the policy reads.
        """
        self.counts["user_turns"] += 1
        chat = [dict(message) for message in messages]
        try:
            over, text, score = read_reply(await user.call("generate_response", chat))
        except TimeoutError:
            self.counts["user_timeouts"] += 1
            episode.cut_short()
            return None
        except Exception as error:
            self.note(user, error, "user_failures")
            return self.cut(f"error: {described(error)}")
        if score is not None:
            episode.user_scores.append(score)
        return None if over else text

    def cut(self, text: str) -> str:
        """Return at most ``max_tool_response_length`` characters, of the side that is to be kept (verl's rule)."""
        most, side = self.options.max_tool_response_length, self.options.tool_response_truncate_side
        if len(text) <= most:
            return text
        if side == "left":
            return text[:most] + "...(truncated)"
        if side == "right":
            return "(truncated)..." + text[-most:]
        head = most // 2
        return text[:head] + "...(truncated)..." + text[len(text) - head :]

    # -- what stands behind the policy's turn --

    def frame(self, role: str, count: int) -> Frame:
        """Return what stands around replies of a role. Raises ChatError where the template has no use for it."""
        if (role, count) not in self._frames:
            self._frames[role, count] = reply_frame(self.template, role, count)
        return self._frames[role, count]

    def framed(self, role: str, texts: Sequence[str], episode: Episode) -> list[Piece]:
        """Return messages of a role and the beginning of the policy's next turn, without the end that it wrote itself.

        Without a chat template answers stand between ``<tool_response>`` tags.
        """
        if not self.has_template:
            before, behind = ("<tool_response>", False), ("</tool_response>", False)
            return [piece for text in texts for piece in (before, (text, True), behind)]
        frame = self.frame(role, len(texts))
        first = frame.pieces[0]
        end = first_token(first, self.whole_tokens)
        written = end is not None and episode.last_token == self.whole_tokens[end]
        # the policy may also have ended its turn with another of the tokens that end turns
        if written or (end in self.own_ends and (episode.last_token in self.ends or episode.stop is Stop.EOS)):
            first = first.lstrip()[len(end) :]
        pieces = [(first, False)]
        for text, behind in zip(texts, frame.pieces[1:], strict=True):
            pieces += [(frame.written(text), True), (behind, False)]
        return pieces

    def add(self, pieces: Sequence[Piece], role: str, episode: Episode) -> bool:
        """Append answers and what is around them. What is in an answer is text, whatever it looks like."""
        ids: list[int] = []
        for text, is_answer in pieces:
            ids += episode.encode(text) if is_answer else self.tokenizer.encode(text, add_special_tokens=False)
        return episode.add_ids(ids, "".join(text for text, _ in pieces), role)

    def metrics(self) -> Mapping[str, float]:
        counts, self.counts = self.counts, Counter()
        asked = counts["made"] + counts["invalid"]
        names = ("invalid", "refused", "timeout", "failed")
        found = {"agent/calls": asked, **{f"agent/{n}_calls": counts[n] / asked if asked else 0.0 for n in names}}
        others = ["tool_state_failures"] if self.tools else []
        others += ["user_turns", "user_timeouts", "user_failures"] if self.users else []
        return found | {f"agent/{name}": float(counts[name]) for name in others}

    def close(self) -> None:
        for owner in [*self.tools.values(), *self.users.values()]:
            try:
                owner.close()
            except Exception:  # how the run ended must not be hidden by it
                log.warning("%s cannot be closed", type(owner).__name__, exc_info=True)
