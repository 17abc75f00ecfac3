"""The keys that only Search-R1 has: its budget of searches, and the retriever. See ``core/config/recipes.py``.

The lengths of an episode, ``data.max_start_length`` and ``data.max_obs_length``, are the core's: prompts are measured
by them.
"""

from __future__ import annotations

from core.config.limits import Count
from core.config.schema import Config
from core.config.section import FrozenDict, Open, Section, condition, execution, key

PAPER = "Search-R1"
SEARCHES = condition(lambda c: c.config.do_search, "do_search is off")
RETRIEVES = condition(
    lambda c: c.config.do_search or c.config.retriever.prefetch, "do_search and retriever.prefetch are off"
)


class RetrieverConfig(Section):
    """What answers a search."""

    url: str | None = execution(
        "http://127.0.0.1:8000/retrieve", "address of a retrieval server; null: a retriever in this process, see local"
    )
    topk: Count = key(3, "passages a search returns")
    prefetch: bool = key(False, "put the question's passages before the first turn: RAG")
    client: Open = execution(
        FrozenDict(),
        "where there is a url: fields of ClientOptions, recipes/search_r1/retrieval_client.py",
        condition(lambda c: c.own.url is not None, "retriever.url is null: no server is asked"),
    )
    local: Open = key(
        FrozenDict(),
        "where there is none: fields of RetrieverOptions, recipes/search_r1/index/passages.py",
        condition(lambda c: c.own.url is None, "retriever.url names a server"),
    )


class SearchR1Config(Config):
    """The core's configuration with Search-R1's keys."""

    retriever: RetrieverConfig = key(RetrieverConfig(), used_if=RETRIEVES)
    max_turns: Count = key(4, "turns that may search; one more must answer", SEARCHES)
    do_search: bool = key(True, "let the policy search; False is the baseline that cannot")


SCHEMA = SearchR1Config
