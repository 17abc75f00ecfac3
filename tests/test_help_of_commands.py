"""Every file that is a command has a --help: what the command does, and what each argument
means."""

from __future__ import annotations

import argparse
import runpy
import subprocess
import sys

import pytest

from core.config import recipes
from core.tracking.run_manifest import ROOT
from tests.test_structure import modules

# Started by other processes with what they need on stdin or in the environment; nobody types them.
NOT_TYPED = {
    "core.rewards.grader_process",
    "core.rewards.graders",
    "recipes.agents.openai_agents_sums",
    "recipes.agents.resident",
    "recipes.agents.verifiers_sums",
    "recipes.launch.strikes",
    "reward_scores.sandbox.harness",
}


def test_each_command_and_each_argument_is_explained(monkeypatch, capsys, tmp_path, subtests):
    commands = [
        name.removesuffix(".__main__")
        for name, path in modules().items()
        if '\nif __name__ == "__main__":\n' in path.read_text(encoding="utf-8")
        and name not in NOT_TYPED
    ]
    assert {"core.plan", "results.report", "data_preprocess.gsm8k", "recipes.lab.tour"} <= set(
        commands
    )
    assert sum(".main_" in name for name in commands) == len(recipes.names())
    monkeypatch.chdir(tmp_path)
    seen = []
    shown = argparse.ArgumentParser.print_help
    monkeypatch.setattr(
        argparse.ArgumentParser, "print_help", lambda self: (seen.append(self), shown(self))
    )
    for command in commands:
        with subtests.test(command):
            seen.clear()
            monkeypatch.setattr(sys, "argv", [command, "--help"])
            monkeypatch.delitem(sys.modules, command, raising=False)
            with pytest.raises(SystemExit) as end:
                runpy.run_module(command, run_name="__main__", alter_sys=True)
            assert not end.value.code and f"usage: python -m {command}" in capsys.readouterr().out
            if ".main_" not in command:  # whose help lists the keys of a recipe
                (parser,) = seen
                told = [
                    one
                    for one in parser._actions
                    if one.help != argparse.SUPPRESS and one.dest != "help"
                ]
                assert not [one.dest for one in told if not one.help]
                assert parser.description and parser.prog.startswith("python -m ")
    assert not any(tmp_path.iterdir())


def test_cleaning_leaves_the_runs():
    def commands(target: str) -> str:
        return subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    removed = [line for line in commands("clean").splitlines() if line.startswith("rm ")]
    assert removed and not any("outputs" in line for line in removed)
    assert "outputs" in commands("clean-runs")
