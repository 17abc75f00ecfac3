"""From the command line to a configuration, a dry run, or one line a problem.

    python -m recipes.grpo.main_grpo key=value ...          runs
    DRY_RUN=1 python -m recipes.grpo.main_grpo key=value ... composes, checks, prints and exits
    python -m recipes.grpo.main_grpo --help [word ...]      explains the keys, or those that the words occur in

Arguments before a lone ``--`` are a run script's own: ``main_grpo data.train_files=... -- "$@"``. Those after it were
typed and win, a typed preset too (:mod:`core.config.composition`). A path that a script brings along need not exist yet
in a dry run, one that was typed does.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn

from core.cluster.address import address_problem
from core.config import Composed, Config, code_by_path, diff, examine, paths, recipes, registry
from core.config.defaults import resolve
from core.config.problem import show
from core.errors import InputError
from core.model_shapes import model_problems
from core.plan import plan_lines
from core.requirements_check import missing_for_run

HELP = {"-h", "--help"}


def prepare(recipe: str, argv: Sequence[str], hooks: Collection[str] = ()) -> Config:
    """Return the configuration to run, or end the process: with 2 for problems, 0 after a dry run or ``--help``."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without a character that was typed shows its number
        sys.stdout.reconfigure(errors="backslashreplace")
    if HELP & {*argv}:
        _help(recipe, argv, hooks)
    try:
        composed = examine(recipe, argv, hooks)
    except InputError as error:  # a rule of a recipe of the user's
        _refuse(error.problems)
    dry = is_dry_run()
    if problems := all_problems(composed, _typed_keys(recipe, argv) if dry else None):
        _refuse(problems)
    if dry:
        print(_report(recipe, composed))
        raise SystemExit(0)
    _notes(composed)
    print(f"writes to {paths.run_folder(composed.config)}", flush=True)
    return composed.config


def all_problems(composed: Composed, typed: frozenset[str] | None) -> list[str]:
    """Return the problems of a configuration and with what it names; in a dry run with the ``typed`` paths only."""
    problems = [*composed.problems, *_outside(composed, typed)]
    if not composed.problems:
        problems += model_problems(composed.config)
    return problems or _before_start(composed.config)


def is_dry_run() -> bool:
    """Return whether DRY_RUN in the environment asks to check and to start nothing."""
    return os.environ.get("DRY_RUN", "").lower() not in ("", "0", "false", "no")


def _typed_keys(recipe: str, argv: Sequence[str]) -> frozenset[str]:
    from core.config import composition

    return frozenset(composition.read(composition.split(argv)[1], recipe).given)


def _outside(composed: Composed, typed: frozenset[str] | None) -> list[str]:
    """Return the problems with what lies outside the configuration: in a dry run, with the ``typed`` paths only."""
    refused = tuple(f"{line.partition('=')[0]}=" for line in composed.problems)  # these keys hold their defaults
    absent = map(str, paths.missing(composed.config, typed))
    lines = [line for line in absent if not line.startswith(refused)]
    if typed is None:
        lines += [*_missing_for_run(composed.config), *_without_cluster(composed.config)]
    return lines


def _before_start(config: Config) -> list[str]:
    """Return the problems with users' files and with those that episodes read."""
    files = ((key, Path(path).expanduser()) for key, path in paths.named(config) if path.endswith(".py"))
    lines = [
        f"{key}={path}: {line}" for key, path in files if path.is_file() for line in code_by_path.verl_imports(path)
    ]
    if config.actor_rollout_ref.rollout.agent_loop == registry.TOOL_AGENT:
        from core.rollout.template_check import problems_before_start

        lines += problems_before_start(config)
    return lines


def _without_cluster(config: Config) -> list[str]:
    problem = address_problem(config)
    return [str(problem)] if problem else []


def _missing_for_run(config: Config) -> list[str]:
    engine = registry.ENGINES[config.actor_rollout_ref.rollout.name]
    lines = missing_for_run(config, engine.package if config.needs_engine else None)
    if config.needs_engine and engine.problems:
        lines += code_by_path.load_object(engine.problems)(config)
    return lines


def _refuse(problems: Sequence[str]) -> NoReturn:
    print("\n".join(problems), file=sys.stderr)
    raise SystemExit(2)


def _notes(composed: Composed) -> None:
    """Print warnings, keys of other versions and unused keys, before anything runs."""
    for line in composed.warnings:
        print(f"warning: {line}", file=sys.stderr)
    for line in _read(composed):
        print(f"read as: {line}", file=sys.stderr)
    for line in _unused(composed):
        print(f"no effect: {line}", file=sys.stderr)


def _read(composed: Composed) -> list[str]:
    """Return keys and values of other versions with the settings that they were read as."""
    return [
        f"{key}={show(value, key)}: {', '.join(f'{name}={show(item, name)}' for name, item in settings.items())}"
        for key, (value, settings) in composed.read.items()
    ]


def _unused(composed: Composed) -> list[str]:
    return [f"{key}={show(value, key)}: {reason}" for key, (value, reason) in composed.unused.items()]


def _report(recipe: str, composed: Composed) -> str:
    changed = [
        f"{key}={show(new, key)} (default {show(old, key)})"
        for key, (old, new) in diff(resolve(recipes.schema_of(recipe)(), recipe), composed.config).items()
        if key not in composed.without_effect
    ]
    cluster = [f"cluster: {line}" for line in _without_cluster(composed.config)]
    blocks = (
        ("differs from the defaults", changed),
        ("read as", _read(composed)),
        ("has no effect in this configuration", _unused(composed)),
        ("warnings", list(composed.warnings)),
        ("checked at start", [*paths.checked_at_start(composed.config), *cluster]),
        (f"plan (python -m core.plan {recipe} --gpu NAME plans for others)", plan_lines(composed.config)),
    )
    lines = [f"dry run: the configuration of recipe {recipe} is valid"]
    for title, entries in blocks:
        if entries:
            lines += [f"{title}:", *(f"  {entry}" for entry in entries)]
    return "\n".join(lines)


def _help(recipe: str, arguments: Sequence[str], hooks: Collection[str]) -> NoReturn:
    """Print the help and end: with 1 where a search found nothing. Words after ``--help`` are searched for."""
    at = next(number for number, text in enumerate(arguments) if text in HELP)
    words = [text.partition("=")[0] for text in arguments[at + 1 :] if text not in {*HELP, "--"}]
    from core.config import help as explained

    text, known = explained.shown(recipe, arguments[:at], words, hooks)
    print(text, file=sys.stdout if known else sys.stderr)
    raise SystemExit(0 if known else 1)
