"""What an outside agent asks of the policy in one episode, recorded token by token.

Messages that begin with those of an earlier completion extend its ids: what the policy sampled is
never encoded again, and what is new is written behind it as a tool's answer is. Messages that
extend nothing (an edited or compacted history) begin a trajectory of their own. So does a second
continuation of a completion: its prompt is what both share, and each sampled token trains once.
"""

import asyncio
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from core.data.encoder import TAG_TOKENS, Encoder
from core.data.vocabulary import ChatError, with_read_arguments
from core.errors import InputError
from core.rollout.agent_loop import Episode, EpisodeLimits, Stretch, check_readable
from core.rollout.chat_frames import ChatFrames
from core.rollout.collect import results_of
from core.rollout.tool_agent import THOUGHT, behind_thought, parse_calls
from core.types import Stop, Trajectory

CALL = "<tool_call>"
MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name")


class Refused(Exception):
    """A request that cannot be answered. ``field`` is the one to blame, ``code`` is OpenAI's."""

    def __init__(self, field: str, rule: str, code: str | None = None):
        super().__init__(f"{field}: {rule}")
        self.field = field
        self.code = code


class ChatRequest(BaseModel):
    """The body of a request for chat completions. None stands for the run's own value."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""  # any name
    user: str = ""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: Literal[True] = True
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: str | list[str] = []
    include_stop_str_in_output: bool = False  # vLLM's
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None  # as OpenAI and vLLM
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    store: Literal[False] = False
    stream: bool = False
    stream_options: dict[str, Any] = {}

    @property
    def stops(self) -> list[str]:
        """Return the stop strings; an empty one stops nothing."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        return [stop for stop in stops if stop]

    @property
    def described_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the policy may call."""
        return self.tools if self.tool_choice == "auto" else []

    @property
    def sampled_by(self) -> dict[str, float]:
        """Return the sampling settings that are not the run's own."""
        settings = {"temperature": self.temperature, "top_p": self.top_p}
        return {name: value for name, value in settings.items() if value is not None}


@dataclass(eq=False)
class Completion:
    """An answer of the policy, which later messages may extend."""

    answer: dict[str, Any]  # the message that was sent
    messages: list[dict[str, Any]]  # the request's, and the answer behind what it began with
    text: str  # the whole last message, with what it began with and the stop string
    tools: Sequence[Any]
    episode: Episode
    length: int  # tokens of the episode's context up to here
    stretch: Stretch
    stop: Stop
    is_last: bool = True  # its trajectory ends with it

    def new_part(self, messages: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]] | None:
        """Return the messages behind this one, or what a last message adds to it; else None."""
        count = len(self.messages)
        if list(messages[: count - 1]) != self.messages[:-1] or len(messages) < count:
            return None
        sent = self.messages[-1]
        message = messages[count - 1]
        if len(messages) > count:
            whole = {**sent, "content": self.text}
            return messages[count:] if message in (sent, whole) else None
        begins = message["role"] == "assistant" and message["content"].startswith(self.text)
        return message["content"][len(self.text) :] if begins else None


