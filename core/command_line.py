"""The body of every ``main_<recipe>.py``: from the command line to a run, a dry run, or one line a
problem.

    python -m recipes.grpo.main_grpo key=value ...          runs
    DRY_RUN=1 python -m recipes.grpo.main_grpo key=value ... composes, checks, prints and exits
    python -m recipes.grpo.main_grpo --help [word ...]      explains the keys, or those that the
    words occur in; --help first: those that a first run needs

Nothing here imports torch before the configuration is known to be good.
"""

import importlib
import io
import logging
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml

from core.config import code_by_path, convert, paths, recipes, registry
from core.config.composition import Composed, examine
from core.config.defaults import has_accelerator, resolve
from core.config.schema import Config
from core.config.section import Limit, Problem, show
from core.config.unused_keys import unused
from core.dry_run import is_dry_run
from core.errors import (
    FULL,
    InputError,
    NoRoom,
    OutOfMemory,
    UnhealthyRun,
    WorkersLost,
    WriteFailed,
    message_of,
    printable,
    write_failed,
)
from core.secret_keys import remember

log = logging.getLogger("core")

HELP = {"-h", "--help"}
# Keys that may name a function in a user's file
FUNCTIONS = ("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode")
FIRST_KEYS = Path(recipes.__file__).with_name("first_keys.yaml")
USAGE = """usage: python -m recipes.{recipe}.main_{recipe} [preset=NAME] [key=value ...]
       python -m recipes.{recipe}.main_{recipe} --help WORD ...
       (only the keys in which all the words occur)
       python -m recipes.{recipe}.main_{recipe} --help first
       (only the fifteen keys that a first run of your own needs, the most important first)

The command trains with the recipe {recipe}. DRY_RUN=1 in the environment only checks and prints the
configuration and what the run will need. preset=NAME puts the settings of a file over the recipe's
defaults; key=value wins over both.
Presets: {presets}

keys with their defaults (a list is written [a,b]; text with special characters is quoted, as in
key="'a=b'"):"""


def main(recipe: str, *, trainer: str = recipes.TRAINER) -> None:
    """Run a recipe with the arguments of the command line. ``trainer`` is ``module:class``.

    Exits with 2 where the input is at fault, with 1 where the run or the machine is.
    """
    # OpenMP reads it when torch loads. Threads that spin for each other took three times as long on
    # cores with other work, and the result is the same to the bit
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        work(trainer, prepare(recipe, sys.argv[1:], trainer))
    except KeyboardInterrupt:
        # Before the first step, or after the last: in between a signal is a request
        print(
            "SIGINT: stopped before the first step; the same command begins again", file=sys.stderr
        )
        raise SystemExit(130) from None
    except ModuleNotFoundError:  # a package that is not installed has a line of its own
        raise
    except Exception:  # as Python prints it, without secrets
        print(printable(traceback.format_exc()), file=sys.stderr)
        raise SystemExit(1) from None


# -- checks ---------------------------------------------------------------------------------------


def prepare(recipe: str, argv: Sequence[str], trainer: str = recipes.TRAINER) -> Config:
    """Return the configuration to run, or end the process.

    It ends with 2 for problems, with 0 after a dry run or ``--help``.
    """
    # A terminal without a character that was typed shows its number
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if HELP & {*argv}:
        at = next(number for number, text in enumerate(argv) if text in HELP)
        words = [text.partition("=")[0] for text in argv[at + 1 :] if text not in {*HELP, "--"}]
        text, known = help_text(recipe, argv[:at], words)
        print(text, file=sys.stdout if known else sys.stderr)
        raise SystemExit(0 if known else 1)
    dry = is_dry_run()
    composed = examine(recipe, argv)
    remember(composed.words, convert.as_tree(composed.config))
    problems = all_problems(composed, composed.typed if dry else None)
    if dry and not problems:
        problems = open_files(trainer, composed.config)
    if problems:
        _refuse(problems)
    if dry:
        print(_report(recipe, composed))
        raise SystemExit(0)
    for title, lines in _notes(composed).items():
        for line in lines:
            print(f"{title}: {line}", file=sys.stderr)
    return composed.config


