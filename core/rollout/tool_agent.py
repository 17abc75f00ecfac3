"""The tool agent (``actor_rollout_ref.rollout.multi_turn.enable``): it makes a turn's calls and adds their answers.

A call is JSON with ``name`` and ``arguments`` in ``<tool_call>``. A turn with calls is followed by their answers; one
without goes to the example's simulated user or ends the episode. Both are framed as the chat template writes messages
of roles ``tool`` and ``user``. Calls that cannot be made (unreadable, no such tool, wrong arguments, none left) are
answered with the error, and so are tools and users that fail: their code may raise, return or block what it likes, and
never ends a run.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import threading
import traceback
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from core.data.chat_frames import ChatError, Frame, reply_frame, template_of
from core.data.parquet import Example
from core.data.vocabulary import end_ids, first_token, template_ends, whole_tokens, writable
from core.errors import InputError, printable
from core.rollout.agent_loop import AgentLoop, Episode
from core.rollout.tools import USERS_KEY, ToolError, chosen_tools, chosen_user, load_tools, load_users
from core.types import Prompt, Stop
from reward_scores.tags import between

if TYPE_CHECKING:
    from core.config.schema import Config

log = logging.getLogger(__name__)
GRACE_S = 1.0  # for an event loop to show that it is not blocked, after a call on it ran out of time
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


# --- code of tools and users ---


class OutsideError(Exception):
    """Outside code failed: the text is for the policy, ``trace`` for its author."""

    trace = ""


async def guarded(job: Callable[[], Awaitable[Any]]) -> Any:
    """Return what a job returns. Raises OutsideError for whatever it raises but ToolError.

    A cancellation by the deadline or the run comes through. A tool may raise CancelledError, SystemExit or
    KeyboardInterrupt itself, which would end the event loop.
    """
    try:
        return await job()
    except ToolError:
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
            raise
        # format_exception_only: the text of an error may fail as well
        text = traceback.format_exception_only(error)[-1][:1000]
        failure = OutsideError(" ".join(text.split())[:200])
        failure.trace = traceback.format_exc(limit=-8)[-TRACE:]
    raise failure


class ApartLoop:
    """An event loop on a thread of its own, for code that may block. One that is blocked is left for a new one."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, job: Callable[[], Awaitable[Any]]) -> Any:
        """Await a job there. To cancel it does not wait for code that ignores that."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="tools", daemon=True).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(job(), self._loop))

    async def leave_if_blocked(self) -> None:
        """Begin a new loop with the next job where this one does not answer within ``GRACE_S``."""
        loop, answered = self._loop, threading.Event()
        if loop is None:
            return
        loop.call_soon_threadsafe(answered.set)
        if not await asyncio.to_thread(answered.wait, GRACE_S) and self._loop is loop:
            self._loop = None
            log.warning(
                "a tool or user blocks its event loop past its deadline; the next calls get a new one. Await instead "
                "of blocking (asyncio.to_thread), or bound the time in the tool"
            )

    def close(self) -> None:
        """End the thread, unless a call blocks it. A second call does nothing."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


class Instance:
    """A tool or a simulated user in one episode. ``kwargs`` has the example's arguments of each method."""

    def __init__(self, owner: Any, kwargs: Mapping[str, Any], episode: Episode, timeout_s: float, apart: ApartLoop):
        self.owner, self.episode, self.timeout_s, self.apart = owner, episode, timeout_s, apart
        self.kwargs = copy.deepcopy(dict(kwargs))  # a tool may change what it is given
        self.id = str(uuid.uuid4())
        self.failure: Exception | None = None  # it could not begin
        self.begun = False

    async def begin(self, method: str) -> None:
        """Await the method that begins an episode."""
        try:
            await self.call(method)
            self.begun = True
        except FAILURES as error:
            self.failure = error
            raise

    async def call(
        self, method: str, *args: Any, read: Callable[[Any], Any] = lambda found: found, counted: bool = False
    ) -> Any:
        """Return what ``read`` makes of what a method returned. ``counted``: it is a call that the policy made.

        Raises ToolError, TimeoutError, and OutsideError for everything else.
        """
        if self.failure is not None:
            raise self.failure

        async def found() -> Any:
            return read(await getattr(self.owner, method)(self.id, *args, **(self.kwargs.get(method) or {})))

        job = partial(guarded, found)
        if self.owner.runs_apart:
            job = partial(self.apart.run, job)
        try:
            return await (self.episode.call if counted else self.episode.wait)(job, self.timeout_s)
        except TimeoutError:
            if self.owner.runs_apart:
                await self.apart.leave_if_blocked()
            raise TimeoutError(f"no answer in {self.timeout_s:g} s") from None


