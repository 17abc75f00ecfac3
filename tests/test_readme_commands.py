"""Every command block of every README works as typed: in a fresh shell without environment, PYTHONPATH or packages.

The shell stands in a copy of the repository after ``make setup``. DRY_RUN=1 is set, ``make`` prints only and nothing
reaches the network; the few commands that know no dry run find what they need, refuse in the way that the table below
says, or only show their help. ``make test-slow`` types the labs in fact.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from core.config import convert, examine
from core.config.recorded import role_of
from core.config.section import FILES, IDENTITY
from data_preprocess.gsm8k import row
from data_preprocess.schema import write_rows
from results.reporting.run_scripts import PRINT_WORDS

ROOT = Path(__file__).resolve().parent.parent
FENCED = re.compile(r"^```bash\n(?!# mine/)(.*?)^```$", re.M | re.S)  # mine/: a file, see test_your_own_recipe.py

# What a command that knows no dry run says here, in its last lines: status, text.
REFUSALS = {
    r"main_grpo \$KEYS": (2, "does not exist"),  # a reader's own files are not there
    r"data_preprocess\.check my/": (1, "does not exist"),  # as above
    r"core\.evaluate generate search_r1 --run": (2, "is not a checkpoint"),  # the lab's run is not there
    r"core\.export outputs/": (2, "is not a checkpoint"),  # the stand-in for the lab's run has none
    r"results\.trace outputs/": (2, "no step is recorded"),  # as above
    r"main_sft data\.train_files=\./outputs/kept": (2, "does not exist"),  # what was kept is not there
    r"^curl ": (7, ""),  # no server listens in a dry run
    r"index\.cli ": (0, "my-index: bm25"),
}
# They train, and know no dry run: only asked for their help here.
TRAINS = re.compile(r"-m (recipes\.lab\.\w+|recipes\.grpo\.from_scratch)")
# Typed in fact by the slow test; what they make is there for the commands after them.
LABS = re.compile(r"^make lab|run_lab\.sh|recipes\.lab\.|from_scratch|results\.(report|publish|trace)|core\.export")


@dataclass(frozen=True)
class Block:
    path: Path
    number: int
    commands: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(ROOT)}, block {self.number}"


def readmes() -> list[Path]:
    tracked = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in tracked.stdout.splitlines()]


@functools.cache
def blocks() -> list[Block]:
    found = []
    for path in readmes():
        for number, text in enumerate(FENCED.findall(path.read_text(encoding="utf-8")), 1):
            lines = text.replace("\\\n", " ").splitlines()
            commands = tuple(line for line in lines if line.strip() and not line.startswith("#"))
            found.append(Block(path, number, commands))
    return found


@dataclass(frozen=True)
class Typed:
    command: str
    status: int
    output: str


def copy_of_the_repository(to: Path) -> Path:
    """The files that git would commit, older than the set-up, which is this interpreter's environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
            os.utime(to / name, (0, 0))
    (to / ".venv").symlink_to(sys.prefix)
    subprocess.run(["git", "init", "-q"], cwd=to, check=True)
    return to


