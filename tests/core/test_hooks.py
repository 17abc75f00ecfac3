"""A trainer's hooks are read from the source of its class: a configuration is checked before torch is imported."""

from __future__ import annotations

import sys

import pytest

from core import command_line
from core.config import recipes
from core.errors import InputError

TRAINERS = """
from core.ray_trainer import RayPPOTrainer
from recipes.dapo.dapo_ray_trainer import RayDAPOTrainer as Base

class Shaping(RayPPOTrainer):
    def shape_reward(self, score, trajectory):
        return score

    def shaped(self, score):
        return score

class Child(Shaping):
    async def generate(self, *args):
        return await super().generate(*args)

class OfDAPO(Base):
    def compute_advantages(self, batch, metrics):
        return batch

class Misspelled(Shaping):
    def keep_groups(self, group):
        return True
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some_trainers.py").write_text(TRAINERS)
    return "some_trainers"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Shaping", ("shape_reward",)),
        ("Child", ("generate", "shape_reward")),
        ("OfDAPO", ("shape_reward", "keep_group", "compute_advantages")),
    ],
)
def test_hooks_are_those_of_the_class_and_its_bases(module, name, expected):
    assert recipes.hooks_of(f"{module}:{name}") == expected
    assert module not in sys.modules


def test_a_method_that_is_nearly_a_hook_is_refused_with_the_hooks_name(module, capsys, monkeypatch):
    with pytest.raises(InputError, match=r"Misspelled\.keep_groups: .*rename it to keep_group"):
        recipes.hooks_of(f"{module}:Misspelled")
    monkeypatch.setattr(sys, "argv", ["main_mine"])
    with pytest.raises(SystemExit) as ended:
        command_line.main("grpo", trainer=f"{module}:Misspelled")
    assert ended.value.code == 2 and "keep_groups" in capsys.readouterr().err


def test_the_entry_of_a_recipe_of_ones_own_is_read(tmp_path, monkeypatch, module):
    config = tmp_path / "recipes" / "mine" / "config"
    config.mkdir(parents=True)
    (config / "mine.yaml").write_text("{}")
    main = config.parent / "main_mine.py"
    main.write_text(f'from core import command_line\ncommand_line.main("mine", trainer="{module}:Child")\n')
    assert recipes.trainer_of("mine") == (f"{module}:Child", ("generate", "shape_reward"))
    main.write_text('from core import command_line\ncommand_line.main("mine", trainer=name())\n')
    with pytest.raises(InputError, match="plain text"):
        recipes.trainer_of("mine")
