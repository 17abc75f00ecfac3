"""A search episode (Search-R1, arXiv:2503.09516, algorithm 1): think, search, read, until there is
an answer.

    policy   ... <search>query</search>
    tool     <information>Doc 1(Title: ...) ...</information>
    policy   ... <answer>answer</answer>

Up to ``max_turns`` turns may search; the one after them must answer, and a search in it is not
carried out. A turn without search or answer gets a notice and may try again. README.md lists where
the published code does otherwise.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.dry_run import is_dry_run
from core.errors import InputError
from core.rollout.agent_loop import AgentLoop, Episode
from core.types import Prompt

if TYPE_CHECKING:
    from recipes.search_r1.config_schema import RetrieverConfig, SearchR1Config
    from recipes.search_r1.index.passages import Passage

SEARCH, ANSWER = "search", "answer"
TAGS = ("think", "search", "information", "answer")
STOP = (f"</{SEARCH}>", f"</{ANSWER}>")
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between "
    "<search> and </search>. If I "
    "want to give the final answer, I should put the answer between <answer> and </answer>. Let "
    "me try again.\n"
)
BEFORE, AFTER = "\n\n<information>", "</information>\n\n"
Retrieve = Callable[[list[str], int], Awaitable[list[list["Passage"]]]]


@dataclass(frozen=True)
class Action:
    """``kind`` is ``search`` or ``answer``."""

    kind: str
    content: str


def parse_action(text: str) -> Action | None:
    """Return the first complete ``<search>`` or ``<answer>`` of a turn; None without one, and for
    an empty query."""
    found = []
    for kind in (SEARCH, ANSWER):
        start = text.find(f"<{kind}>")
        inside = start + len(kind) + 2
        end = text.find(f"</{kind}>", inside) if start >= 0 else -1
        if end >= 0:
            found.append((start, Action(kind, text[inside:end].strip())))
    action = min(found, key=lambda pair: pair[0])[1] if found else None
    return None if action == Action(SEARCH, "") else action


def show_passage(number: int, passage: Passage) -> str:
    """Return a passage as the policy reads it. Its protocol tags get parentheses, so that they are
    no actions."""
    title, _, text = passage.contents.partition("\n")
    for tag in TAGS:
        for mark in (tag, f"/{tag}"):
            title, text = (
                title.replace(f"<{mark}>", f"({mark})"),
                text.replace(f"<{mark}>", f"({mark})"),
            )
    return f"Doc {number}(Title: {title}) {text}\n"


def information(
    passages: Sequence[Passage], room: int, encode: Callable[[str], list[int]]
) -> str | None:
    """Return a search's block of at most ``room`` tokens: as many whole passages as fit, from the
    best on.

    Where not even the best one fits, its words are cut from the end, so that the tags always close.
    None where there is no room for the tags.
    """

    def block(shown: str) -> str:
        return f"{BEFORE}{shown.strip()}{AFTER}"

    def fits(shown: str) -> bool:
        return len(encode(block(shown))) <= room

    shown = [show_passage(number, passage) for number, passage in enumerate(passages, start=1)]
    for count in range(len(shown), 0, -1):
        if fits("".join(shown[:count])):
            return block("".join(shown[:count]))
    words = shown[0].split(" ") if shown else []
    low, high = 0, len(words)  # the most words that fit, by halving: longer texts have more tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(" ".join(words[:middle])) else (low, middle - 1)
    return block(" ".join(words[:low])) if fits("") else None


def question_of(prompt: Prompt) -> str:
    """Return the question alone: ``extra_info.question``, or the text after the last ``Question:``
    of the prompt."""
    asked = (
        prompt.extra_info.get("question")
        or prompt.messages[-1]["content"].rpartition("Question:")[2]
    )
    return asked.strip()


class SearchLoop(AgentLoop):
    """The agent loop of search episodes; keys ``max_turns``, ``do_search``, ``retriever.*``,
    ``data.max_obs_length``.

    Without ``do_search`` an episode is one turn (R1), with ``retriever.prefetch`` after the
    question's own passages (RAG). Raises InputError for a retriever that cannot be made.
    """

    tags = tuple(f"<{end}{kind}>" for kind in (SEARCH, ANSWER) for end in ("", "/"))

    def __init__(self, config: SearchR1Config, tokenizer: Any):
        super().__init__(config, tokenizer)
        self.counts: Counter[str] = Counter()
        self.client: Any = None
        self.retrieve: Retrieve | None = None
        if config.do_search or config.retriever.prefetch:
            self._open(config.retriever)

    def _open(self, retriever: RetrieverConfig) -> None:
        try:
            if retriever.url is not None:
                from recipes.search_r1.retrieval_client import ClientOptions, RetrievalClient

                options = ClientOptions(url=retriever.url, **retriever.client)
                self.client = RetrievalClient(options)
                if not (options.offline or is_dry_run()):
                    # A server that is away is known before a model loads
                    asyncio.run(self.client.health())
                self.retrieve = self.client.retrieve
            else:
                from recipes.search_r1.index.opening import make_retriever
                from recipes.search_r1.index.passages import RetrieverOptions

                self.retrieve = in_process(make_retriever(RetrieverOptions(**retriever.local)))
        except (TypeError, ValueError, RuntimeError, OSError) as error:
            where = "client" if retriever.url is not None else "local"
            raise InputError(
                f"retriever.{where}={dict(getattr(retriever, where))}: {error}"
            ) from error

    async def run(self, episode: Episode) -> None:
        config = self.config
        if config.retriever.prefetch:
            await self.search(question_of(episode.prompt), episode)
        searches = config.max_turns if config.do_search else 0
        kind = None
        while not episode.over and kind != ANSWER and episode.turns <= searches:
            turn = await episode.turn(stop=STOP if config.do_search else STOP[1:])
            may_search = episode.turns <= searches
            action = parse_action(turn.text)
            kind = action.kind if action and (may_search or action.kind == ANSWER) else "invalid"
            self.counts[kind] += 1
            if kind == SEARCH:
                await self.search(action.content, episode)
            elif kind == "invalid" and may_search:
                episode.add(INVALID)
        self.counts["episodes"] += 1
        self.counts["finished"] += kind == ANSWER

    async def search(self, query: str, episode: Episode) -> None:
        """Append the passages that the query finds.

        A turn of ordinary length keeps its room. Where even the tags would take it, the episode is
        over: neither the question nor what was read is ever dropped.
        """
        (passages,) = await episode.call(lambda: self.retrieve([query], self.config.retriever.topk))
        room = min(
            self.config.data.max_obs_length,
            episode.left - min(episode.limits.turn, episode.left // 2),
        )
        block = information(passages, room, episode.encode)
        if block is None:
            episode.cut_short()
        else:
            episode.add(block)

    def metrics(self) -> Mapping[str, float]:
        """Return the shares of turns and of episodes, with the metrics of the retriever's
        client."""
        counts, self.counts = self.counts, Counter()
        turns = counts[SEARCH] + counts[ANSWER] + counts["invalid"]
        asked = self.client.metrics() if self.client is not None else {}
        if "retrieval/seconds" in asked:
            # Like all times: no two runs share it
            asked["timing_s/retrieval"] = asked.pop("retrieval/seconds")
        return {
            "env/ratio_of_valid_action": 1 - counts["invalid"] / turns if turns else 0.0,
            "env/number_of_valid_search": counts[SEARCH] / counts["episodes"]
            if counts["episodes"]
            else 0.0,
            "env/finish_ratio": counts["finished"] / counts["episodes"]
            if counts["episodes"]
            else 0.0,
            **asked,
        }

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


def in_process(retriever: Any) -> Retrieve:
    """Return a search in the engine's own thread. It answers without yielding to others, so a
    replay is exact."""

    async def retrieve(queries: list[str], topk: int) -> list[list[Passage]]:
        return retriever.retrieve(queries, topk)

    return retrieve
