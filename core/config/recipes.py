"""What recipes' folders add to the configuration: presets, keys of their own, rules on these.

``recipes/<recipe>/config/`` holds ``<recipe>.yaml`` and presets; it may hold ``key_roles.yaml``, in the form of the
file of that name here. A user's own recipe may also lie in a folder ``recipes/`` elsewhere on Python's path.
``recipes/<recipe>/config_schema.py`` may define ``SCHEMA``, a subclass of :class:`Config` with the recipe's own keys,
``PAPER``, the name that messages give it, and ``SWITCHES``, the keys that switch its techniques on: other recipes
accept these keys at values that leave a technique off. ``recipes/<recipe>/config_rules.py`` may define ``rules``, a
:class:`core.config.rulebook.RuleBook`. Files are found by the recipe's name; core imports no recipe.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

from core.config import convert
from core.config.rulebook import RuleBook
from core.config.schema import Config
from core.config.yaml_files import read_table
from core.errors import InputError

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def names() -> list[str]:
    """Return the names of all recipes: folders that hold a configuration of their own name."""
    return sorted(path.stem for path in RECIPES.glob("*/config/*.yaml") if path.stem == path.parts[-3])


def folder(recipe: str) -> Path:
    """Return the folder of a recipe's configuration files, which need not exist."""
    if not re.fullmatch(r"[\w-]+", recipe):  # a manifest may name one, and no path leads from it to code
        return RECIPES / "-" / "config"
    places = (place / recipe / "config" for place in (RECIPES, *(Path(p).absolute() / "recipes" for p in sys.path)))
    return next((each for each in places if (each / f"{recipe}.yaml").exists()), RECIPES / recipe / "config")


def table(recipe: str, name: str) -> Any:
    """Return what the recipe's own file of this name holds, or None where it has none."""
    path = folder(recipe) / name
    return read_table(path) if path.exists() else None


def schema_of(recipe: str) -> type[Config]:
    """Return the class of a recipe's configurations: :class:`Config`, or the recipe's subclass of it."""
    module = module_of(recipe)
    return Config if module is None else module.SCHEMA


def rules_of(recipe: str) -> RuleBook | None:
    """Return the rules of a recipe's own, or None where it has none."""
    module = module_of(recipe, "config_rules")
    return None if module is None else module.rules


def extended() -> Iterator[tuple[str, ModuleType]]:
    """Yield the recipes that have keys of their own, with the modules that define them."""
    yield from ((recipe, module) for recipe in names() if (module := module_of(recipe)) is not None)


def switch_of(key: str) -> tuple[str, str] | None:
    """Return the recipe and the switch of the technique that the key belongs to, or None."""
    for recipe, module in extended():
        for switch, pattern in getattr(module, "SWITCHES", {}).items():
            if fnmatchcase(key, pattern) and key in convert.all_keys(module.SCHEMA):
                return recipe, switch
    return None


def trainer_of(recipe: str) -> tuple[str | None, tuple[str, ...]]:
    """Return the trainer (``module:class``) of a recipe, None for core's own, and the hooks that it overrides.

    They are the arguments of ``launch.main(...)`` in ``main_<recipe>.py``, which is read and not run. Raises InputError
    where they are not written as texts there, or as names of texts.
    """
    path = folder(recipe).parent / f"main_{recipe}.py"
    if not path.exists():
        raise InputError(f"recipe={recipe}: has no main_{recipe}.py; choose one of {', '.join(names())}")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch.main"]
    try:
        (call,) = calls
        keywords = {
            one.arg: named[one.value.id] if isinstance(one.value, ast.Name) else one.value for one in call.keywords
        }
        values = {name: ast.literal_eval(value) for name, value in keywords.items()}
    except (KeyError, ValueError) as error:
        raise InputError(
            f"{path}: no launch.main(...) whose trainer= and hooks= are plain texts; write them so"
        ) from error
    return values.get("trainer"), tuple(values.get("hooks", ()))


@functools.cache
def module_of(recipe: str, name: str = "config_schema") -> ModuleType | None:
    """Return the module of this name in a recipe's folder, or None where it has none."""
    exists = folder(recipe).with_name(f"{name}.py").exists()
    return importlib.import_module(f"recipes.{recipe}.{name}") if exists else None
