"""The sums task: arithmetic that a tiny model cannot do in its head, and a calculator to call.

    47*86+35=
    <tool_call>{"name": "calculator", "arguments": {"expression": "47*86+35"}}</tool_call>
    <tool_response>4077</tool_response>
    #### 4077

    python -m recipes.lab.sums

Writes ``outputs/lab/sums/{train,test}.parquet`` and ``outputs/lab/sums/base/<hash>/``, to which
``base/current`` points. The base model can call and copy, and does so in about one answer of eight;
the others guess.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from data_preprocess.schema import make_row
from recipes.lab.base_model import (
    Episode,
    Stretch,
    WarmStart,
    draw_distinct,
    draw_splits,
    prepare_command,
)
from recipes.lab.tokenizer import build_tokenizer

DATA_SOURCE = "lab/sums"
CALL = ('<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>')
ANSWER = ("<tool_response>", "</tool_response>")
ALPHABET = (*string.digits, *string.ascii_lowercase, *"+-*/=.:,'()\"{}<>", "Ġ", "Ċ")
WORDS = (*CALL, *ANSWER, "#### ", "error: ")


@dataclass(frozen=True)
class Sum:
    expression: str
    value: int

    @property
    def key(self) -> str:
        return self.expression

    @property
    def prompt(self) -> str:
        return f"{self.expression}="


def draw(rng: random.Random) -> Sum:
    a, b, c = (rng.randint(11, 99) for _ in range(3))
    return Sum(f"{a}*{b}+{c}", a * b + c)


def sums(count: int, purpose: str, without: Iterable[str] = ()) -> Iterator[Sum]:
    """Yield ``count`` different sums, none of ``without``, the same on every machine."""
    return draw_distinct(draw, count, random.Random(f"sums {purpose}"), without)


def calling(question: Sum, eos: str) -> list[Stretch]:
    """Return the turns of an answer that calls the calculator."""
    call = f"{CALL[0]}{question.expression}{CALL[1]}{eos}"
    reply = f"{ANSWER[0]}{question.value}{ANSWER[1]}"
    return [(call, True), (reply, False), (f"#### {question.value}{eos}", True)]


@dataclass(frozen=True)
class SumsRecipe(WarmStart):
    """Settings of the warm start, with its episodes."""

    task: ClassVar[str] = "sums"

    layers: int = 2
    positions: int = 256
    task_steps: int = 300
    hold_steps: int = 260
    call_share: float = 0.12  # of the mixture; the rest guess
    examples: int = 12_000

    def new_tokenizer(self) -> Any:
        return build_tokenizer(ALPHABET, WORDS)

    def splits(self, train: int = 4096, test: int = 300) -> dict[str, list[Sum]]:
        return draw_splits(sums, train, test)

    def row(self, question: Sum, split: str, index: int) -> dict[str, Any]:
        """Return a row in verl's schema, which chooses the calculator."""
        facts = {"split": split, "index": index, "tool_selection": ["calculator"]}
        return make_row(DATA_SOURCE, question.prompt, str(question.value), "arithmetic", **facts)

    def episodes(self, tokenizer: Any) -> tuple[list[Episode], list[Episode]]:
        """Return answers that call, and the mixture of those and guesses."""
        rng = random.Random(self.seed)
        eos = tokenizer.eos_token
        tests = [question.key for question in self.splits(train=0)["test"]]
        task: list[Episode] = []
        mixture: list[Episode] = []
        for question in sums(self.examples, f"warm start {self.seed}", tests):
            full = (question.prompt, calling(question, eos))
            guess = (question.prompt, [(f"#### {rng.randint(132, 9900)}{eos}", True)])
            task.append(full)
            mixture.append(full if rng.random() < self.call_share else guess)
        return task, mixture


RECIPE = SumsRecipe()


if __name__ == "__main__":
    prepare_command(RECIPE, __doc__)