def all_problems(composed: Composed, typed: Collection[str] | None) -> list[str]:
    """Return the problems of a configuration and of what it names.

    ``typed`` are the keys whose paths have to exist in a dry run; None: a run begins.
    """
    from core.algorithm.correction_bounds import threshold_problems
    from core.tracking.tracker import folder_problem
    from core.vision import pictures

    config = composed.config
    problems = list(composed.problems)
    # A refused key holds its default, whose path nobody gave
    refused = {line.partition("=")[0] for line in problems}
    problems += [str(path) for path in paths.missing(config, typed) if path.key not in refused]
    if in_the_way := folder_problem(config):
        problems.append(in_the_way)
    if typed is None:
        problems += _missing_here(config)
        on_cpus = ranks_on_cpus(composed)
        if on_cpus and on_cpus.key in composed.script:
            problems.append(str(on_cpus))
    if not composed.problems:
        problems += map(str, threshold_problems(config))
        problems += map(str, pictures.problems(config))
    return problems


def _missing_here(config: Config) -> list[str]:
    """Return what this machine lacks for a run of the configuration, a line each."""
    trainer = config.trainer
    name = config.actor_rollout_ref.rollout.name
    engine = registry.ENGINES[name]
    packages = {"trainer.backend=ray": "ray"} if trainer.backend == "ray" else {}
    if config.needs_engine and engine.package is not None:
        packages[f"actor_rollout_ref.rollout.name={name}"] = engine.package
    lines = []
    for setting, package in packages.items():
        if find_spec(package) is None:
            rule = f"{package} is not installed"
            lines.append(f"{setting}: {rule}; make setup installs it where it can")
    if config.needs_engine and engine.problems:
        lines += code_by_path.load_object(engine.problems)(config)
    # Over Ray the driver's own machine may have no GPU
    if trainer.backend == "local" and trainer.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            rule = "PyTorch finds no GPU here"
            lines.append(f"trainer.device=cuda: {rule}; use cpu, or see nvidia-smi")
    if no_cluster := paths.address_problem(config):
        lines.append(str(no_cluster))
    elif trainer.backend == "ray" and not lines:
        lines += code_by_path.load_object("core.cluster.ray_nodes:start_problems")(config)
    return lines


def ranks_on_cpus(composed: Composed) -> Problem | None:
    """Return the problem of ranks that were requested as GPUs and would compute on a CPU."""
    trainer = composed.config.trainer
    key = "trainer.n_gpus_per_node"
    if trainer.backend != "ray" or trainer.device or has_accelerator() or key not in composed.given:
        return None
    rule = "this machine has no GPU, so that learner ranks would compute on its CPU"
    fix = "set trainer.device=cpu if that is meant, or cuda where a cluster has the GPUs"
    return Problem(key, composed.given[key], rule, fix)


def open_files(trainer: str, config: Config) -> list[str]:
    """Return what is wrong in the local files of a dry run.

    If data and model are on this machine, everything is read as a start reads it: data, tokenizer,
    reward function, hooks, tools. Otherwise only loggers, columns, first rows and the function are.
    """
    from core.data.parquet import ExampleFile
    from core.rewards.grading import CustomFunction
    from core.tracking.loggers import check_loggers

    problems: list[str] = []
    data = config.data
    custom = config.custom_reward_function
    files = [*data.train_files, *data.val_files]
    model = config.actor_rollout_ref.model.path
    here = [path for path in (*files, model) if Path(path).expanduser().exists()]

    def tried(work: Callable[..., Any], *arguments: Any) -> None:
        try:
            work(*arguments)
        except InputError as error:
            problems.extend(error.problems)
        except Exception as error:
            if (line := fault_of_user(error)) is None:
                raise
            problems.append(line)

    def read_first(path: str) -> None:
        ExampleFile(path, data.prompt_key, data.reward_fn_key, data.image_key).example(0)

    tried(check_loggers, config.trainer.logger)
    for path in here:
        if path in files and config.generates:
            tried(read_first, path)
    if custom.path and Path(custom.path.removeprefix("file://")).expanduser().is_file():
        tried(CustomFunction, custom.path, custom.name, custom.reward_kwargs)
    for key in FUNCTIONS if find_spec("torch") else ():  # their files import it
        value = convert.get(config, key)
        if value and value.rpartition(":")[0].endswith(".py"):
            tried(code_by_path.load_object, value, key)
    # A judge is on another machine
    if not problems and len(here) > len(files) and not config.reward_model.judged:
        run = load_trainer(trainer)(config)
        tried(run.load_data)
        if not problems:
            tried(run.check_sizes)
        for part in filter(None, (run.reward, run.agent_loop)):
            part.close()
    return problems


