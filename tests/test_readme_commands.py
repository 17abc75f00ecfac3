"""Every command block of every README works as typed: in a fresh shell without environment,
PYTHONPATH or packages.

The shell stands in a copy of the repository after ``make setup``. DRY_RUN=1 is set, ``make`` prints
only and nothing reaches the network; the few commands that know no dry run find what they need,
refuse in the way that the table below says, or only show their help. ``make test-slow`` types the
labs in fact.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_preprocess.gsm8k import row
from data_preprocess.schema import write_rows

ROOT = Path(__file__).resolve().parent.parent
# Mine/: a file, see test_your_own_recipe.py
FENCED = re.compile(r"^```bash\n(?!# mine/)(.*?)^```$", re.M | re.S)

# What a command that knows no dry run says here, in its last lines: status, text.
REFUSALS = {
    r'main_grpo "\$\{KEYS': (2, "does not exist"),  # a reader's own files are not there
    r"data_preprocess\.check my/": (1, "does not exist"),  # as above
    # The lab's run is not there
    r"core\.evaluate generate search_r1 --run": (2, "is not a checkpoint"),
    r"core\.export outputs/": (2, "is not a checkpoint"),  # the stand-in for the lab's run has none
    r"results\.trace outputs/": (2, "no step is recorded"),  # as above
    # What was kept is not there
    r"main_sft data\.train_files=\./outputs/kept": (2, "does not exist"),
    r"data\.train_files=\./questions\.jsonl": (2, "does not exist"),  # a reader's own questions
    r"agent\.path=my/agent\.py": (2, "does not exist"),  # a reader's own agent
    r"^curl ": (7, ""),  # no server listens in a dry run
    r"index\.cli ": (0, "my-index: bm25"),
}
# They train, and know no dry run: only asked for their help here.
TRAINS = re.compile(r"-m (recipes\.lab\.\w+|recipes\.grpo\.from_scratch)")
# Typed in fact by the slow test; what they make is there for the commands after them.
LABS = re.compile(
    r"^make lab|run_lab\.sh|recipes\.lab\.|from_scratch|results\.(report|publish|trace)|core\.export"
)


@dataclass(frozen=True)
class Block:
    path: Path
    name: str
    commands: tuple[str, ...]


def git_files(*arguments: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *arguments], cwd=ROOT, capture_output=True, check=True
    )
    return listed.stdout.decode().split("\0")[:-1]


@functools.cache
def blocks() -> list[Block]:
    found = []
    for name in git_files("*.md"):
        for number, text in enumerate(FENCED.findall((ROOT / name).read_text(encoding="utf-8")), 1):
            lines = text.replace("\\\n", " ").splitlines()
            commands = tuple(line for line in lines if line.strip() and not line.startswith("#"))
            found.append(Block(ROOT / name, f"{name}, block {number}", commands))
    return found


@dataclass(frozen=True)
class Typed:
    command: str
    status: int
    output: str


def copy_of_the_repository(to: Path) -> Path:
    """The files that git would commit, older than the set-up, which is this interpreter's
    environment."""
    for name in git_files("-co", "--exclude-standard"):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
            os.utime(to / name, (0, 0))
    (to / ".venv").symlink_to(sys.prefix)
    subprocess.run(["git", "init", "-q"], cwd=to, check=True)
    return to


def type_in(
    folder: Path, home: Path, commands: tuple[str, ...], *, in_fact: bool = False
) -> list[Typed]:
    """Type the commands into one fresh shell and return what each did."""
    lines = ["export HF_HUB_OFFLINE=1 MAKEFLAGS=n DRY_RUN=1"]
    for command in commands:
        if in_fact:
            lines.append(
                "unset DRY_RUN MAKEFLAGS"
                if LABS.search(command)
                else "export MAKEFLAGS=n DRY_RUN=1"
            )
        else:
            command = TRAINS.sub(r"\g<0> --help", command)
        lines += [command, r"printf '\n@@ %d\n' $?"]
    done = subprocess.run(
        [
            "/usr/bin/env",
            "-i",
            f"HOME={home}",
            "PATH=/usr/bin:/bin",
            "LANG=C.UTF-8",
            "bash",
            "--noprofile",
            "--norc",
        ],
        input="\n".join(lines) + "\n",
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=7200,
    )
    parts = re.split(r"^@@ (\d+)$", done.stdout, flags=re.M)
    pairs = zip(commands, parts[1::2], parts[0::2], strict=False)
    return [Typed(command, int(status), output) for command, status, output in pairs]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> tuple[Path, Path]:
    """A copy of the repository, and a home with a few real rows, both without a run."""
    home = tmp_path_factory.mktemp("home")
    example = {"question": "What is 2 + 3?", "answer": "It is 5.\n#### 5"}
    write_rows(home / "data/gsm8k/train.parquet", [row(example, "train", 0)])
    folder = copy_of_the_repository(tmp_path_factory.mktemp("copy"))
    (folder / "corpus.jsonl").write_text('{"id": "0", "contents": "Dune\\nDune is a novel."}\n')
    return folder, home


def expected(command: str) -> tuple[int, str]:
    return next(
        (wanted for pattern, wanted in REFUSALS.items() if re.search(pattern, command)), (0, "")
    )


def test_there_are_blocks_and_every_exception_stands_for_a_command():
    assert len(blocks()) >= 8 and sum(len(block.commands) for block in blocks()) >= 30
    commands = [command for block in blocks() for command in block.commands]
    for pattern in REFUSALS:
        assert any(re.search(pattern, command) for command in commands), pattern


@pytest.mark.timeout(900)
# Dozens of dry runs
@pytest.mark.parametrize("of_recipes", [False, pytest.param(True, marks=pytest.mark.processes)])
def test_blocks_work_as_typed(place, of_recipes, subtests):
    folder, home = place
    runs = folder / "outputs/grpo/lab-30-steps"  # what make lab leaves, but for its checkpoint
    shutil.copytree(folder / "results/grpo/lab-seed1", runs, dirs_exist_ok=True)
    for block in blocks():
        if block.path.is_relative_to(ROOT / "recipes") == of_recipes:
            with subtests.test(block.name):
                typed = type_in(folder, home, block.commands)
                assert len(typed) == len(block.commands), (
                    typed[-1].output if typed else "the shell ended"
                )
                for one in typed:
                    status, text = expected(one.command)
                    assert one.status == status and text in one.output, (
                        f"{one.command}\n{one.output}"
                    )
                    assert "Traceback" not in one.output and "No module named" not in one.output, (
                        one.output
                    )


@pytest.mark.slow
@pytest.mark.timeout(7200)  # on two cores that other work shares
def test_the_labs_work_as_typed_in_this_order(place, tmp_path, subtests):
    """Into one copy: some use what earlier ones made."""
    folder = copy_of_the_repository(tmp_path / "copy")
    labs = [block for block in blocks() if any(LABS.search(command) for command in block.commands)]
    assert labs[0].commands[0].startswith("make lab")
    for block in labs:
        with subtests.test(block.name):
            for one in type_in(folder, place[1], block.commands, in_fact=True):
                if LABS.search(one.command):
                    assert one.status == 0 and "Traceback" not in one.output, (
                        f"{one.command}\n{one.output}"
                    )
    assert (folder / "outputs/grpo/lab-30-steps/report.html").exists()


OF_OTHERS = "EngineArgs.__init__()"  # vLLM's message


def test_messages_on_the_page_of_troubles_are_printed_by_some_code():
    """Of each quoted message at least seven in ten pairs of neighbouring words stand in a source
    file."""
    files = git_files(
        "core", "recipes", "reward_scores", "results", "data_preprocess", "environment", "Makefile"
    )
    source = "".join(
        (ROOT / name).read_text() for name in files if name.endswith((".py", ".sh", "Makefile"))
    )
    source = " ".join(re.sub(r"\{[^{}]*\}|\\n", " ", re.sub(r'"\s*\n\s*f?"', "", source)).split())
    page = (ROOT / "TROUBLESHOOTING.md").read_text().splitlines()
    quoted = [
        message
        for line in page
        if line.startswith("> ")
        for message in re.findall(r"`([^`]+)`", line)
    ]
    assert len(quoted) > 25
    for message in quoted:
        parts = [part.split() for part in re.sub(r"\([A-Z][\w ]*: .*", "", message).split("...")]
        pairs = [f"{a} {b}".strip("():;,.") for part in parts for a, b in itertools.pairwise(part)]
        found = sum(pair in source for pair in pairs)
        assert message.startswith(OF_OTHERS) or found >= 0.7 * len(pairs), message