@dataclass(eq=False, repr=False)
class ChatSession:
    """The completions of one episode. All methods run on the event loop of the run.

    ``most_tokens`` bounds the prompt and response of a trajectory together, ``most_turns`` the
    number of completions.
    """

    root: Episode
    frames: ChatFrames
    encoder: Encoder
    most_tokens: int
    most_turns: int | None

    def __post_init__(self) -> None:
        self.home = asyncio.get_running_loop()
        self.completions: list[Completion] = []
        self.episodes: list[Episode] = []  # the trajectories
        self.counts: Counter[str] = Counter()
        self.is_full = False  # the last request did not fit
        self.was_full = False  # one did not: the episode counts as cut short
        self.error: Exception | None = None  # of the engine: it ends the run
        self._tasks: set[asyncio.Task] = set()  # requests in flight
        self._idle_since = time.monotonic()
        self._is_closed = False
        self._begin_thinking()

    def idle_seconds(self) -> float:
        """Return the seconds since the last completion; 0 while one is in flight."""
        return 0.0 if self._tasks else time.monotonic() - self._idle_since

    def _begin_thinking(self) -> None:
        """Let an engine that repeats exactly wait for the agent's next request, or its end."""
        if self._is_closed:  # no request follows, and the engine would wait for ever
            return
        self._thinking = self.home.create_future()
        barrier = self.root.sampler.barrier
        self._thought = self.home.create_task(barrier.run("tools", lambda: self._thinking))

    async def _end_thinking(self) -> None:
        if not self._thinking.done():
            self._thinking.set_result(None)
        await self._thought

    async def close(self) -> None:
        """Cancel what is in flight, and refuse what comes later."""
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self._end_thinking(), return_exceptions=True)

    async def complete(self, ask: ChatRequest) -> list[Completion]:
        """Return ``ask.n`` completions. Raises Refused, and what the engine raises."""
        if self._is_closed:
            raise Refused("authorization", "the episode of this token has ended")
        task = asyncio.current_task()
        self._tasks.add(task)
        self.counts["requests"] += 1
        try:
            await self._end_thinking()
            messages, episodes = self._begin_answers(ask)
            self.is_full = False  # the agent goes on with something that fits
            if ask.n == 1:  # without a task of its own: an exact engine sees its end at once
                completions = [await self._answer(episodes[0], messages, ask)]
            else:
                answers = (self._answer(episode, messages, ask) for episode in episodes)
                completions = await results_of(answers)
            return completions
        except Refused:
            self.counts["refused"] += 1
            raise
        except Exception as error:
            self.error = error
            raise
        finally:
            self._idle_since = time.monotonic()
            self._tasks.discard(task)
            if not self._tasks:
                self._begin_thinking()

    def _begin_answers(self, ask: ChatRequest) -> tuple[list[dict[str, Any]], list[Episode]]:
        """Return the messages, and the trajectory that each answer belongs to. Raises Refused."""
        begun = self.counts["turns"] + ask.n  # also those in flight
        if self.most_turns is not None and begun > self.most_turns:
            raise Refused("messages", f"an episode has max_assistant_turns={self.most_turns}")
        try:
            messages = [plain_message(message) for message in ask.messages]
            check_readable(self.root.sampler.tokenizer, ask.stops)
            episode = self._open(messages, ask.described_tools)
        except (Refused, asyncio.CancelledError):
            raise
        except (InputError, ChatError) as error:
            raise Refused("messages", str(error)) from error
        except Exception as error:  # whatever an agent sends costs its own request, and no run
            why = f"{type(error).__name__}: {error}"
            raise Refused("messages", f"cannot be written for the policy ({why})") from error
        self.counts["turns"] = begun
        context = episode.context
        return messages, [episode, *(self._begin(context) for _ in range(ask.n - 1))]

    def _open(self, messages: list[dict[str, Any]], tools: Sequence[Any]) -> Episode:
        """Return the trajectory that the answer to these messages belongs to."""
        matches = [
            (len(completion.messages), completion.is_last, -place)
            for place, completion in enumerate(self.completions)
            if completion.tools == tools and completion.new_part(messages) is not None
        ]
        prompt = self.root.prompt
        if not matches:
            is_described = bool(tools) and self.frames.has_template
            if not is_described and messages == [plain_message(each) for each in prompt.messages]:
                ids = list(prompt.token_ids)
            else:
                self.encoder.check_roles(messages)
                ids = self.encoder.encode(messages, tools)
            if self.episodes:
                self.counts["rendered"] += 1
                self.counts["tokens_rendered"] += len(ids)
            return self._begin(self._fitting(ids))
        self.counts["extended"] += 1
        completion = self.completions[-max(matches)[2]]
        episode = completion.episode
        text, ids = self._encode_new(completion, messages)
        context = self._fitting([*episode.context[: completion.length], *ids])
        if not completion.is_last:
            return self._begin(context)
        completion.is_last = False
        if ids:
            episode.add(text, messages[-1]["role"], ids)
        return episode

    def _encode_new(
        self, completion: Completion, messages: list[dict[str, Any]]
    ) -> tuple[str, list[int]]:
        new = completion.new_part(messages)
        if isinstance(new, str):
            return new, self.root.encode(new)
        if new[-1]["role"] == "assistant":
            raise Refused(
                "messages", "an assistant's message that the policy did not write is last"
            )
        described = {"tools": completion.tools} if completion.tools else {}
        self.frames.check(new, **described)
        last_id = int(completion.stretch.ids[-1])
        return self.frames.encode(new, last_id, completion.stop, **described)

    def _fitting(self, ids: list[int]) -> list[int]:
        """Return the ids if at least one token may follow them. Raises Refused."""
        if len(ids) >= self.most_tokens:
            self.is_full = self.was_full = True
            rule = f"have {len(ids)} tokens; {self.most_tokens} hold them and an answer"
            raise Refused("messages", rule, "context_length_exceeded")
        return ids

    def _begin(self, ids: Sequence[int]) -> Episode:
        """Begin a trajectory. Its seeds are its own; the first one has those of an episode."""
        root = self.root
        limits = EpisodeLimits(self.most_tokens - len(ids), root.limits.turn)
        prompt = dataclasses.replace(root.prompt, token_ids=tuple(ids))
        first_turn = len(self.episodes) << 32
        episode = Episode(
            prompt, root.sample_index, root.sampling, limits, root.sampler, first_turn
        )
        self.episodes.append(episode)
        return episode

    async def _answer(
        self, episode: Episode, messages: list[dict[str, Any]], ask: ChatRequest
    ) -> Completion:
        opening = self.root.sampler.tokenizer.decode(episode.context[-TAG_TOKENS:])
        segment = await episode.turn(
            stop=ask.stops,
            max_tokens=ask.max_completion_tokens or ask.max_tokens,
            sampled_by=ask.sampled_by,
        )
        shown = segment.text
        ends = [shown.find(stop) for stop in ask.stops if stop in shown]
        if ends and not ask.include_stop_str_in_output:
            shown = shown[: min(ends)]
        is_thinking = opening.rstrip().endswith(THOUGHT)
        answer = self._message(shown, ask.described_tools, is_thinking)
        episode.tool_calls += len(answer.get("tool_calls", ()))
        begun = ""
        if messages[-1]["role"] == "assistant":  # it was the beginning of the answer
            begun = messages[-1]["content"]
            messages = messages[:-1]
        completion = Completion(
            answer=answer,
            messages=[*messages, plain_message({**answer, "content": begun + answer["content"]})],
            text=begun + segment.text,
            tools=ask.described_tools,
            episode=episode,
            length=len(episode.context),
            stretch=episode.last_stretch,
            stop=episode.stop,
        )
        self.completions.append(completion)
        return completion

    def _message(self, text: str, tools: Sequence[Any], thinking: bool) -> dict[str, Any]:
        """Return the assistant's message for a text: with calls, if it makes only valid ones."""
        calls = parse_calls(text, thinking) if tools else []
        if not calls or any(call.problem for call in calls):
            return {"role": "assistant", "content": text}
        behind = behind_thought(text, thinking)
        before = text[: len(text) - len(behind)] + behind.partition(CALL)[0]
        tool_calls = []
        for call in calls:
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            call_id = f"call_{self.counts['calls']}"
            tool_calls.append({"id": call_id, "type": "function", "function": function})
            self.counts["calls"] += 1
        return {"role": "assistant", "content": before, "tool_calls": tool_calls}

    async def trajectory(self, reward: float | None, failure: str) -> Trajectory:
        """Return the trajectory of the last completion, with all others as its branches."""
        if not self.completions:
            await self.root.turn(max_tokens=1)  # a trajectory has a token; this one never trains
            unasked = dataclasses.replace(
                self.root.trajectory(), failure=failure or "the agent asked the policy nothing"
            )
            return dataclasses.replace(unasked, response_mask=np.zeros(1, np.bool_))
        last = self.completions[-1].episode
        if self.was_full:
            last.cut_short()
        branches = [each.trajectory() for each in self.episodes if each.turns and each is not last]
        return dataclasses.replace(
            last.trajectory(), reward=reward, failure=failure, branches=tuple(branches)
        )


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what counts of a message, its content as one text. Raises Refused."""
    plain = {
        name: value
        for name, value in message.items()
        if value or name == "content" and value is not None
    }
    if unknown := [name for name in plain if name not in MESSAGE_FIELDS]:
        raise Refused(f"messages.{unknown[0]}", "is not supported", "unsupported_parameter")
    content = plain.get("content", "")
    if not isinstance(content, str | list):
        raise Refused("messages.content", "must be text")
    if not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise Refused("messages.content", "must be text")
        content = "".join(parts)
    if "tool_calls" in plain:
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    plain |= {"role": str(plain.get("role")), "content": content}
    return with_read_arguments([plain])[0]  # another client may write the same arguments anew


def _plain_call(call: Any) -> dict[str, Any]:
    """Return what counts of a call: a client that read a stream adds an index. Raises Refused."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise Refused("messages.tool_calls", "must be calls of functions")
    counted = {name: function.get(name) for name in ("name", "arguments")}
    return {"id": call.get("id"), "type": "function", "function": counted}
