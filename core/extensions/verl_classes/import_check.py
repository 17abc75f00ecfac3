"""Whether users' files import or return what there is nothing for here, read from their text: no file is run for it.

An import within a function would otherwise fail in the middle of a run. What a file imports under ``try`` or
``TYPE_CHECKING`` it can do without, and a reward function what classes beside it import when they are called: public
files hold a tool and a data set class with it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from core.config.plugins import in_project
from core.config.stand_ins import find_in_forks, fork_of
from core.data.stream import data_class
from core.extensions.verl_classes.shim import ABSENT, ADVICE, import_problem

if TYPE_CHECKING:
    from core.config.schema import Config

LOOPS = "verl.experimental.agent_loop"
ROLLOUT = "actor_rollout_ref.rollout"
PICTURE = "the tool answers with pictures, and an episode here has text alone behind its prompt; answer with a text"
FUNCTION = "custom_reward_function.path"


def named_files(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield key, path and class of every Python file that the configuration names; "" for a class not read here."""
    import yaml

    custom, module = config.custom_reward_function.path, config.reward_model.module.path
    loop = (config.actor_rollout_ref.rollout.agent_loop or "").rpartition(":")[0]
    keys = {FUNCTION: custom, "reward_model.module.path": module, f"{ROLLOUT}.agent_loop": loop}
    keys["data.custom_cls.path"] = data_class(config.data)
    yield from ((key, path.removeprefix("file://"), "") for key, path in keys.items() if path)
    options = config.actor_rollout_ref.rollout.multi_turn
    for name in ("tool_config_path", "interaction_config_path"):
        file = Path(getattr(options, name, None) or "").expanduser()
        try:
            listed = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError):  # reported where the file is read
            continue
        for entry in next(iter(listed.values()), ()) if isinstance(listed, dict) else listed or ():
            kind = entry.get("class_name") if isinstance(entry, dict) else None
            if isinstance(kind, str) and ".py:" in (where := in_project(kind, file)):
                path, _, kind = where.rpartition(":")
                yield f"{ROLLOUT}.multi_turn.{name}", path, kind


def problems(config: Config) -> list[str]:
    """Return a line for each import of verl that has nothing behind it here, and each picture that a tool returns."""
    installed = PathFinder.find_spec("verl") is not None
    lines = []
    for key, path, kind in dict.fromkeys(named_files(config)):
        try:
            tree = ast.parse(Path(path).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):  # reported where the file is loaded
            continue
        body = [one for one in tree.body if key != FUNCTION or not isinstance(one, ast.ClassDef)]
        for line, module, name in imports(body):
            problem = None if installed or in_fork(path, module, name) else import_problem(module, name)
            if key.endswith(".agent_loop") and module.startswith(LOOPS):
                problem = f"{module} makes the loop one of verl's server manager; {ADVICE[LOOPS]}"
            if problem:
                lines.append(f"{key}={path}: line {line}: {problem}")
        lines += [f"{key}={path}: line {line}: {PICTURE}" for line in pictures(tree.body, kind)]
    return list(dict.fromkeys(lines))


def pictures(body: Iterable[ast.stmt], kind: str) -> Iterator[int]:
    """Yield the lines on which a class makes a ToolResponse with pictures or videos."""
    classes = [one for one in body if isinstance(one, ast.ClassDef) and one.name == kind]
    for call in (node for one in classes for node in ast.walk(one) if isinstance(node, ast.Call)):
        given = {one.arg for one in call.keywords if not (isinstance(one.value, ast.Constant) and not one.value.value)}
        if ast.unparse(call.func).endswith("ToolResponse") and given & {"image", "video"}:
            yield call.lineno


def in_fork(path: str, module: str, name: str | None) -> bool:
    """Return whether a file lies in a fork of verl that has the module, or the name as a module or in its text."""
    fork = fork_of(Path(path).expanduser().resolve())
    if fork is None or module.startswith(ABSENT):
        return False
    spec = find_in_forks(module, [fork])
    if name is None or spec is None or find_in_forks(f"{module}.{name}", [fork]) is not None:
        return spec is not None
    return spec.origin is not None and name in Path(spec.origin).read_text(encoding="utf-8")


def imports(body: Iterable[ast.stmt]) -> Iterator[tuple[int, str, str | None]]:
    """Yield line, module and name of every import of verl that a file cannot do without."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, one.name, None) for one in node.names if one.name.split(".")[0] == "verl")
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "verl":
            yield from ((node.lineno, node.module, None if one.name == "*" else one.name) for one in node.names)
        elif isinstance(node, ast.Try) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            continue
        else:
            for part in ("body", "orelse"):
                yield from imports(child for child in getattr(node, part, ()) if isinstance(child, ast.stmt))
