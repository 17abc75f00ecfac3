"""What recipes' folders add to the configuration: presets, keys of their own, rules on these.

``recipes/<recipe>/config/`` holds ``<recipe>.yaml`` and presets. A user's own recipe may also lie in a folder
``recipes/`` elsewhere on Python's path.
``recipes/<recipe>/config_schema.py`` may define ``SCHEMA``, a subclass of :class:`Config` with the recipe's own keys,
``PAPER``, the name that messages give it, and ``SWITCHES``, the keys that switch its techniques on: other recipes
accept these keys at values that leave a technique off. ``recipes/<recipe>/config_rules.py`` may define ``rules``, a
:class:`core.config.rulebook.RuleBook`. Files are found by the recipe's name; core imports no recipe.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from core.config import convert
from core.config.convert import read_table
from core.config.rulebook import RuleBook
from core.config.schema import Config
from core.errors import InputError

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TRAINER = "core.ray_trainer:RayPPOTrainer"  # of recipes that name none
HOOKS = ("generate", "shape_reward", "keep_group", "compute_advantages")  # its methods that recipes override
NEAR = 0.85  # from this similarity on a method's name is taken for a misspelled hook


@functools.lru_cache(maxsize=32)
def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a source, parsed once a process: every composition reads the trainer's again."""
    return ast.parse(source)


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


def trainer_of(recipe: str) -> tuple[str, tuple[str, ...]]:
    """Return the trainer (``module:class``) of a recipe and the hooks that it overrides.

    It is the argument of ``command_line.main(...)`` in ``main_<recipe>.py``, which is read and not run. Raises
    InputError where it is not written as a text there, or as the name of one.
    """
    path = folder(recipe).parent / f"main_{recipe}.py"
    if not path.exists():
        raise InputError(f"recipe={recipe}: has no main_{recipe}.py; choose one of {', '.join(names())}")
    tree = parsed(path.read_text(encoding="utf-8"))
    texts = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "command_line.main"]
    try:
        (call,) = calls
        given = [texts[k.value.id] if isinstance(k.value, ast.Name) else k.value for k in call.keywords]
        (trainer,) = map(ast.literal_eval, given) if given else (TRAINER,)
    except (KeyError, ValueError) as error:
        problem = f"{path}: no command_line.main(...) whose trainer= is a plain text; write it so"
        raise InputError(problem) from error
    return trainer, hooks_of(trainer)


def hooks_of(trainer: str) -> tuple[str, ...]:
    """Return the hooks that a trainer (``module:class``) overrides, from its source: importing it would load torch.

    Raises InputError for a method whose name is nearly a hook's: it would never be called.
    """
    known, found, left = set(_methods(TRAINER)[0]), set(), [trainer]
    while left:
        one = left.pop()
        if one == TRAINER:
            continue
        methods, bases = _methods(one)
        left += bases
        found |= {*HOOKS} & {*methods}
        for name in methods:
            if name not in known and (near := difflib.get_close_matches(name, HOOKS, 1, NEAR)):
                raise InputError(f"{one}.{name}: no hook has this name, so it is never called; rename it to {near[0]}")
    return tuple(hook for hook in HOOKS if hook in found)


def _methods(path: str) -> tuple[list[str], list[str]]:
    """Return the methods of a class (``module:class``) and its bases, as far as its source names them."""
    module, _, name = path.partition(":")
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # of its package; importing it will report that
        return [], []
    if spec is None or not str(spec.origin).endswith(".py"):
        return [], []
    body = parsed(Path(spec.origin).read_text(encoding="utf-8")).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    places = {one: f"{module}:{one}" for one in classes}
    for node in body:
        if isinstance(node, ast.ImportFrom) and not node.level:
            places |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
    if name not in classes:
        return [], []
    defined = [node.name for node in classes[name].body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return defined, [places[base.id] for base in classes[name].bases if getattr(base, "id", None) in places]


@functools.cache
def module_of(recipe: str, name: str = "config_schema") -> ModuleType | None:
    """Return the module of this name in a recipe's folder, or None where it has none."""
    exists = folder(recipe).with_name(f"{name}.py").exists()
    return importlib.import_module(f"recipes.{recipe}.{name}") if exists else None
