"""When a key of core has no effect in Search-R1 (see core/config/rulebook.py)."""

from __future__ import annotations

from core.config.rulebook import RuleBook, Unused
from core.config.rules import View

rules = RuleBook()


@rules.unused
def nothing_is_retrieved(c: View) -> Unused:
    if not c.config.do_search and not c.config.retriever.prefetch:
        yield ("data.max_obs_length",), "do_search and retriever.prefetch are off"