def _refuse(problems: Sequence[str]) -> NoReturn:
    print(printable("\n".join(problems)), file=sys.stderr)
    raise SystemExit(2)


# -- what is printed ------------------------------------------------------------------------------


def _notes(composed: Composed) -> dict[str, list[str]]:
    """Return warnings, what keys of other versions were read as, and keys without effect."""
    warnings = list(composed.warnings)
    if on_cpus := ranks_on_cpus(composed):
        warnings.append(str(on_cpus))
    read = []
    for key, (value, settings) in composed.read.items():
        meaning = ", ".join(f"{name}={show(item, name)}" for name, item in settings.items())
        read.append(f"{key}={show(value, key)}: {meaning}")
    without_effect = [
        f"{key}={show(value, key)}: {reason}" for key, (value, reason) in composed.unused.items()
    ]
    return {"warning": warnings, "read as": read, "no effect": without_effect}


def _report(recipe: str, composed: Composed) -> str:
    """Return what a dry run prints."""
    from core.plan import DEFAULT_GPU, length_notes, plan_lines

    config = composed.config
    planned_gpu = DEFAULT_GPU if ranks_on_cpus(composed) else None  # GPUs that are elsewhere
    defaults = convert.flat(resolve(recipes.schema_of(recipe)(), recipe))
    changes = [
        f"{key}={show(value, key)} (default {show(defaults[key], key)})"
        for key, value in convert.flat(config).items()
        if value != defaults[key] and not unused(config, key)
    ]
    not_checked = list(paths.not_checked(config))
    if no_cluster := paths.address_problem(config):
        not_checked.append(f"cluster: {no_cluster}")
    not_checked += length_notes(config)
    plan = f"plan (python -m core.plan {recipe} --gpu NAME plans for others)"
    blocks = {
        "differs from the defaults": changes,
        **_notes(composed),
        "not checked here": not_checked,
        plan: plan_lines(config, planned_gpu),
    }
    lines = [f"dry run: the configuration of recipe {recipe} is valid"]
    for title, entries in blocks.items():
        if entries:
            lines += [f"{title}:", *(f"  {entry}" for entry in entries)]
    return "\n".join(lines)


def help_text(recipe: str, overrides: Sequence[str], words: Sequence[str]) -> tuple[str, bool]:
    """Return the text of ``--help``, and whether any key has all of the ``words``."""
    lines: list[str] = []
    if not words:
        presets = sorted(path.stem for path in (recipes.folder(recipe) / "preset").glob("*.yaml"))
        lines = USAGE.format(recipe=recipe, presets=", ".join(presets) or "none").splitlines()
    width = max(40, min(120, shutil.get_terminal_size((120, 24)).columns))
    wrap = textwrap.TextWrapper(
        width, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )
    if list(words) == ["first"]:
        lines = [
            line
            for head, text in first_keys(recipe, overrides)
            for line in (*wrap.wrap(head), *wrap.wrap(f"    {text}"))
        ]
        return "\n".join(lines), True
    for entry in explained(recipe, overrides):
        if all(word.lower() in " ".join(entry).lower() for word in words):
            head, text = entry
            lines += [*wrap.wrap(head), *wrap.wrap(f"    {text}")]
    if lines:
        return "\n".join(lines), True
    nothing = "no key has this in its name, its comment or its choices"
    return f"--help {' '.join(words)}: {nothing}", False


