"""The keys that only Search-R1 has: its budget of searches, and the retriever. See ``core/config/recipes.py``.

The lengths of an episode, ``data.max_start_length`` and ``data.max_obs_length``, are the core's: prompts are measured
by them.
"""

from __future__ import annotations

from core.config import limits
from core.config.frozen import FrozenDict
from core.config.schema import Config
from core.config.section import Open, Section

PAPER = "Search-R1"


class RetrieverConfig(Section):
    """What answers a search."""

    url: str | None = (
        "http://127.0.0.1:8000/retrieve"  # address of a retrieval server; None: a retriever in this process, see local
    )
    topk: limits.Count = 3  # passages a search returns
    prefetch: bool = False  # put the question's passages before the first turn: RAG
    client: Open = FrozenDict()  # where there is a url: fields of ClientOptions, recipes/search_r1/retrieval_client.py
    local: Open = FrozenDict()  # where there is none: fields of RetrieverOptions, recipes/search_r1/index/passages.py


class SearchR1Config(Config):
    """The core's configuration with Search-R1's keys."""

    retriever: RetrieverConfig = RetrieverConfig()
    max_turns: limits.Count = 4  # turns that may search; one more must answer
    do_search: bool = True  # let the policy search; False is the baseline that cannot


SCHEMA = SearchR1Config
