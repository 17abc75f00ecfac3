"""The keys that only Search-R1 has: its budget of searches, and the retriever.

The lengths of an episode, ``data.max_start_length`` and ``data.max_obs_length``, are the core's:
prompts are measured by them.
"""

from __future__ import annotations

from typing import ClassVar

from core.config.schema import Config
from core.config.section import EMPTY, Condition, Count, Open, Section, beside, execution, key

PAPER = "Search-R1"


class RetrieverConfig(Section):
    """What answers a search."""

    url: str | None = execution(
        "http://127.0.0.1:8000/retrieve",
        "address of a retrieval server; null: a retriever in this process, see local",
    )
    topk: Count = key(3, "passages a search returns")
    prefetch: bool = key(False, "put the question's passages before the first turn: RAG")
    client: Open = execution(
        EMPTY,
        "where there is a url: fields of ClientOptions, recipes/search_r1/retrieval_client.py",
        beside("url"),
    )
    local: Open = key(
        EMPTY,
        "where there is none: fields of RetrieverOptions, recipes/search_r1/index/passages.py",
        Condition(lambda config, own: own.url is None, "needs retriever.url=null"),
    )


RETRIEVES = Condition(
    lambda config, own: config.do_search or config.retriever.prefetch,
    "needs do_search or retriever.prefetch",
)


class SearchR1Config(Config):
    """The core's configuration with Search-R1's keys."""

    retriever: RetrieverConfig = key(RetrieverConfig(), used_if=RETRIEVES)
    max_turns: Count = key(4, "turns that may search; one more must answer", beside("do_search"))
    do_search: bool = key(True, "let the policy search; False is the baseline that cannot")

    plays_episodes: ClassVar[bool] = True  # the trainer plays searches, and no agent loop does


SCHEMA = SearchR1Config
