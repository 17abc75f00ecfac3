"""Keys of Search-R1 that do nothing in a configuration (see core/config/rulebook.py)."""

from __future__ import annotations

from core.config.rulebook import RuleBook, Unused
from core.config.view import View

rules = RuleBook()


@rules.unused
def parts_that_are_off(c: View) -> Unused:
    if not c.config.do_search:
        yield (("max_turns",), "do_search is off")
    if not c.config.do_search and not c.config.retriever.prefetch:
        yield (("retriever.*", "data.max_obs_length"), "do_search and retriever.prefetch are off")
    if c.config.retriever.url is None:
        yield (("retriever.client*",), "retriever.url is null: no server is asked")
    if c.config.retriever.url is not None:
        yield (("retriever.local*",), "retriever.url names a server")
