"""What ends a response: the end of sequence, a stop id, a stop string, or its limit, in this order.

Every engine decides it here, token by token, so that a trajectory's ``stop`` means the same whoever sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.data.vocabulary import REPLACEMENT, end_ids
from core.engines import SamplingParams
from core.types import Stop


def eos_ids(tokenizer: Any, model: Any = None) -> frozenset[int]:
    """Return the ids that end a response: :func:`core.data.vocabulary.end_ids` of the model's generation config."""
    return end_ids(tokenizer, getattr(model, "generation_config", None))


class StopRule:
    """Decides when one response ends. It follows the response: one rule a request, applied after every token."""

    def __init__(self, sampling: SamplingParams, eos: frozenset[int], tokenizer: Any):
        self.eos = frozenset() if sampling.ignore_eos else eos
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.strings = StopStrings(tokenizer, sampling.stop) if sampling.stop else None
        self.max_tokens = sampling.max_tokens

    def ended(self, ids: Sequence[int]) -> Stop | None:
        """Return why ``ids``, all tokens of the response so far, are the whole response; None where they are not."""
        if ids[-1] in self.eos:
            return Stop.EOS
        if ids[-1] in self.stop_ids:
            return Stop.STOP_TOKEN
        if self.strings is not None and self.strings.completed(ids):
            return Stop.STOP_STRING
        return Stop.LENGTH if len(ids) >= self.max_tokens else None


class StopStrings:
    """Finds the token that completes a stop string. Only the tail of the response is decoded each time.

    Text is taken from the difference between two decodings that start at the same earlier token, because a
    tokenizer may decode a token differently at the start of a text than in its middle.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.keep = max(map(len, stop)) - 1  # characters of earlier text that a match can reach back to
        self.begin = self.read = 0  # ids[begin:read] are decoded already, their text is ``known``
        self.tail = self.known = ""

    def completed(self, ids: Sequence[int]) -> bool:
        """Return whether the last token completed a stop string. Call it after every token, with all ids."""
        text = self.tokenizer.decode(ids[self.begin :], skip_special_tokens=True)
        window = self.tail + text[len(self.known) :]
        if any(stop in window for stop in self.stop):
            return True
        if not text.endswith(REPLACEMENT):  # else the bytes of a character are not complete yet
            self.tail = window[-self.keep :] if self.keep else ""
            self.begin, self.read = self.read, len(ids)
            self.known = self.tokenizer.decode(ids[self.begin : self.read], skip_special_tokens=True)
        return False
