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

from core.data.vocabulary import encode_literally
from core.dry_run import is_dry_run
from core.errors import InputError
from core.rollout.agent_loop import AgentLoop, Episode
from core.types import Prompt

if TYPE_CHECKING:
    from recipes.search_r1.config_schema import RetrieverConfig, SearchR1Config
    from recipes.search_r1.index.passages import Passage

SEARCH = "search"
ANSWER = "answer"
TAGS = ("think", "search", "information", "answer")
STOP = (f"</{SEARCH}>", f"</{ANSWER}>")
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between "
    "<search> and </search>. If I "
    "want to give the final answer, I should put the answer between <answer> and </answer>. Let "
    "me try again.\n"
)
BEFORE = "\n\n<information>"
AFTER = "</information>\n\n"
Retrieve = Callable[[list[str], int], Awaitable[list[list["Passage"]]]]


@dataclass(frozen=True)
class Action:
    """``kind`` is ``search`` or ``answer``."""

    kind: str
    content: str


def parse_action(text: str) -> Action | None:
    """Return the first complete ``<search>`` or ``<answer>`` of a turn; None without one.

    An empty query is no action.
    """
    first = None
    first_start = len(text)
    for kind in (SEARCH, ANSWER):
        start = text.find(f"<{kind}>")
        begin = start + len(f"<{kind}>")
        end = text.find(f"</{kind}>", begin) if start >= 0 else -1
        if end >= 0 and start < first_start:
            first = Action(kind, text[begin:end].strip())
            first_start = start
    return None if first == Action(SEARCH, "") else first


def show_passage(number: int, passage: Passage) -> str:
    """Return a passage as the policy reads it: tags in it get parentheses and are no actions."""
    contents = passage.contents
    for tag in TAGS:
        for mark in (tag, f"/{tag}"):
            contents = contents.replace(f"<{mark}>", f"({mark})")
    title, _, text = contents.partition("\n")
    return f"Doc {number}(Title: {title}) {text}\n"


def information(
    passages: Sequence[Passage], room: int, encode: Callable[[str], list[int]]
) -> str | None:
    """Return a search's block of at most ``room`` tokens: as many of the best passages as fit.

    If not even the best one fits, its words are cut from the end, so that the tags always close.
    None if there is no room for the tags.
    """

    def block(shown: str) -> str:
        return f"{BEFORE}{shown.strip()}{AFTER}"

    def fits(shown: str) -> bool:
        return len(encode(block(shown))) <= room

    shown = [show_passage(number, passage) for number, passage in enumerate(passages, start=1)]
    for count in range(len(shown), 0, -1):
        if fits("".join(shown[:count])):
            return block("".join(shown[:count]))
    if not fits(""):
        return None
    words = shown[0].split(" ") if shown else []
    # The most words that fit, by halving: longer texts have more tokens
    fitting = 0
    too_many = len(words) + 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(" ".join(words[:middle])):
            fitting = middle
        else:
            too_many = middle
    return block(" ".join(words[:fitting]))


def question_of(prompt: Prompt) -> str:
    """Return ``extra_info.question``, or the text after the last ``Question:`` of the prompt."""
    after_mark = prompt.messages[-1]["content"].rpartition("Question:")[2]
    return (prompt.extra_info.get("question") or after_mark).strip()


class SearchLoop(AgentLoop):
    """The agent loop of search episodes.

    Keys: ``max_turns``, ``do_search``, ``retriever.*``, ``data.max_obs_length``. Without
    ``do_search`` an episode is one turn (R1), with ``retriever.prefetch`` after the question's own
    passages (RAG). Raises InputError for a retriever that cannot be made.
    """

    tags = tuple(f"<{end}{kind}>" for kind in (SEARCH, ANSWER) for end in ("", "/"))

    def __init__(self, config: SearchR1Config, tokenizer: Any):
        super().__init__(config, tokenizer)
        self.counts: Counter[str] = Counter()
        self.client: Any = None
        self.retrieve: Retrieve | None = None
        if config.do_search or config.retriever.prefetch:
            self._check_room()
            self._open(config.retriever)

    def _check_room(self) -> None:
        room = self.config.data.max_obs_length
        needed = len(encode_literally(self.tokenizer, BEFORE + AFTER))
        if room < needed:
            raise InputError(
                f"data.max_obs_length={room}: the tags around passages alone are {needed} tokens; "
                f"raise it (as published: 500)"
            )

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
            options = dict(getattr(retriever, where))
            raise InputError(f"retriever.{where}={options}: {error}") from error

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

        A turn of ordinary length keeps its room. If even the tags would take it, the episode is
        over: neither the question nor what was read is ever dropped.
        """
        (passages,) = await episode.call(lambda: self.retrieve([query], self.config.retriever.topk))
        kept_for_turn = min(episode.limits.turn, episode.left // 2)
        room = min(self.config.data.max_obs_length, episode.left - kept_for_turn)
        block = information(passages, room, episode.encode)
        if block is None:
            episode.cut_short()
        else:
            episode.add(block)

    def metrics(self) -> Mapping[str, float]:
        """Return shares of turns and of episodes, and the metrics of the retriever's client."""
        counts = self.counts
        self.counts = Counter()
        episodes = counts["episodes"]
        turns = counts[SEARCH] + counts[ANSWER] + counts["invalid"]
        metrics = {
            "env/ratio_of_valid_action": 1 - counts["invalid"] / turns if turns else 0.0,
            "env/number_of_valid_search": counts[SEARCH] / episodes if episodes else 0.0,
            "env/finish_ratio": counts["finished"] / episodes if episodes else 0.0,
        }
        if self.client is not None:
            metrics |= self.client.metrics()
        if "retrieval/seconds" in metrics:
            # Among the times, which no two runs share
            metrics["timing_s/retrieval"] = metrics.pop("retrieval/seconds")
        return metrics

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


def in_process(retriever: Any) -> Retrieve:
    """Return a search in the engine's own thread: it yields to nothing, so a replay is exact."""

    async def retrieve(queries: list[str], topk: int) -> list[list[Passage]]:
        return retriever.retrieve(queries, topk)

    return retrieve
