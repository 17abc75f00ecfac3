"""TROUBLESHOOTING.md cannot rot: its messages are the code's, its keys are in the schema, its commands exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from core.config import convert
from core.errors import out_of_memory
from core.planning.memory_knobs import DOCUMENT

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^> `(.+)`$", TEXT, re.MULTILINE)
SECTIONS = ("data", "actor_rollout_ref", "critic", "reward_model", "custom_reward_function", "algorithm", "trainer")
PLACES = ("core", "recipes", "results", "reward_scores")
METRICS = ("timing_s", "reward", "response_length", "actor", "rollout_corr", "collect")


def strings(path: Path) -> list[str]:
    """The texts of a program that are not documentation; a value within one is the character NUL."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found.append(node.value)
    return found


@cache
def printed() -> str:
    """All texts that the code may print, a line each."""
    programs = [text for place in PLACES for path in (ROOT / place).rglob("*.py") for text in strings(path)]
    paths = [*(ROOT / "environment").glob("*.sh"), *(ROOT / "recipes").rglob("*.sh")]
    scripts = [path.read_text(encoding="utf-8") for path in paths]
    return "\n".join([*(text.replace("\n", " ") for text in programs), *scripts]).replace("`", "")


def occurs(message: str) -> bool:
    pieces = [re.escape(piece) for piece in message.split("...") if piece.strip()]
    assert max(map(len, pieces)) >= 10, f"{message}: too short to be looked for"
    return re.search("[^\n]*".join(pieces), printed()) is not None


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_printed_by_the_code(message):
    assert occurs(message)


def test_what_no_code_prints_is_noticed():
    assert not occurs("out of memory in stage ...")
    assert not occurs("Wait for it to end ... another process is writing"), "the order counts"


def test_an_out_of_memory_error_reads_as_it_is_shown():
    made = str(out_of_memory(MemoryError(), "update_actor", "on learner rank 3"))
    assert re.match("out of memory in phase .* on .*", made) and DOCUMENT == "TROUBLESHOOTING.md"


def test_every_heading_has_something_and_the_readme_leads_here():
    assert len(MESSAGES) >= 35 and len(set(MESSAGES)) == len(MESSAGES)
    assert "(TROUBLESHOOTING.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_key_is_in_the_schema():
    prose = "\n".join(line for line in TEXT.splitlines() if not line.startswith("> "))
    named = set(re.findall(rf"`((?:{'|'.join(SECTIONS)}|ray_kwargs)\.[\w.]+)", prose))
    known = set(convert.all_keys())
    unknown = {key for key in named if key not in known and not any(each.startswith(f"{key}.") for each in known)}
    assert len(named) > 40 and not unknown


def test_every_metric_is_written_by_the_code():
    named = re.findall(rf"`((?:{'|'.join(METRICS)})/\w+)(?:/\w+)?`", TEXT)
    texts = set(printed().split("\n"))

    def written(name: str) -> bool:  # whole, after a computed prefix, or added to one elsewhere
        last = name.partition("/")[2]
        return any(text in texts for text in (name, f"\0/{last}", last)) or any(f"\0{name}" in text for text in texts)

    absent = [name for name in named if not written(name)]
    assert len(named) > 12 and not absent, absent


def test_every_command_exists():
    for module in re.findall(r"python -m ([\w.]+)", TEXT):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", targets, re.MULTILINE) for target in re.findall(r"make (\w+)`", TEXT))