FAILURES = (ToolError, TimeoutError, OutsideError)  # what Instance.call raises


def read_answer(answer: Any) -> tuple[str, float | None]:
    """Return the text and the reward of a tool's answer: a text, or a text or ToolResponse with reward and metrics."""
    response, reward, *_ = answer if isinstance(answer, tuple) and len(answer) > 1 else (answer, None)
    if getattr(response, "image", None) or getattr(response, "video", None):
        raise ValueError("it returned a picture or a video, and an answer is text here")
    text = response if isinstance(response, str) else getattr(response, "text", response)
    if not isinstance(text, str):
        raise ValueError(f"it returned {type(text).__name__}, not text")
    return text, _finite(reward)


def read_reply(reply: Any) -> tuple[bool, str, float | None]:
    """Return whether a user ends the episode, their text and their score of the policy's turn."""
    if not isinstance(reply, tuple) or len(reply) < 3:
        raise ValueError(f"it returned {type(reply).__name__}, not (whether it ends, text, score, metrics)")
    over, text, score = reply[:3]
    if not (over or isinstance(text, str)):
        raise ValueError(f"it returned {type(text).__name__}, not text")
    return bool(over), text, _finite(score)


def _finite(value: Any) -> float | None:
    if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
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
        self.apart = ApartLoop()
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
            tools[name] = Instance(tool, kwargs, episode, timeout_s, self.apart)
        if user is not None:
            methods = ("start_interaction", "generate_response", "finalize_interaction")
            kwargs = dict.fromkeys(methods, facts["interaction_kwargs"])
            user = Instance(user, kwargs, episode, timeout_s, self.apart)
        try:
            for name, tool in tools.items():
                await self.noted(f"the tool {name!r}", tool.begin("create"))
            if user is not None:
                await self.noted("the user", user.begin("start_interaction"), "user_failures")
            await self.take_turns(tools, user, episode)
        finally:
            if user is not None and user.begun:
                await self.noted("the user", user.call("finalize_interaction"), "user_failures")
            for name, tool in tools.items():
                if tool.begun:
                    reward = await self.noted(f"the tool {name!r}", tool.call("calc_reward", read=_finite))
                    episode.tool_scores |= {} if reward is None else {name: reward}
                    await self.noted(f"the tool {name!r}", tool.call("release"))

    async def noted(self, name: str, call: Awaitable[Any], count: str = "tool_state_failures") -> Any:
        """Return what a call returned; None where it failed, which is noted."""
        try:
            return await call
        except FAILURES as error:
            self.note(name, error, count)
            return None

    def note(self, name: str, error: Exception, count: str) -> None:
        """Count a failure of outside code, and log the first one of each tool and user with its traceback."""
        self.counts[count] += 1
        if name not in self.traced:
            self.traced.add(name)
            reason, trace = printable(str(error)), printable(getattr(error, "trace", ""))
            log.warning("%s failed: %s; further failures are counted alone\n%s", name, reason, trace)

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
            return await tools[call.name].call("execute", call.arguments, read=read_answer, counted=True)
        except (ToolError, TimeoutError) as error:
            self.counts["refused" if isinstance(error, ToolError) else "timeout"] += 1
            return f"error: {error}", None
        except OutsideError as error:
            self.note(f"the tool {call.name!r}", error, "failed")
            return f"error: the tool failed: {error}", None

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
            over, text, score = await user.call("generate_response", chat, read=read_reply)
        except TimeoutError:
            self.counts["user_timeouts"] += 1
            episode.cut_short()
            return None
        except (ToolError, OutsideError) as error:
            self.note("the user", error, "user_failures")
            return self.cut(f"error: {error}")
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
        self.apart.close()