def type_in(folder: Path, home: Path, commands: tuple[str, ...], *, in_fact: bool = False) -> list[Typed]:
    """Type the commands into one fresh shell and return what each did."""
    lines = ["export HF_HUB_OFFLINE=1 MAKEFLAGS=n DRY_RUN=1"]
    for command in commands:
        if in_fact:
            lines.append("unset DRY_RUN MAKEFLAGS" if LABS.search(command) else "export MAKEFLAGS=n DRY_RUN=1")
        else:
            command = TRAINS.sub(r"\g<0> --help", command)
        lines += [command, r"printf '\n@@ %d\n' $?"]
    done = subprocess.run(
        ["/usr/bin/env", "-i", f"HOME={home}", "PATH=/usr/bin:/bin", "LANG=C.UTF-8", "bash", "--noprofile", "--norc"],
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


@pytest.fixture(scope="module")
def with_runs(place) -> tuple[Path, Path]:
    """The same with what ``make lab`` leaves, but for its checkpoint."""
    folder, home = place
    shutil.copytree(folder / "results/grpo/lab-seed1", folder / "outputs/grpo/lab-30-steps")
    return folder, home


def expected(command: str) -> tuple[int, str]:
    return next((wanted for pattern, wanted in REFUSALS.items() if re.search(pattern, command)), (0, ""))


def test_there_are_blocks_and_every_exception_stands_for_a_command():
    assert len(blocks()) >= 8 and sum(len(block.commands) for block in blocks()) >= 30
    commands = [command for block in blocks() for command in block.commands]
    for pattern in REFUSALS:
        assert any(re.search(pattern, command) for command in commands), pattern


@pytest.mark.timeout(900)
@pytest.mark.parametrize("of_recipes", [False, pytest.param(True, marks=pytest.mark.processes)])  # dozens of dry runs
def test_blocks_work_as_typed(with_runs, of_recipes, subtests):
    folder, home = with_runs
    for block in blocks():
        if block.path.is_relative_to(ROOT / "recipes") == of_recipes:
            with subtests.test(block.name):
                typed = type_in(folder, home, block.commands)
                assert len(typed) == len(block.commands), typed[-1].output if typed else "the shell ended"
                for one in typed:
                    status, text = expected(one.command)
                    assert one.status == status and text in one.output, f"{one.command}\n{one.output}"
                    assert "Traceback" not in one.output and "No module named" not in one.output, one.output


def test_without_activation_python_is_not_the_environments(place):
    """The shell of these tests knows nothing of the environment: a block that forgets it would fail."""
    folder, home = place
    (typed,) = type_in(folder, home, ("python -c 'import hydra'",))
    assert typed.status != 0


def commands_that_train() -> list[str]:
    """Those of the READMEs, of the table of references and of ``make lab``, without comments; some stand in several."""
    typed = [command for block in blocks() for command in block.commands]
    references = yaml.safe_load((ROOT / "results/references.yaml").read_text(encoding="utf-8"))["references"]
    typed += [reference["command"] for reference in references if "command" in reference]
    typed += [line.strip() for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()]
    return [
        command for command in typed if re.search(r"bash recipes/\w+/run_(?!retriever)|-m recipes\.\w+\.main_", command)
    ]


def arguments_of(command: str) -> tuple[str, list[str]]:
    """Return the recipe that a command starts, and all arguments of its ``main_<recipe>``."""
    words = [word for word in shlex.split(command, comments=True) if word != "DRY_RUN=1"]
    if words[0] == "bash":
        shell = ["bash", "-c", PRINT_WORDS, *words[1:]]
        done = subprocess.run(shell, cwd=ROOT, env={**os.environ, "DRY_RUN": "1"}, capture_output=True, text=True)
        words = done.stdout.split("\0")[:-1]
    return words[2].rpartition("main_")[2], words[3:]


def test_commands_with_other_settings_have_other_folders_and_equal_ones_share_theirs():
    """So all of them can be typed one after another, and none meets the run of another."""
    settings_of, folders_of = defaultdict(set), defaultdict(set)
    for command in commands_that_train():
        recipe, arguments = arguments_of(command)
        composed = examine(recipe, arguments)
        if "--help" in arguments or composed.problems:  # one is misspelt on purpose
            continue
        counts = {IDENTITY, FILES}
        settings = repr([recipe, {k: v for k, v in convert.as_json(composed.config).items() if role_of(k) in counts}])
        folder = composed.config.trainer.default_local_dir
        settings_of[folder].add(settings)
        if "trainer.experiment_name=" not in command:
            folders_of[settings].add(folder)
    assert len(settings_of) >= 20
    assert {folder: len(found) for folder, found in settings_of.items() if len(found) > 1} == {}
    assert [folders for folders in folders_of.values() if len(folders) > 1] == []


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
                    assert one.status == 0 and "Traceback" not in one.output, f"{one.command}\n{one.output}"
    assert (folder / "outputs/grpo/lab-30-steps/report.html").exists()
