"""Every file that is a command has a --help: what the command does, and what each argument means."""

from __future__ import annotations

import argparse
import runpy
import sys

import pytest

from tests.test_structure import PYTHON, module_of

# Started by other processes with what they need on stdin or in the environment; nobody types them.
NOT_TYPED = {
    "core.rewards.graders",
    "reward_scores.sandbox.harness",
    "reward_scores.sandbox.probe",
    "recipes.lab.planted_run",
}
COMMANDS = sorted(
    {
        module_of(path).removesuffix(".__main__")
        for path in PYTHON
        if '\nif __name__ == "__main__":\n' in path.read_text(encoding="utf-8")
    }
    - NOT_TYPED
)
MAINS = [name for name in COMMANDS if ".main_" in name]


def run_help(command: str, monkeypatch) -> int:
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    monkeypatch.delitem(sys.modules, command, raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module(command, run_name="__main__", alter_sys=True)
    return end.value.code


def test_the_commands_are_found():
    assert {"core.plan", "results.report", "data_preprocess.gsm8k", "recipes.lab.tour"} <= set(COMMANDS)
    assert len(MAINS) == 5


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in MAINS])
def test_each_argument_is_explained(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    seen = []
    shown = argparse.ArgumentParser.print_help
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda self: (seen.append(self), shown(self)))
    assert run_help(command, monkeypatch) == 0
    (parser,) = seen
    told = [one for one in parser._actions if one.help != argparse.SUPPRESS and one.dest != "help"]
    assert not [one.dest for one in told if not one.help]
    assert parser.description and parser.prog.startswith("python -m ")
    assert f"usage: python -m {command}" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", MAINS)
def test_the_help_of_a_recipe_explains_its_keys(command, monkeypatch, capsys):
    assert run_help(command, monkeypatch) == 0
    assert f"usage: python -m {command} " in capsys.readouterr().out
