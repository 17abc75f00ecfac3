"""The tool agent (``actor_rollout_ref.rollout.multi_turn.enable``): it makes a turn's calls and adds their answers.

A turn with calls is followed by their answers; one without goes to the example's simulated user
(:mod:`core.rollout.tools.interactions`) or ends the episode. The format (``core/rollout/call_formats``) decides
how a call is written and an answer framed. Calls that cannot be made (unreadable, no such tool, wrong arguments, none
left) are answered with the error, and so are tools and users that fail (:mod:`core.rollout.outside_code`).
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from core.data.chat_frames import ChatError, rendered
from core.data.dataset import Worded, truncate
from core.data.parquet import Example
from core.data.vocabulary import writable
from core.errors import InputError
from core.rollout.agent_loop import AgentLoop, Episode
from core.rollout.call_formats.call_formats import FORMATS, Call, Chat, Piece, tell_hermes
from core.rollout.outside_code import SHARED, ApartLoop, Failed, SharedContext, described, guarded
from core.rollout.tools.interactions import KEY as USERS
from core.rollout.tools.interactions import Interaction, UserTurn, chosen_user, load_interactions, reply_problem
from core.rollout.tools.template_check import template_problems, uses_of_template
from core.rollout.tools.tools import (
    KEY,
    EpisodeTool,
    Tool,
    ToolAnswer,
    ToolError,
    ToolSpec,
    chosen,
    facts_for,
    kwargs_of,
    load_tools,
)
from core.safe_text.printable import printable
from core.types import Prompt

if TYPE_CHECKING:
    from core.config.schema import Config

log = logging.getLogger(__name__)
Respond = Callable[[Sequence[Mapping[str, Any]]], Awaitable[Any]]  # of a user, in one episode
Wait = Callable[[Callable[[], Awaitable[Any]], float], Awaitable[Any]]  # Episode.call or Episode.wait
USER_COUNTS = ("user_turns", "user_timeouts", "user_failures")
NO_TEMPLATE = (
    "a user's turn is framed by the chat template, and the tokenizer has none; set "
    "actor_rollout_ref.model.custom_chat_template, or take an instruct model's tokenizer"
)
CUT = "...(truncated)..."


class TimedOut(Failed):
    """A call that met its deadline."""


class ToolInstance(Tool):
    """A tool with its state in one episode."""

    def __init__(self, owner: EpisodeTool, state: Any, facts: Mapping[str, Any]):
        self.owner, self.state, self.facts = owner, state, facts
        self.runs_apart = owner.runs_apart

    async def call(self, arguments: Mapping[str, Any], facts: Mapping[str, Any]) -> Any:
        if isinstance(self.state, Failed):
            return self.state
        return await self.owner.call_in(self.state, arguments, self.facts)


def answer_problem(answer: Any) -> Failed | None:
    """Return what is wrong with what a tool returned, or None."""
    if not isinstance(answer, ToolAnswer):
        return Failed(f"it returned {type(answer).__name__}, not text")
    if not isinstance(answer.text, str):
        return Failed(f"it returned {type(answer.text).__name__}, not text")
    if answer.reward is not None and not (isinstance(answer.reward, Real) and math.isfinite(answer.reward)):
        return Failed(f"it returned the reward {answer.reward!r:.60}, which is no finite number")
    return None


class ToolAgentLoop(AgentLoop):
    """Raises InputError where the file of tools is broken."""

    def __init__(self, config: Config, tokenizer: Any):
        super().__init__(config, tokenizer)
        self.options = config.actor_rollout_ref.rollout.multi_turn
        tools, users = self.options.tool_config_path, self.options.interaction_config_path
        if not (tools or users):  # the data chose this loop: a rule checks the configuration's choice
            raise InputError(f"{KEY}=null: the tool agent needs tools; name a YAML file (see core/rollout/tools)")
        self.tools = load_tools(tools) if tools else {}
        self.users = load_interactions(users) if users else {}
        self.format = FORMATS[self.options.format]
        schemas = [spec.schema for spec in self.tools.values()]
        self.chat = Chat(tokenizer, config.data.apply_chat_template_kwargs, schemas)
        self.counts: Counter[str] = Counter()
        self.apart = ApartLoop()
        self.traced: set[str] = set()  # tools and users whose first failure was logged
        if self.users and not self.chat.has_template:
            raise InputError(f"{USERS}={users}: {NO_TEMPLATE}")
        try:
            self.check_template()
        except ChatError as error:
            raise InputError(f"{KEY}={tools}: the chat template refuses the tools' schemas: {error}") from error

    def check_template(self) -> None:
        """Render what episodes will add. Raises InputError for a template that has no use for it."""
        if not self.chat.has_template:
            return
        uses = uses_of_template(self.config, tools=bool(self.tools), users=bool(self.users))
        if problems := template_problems(self.config, self.chat.template, uses):
            raise InputError(problems)
        if self.tools and self.format.tell is tell_hermes:
            shown = rendered(self.chat.template, [{"role": "user", "content": "."}])
            if untold := [name for name in self.tools if name not in shown]:
                log.warning(
                    "the chat template does not write the schemas of tools (%s): the policy knows them only if the "
                    "data tells of them; set actor_rollout_ref.model.custom_chat_template, or multi_turn.format=react",
                    ", ".join(untold),
                )

    async def run(self, episode: Episode) -> None:
        SHARED.set(SharedContext())
        tools = chosen(self.tools, episode.prompt.extra_info)
        self.tell_of(tools, episode)
        instances = await self.start_tools(tools, episode)
        try:
            await self.converse({**tools, **instances}, episode)
        finally:
            await self.end_tools(instances, episode)

    async def start_tools(self, tools: Mapping[str, ToolSpec], episode: Episode) -> dict[str, ToolSpec]:
        """Return the tools that have a state in an episode, each with that state as its tool."""
        instances = {}
        for name, spec in tools.items():
            if isinstance(spec.tool, EpisodeTool):
                facts = copy.deepcopy(dict(kwargs_of(name, episode.prompt.extra_info)))
                state = await self.called(spec.tool, partial(spec.tool.start, facts), episode.wait, spec.timeout_s)
                if isinstance(state, Failed):
                    self.note(f"the tool {name!r}, at the start of an episode,", state, "tool_state_failures")
                instances[name] = replace(spec, tool=ToolInstance(spec.tool, state, facts))
        return instances

    async def end_tools(self, instances: Mapping[str, ToolSpec], episode: Episode) -> None:
        """Keep the reward that each tool gives the whole episode, and let go of its state."""
        for name, spec in instances.items():
            one = spec.tool
            if isinstance(one.state, Failed):
                continue
            reward = await self.called(one, partial(one.owner.reward, one.state, one.facts), episode.wait)
            if isinstance(reward, Failed):
                self.note(f"the reward of the tool {name!r}", reward, "tool_state_failures")
            elif reward is not None:
                episode.tool_scores[name] = reward
            ended = await self.called(one, partial(one.owner.end, one.state, one.facts), episode.wait)
            if isinstance(ended, Failed):
                self.note(f"the tool {name!r}, at the end of an episode,", ended, "tool_state_failures")

    async def converse(self, tools: Mapping[str, ToolSpec], episode: Episode) -> None:
        """Play the episode with the example's simulated user, where it has one."""
        user = chosen_user(self.users, episode.prompt.extra_info)
        if user is None:
            return await self.take_turns(tools, episode, None)
        person, facts = user
        state = await self.called(person, partial(person.start, copy.deepcopy(facts)), episode.wait)

        async def respond(messages: Sequence[Mapping[str, Any]]) -> Any:
            if isinstance(state, Failed):
                return state
            return await self.called(person, partial(person.generate_response, state, messages), episode.wait)

        try:
            await self.take_turns(tools, episode, respond)
        finally:
            if not isinstance(state, Failed):
                ended = await self.called(person, partial(person.finalize, state), episode.wait)
                if isinstance(ended, Failed):
                    self.note("the user", ended, "user_failures")

    async def called(
        self, owner: Tool | Interaction, call: Callable[[], Any], wait: Wait, s: float | None = None
    ) -> Any:
        """Return what a tool's or user's method returned, or Failed; a tool's ToolError comes through."""
        timeout_s, passes = s or self.options.tool_timeout_s, (ToolError,) if isinstance(owner, Tool) else ()
        run = self.apart.run if owner.runs_apart else guarded
        try:
            return await wait(partial(run, call, *passes), timeout_s)
        except TimeoutError:
            return TimedOut(f"no answer in {timeout_s:g} s")

    def note(self, name: str, failed: Failed, count: str) -> None:
        """Count a failure of code from outside, and log the first one of each tool and user with its traceback."""
        self.counts[count] += 1
        if name not in self.traced:
            self.traced.add(name)
            reason, trace = printable(failed.reason), printable(failed.trace)
            log.warning("%s failed: %s; further failures are counted alone\n%s", name, reason, trace)

    async def take_turns(self, tools: Mapping[str, ToolSpec], episode: Episode, respond: Respond | None) -> None:
        """Alternate with the policy: tools answer a turn with calls, the user, where there is one, any other."""
        messages, answered = list(episode.prompt.messages), 0
        while not episode.over:
            turn = await episode.turn(stop=self.format.stop)
            calls = self.format.parse(turn.text)
            last = episode.turns == self.options.max_assistant_turns or answered == self.options.max_user_turns
            if last or not (calls or (respond and not episode.over)):
                return
            messages.append({"role": "assistant", "content": turn.text})
            if calls:
                role, answers = "tool", await self.answers(calls, tools, episode)
                pieces = self.format.frame(self.chat, answers, episode)
            else:
                reply = await self.reply(respond, messages, episode)
                if reply is None or reply.over:
                    return
                role, answers = "user", [writable(reply.text)]
                pieces = self.chat.messages(role, answers, episode)
            messages += [{"role": role, "content": text} for text in answers]
            answered += 1
            if not self.add(pieces, episode, role):
                return

    async def reply(self, respond: Respond, messages: Sequence[Mapping[str, Any]], episode: Episode) -> UserTurn | None:
        """Return the user's reply and keep its score; None, and a truncated episode, where none came in time.

        A reply that is none becomes an error that the policy reads.
        """
        self.counts["user_turns"] += 1
        reply = await respond([dict(message) for message in messages])  # a user may change what it is given
        if isinstance(reply, TimedOut):
            self.counts["user_timeouts"] += 1
            episode.cut_short()
            return None
        if not isinstance(reply, Failed) and (problem := reply_problem(reply)):
            reply = Failed(problem)
        if isinstance(reply, Failed):
            self.note("the user", reply, "user_failures")
            return UserTurn(False, self.cut(f"error: {reply.reason}"))
        if reply.scored:
            episode.user_scores.append(float(reply.score))
        return reply

    def check(self, example: Example | Prompt) -> str | None:
        try:
            chosen(self.tools, example.extra_info)
            chosen_user(self.users, example.extra_info)
        except ValueError as error:
            return str(error)
        return None

    def worded(self, example: Example | Prompt) -> Worded:
        """Return the prompt with what tells of the example's tools."""
        plain = super().worded(example)
        try:
            tools = chosen(self.tools, example.extra_info)
        except ValueError:  # which check reports, of every example and before a start
            return plain
        if not (tools and self.chat.has_template):
            return plain
        chat = [{"role": "user", "content": plain.prompt}] if isinstance(plain.prompt, str) else plain.prompt
        return Worded(*self.format.tell(chat, [spec.schema for spec in tools.values()]), tuple(tools))

    def tell_of(self, tools: Mapping[str, ToolSpec], episode: Episode) -> None:
        """Put the tools into the prompt, as the data was measured. Raises ValueError if it is too long then."""
        if not (tools and self.chat.has_template):
            return
        data, prompt = self.config.data, episode.prompt
        ids = self.chat.encoder.encode_with(self.worded(prompt), prompt.media)
        try:
            episode.restart(truncate(ids, data.max_prompt_length, data.truncation))
        except ValueError as error:
            fix = "raise data.max_prompt_length, or shorten the schemas"
            raise ValueError(f"uid={prompt.uid}, with its tools' schemas: {error}; {fix}") from error

    async def answers(self, calls: Sequence[Call], tools: Mapping[str, ToolSpec], episode: Episode) -> list[str]:
        """Make the calls of a turn, all at the same time, and return their results in the order of the calls."""
        permitted = calls[: self.options.max_parallel_calls]
        answers = await asyncio.gather(*(self.outcome(call, tools, episode) for call in permitted))
        episode.tool_rewards += [float(answer.reward) for answer in answers if answer.reward is not None]
        return [self.cut(writable(answer.text)) for answer in answers]

    async def outcome(self, call: Call, tools: Mapping[str, ToolSpec], episode: Episode) -> ToolAnswer:
        """Return a call's answer, or the error that the policy reads in its place."""
        spec = tools.get(call.name)
        if problem := self.problem(call, spec, tools, episode):
            self.counts["invalid"] += 1
            return ToolAnswer(f"error: {problem}")
        self.counts["made"] += 1
        facts = copy.deepcopy(facts_for(call.name, episode.prompt.extra_info))  # a tool may change what it is given
        try:
            asked = partial(spec.tool.call, call.arguments, facts)
            returned = await self.called(spec.tool, asked, episode.call, spec.timeout_s)
        except ToolError as error:
            self.counts["refused"] += 1
            return ToolAnswer(f"error: {error}")
        answer = ToolAnswer(returned) if isinstance(returned, str) else returned
        if isinstance(answer, TimedOut):
            self.counts["timeout"] += 1
            return ToolAnswer(f"error: {answer.reason}")
        failed = answer if isinstance(answer, Failed) else answer_problem(answer)
        if failed is None:
            return answer
        self.note(f"the tool {call.name!r}", failed, "failed")
        return ToolAnswer(f"error: the tool failed: {failed.reason}")

    def problem(self, call: Call, spec: ToolSpec | None, tools: Mapping[str, ToolSpec], episode: Episode) -> str | None:
        """Return why a call cannot be made, or None."""
        if call.problem is not None:
            return call.problem
        if spec is None:
            return f"there is no tool {call.name!r}; there are {', '.join(tools) or 'none'}"
        try:
            problem = spec.problem(call.arguments)
        except Exception as error:  # what a policy writes may be too deep, or too long a number, for a schema's check
            problem = f"the arguments cannot be read ({described(error)})"
        most = self.options.max_tool_calls
        if problem is None and most is not None and episode.tool_calls >= most:
            problem = f"no call is left: an episode has {most}"
        return problem

    def cut(self, text: str) -> str:
        """At most ``max_tool_response_length`` characters, of the side that is to be kept (verl's rule)."""
        most, side = self.options.max_tool_response_length, self.options.tool_response_truncate_side
        if len(text) <= most:
            return text
        if side == "left":
            return text[:most] + "...(truncated)"
        if side == "right":
            return "(truncated)..." + text[-most:]
        head = most // 2
        return text[:head] + CUT + text[len(text) - head :]

    def add(self, pieces: Sequence[Piece], episode: Episode, role: str = "tool") -> bool:
        """Append answers and what is around them. What is in an answer is text, whatever it looks like."""
        ids: list[int] = []
        for text, is_answer in pieces:
            ids += episode.encode(text) if is_answer else self.tokenizer.encode(text, add_special_tokens=False)
        return episode.add_ids(ids, "".join(text for text, _ in pieces), role)

    def metrics(self) -> Mapping[str, float]:
        counts, self.counts = self.counts, Counter()
        asked = counts["made"] + counts["invalid"]
        names = ("invalid", "refused", "timeout", "failed")
        calls = {"agent/calls": asked, **{f"agent/{n}_calls": counts[n] / asked if asked else 0.0 for n in names}}
        if any(isinstance(spec.tool, EpisodeTool) for spec in self.tools.values()):
            calls["agent/tool_state_failures"] = float(counts["tool_state_failures"])
        return calls | ({f"agent/{n}": float(counts[n]) for n in USER_COUNTS} if self.users else {})

    def close(self) -> None:
        for owner in [*(spec.tool for spec in self.tools.values()), *self.users.values()]:
            try:
                owner.close()
            except Exception:  # how the run ended must not be hidden by it
                log.warning("%s cannot be closed", type(owner).__name__, exc_info=True)
        self.apart.close()
