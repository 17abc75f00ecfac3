"""The tool agent (``actor_rollout_ref.rollout.multi_turn.enable``): it makes a turn's calls and adds their answers.

A turn with calls is followed by their answers; one without goes to the example's simulated user
(:mod:`core.rollout.users`) or ends the episode. The format (:mod:`core.rollout.call_formats`) decides how a call is
written and an answer framed. Calls that cannot be made (unreadable, no such tool, wrong arguments, none left) are
answered with the error, and so are tools and users that fail (:mod:`core.rollout.outside_code`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from core.data.chat_frames import ChatError, rendered
from core.data.encoder import Worded, truncate
from core.data.parquet import Example
from core.data.vocabulary import writable
from core.errors import InputError, printable
from core.rollout.agent_loop import AgentLoop, Episode
from core.rollout.call_formats import FORMATS, Call, Chat, Piece, tell_hermes
from core.rollout.outside_code import ApartLoop, Failed, described, guarded
from core.rollout.template_check import template_problems, uses_of_template
from core.rollout.tools import KEY as TOOLS_KEY
from core.rollout.tools import ToolError, ToolInstance, ToolSpec, chosen, kwargs_of, load_tools
from core.rollout.users import KEY as USERS_KEY
from core.rollout.users import UserInEpisode, UserTurn, chosen_user, load_users
from core.types import Prompt

if TYPE_CHECKING:
    from core.config.schema import Config

log = logging.getLogger(__name__)
Wait = Callable[[Callable[[], Awaitable[Any]], float], Awaitable[Any]]  # Episode.call or Episode.wait
USER_COUNTS = ("user_turns", "user_timeouts", "user_failures")
NO_TEMPLATE = (
    "a user's turn is framed by the chat template, and the tokenizer has none; set "
    "actor_rollout_ref.model.custom_chat_template, or take an instruct model's tokenizer"
)


class TimedOut(Failed):
    """A call that met its deadline."""


class ToolAgentLoop(AgentLoop):
    """Raises InputError where the file of tools is broken."""

    def __init__(self, config: Config, tokenizer: Any):
        super().__init__(config, tokenizer)
        self.options = config.actor_rollout_ref.rollout.multi_turn
        tools, users = self.options.tool_config_path, self.options.interaction_config_path
        if not (tools or users):  # the data chose this loop: a rule checks the configuration's choice
            raise InputError(f"{TOOLS_KEY}=null: the tool agent needs tools; name a YAML file with them")
        self.tools: Mapping[str, ToolSpec] = load_tools(tools) if tools else {}
        self.users: Mapping[str, Any] = load_users(users) if users else {}
        self.format = FORMATS[self.options.format]
        schemas = [spec.schema for spec in self.tools.values()]
        self.chat = Chat(tokenizer, config.data.apply_chat_template_kwargs, schemas)
        self.counts: Counter[str] = Counter()
        self.apart = ApartLoop()
        self.traced: set[str] = set()  # tools and users whose first failure was logged
        if self.users and not self.chat.has_template:
            raise InputError(f"{USERS_KEY}={users}: {NO_TEMPLATE}")
        try:
            self.check_template()
        except ChatError as error:
            raise InputError(f"{TOOLS_KEY}={tools}: the chat template refuses the tools' schemas: {error}") from error

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

    def check(self, example: Example | Prompt) -> str | None:
        try:
            chosen(self.tools, example.extra_info)
            chosen_user(self.users, example.extra_info)
        except ValueError as error:
            return str(error)
        return None

    # -- the prompt --------------------------------------------------------------------------------

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

    # -- the episode -------------------------------------------------------------------------------

    async def run(self, episode: Episode) -> None:
        facts = episode.prompt.extra_info
        specs, user = chosen(self.tools, facts), chosen_user(self.users, facts)
        self.tell_of(specs, episode)
        instances = {name: ToolInstance(spec.tool, kwargs_of(name, facts)) for name, spec in specs.items()}
        begun: dict[str, ToolInstance] = {}  # whose state has to be let go
        failed: dict[str, Failed] = {}  # tools and, under "", the user, that could not begin
        for name, instance in instances.items():
            if specs[name].keeps_state:
                started = await self.called(instance.tool, instance.create, episode.wait, specs[name].timeout_s)
                if isinstance(started, Failed):
                    failed[name] = started
                    self.note(f"the tool {name!r}, at the start of an episode,", started, "tool_state_failures")
                else:
                    begun[name] = instance
        try:
            if user is not None:
                started = await self.called(user.user, user.start, episode.wait)
                if isinstance(started, Failed):
                    failed[""] = started
            await self.take_turns(Players(specs, instances, user, failed), episode)
        finally:
            if user is not None and "" not in failed:
                ended = await self.called(user.user, user.finalize, episode.wait)
                if isinstance(ended, Failed):
                    self.note("the user", ended, "user_failures")
            await self.end_tools(begun, episode)

    async def end_tools(self, begun: Mapping[str, ToolInstance], episode: Episode) -> None:
        """Keep the reward that each tool gives the whole episode, and let go of its state."""
        for name, instance in begun.items():
            reward = await self.called(instance.tool, instance.calc_reward, episode.wait)
            if isinstance(reward, Failed):
                self.note(f"the reward of the tool {name!r}", reward, "tool_state_failures")
            elif reward is not None:
                episode.tool_scores[name] = reward
            ended = await self.called(instance.tool, instance.release, episode.wait)
            if isinstance(ended, Failed):
                self.note(f"the tool {name!r}, at the end of an episode,", ended, "tool_state_failures")

    async def called(
        self, owner: Any, call: Callable[[], Any], wait: Wait, s: float | None = None, *passes: type[Exception]
    ) -> Any:
        """Return what a method of a tool or user returned, or Failed. Errors of the types ``passes`` come through."""
        timeout_s = s or self.options.tool_timeout_s
        run = self.apart.run if getattr(owner, "runs_apart", True) else guarded
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

    async def take_turns(self, players: Players, episode: Episode) -> None:
        """Alternate with the policy: tools answer a turn with calls, the user, where there is one, any other."""
        messages, answered = list(episode.prompt.messages), 0
        while not episode.over:
            turn = await episode.turn(stop=self.format.stop)
            calls = self.format.parse(turn.text)
            last = episode.turns == self.options.max_assistant_turns or answered == self.options.max_user_turns
            if last or not (calls or (players.user and not episode.over)):
                return
            messages.append({"role": "assistant", "content": turn.text})
            if calls:
                role, answers = "tool", await self.answers(calls, players, episode)
                pieces = self.format.frame(self.chat, answers, episode)
            else:
                reply = await self.reply(players, messages, episode)
                if reply is None or reply.over:
                    return
                role, answers = "user", [writable(reply.text)]
                pieces = self.chat.messages(role, answers, episode)
            messages += [{"role": role, "content": text} for text in answers]
            answered += 1
            if not self.add(pieces, episode, role):
                return

    async def reply(self, players: Players, messages: Sequence[Mapping[str, Any]], episode: Episode) -> UserTurn | None:
        """Return the user's reply and keep its score; None, and a truncated episode, where none came in time.

        A reply that is none becomes an error that the policy reads.
        """
        self.counts["user_turns"] += 1
        respond = partial(players.user.respond, messages)
        reply = players.failed.get("") or await self.called(players.user.user, respond, episode.wait)
        if isinstance(reply, TimedOut):
            self.counts["user_timeouts"] += 1
            episode.cut_short()
            return None
        if isinstance(reply, Failed):
            self.note("the user", reply, "user_failures")
            return UserTurn(False, self.cut(f"error: {reply.reason}"))
        if reply.score is not None:
            episode.user_scores.append(reply.score)
        return reply

    # -- calls -------------------------------------------------------------------------------------

    async def answers(self, calls: Sequence[Call], players: Players, episode: Episode) -> list[str]:
        """Make the calls of a turn, all at the same time, and return their results in the order of the calls."""
        permitted = calls[: self.options.max_parallel_calls]
        answers = await asyncio.gather(*(self.outcome(call, players, episode) for call in permitted))
        episode.tool_rewards += [float(reward) for _, reward in answers if reward is not None]
        return [self.cut(writable(text)) for text, _ in answers]

    async def outcome(self, call: Call, players: Players, episode: Episode) -> tuple[str, float | None]:
        """Return a call's answer and reward, or the error that the policy reads in its place."""
        if problem := self.problem(call, players.specs, episode):
            self.counts["invalid"] += 1
            return f"error: {problem}", None
        self.counts["made"] += 1
        spec, instance = players.specs[call.name], players.instances[call.name]
        execute = partial(instance.execute, call.arguments)
        if call.name in players.failed:
            execute = partial(_returned, players.failed[call.name])
        try:
            answer = await self.called(spec.tool, execute, episode.call, spec.timeout_s, ToolError)
        except ToolError as error:
            self.counts["refused"] += 1
            return f"error: {error}", None
        if isinstance(answer, TimedOut):
            self.counts["timeout"] += 1
            return f"error: {answer.reason}", None
        if isinstance(answer, Failed):
            self.note(f"the tool {call.name!r}", answer, "failed")
            return f"error: the tool failed: {answer.reason}", None
        return answer

    def problem(self, call: Call, specs: Mapping[str, ToolSpec], episode: Episode) -> str | None:
        """Return why a call cannot be made, or None."""
        if call.problem is not None:
            return call.problem
        if call.name not in specs:
            return f"there is no tool {call.name!r}; there are {', '.join(specs) or 'none'}"
        try:
            problem = specs[call.name].problem(call.arguments)
        except Exception as error:  # what a policy writes may be too deep, or too long a number, for a schema's check
            problem = f"the arguments cannot be read ({described(error)})"
        most = self.options.max_tool_calls
        if problem is None and most is not None and episode.tool_calls >= most:
            problem = f"no call is left: an episode has {most}"
        return problem

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
        if any(spec.keeps_state for spec in self.tools.values()):
            calls["agent/tool_state_failures"] = float(counts["tool_state_failures"])
        return calls | ({f"agent/{n}": float(counts[n]) for n in USER_COUNTS} if self.users else {})

    def close(self) -> None:
        for owner in [*(spec.tool for spec in self.tools.values()), *self.users.values()]:
            try:
                getattr(owner, "close", lambda: None)()
            except Exception:  # how the run ended must not be hidden by it
                log.warning("%s cannot be closed", type(owner).__name__, exc_info=True)
        self.apart.close()


class Players:
    """Who answers the policy in one episode; ``failed``: by name, those that could not begin, "" for the user."""

    def __init__(
        self,
        specs: Mapping[str, ToolSpec],
        instances: Mapping[str, ToolInstance],
        user: UserInEpisode | None,
        failed: Mapping[str, Failed],
    ):
        self.specs, self.instances, self.user, self.failed = specs, instances, user, failed


async def _returned(value: Any) -> Any:
    return value
