"""The guessing task: a simulated user thinks of a letter and answers each guess with its side.

    f-n?     ->    #j     later     #l     earlier     #k

A range has up to 15 letters, and a policy four guesses.

    python -m recipes.lab.guesses

Writes ``outputs/lab/guesses/{train,test}.parquet`` and ``outputs/lab/guesses/base/<hash>/``, to
which ``base/current`` points. Halving the range finds every letter in four guesses, guessing
without listening finds about one in three. The base model can halve, and does so in about one
episode of six.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from core.rollout.tools import BaseInteraction
from data_preprocess.schema import make_row
from recipes.lab.base_model import Episode, Stretch, WarmStart, prepare_command
from recipes.lab.tokenizer import build_tokenizer

DATA_SOURCE = "lab/guesses"
LETTERS = string.ascii_lowercase
GUESSES = 4
WIDTHS = range(8, 16)
EARLIER = "earlier"
LATER = "later"
PUZZLED = "?"
TEMPLATE = (
    "{% for one in messages %}{{ one['content'] }}"
    "{% if one['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Riddle:
    first: int  # of the letters that it may be, a place in the alphabet
    last: int
    secret: int

    @property
    def prompt(self) -> str:
        return f"{LETTERS[self.first]}-{LETTERS[self.last]}?"

    def hint(self, guess: int) -> str:
        return LATER if guess < self.secret else EARLIER


class Thinker(BaseInteraction):
    """The user who thinks of the letter ``secret`` of an episode's facts.

    They leave after the last guess.
    """

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], *, secret: str, **facts: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        guess = messages[-1]["content"].strip().removeprefix("#")
        guesses = sum(message["role"] == "assistant" for message in messages)
        if guess == secret:
            return True, "", 1.0, {}
        reply = LATER if guess < secret else EARLIER
        if len(guess) != 1 or guess not in LETTERS:
            reply = PUZZLED
        return guesses == GUESSES, reply, 0.0, {}


def halving(riddle: Riddle) -> Iterator[int]:
    """Yield the guesses of someone who halves what is left, until the letter is found."""
    first = riddle.first
    last = riddle.last
    guess = -1
    while guess != riddle.secret:
        guess = (first + last) // 2
        yield guess
        if guess < riddle.secret:
            first = guess + 1
        else:
            last = guess - 1


def deaf(riddle: Riddle, rng: random.Random) -> Iterator[int]:
    """Yield guesses within the range that no hint changes."""
    for guess in rng.sample(range(riddle.first, riddle.last + 1), GUESSES):
        yield guess
        if guess == riddle.secret:
            return


def episode(riddle: Riddle, guesses: Iterator[int], eos: str) -> list[Stretch]:
    """Return the turns as they are played: none after the right guess, or after the last one."""
    stretches: list[Stretch] = []
    for number, guess in enumerate(guesses, start=1):
        stretches.append((f"#{LETTERS[guess]}{eos}", True))
        if guess != riddle.secret and number < GUESSES:
            stretches.append((riddle.hint(guess), False))
    return stretches


@dataclass(frozen=True)
class GuessesRecipe(WarmStart):
    """Settings of the warm start, with its episodes."""

    task: ClassVar[str] = "guesses"

    layers: int = 2
    positions: int = 64
    task_steps: int = 400
    mixture_steps: int = 80
    hold_steps: int = 340
    halving_share: float = 0.16  # of the mixture; the rest do not listen

    def new_tokenizer(self) -> Any:
        tokenizer = build_tokenizer((*LETTERS, *"-?#"), (EARLIER, LATER))
        tokenizer.chat_template = TEMPLATE
        return tokenizer

    def splits(self, test: int = 200) -> dict[str, list[Riddle]]:
        """Return every riddle, ``test`` of them held out, in the same order on every machine."""
        riddles = []
        for width in WIDTHS:
            for first in range(len(LETTERS) - width + 1):
                last = first + width - 1
                riddles += [Riddle(first, last, secret) for secret in range(first, last + 1)]
        random.Random("guesses").shuffle(riddles)
        return {"train": riddles[test:], "test": riddles[:test]}

    def row(self, riddle: Riddle, split: str, index: int) -> dict[str, Any]:
        """Return a row in verl's schema, which chooses the user and tells them the letter."""
        secret = LETTERS[riddle.secret]
        facts = {"index": index, "interaction_kwargs": {"name": "thinker", "secret": secret}}
        chat = [{"role": "user", "content": riddle.prompt}]
        return make_row(DATA_SOURCE, chat, secret, "guessing", split=split, **facts)

    def episodes(self, tokenizer: Any) -> tuple[list[Episode], list[Episode]]:
        """Return episodes that halve, and the mixture of those and guesses that do not listen."""
        rng = random.Random(self.seed)
        eos = tokenizer.eos_token
        riddles = self.splits()["train"]
        task = [(riddle.prompt, episode(riddle, halving(riddle), eos)) for riddle in riddles]
        mixture = []
        for _ in range(8):
            for riddle, full in zip(riddles, task, strict=True):
                if rng.random() < self.halving_share:
                    mixture.append(full)
                else:
                    mixture.append((riddle.prompt, episode(riddle, deaf(riddle, rng), eos)))
        return task, mixture


RECIPE = GuessesRecipe()


if __name__ == "__main__":
    prepare_command(RECIPE, __doc__)