def explained(recipe: str, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield ``key=default`` and the description of every key of the recipe.

    Defaults are those under the overrides.
    """
    config = examine(recipe, overrides).config
    for key, hint in convert.all_keys(type(config)).items():
        descriptions = []  # a section's description is its keys' too
        section = type(config)
        for name in key.split("."):
            descriptions.append(section.model_fields[name].description)
            section = type(getattr(section(), name))
        sentences = filter(None, [*descriptions, choices(hint)])
        text = " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)
        yield f"{key}={show(convert.get(config, key), key)}", text


def first_keys(recipe: str, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield rank and ``key=default`` of the keys that a first run needs, and a sentence on each."""
    config = examine(recipe, overrides).config
    ranked = yaml.safe_load(FIRST_KEYS.read_text(encoding="utf-8"))
    known = [key for key in ranked if convert.known(key, type(config))]
    for rank, key in enumerate(known, 1):
        value = show(convert.get(config, key), key)
        yield f"{rank}. {key}={value}", f"{ranked[key][0].upper()}{ranked[key][1:]}."


def choices(hint: Any) -> str:
    """Return the names or bounds that a type admits, in words."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    parts = [
        part.requirement if isinstance(part, Limit) else choices(part) for part in get_args(hint)
    ]
    return ", ".join(filter(None, parts))


# -- the run --------------------------------------------------------------------------------------


class PrintableFormatter(logging.Formatter):
    """Lines of a log may quote a model's text: its control characters stay off the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def load_trainer(trainer: str) -> Callable[[Config], Any]:
    """Return the class ``module:class``. One with an unknown hook ends the process."""
    module, _, name = trainer.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except InputError as error:
        _refuse(error.problems)


def work(trainer: str, config: Config) -> None:
    """Train in this process and print the outcome."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for package in ("core", "recipes"):
        logging.getLogger(package).setLevel(logging.INFO)
    log.info("the configuration has no problem; loading torch and transformers")
    run = train(load_trainer(trainer), config).run
    print(f"{run.outcome()}; run folder {run.run_dir}", flush=True)


def train(trainer: Callable[[Config], Any], config: Config) -> Any:
    """Train to the end and return the trainer.

    If a process dies or hangs, training restarts from the run's last checkpoint.
    """
    limit = config.trainer.max_restarts
    restarts = 0
    saved_step = 0
    began_in = os.getcwd()  # a scorer may change it, and paths of data and models are relative
    while True:
        trained = trainer(config)
        try:
            trained.init_workers()
            trained.fit()
            return trained
        except (WorkersLost, NoRoom) as error:
            if isinstance(error, NoRoom) and not restarts:  # more was asked for than there is
                _end(error, trained.run.run_dir)
            if restarts >= limit or trained.run.stop.requested:
                text = f"{error}\n(trainer.max_restarts={limit}: not started again)"
                print(printable(text), file=sys.stderr)
                raise SystemExit(1) from error
            log.error("%s", error)
        except Exception as error:
            _end(error, trained.run.run_dir)
        restarts += 1
        os.chdir(began_in)
        if trained.run.has_own_checkpoint:  # else it begins again where the command says
            config = convert.replaced(config, {"trainer.resume_mode": "auto"})
        # A restart that found no room for its processes has read no checkpoint
        saved_step = trained.run.saved_step or saved_step
        log.error("restart %d of %d, after step %d", restarts, limit, saved_step)


def _end(error: Exception, run_dir: Path) -> NoReturn:
    """End the process with a line: with 2 for a fault of the input, 1 of the run or the machine.

    An exception of a user's own code ends with its traceback and a line. Any other exception is
    raised again.
    """
    expected = isinstance(error, InputError | UnhealthyRun | OutOfMemory)
    if not expected and (line := fault_of_user(error)) is not None:
        _refuse([line])
    if not (expected or isinstance(error, OSError) and error.errno in FULL):
        raise error
    if isinstance(error, OSError | OutOfMemory):
        print(printable(traceback.format_exc()), file=sys.stderr)
    if isinstance(error, OSError):
        error = write_failed(error, error.filename or run_dir, "a file")
    print(printable(message_of(error)), file=sys.stderr)
    by_input = isinstance(error, InputError) and not isinstance(error, WriteFailed)
    raise SystemExit(2 if by_input else 1) from error


def fault_of_user(error: BaseException) -> str | None:
    """Return the traceback and a line for an exception that a user's own file raised, or None."""
    frames = traceback.extract_tb(error.__traceback__)
    while frames and not code_by_path.is_own(frames[0].filename):
        frames.pop(0)
    if not frames:
        return None
    trace = traceback.format_list(frames) + traceback.format_exception_only(error)
    where = f"{frames[0].filename}: {frames[0].name} raised {type(error).__name__}"
    fix = "correct it: recipes/README.md has what it is called with"
    return f"Traceback of your code:\n{''.join(trace)}{where}; {fix}"
