"""The tool agent (``actor_rollout_ref.rollout.multi_turn.enable``): calls in ``<tool_call>`` JSON, answers in the chat.

A turn with calls is followed by their answers, one without ends the episode. What follows a turn is what the chat
template writes for a message of role ``tool``; a tokenizer without a template gets ``<tool_response>`` alone. Calls
that cannot be made (no JSON, no such tool, wrong arguments, none left) are answered with what is wrong with them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core.data.dataset import Encoder
from core.data.parquet import Example
from core.errors import InputError
from core.rollout.agent_loop import AgentLoop, Episode
from core.rollout.tools import KEY, Call, ToolError, ToolSpec, chosen, facts_for, load_tools, parse_hermes
from core.types import Prompt

if TYPE_CHECKING:
    from core.config.schema import Config

MARK = "\x00answer\x00"  # stands for a tool's answer while the template writes what is around it
CUT = "...(truncated)..."


class ToolAgentLoop(AgentLoop):
    """Raises InputError where the file of tools is broken."""

    def __init__(self, config: Config, tokenizer: Any):
        super().__init__(config, tokenizer)
        self.options = config.actor_rollout_ref.rollout.multi_turn
        if self.options.tool_config_path is None:  # the data chose this loop: a rule checks the configuration's choice
            raise InputError(f"{KEY}=null: the tool agent needs tools; name a YAML file (core/rollout/tools.py)")
        self.tools = load_tools(self.options.tool_config_path)
        self.encoder = Encoder(tokenizer, config.data.apply_chat_template_kwargs)
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.counts: Counter[str] = Counter()

    async def run(self, episode: Episode) -> None:
        tools = chosen(self.tools, episode.prompt.extra_info)
        self.tell_of(tools, episode)
        user_turns = 0
        while not episode.over:
            turn = await episode.turn()
            calls = parse_hermes(turn.text)
            if not calls or episode.turns == self.options.max_assistant_turns:
                return
            if user_turns == self.options.max_user_turns:
                return
            answers = await self.answers(calls, tools, episode)
            user_turns += 1
            if not self.add(answers, episode):
                return

    def check(self, example: Example | Prompt) -> str | None:
        try:
            chosen(self.tools, example.extra_info)
        except ValueError as error:
            return str(error)
        return None

    def tell_of(self, tools: Mapping[str, ToolSpec], episode: Episode) -> None:
        """Put the tools' schemas into the prompt, as the chat template writes them. Raises ValueError if too long."""
        if not (tools and self.has_template):
            return
        limit = self.config.data.max_prompt_length
        schemas = [spec.schema for spec in tools.values()]
        with_tools = Encoder(self.tokenizer, {**self.encoder.template_kwargs, "tools": schemas})
        (ids,) = with_tools.encode([episode.prompt.messages])
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

    def add(self, answers: Sequence[str], episode: Episode) -> bool:
        """Append the answers as the template frames them. What is in an answer is text, whatever it looks like."""
        ids: list[int] = []
        texts: list[str] = []
        for part, is_answer in self.framed(answers, episode):
            ids += episode.encode(part) if is_answer else self.tokenizer.encode(part, add_special_tokens=False)
            texts.append(part)
        return episode.add_ids(ids, "".join(texts))

    def framed(self, answers: Sequence[str], episode: Episode) -> list[tuple[str, bool]]:
        """Pieces of text and whether each is a tool's."""
        if not self.has_template:
            frame = ("<tool_response>", False), ("</tool_response>", False)
            return [piece for text in answers for piece in (frame[0], (text, True), frame[1])]
        asked = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
        replies = [{"role": "tool", "content": MARK} for _ in answers]
        after = self.encoder.render([*asked, *replies]).partition(MARK)[2]
        eos = self.tokenizer.eos_token
        if episode.last_token == self.tokenizer.eos_token_id and after.startswith(eos):
            after = after[len(eos) :]  # the policy has written it already
        frames = after.split(MARK)
        if len(frames) != len(answers) + 1:
            raise ValueError("the chat template does not write messages of role 'tool'; use another one, or a loop")
        pieces = [(frames[0], False)]
        for text, frame in zip(answers, frames[1:], strict=True):
            pieces += [(text, True), (frame, False)]
        return pieces

    def metrics(self) -> Mapping[str, float]:
        counts, self.counts = self.counts, Counter()
        asked = counts["made"] + counts["invalid"]
        names = ("invalid", "refused", "timeout")
        return {"agent/calls": asked, **{f"agent/{n}_calls": counts[n] / asked if asked else 0.0 for n in names}}

    def close(self) -> None:
        for spec in self.tools.values():
            spec.tool.close()
