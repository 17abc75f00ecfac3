"""Composes the command lines that people published for verl, and prints how many a source end in
which way.

python -m tests.public_lines [--list]

``commands/public_lines.jsonl`` has 302 lines of verl 0.2 to main, of its recipes and of other
repositories: source, script, module, recipe here, arguments. ``$DATA`` and ``$SRC`` stand for
folders of data and of the source's checkout. Composing is what ``DRY_RUN=1`` does. A line that is
refused with another recipe's name is that recipe's. A line *composes*; or is *mended*: what its
messages advise, and nothing else, ends in a configuration; or it asks for something that is *not
here*.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from core.command_line import all_problems
from core.config.composition import Composed, examine

FOLDER = Path(__file__).parent / "commands"
COMPOSES, MENDED, ABSENT, OPEN = "composes", "mended by the advice", "not here", "open"
STEPS = 6  # of following the advice
RECIPES = "verl-recipe, Search-R1"
# What this repository does not have; a line that asks for it is refused, and rightly
FEATURES = {  # name -> pattern of a problem
    "another training engine": r"training engine that is not here|models train with FSDP2",
    "asynchronous trainers": r"asynchronous trainer",
    "agent loops of others": r"agent loop (that is not here|of verl's own interface)|a mode of "
    r"another project",
    "keys of a fork": r"unknown key; no such key here|is a section of|is a scorer for validation",
    "classes of data sets and samplers": r"(data set class|sampler) of verl's interface",
    "a reward model behind an engine": r"a reward model behind an engine",
    "another function or engine": r"(reward_manager|loss_mode|adv_estimator|rollout\.name)=.*must "
    r"be one of",
    "adapters of an earlier run": r"adapters start fresh",
    "engines over several nodes": r"must divide the \d+ GPUs of a node",
    "pictures over SGLang, in SFT or split": r"sends no pictures|reads pictures",
    "a file that is not given": r"--config-(name|path)|does not exist",
    "distillation, quantisation": r"distils|other numbers than the learner",
}


@dataclass(frozen=True)
class Line:
    """One published command line."""

    source: str
    script: str
    module: str
    recipe: str
    args: tuple[str, ...]
    valid: bool  # verl 0.6.1 accepts its keys

    @property
    def kind(self) -> str:
        """The row of the table that counts it."""
        if self.recipe == "sft":
            return "SFT"
        if "async" in self.module or "one_step" in self.module:
            return "asynchronous trainers"
        if self.source.startswith("verl-"):
            names = {
                "0.6.1": "verl 0.6.1",
                "HEAD": "verl main",
                "0.7.1": "verl 0.7.1",
                "recipe": RECIPES,
            }
            return names.get(self.source.removeprefix("verl-"), "verl 0.2 to 0.5")
        return RECIPES if self.source.endswith("+Search-R1") else "third parties"


@cache
def lines() -> tuple[Line, ...]:
    """Return the committed lines."""
    texts = (FOLDER / "public_lines.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(
        Line(
            one["source"],
            one["script"],
            one["module"],
            one["recipe"],
            tuple(one["args"]),
            one["valid_in_verl_061"],
        )
        for one in map(json.loads, texts)
    )


def arguments(line: Line, folder: Path) -> list[str]:
    """Return the arguments with the paths of a folder, in which the files that they name are
    made."""

    def made(match: re.Match) -> str:
        path = folder / match[1].lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        files = {"tools.yaml": (FOLDER / "multi_turn" / "tools.yaml").read_text()}
        path.write_text(files.get(path.name, ""))
        return str(path)

    multi_turn = str(FOLDER / "multi_turn")
    own = (
        re.sub(r"\$SRC/[\w.+-]+/examples/sglang_multiturn/config$", multi_turn, text)
        for text in line.args
    )
    return [re.sub(r"\$DATA(/[\w./-]+)", made, text) for text in own]


@cache
def composed(recipe: str, args: tuple[str, ...]) -> tuple[Composed, list[str]]:
    """Return what a dry run composes, and its problems."""
    found = examine(recipe, args)
    return found, all_problems(found, frozenset(found.given))


@cache
def command(line: Line, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Return recipe and arguments: the line's own, or those of the command that its refusal
    names."""
    args = tuple(arguments(line, folder))
    _, problems = composed(line.recipe, args)
    advised = next(
        filter(
            None, (re.search(r"; run python -m recipes\.(\w+)\.main_\1$", one) for one in problems)
        ),
        None,
    )
    return (advised[1] if advised else line.recipe, args)


def verdict(line: Line, folder: Path) -> tuple[str, list[str]]:
    """Return how a line ends, and the problems that it began with."""
    recipe, args = command(line, folder)
    _, first = composed(recipe, args)
    if not first:
        return COMPOSES, []
    if any(re.search(pattern, problem) for pattern in FEATURES.values() for problem in first):
        return ABSENT, first
    problems = first
    for _ in range(STEPS):
        changed = tuple(followed(args, problems))
        if changed == args:
            return OPEN, first
        args = changed
        _, problems = composed(recipe, args)
        if not problems:
            return MENDED, first
    return OPEN, first


def followed(args: Sequence[str], problems: Sequence[str]) -> list[str]:
    """Return the arguments once the first thing that each problem advises is done, literally."""
    changed = list(args)
    for problem in problems:
        key, fixes = problem.partition("=")[0], problem.split("; ")[1:]

        def first(pattern: str, fixes: Sequence[str] = fixes) -> str | None:
            return next((found[1] for text in fixes if (found := re.search(pattern, text))), None)

        own = re.compile(rf"\+*{re.escape(key)}=")
        others = [text for text in changed if not own.match(text)]
        setting, renamed = first(r"(?:set|use) ([\w.]+=[\w.\-]+)"), first(r"use ([\w]+\.[\w.]+)")
        value = first(r"(?:set|use|raise it to) ([\w.\-]+)")
        if setting:
            changed = [*(others if setting.startswith(f"{key}=") else changed), setting.rstrip(".")]
        elif any("leave it out" in text for text in fixes):
            changed = others
        elif renamed:
            changed = [own.sub(f"{renamed}=", text, count=1) for text in changed]
        elif value:
            changed = [*others, f"{key}={value}"]
    return changed


def table(found: Mapping[Line, tuple[str, list[str]]]) -> Iterator[str]:
    """Yield the lines of the table: how many of a kind end in which way."""
    counts: dict[str, Counter] = defaultdict(Counter)
    for line, (end, _) in found.items():
        counts[line.kind][end] += 1
        if line.valid and end != ABSENT and line.kind != "SFT":
            counts["valid in verl 0.6.1, and its features are here"][end] += 1
    ends = (COMPOSES, MENDED, ABSENT, OPEN)
    yield f"{'source':48}{'lines':>7}" + "".join(f"{end:>22}" for end in ends)
    for kind, count in sorted(counts.items()):
        yield f"{kind:48}{count.total():7}" + "".join(f"{count[end]:22}" for end in ends)


def main(words: Sequence[str]) -> int:
    """Print the table, and with ``--list`` every line that does not compose with its problems."""
    with TemporaryDirectory() as folder:
        found: dict[Line, Any] = {line: verdict(line, Path(folder)) for line in lines()}
    print("\n".join(table(found)))
    for line, (end, problems) in found.items():
        if "--list" in words and problems:
            print(f"\n{line.source} {line.script}: {end}", *problems, sep="\n    ")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
