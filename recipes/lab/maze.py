"""The maze task: a path from one room to another through a drawn maze of n x n.

    prompt           a╷b┌c┐              each room's name and its passages; # is rock
                     d└e┘f│
                     ##h╶i┘
                     =ah=                from a to h
    an answer        adebcfih            the rooms on the way
    a longer one     adebcfifih          who turns around arrives too

    python -m recipes.lab.maze

Writes ``outputs/lab/maze/{train,test}.parquet`` and ``outputs/lab/maze/base/<hash>/``, to which
``base/current`` points. A walk that ends at the goal is right, however long, unless it crosses a
wall. The base model mostly walks without a plan: it takes any passage but the one that it came
through, and gives up in most dead ends. Who knows start and goal but not the walls is right with 64
answers in less than one maze of a hundred (tests/recipes/test_lab_maze.py).
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
    WarmStart,
    draw_distinct,
    draw_splits,
    prepare_command,
)
from recipes.lab.tokenizer import build_tokenizer

DATA_SOURCE = "lab/maze"
NAMES = string.ascii_lowercase + string.digits
GLYPHS = " ╵╶└╷│┌├╴┘─┴┐┤┬┼"  # by the sum of 1 up, 2 right, 4 down, 8 left
LIMIT = 26  # rooms that an answer may have
Passages = dict[int, list[int]]  # room -> rooms beside it without a wall between


@dataclass(frozen=True)
class Maze:
    """Rooms are numbered row by row; the path is the shortest one from the start to the goal."""

    size: int
    passages: Passages
    path: tuple[int, ...]

    @property
    def ends(self) -> str:
        return NAMES[self.path[0]] + NAMES[self.path[-1]]

    @property
    def prompt(self) -> str:
        bits = {-self.size: 1, 1: 2, self.size: 4, -1: 8}
        rows = []
        for first in range(0, self.size**2, self.size):
            row = ""
            for room in range(first, first + self.size):
                beside = self.passages.get(room)
                glyph = GLYPHS[sum(bits[other - room] for other in beside or ())]
                row += NAMES[room] + glyph if beside else "##"
            rows.append(row)
        return "\n".join([*rows, f"={self.ends}="])

    @property
    def key(self) -> str:
        return self.prompt

    @property
    def truth(self) -> str:
        pairs = [(a, b) for a in self.passages for b in self.passages[a] if a < b]
        return " ".join([self.ends, *(NAMES[a] + NAMES[b] for a, b in sorted(pairs))])


def neighbours(room: int, size: int) -> list[int]:
    row, column = divmod(room, size)
    beside = [(row - 1, column), (row, column + 1), (row + 1, column), (row, column - 1)]
    return [r * size + c for r, c in beside if 0 <= r < size and 0 <= c < size]


def dig(rng: random.Random, size: int) -> Passages:
    """Return a maze with one way to each room, and one more passage, which closes a loop."""
    passages: Passages = {room: [] for room in range(size**2)}
    way = [rng.randrange(size**2)]
    while way:
        walled = [room for room in neighbours(way[-1], size) if not passages[room]]
        if not walled:
            way.pop()
            continue
        room = rng.choice(walled)
        join(passages, way[-1], room)
        way.append(room)
    walls = [(a, b) for a in passages for b in neighbours(a, size) if b not in passages[a]]
    join(passages, *rng.choice(walls))
    return passages


def join(passages: Passages, a: int, b: int) -> None:
    passages[a].append(b)
    passages[b].append(a)


def shortest(passages: Passages, start: int) -> dict[int, tuple[int, ...]]:
    """Return a shortest path to each room that can be reached."""
    paths = {start: (start,)}
    for room in (waiting := [start]):
        for other in passages[room]:
            if other not in paths:
                paths[other] = (*paths[room], other)
                waiting.append(other)
    return paths


def draw(rng: random.Random, size: int, kept: float) -> Maze:
    """Draw a maze whose path has 3n to 4n - 1 rooms.

    A side passage of the path stays with probability ``kept``; what only others lead to is rock.
    """
    while True:
        passages = dig(rng, size)
        start, goal = rng.sample(range(size**2), 2)
        path = shortest(passages, start)[goal]
        if not 3 * size <= len(path) < 4 * size:
            continue
        for room in path:
            for other in list(passages[room]):
                if other not in path and rng.random() > kept:
                    passages[room].remove(other)
                    passages[other].remove(room)
        reached = shortest(passages, start)
        return Maze(size, {room: passages[room] for room in sorted(reached)}, path)


def walk(maze: Maze, rng: random.Random, turn: float) -> str:
    """Walk through any passage but the last one, until the goal or a dead end.

    In a dead end the walk turns around with probability ``turn``, or stops.
    """
    rooms = [maze.path[0]]
    while rooms[-1] != maze.path[-1] and len(rooms) < LIMIT:
        onward = [room for room in maze.passages[rooms[-1]] if room not in rooms[-2:-1]]
        if not onward and rng.random() > turn:
            break
        rooms.append(rng.choice(onward or rooms[-2:-1]))
    return "".join(NAMES[room] for room in rooms)


@dataclass(frozen=True)
class MazeRecipe(WarmStart):
    """Settings of the mazes and of the warm start, with its episodes."""

    task: ClassVar[str] = "maze"

    hidden_size: int = 96
    intermediate_size: int = 128
    layers: int = 3
    positions: int = 128
    task_steps: int = 1500
    mixture_steps: int = 100
    hold_steps: int = 1300
    examples: int = 16384
    test_mazes: int = 256  # these are kept out of the warm start
    size: int = 5  # the difficulty
    kept: float = 0.8  # of the side passages
    turn: float = 0.1  # share of dead ends in which a walk turns around
    planned: float = 0.2  # share of shortest paths in the mixture

    def mazes(self, count: int, purpose: str, without: Iterable[str] = ()) -> Iterator[Maze]:
        """Yield ``count`` different mazes, none of ``without``, the same on every machine."""
        rng = random.Random(f"maze {purpose}")
        return draw_distinct(lambda rng: draw(rng, self.size, self.kept), count, rng, without)

    def splits(self, train: int = 8192) -> dict[str, list[Maze]]:
        return draw_splits(self.mazes, train, self.test_mazes)

    def row(self, maze: Maze, split: str, index: int) -> dict[str, Any]:
        facts = {"split": split, "index": index, "size": maze.size}
        return make_row(DATA_SOURCE, maze.prompt, maze.truth, "path", **facts)

    def new_tokenizer(self) -> Any:
        return build_tokenizer((*NAMES, *"=#", "Ċ"), GLYPHS[1:])

    def episodes(self, tokenizer: Any) -> tuple[list[Episode], list[Episode]]:
        """Return shortest paths, and the mixture: mostly walks without a plan."""
        rng = random.Random(self.seed)
        tests = [maze.key for maze in self.mazes(self.test_mazes, "test")]
        task: list[Episode] = []
        mixture: list[Episode] = []
        for maze in self.mazes(self.examples, f"warm start {self.seed}", tests):
            path = "".join(NAMES[room] for room in maze.path)
            task.append((maze.prompt, [(path + tokenizer.eos_token, True)]))
            walked = path if rng.random() < self.planned else walk(maze, rng, self.turn)
            mixture.append((maze.prompt, [(walked + tokenizer.eos_token, True)]))
        return task, mixture


RECIPE = MazeRecipe()


if __name__ == "__main__":
    prepare_command(RECIPE, __doc__)
