"""What recipes' folders add to the configuration: presets, keys of their own, rules on these.

A recipe is found by its name, here or in a folder ``recipes/`` on Python's path.
``config_schema.py`` has ``SCHEMA``, a subclass of :class:`Config`, and ``PAPER``, its name in
messages. ``config_rules.py`` has ``PROBLEMS`` and ``WARNINGS``, ``main_<recipe>.py`` a ``TRAINER``,
``module:class`` where it is not the core's. ``MAKES`` of the package itself maps a folder to the
command that makes what is in it.
"""

import functools
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from core.config import convert
from core.config.schema import Config
from core.errors import InputError

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TRAINER = "core.ray_trainer:RayPPOTrainer"  # of recipes that name none


def names() -> list[str]:
    """Return the names of all recipes: folders that hold a configuration of their own name."""
    files = RECIPES.glob("*/config/*.yaml")
    return sorted(path.stem for path in files if path.stem == path.parts[-3])


def folder(recipe: str) -> Path:
    """Return the folder of a recipe's configuration files, which need not exist."""
    # A manifest may name one, and no path leads from it to code
    if not re.fullmatch(r"[\w-]+", recipe):
        return RECIPES / "-" / "config"
    for place in (RECIPES, *(Path(path).absolute() / "recipes" for path in sys.path)):
        if (place / recipe / "config" / f"{recipe}.yaml").exists():
            return place / recipe / "config"
    return RECIPES / recipe / "config"


@functools.cache
def module_of(recipe: str, name: str = "config_schema") -> ModuleType | None:
    """Return the module of this name in a recipe's folder, or None if it has none."""
    exists = (folder(recipe).parent / f"{name}.py").exists()
    return importlib.import_module(f"recipes.{recipe}.{name}") if exists else None


def schema_of(recipe: str) -> type[Config]:
    """Return the class of a recipe's configurations: :class:`Config` or the recipe's subclass."""
    return getattr(module_of(recipe), "SCHEMA", Config)


def extended() -> Iterator[tuple[str, ModuleType]]:
    """Yield the recipes that have keys of their own, with the modules that define them."""
    for recipe in names():
        if (module := module_of(recipe)) is not None:
            yield recipe, module


@functools.cache
def owner_of(key: str) -> tuple[str, str] | None:
    """Return the recipe that has a key of its own, and the key that switches its technique on."""
    for recipe, module in extended():
        if convert.known(key, module.SCHEMA) and not convert.known(key):
            switch = f"{key.rpartition('.')[0]}.enable"
            return recipe, switch if switch in convert.all_keys(module.SCHEMA) else key
    return None


def maker_of(path: str) -> str | None:
    """Return the command with which a recipe makes a file or folder of this path."""
    place = f"/{Path(path).as_posix()}/"
    for file in sorted(RECIPES.glob("*/__init__.py")):
        makes = getattr(importlib.import_module(f"recipes.{file.parent.name}"), "MAKES", {})
        for folder_name, command in makes.items():
            if f"/{folder_name}/" in place:
                return command
    return None


def trainer_of(recipe: str) -> str:
    """Return the trainer (``module:class``) of a recipe. Raises InputError: no such recipe."""
    module = module_of(recipe, f"main_{recipe}")
    if module is None:
        choices = ", ".join(names())
        raise InputError(f"recipe={recipe}: has no main_{recipe}.py; choose one of {choices}")
    return getattr(module, "TRAINER", TRAINER)
