"""The keys that only Search-R1 has: its budget of searches, and the retriever. See ``core/config/recipes.py``.

The lengths of an episode, ``data.max_start_length`` and ``data.max_obs_length``, are the core's: prompts are measured
and runs are planned by them.
"""

from __future__ import annotations

from core.config import limits
from core.config.frozen import FrozenDict
from core.config.schema import Config
from core.config.section import Open, Section

PAPER = "Search-R1"
PASSAGES, VECTOR = 21_015_324, 768  # of the published corpus, and the numbers of an E5-base vector
ENCODER, QUERY = 85e6, 20  # parameters of E5-base that multiply a token, and tokens of a query: a guess


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

    @property
    def turns(self) -> int:
        """The policy's turns in the longest episode: those that may search, and the one that must answer."""
        return 1 + self.max_turns if self.data.max_start_length is not None and self.do_search else 1

    @property
    def search_flops(self) -> float:
        """The FLOP of a search behind a URL: the published index, flat, and its encoder; none in this process."""
        return 2.0 * PASSAGES * VECTOR + 2.0 * ENCODER * QUERY if self.retriever.url and self.do_search else 0.0


SCHEMA = SearchR1Config
