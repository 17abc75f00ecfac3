"""The tool agent (``actor_rollout_ref.rollout.multi_turn.enable``): it makes a turn's calls and adds their answers.

A turn with calls is followed by their answers, one without goes to the example's simulated user
(:mod:`core.rollout.interactions`) or ends the episode. How a call is written and an answer framed
is the format's (:mod:`core.rollout.call_formats`). Calls that cannot be made (unreadable, no such tool, wrong
arguments, none left) are answered with what is wrong with them.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from core.data.dataset import Encoder
from core.data.parquet import Example
from core.errors import InputError
from core.rollout.agent_loop import AgentLoop, Episode
from core.rollout.call_formats import FORMATS, Call, Chat, Piece
from core.rollout.interactions import KEY as USERS
from core.rollout.interactions import UserTurn, chosen_user, load_interactions
from core.rollout.tools import KEY, ToolError, ToolSpec, chosen, facts_for, load_tools
from core.types import Prompt

if TYPE_CHECKING:
    from core.config.schema import Config

Respond = Callable[[Sequence[Mapping[str, Any]]], Awaitable[UserTurn]]  # of a user, in one episode
NO_TEMPLATE = (
    "a user's turn is framed by the chat template, and the tokenizer has none; set "
    "actor_rollout_ref.model.custom_chat_template, or take an instruct model's tokenizer"
)
CUT = "...(truncated)..."


class ToolAgentLoop(AgentLoop):
    """Raises InputError where the file of tools is broken."""

    def __init__(self, config: Config, tokenizer: Any):
        super().__init__(config, tokenizer)
        self.options = config.actor_rollout_ref.rollout.multi_turn
        tools, users = self.options.tool_config_path, self.options.interaction_config_path
        if not (tools or users):  # the data chose this loop: a rule checks the configuration's choice
            raise InputError(f"{KEY}=null: the tool agent needs tools; name a YAML file (core/rollout/tools.py)")
        self.tools = load_tools(tools) if tools else {}
        self.users = load_interactions(users) if users else {}
        self.format = FORMATS[self.options.format]
        self.chat = Chat(tokenizer, config.data.apply_chat_template_kwargs)
        self.counts: Counter[str] = Counter()
        if self.users and not self.chat.has_template:
            raise InputError(f"{USERS}={users}: {NO_TEMPLATE}")

    async def run(self, episode: Episode) -> None:
        tools = chosen(self.tools, episode.prompt.extra_info)
        self.tell_of(tools, episode)
        user = chosen_user(self.users, episode.prompt.extra_info)
        if user is None:
            return await self.take_turns(tools, episode, None)
        person, facts = user
        state = await person.start(facts)
        try:
            await self.take_turns(tools, episode, partial(person.generate_response, state))
        finally:
            await person.finalize(state)

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
                reply = await self.reply(partial(respond, messages), episode)
                if reply is None or reply.over:
                    return
                role, answers = "user", [reply.text]
                pieces = self.chat.messages(role, answers, episode)
            messages += [{"role": role, "content": text} for text in answers]
            answered += 1
            if not self.add(pieces, episode, role):
                return

    async def reply(self, respond: Callable[[], Awaitable[UserTurn]], episode: Episode) -> UserTurn | None:
        """Return the user's reply and keep its score; None, and a truncated episode, where none came in time."""
        self.counts["user_turns"] += 1
        try:
            reply = await episode.wait(respond, self.options.tool_timeout_s)
        except TimeoutError:
            self.counts["user_timeouts"] += 1
            episode.cut_short()
            return None
        if not isinstance(reply, UserTurn) or not math.isfinite(reply.score):
            raise ValueError(
                f"{USERS}: generate_response must return a UserTurn with a finite score, it gave {reply!r:.200}"
            )
        episode.user_scores.append(float(reply.score))
        return reply

    def check(self, example: Example | Prompt) -> str | None:
        try:
            chosen(self.tools, example.extra_info)
            chosen_user(self.users, example.extra_info)
        except ValueError as error:
            return str(error)
        return None

    def tell_of(self, tools: Mapping[str, ToolSpec], episode: Episode) -> None:
        """Put the tools into the prompt, in the form of the format. Raises ValueError if it is too long then."""
        if not (tools and self.chat.has_template):
            return
        limit = self.config.data.max_prompt_length
        messages, arguments = self.format.tell(episode.prompt.messages, [spec.schema for spec in tools.values()])
        with_tools = Encoder(self.tokenizer, {**self.chat.encoder.template_kwargs, **arguments})
        ids = with_tools.encode_with(messages, episode.prompt.pictures)
        if len(ids) > limit:
            raise ValueError(
                f"uid={episode.prompt.uid}: the prompt has {len(ids)} tokens with its tools' schemas, more than "
                f"data.max_prompt_length={limit}; raise it, or shorten the schemas"
            )
        episode.restart(ids)

    async def answers(self, calls: Sequence[Call], tools: Mapping[str, ToolSpec], episode: Episode) -> list[str]:
        """Make the calls of a turn, all at the same time, and return their results in the order of the calls."""
        made = calls[: self.options.max_parallel_calls]
        return await asyncio.gather(*(self.answer(call, tools, episode) for call in made))

    async def answer(self, call: Call, tools: Mapping[str, ToolSpec], episode: Episode) -> str:
        spec = tools.get(call.name)
        problem = call.problem
        if problem is None and spec is None:
            problem = f"there is no tool {call.name!r}; there are {', '.join(tools) or 'none'}"
        problem = problem or spec.problem(call.arguments)
        most = self.options.max_tool_calls
        if problem is None and most is not None and episode.tool_calls >= most:
            problem = f"no call is left: an episode has {most}"
        if problem is not None:
            self.counts["invalid"] += 1
            return self.cut(f"error: {problem}")
        self.counts["made"] += 1
        facts, timeout_s = (
            facts_for(call.name, episode.prompt.extra_info),
            spec.timeout_s or self.options.tool_timeout_s,
        )
        try:
            return self.cut(await episode.call(lambda: spec.tool.call(call.arguments, facts), timeout_s))
        except ToolError as error:
            self.counts["refused"] += 1
            return self.cut(f"error: {error}")
        except TimeoutError:
            self.counts["timeout"] += 1
            return self.cut(f"error: no answer in {timeout_s:g} s")

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
        names = ("invalid", "refused", "timeout")
        calls = {"agent/calls": asked, **{f"agent/{n}_calls": counts[n] / asked if asked else 0.0 for n in names}}
        return calls | ({f"agent/{n}": float(counts[n]) for n in ("user_turns", "user_timeouts")} if self.users else {})

    def close(self) -> None:
        for spec in self.tools.values():
            spec.tool.close()
        for user in self.users.values():
            user.close()
