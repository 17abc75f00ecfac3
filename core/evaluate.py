"""Evaluate a model without training it: generate answers to validation questions, and score them.

    python -m core.evaluate generate RECIPE --model MODEL | --run RUN --out ANSWERS.jsonl key=value
    ... python -m core.evaluate score ANSWERS.jsonl key=value ...

Keys are those of training. A stopped generate makes the missing answers; python -m results.report
shows the scores."""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.answers import (
    FORMAT,
    answer_line,
    complete_answers,
    manifest_path,
    prompt_of,
    questions_hash,
    read_answers,
    read_manifest,
    refuse_unscored,
    trajectory_of,
    write_manifest,
)
from core.config import Config, composition, convert, examine, recipes
from core.config.paths import is_local
from core.config.section import show
from core.dry_run import is_dry_run
from core.errors import InputError, OutOfMemory, WorkersLost, memory_phase, printable
from core.files import file_sha256, is_url, write_atomic, written_here
from core.secret_keys import remember
from core.tracking import run_manifest
from core.tracking.json_lines import json_line
from core.tracking.loggers import progress
from core.tracking.validation import ValRecord, failed_share
from core.types import Prompt, ScoredGroup

if TYPE_CHECKING:
    from core.checkpoint.store import Checkpoint
    from core.rewards.layer import RewardLayer
    from core.trainer import Trainer

MODEL, PATH = "actor_rollout_ref.model.", "actor_rollout_ref.model.path"
# Keys that decide an answer beside model, data and prompts, which are compared by content. Recipes'
# own keys count too.
DECIDING = (
    *(
        "data.max_prompt_length",
        "data.max_response_length",
        "data.max_start_length",
        "data.max_obs_length",
    ),
    *(f"{MODEL}{name}" for name in ("override_config", "custom_chat_template")),
    *(
        f"actor_rollout_ref.rollout.{name}"
        for name in ("name", "dtype", "ignore_eos", "engine_kwargs", "agent_loop")
    ),
    *(
        "actor_rollout_ref.rollout.val_kwargs.",
        "actor_rollout_ref.rollout.multi_turn.",
        "trainer.seed",
    ),
)
# Sections of which nothing is loaded while answers are generated, and those of which something is
# while they are scored
UNREAD = (
    "custom_reward_function.",
    "reward_model.",
    "algorithm.",
    "actor_rollout_ref.actor.",
    "critic.",
)
REWARDS = ("reward_model.", "custom_reward_function.")


# -- generate --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerateCall:
    """A checked call of ``generate``, of which nothing is loaded yet. ``checkpoint`` is that of a
    run."""

    recipe: str
    config: Config
    out: Path
    checkpoint: Checkpoint | None = None


def request(
    recipe: str, overrides: Sequence[str], out: Path, model: str | None, run: str | None
) -> GenerateCall:
    """Compose and check. The settings of ``--run`` are those of its newest checkpoint, or of the
    one that it names.

    Raises InputError with the problems of the configuration, or the first one of model and file.
    """
    from core.export import find_checkpoint

    if out.suffix != ".jsonl":
        raise InputError(f"--out={out}: must end in .jsonl")
    model = model or (None if run else examine(recipe, overrides).given.get(PATH))
    if bool(model) == bool(run):
        raise InputError(
            "model: give either --model (a folder or hub id) or --run (a run folder "
            "or a checkpoint)"
        )
    checkpoint, settings = None, {PATH: model}
    if run is not None:
        checkpoint = find_checkpoint(run, "--run")
        trained = checkpoint.provenance.config if checkpoint.provenance else {}
        # The tokenizer that trained lies beside the weights
        here = {PATH: str((checkpoint.folder / "actor").resolve()), f"{MODEL}tokenizer_path": None}
        settings = {**trained, **here, "trainer.resume_mode": "disable"}
    composed = examine(recipe, overrides, settings)
    remember(composed.words, convert.as_tree(composed.config))
    if composed.problems:
        raise InputError(composed.problems)
    if run is not None:
        composition.refuse_code(f"--run={run}", composed.config, recipe, overrides, UNREAD)
    for key, (value, reason) in composed.unused.items():
        print(f"no effect: {key}={show(value, key)}: {reason}", file=sys.stderr)
    return GenerateCall(recipe, composed.config, out, checkpoint)


def generate(call: GenerateCall) -> bool:
    """Write the answers that the file lacks. Return whether there was anything to do.

    Lines are appended as answers end; the complete file is in the order of the questions. Raises
    InputError before a model loads for data, settings and files that do not go together.
    """
    from core.data.prompts import load_val_prompts
    from core.data.vocabulary import policy_template, with_template_date
    from core.learner.models import load_modality, load_tokenizer
    from core.rollout.agent_loop import check_examples, make_agent_loop

    config, model, out = call.config, call.config.actor_rollout_ref.model, call.out
    tokenizer = load_tokenizer(model)
    begun = read_manifest(out, "answers")["settings"] if out.exists() else {}
    template = policy_template(config.data, tokenizer)
    config = with_template_date(config, template, begun.get("data.chat_template_date"))
    call = replace(call, config=config)
    loop = make_agent_loop(config, tokenizer)
    with ExitStack() as owned:
        if loop is not None:
            owned.callback(loop.close)
        prompts = load_val_prompts(
            config.data, tokenizer, load_modality(model, tokenizer), loop and loop.tools_of
        )
        check_examples(loop, prompts)
        manifest = _manifest(call, prompts)
        lines = {}
        if out.exists():
            there = read_manifest(out, "answers")
            old, new = there["settings"], manifest["settings"]
            changed = [
                f"{key} was {old.get(key)}, is {new.get(key)}"
                for key in new
                if old.get(key) != new[key]
            ]
            if changed:
                raise InputError(
                    f"{out}: was begun with other settings: {'; '.join(changed)}; "
                    f"give another --out"
                )
            manifest["sessions"] = [*there["sessions"], *manifest["sessions"]]
            lines = read_answers(out)
        order = {
            (prompt.ordinal, sample): prompt
            for prompt in prompts
            for sample in range(manifest["samples"])
        }
        missing = [(prompt, key[1]) for key, prompt in order.items() if key not in lines]
        if missing:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_manifest(out, manifest)
            write_atomic(out, "".join(map(json_line, lines.values())))  # without damaged lines
            trainer = recipes.trainer_of(call.recipe)
            run = owned.enter_context(answering(config, trainer, tokenizer, loop, prompts))
            asyncio.run(_answer(run, missing, out, lines))
        if list(lines) != list(order):
            write_atomic(out, "".join(json_line(lines[key]) for key in order))
        return bool(missing)


async def _answer(
    run: Trainer, missing: Sequence[tuple[Prompt, int]], out: Path, lines: dict
) -> None:
    """Make the missing answers; append each to ``lines`` and to the file."""

    async def one(prompt: Prompt, sample: int) -> None:
        trajectory = await run.generate(prompt, sample, run.val_sampling)
        text = run.tokenizer.decode(trajectory.prompt_ids.tolist())
        lines[prompt.ordinal, sample] = answer_line(prompt, sample, trajectory, text)
        file.write(json_line(lines[prompt.ordinal, sample]).encode())
        file.flush()
        answered()

    with open(out, "ab") as file, progress("answers", len(missing), "answer") as answered:
        await asyncio.gather(*(one(*each) for each in missing))


@contextmanager
def answering(
    config: Config, trainer: str, tokenizer: Any, loop: Any, prompts: Sequence[Prompt]
) -> Iterator[Trainer]:
    """Yield the trainer ``module:class`` with an engine and nothing that learns: its ``generate``
    plays the episodes.

    ``trainer.backend`` places the engine in this process or, several of them, in actors of a
    cluster. Raises InputError for a model or an engine that cannot be had, and for prompts that do
    not fit into the model's positions.
    """
    from core.config.code_by_path import load_object
    from core.engines.engine import make_engine
    from core.learner.models import check_lengths
    from core.run import prepare_torch

    run = load_object(trainer)(config)
    run.tokenizer, run.agent_loop = tokenizer, loop
    check_lengths(
        config, {"data.val_files": run.room(max(len(prompt.token_ids) for prompt in prompts))}
    )
    device = prepare_torch(config.trainer)
    with ExitStack() as owned:
        with memory_phase("load"):
            if config.trainer.backend == "ray":
                from core.cluster.ray_pools import RayProcesses

                processes = RayProcesses(config, device, learners=False)
                owned.callback(processes.close)
                engine = processes.engine
            else:
                engine = make_engine(config, None, tokenizer, device)
                owned.callback(engine.close)
        run.attach_engine(engine)
        yield run


def _manifest(call: GenerateCall, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return what tells whose answers these are. Raises InputError without questions or weights."""
    from core.checkpoint.provenance import base_of

    if not prompts:
        raise InputError("data.val_files=[]: there are no questions; give parquet files")
    path = call.config.actor_rollout_ref.model.path
    try:
        # A hub's id is known by its name
        weights = f"sha256:{base_of(path)}" if is_local(path) or is_url(path) else path
    except FileNotFoundError as error:
        raise InputError(
            f"--model={path}: {error}; give a folder that core.export wrote"
        ) from error
    data = run_manifest.data_hashes(call.config.data.val_files)
    at = call.checkpoint and {
        "run": str(call.checkpoint.folder.parent),
        "step": call.checkpoint.step,
    }
    hashes = {
        "model": weights,
        "data": [one["sha256"] for one in data],
        "prompts": questions_hash(prompts),
    }
    return {
        "kind": "answers",
        "format": FORMAT,
        "recipe": call.recipe,
        "model": {"path": path, **(at or {})},
        "questions": len(prompts),
        "samples": call.config.actor_rollout_ref.rollout.val_kwargs.n,
        "data": data,
        "settings": {**hashes, **deciding(call.config)},
        "config": convert.as_json(call.config),
        "sessions": [run_manifest.session()],
    }


def deciding(config: Config) -> dict[str, Any]:
    """Return flat key -> value, of the keys that decide an answer: two calls with other values make
    other answers."""
    core_keys = convert.all_keys(Config)
    return {
        key: value
        for key, value in convert.as_json(config).items()
        # A server may move
        if key.startswith(DECIDING) or (key not in core_keys and not key.endswith(".url"))
    }


# -- score -----------------------------------------------------------------------------------------


def score(
    source: Path, overrides: Sequence[str] = (), name: str | None = None
) -> tuple[Path, list[ValRecord]]:
    """Score a complete file of answers, write ``<answers>.scores-<name>.jsonl`` and return it with
    its records.

    It has a line a question, in the form of a run's ``validation/<step>.jsonl``. The settings of
    rewards are those of the call that generated, under ``overrides``. Raises InputError.
    """
    from core.rewards.layer import RewardError, RewardLayer

    manifest, answers = complete_answers(source)
    composed = examine(manifest["recipe"], overrides, manifest["config"])
    config = composed.config
    fix = "decides answers, not their scores; leave it out, or generate with it"
    problems = [
        *composed.problems,
        *(f"{key}: {fix}" for key in composed.given if not key.startswith(REWARDS)),
    ]
    if config.reward_model.enable:
        problems.append(
            "reward_model.enable=True: no model is loaded here; set it to False, or "
            "validate in a run"
        )
    if problems:
        raise InputError(problems)
    unread = tuple(key for key in convert.flat(config) if not key.startswith(REWARDS))
    composition.refuse_code(
        str(manifest_path(source)), config, manifest["recipe"], overrides, unread
    )
    layer = RewardLayer(config)
    try:
        layer.check([prompt_of(line) for line in answers])
        groups = asyncio.run(_scored(layer, answers))
    except RewardError as error:  # on_error=raise
        raise InputError(f"{source}: {error}") from error
    finally:
        layer.close()
    records = [ValRecord.of(group) for group in groups]
    refuse_unscored(source, records, layer.failures.first)
    names = sorted({layer.scorers.scorer(line["data_source"]).name for line in answers})
    if function := config.custom_reward_function.path:
        names = [Path(function).stem]
    label = re.sub(r"[^\w.+=-]", "_", name or "+".join(names))
    path = source.with_name(f"{source.stem}.scores-{label}.jsonl")
    told = {
        **{
            "kind": "scores",
            "format": FORMAT,
            "scorer": label,
            "scorers": names,
            "answers": source.name,
        },
        **{
            key: manifest[key]
            for key in ("recipe", "model", "questions", "samples", "data", "settings")
        },
        "rewards": {
            key: value for key, value in convert.as_json(config).items() if key.startswith(REWARDS)
        },
        "answers_sha256": file_sha256(source),
        "session": run_manifest.session(),
    }
    write_manifest(path, told)
    write_atomic(path, "".join(json_line(record.to_json()) for record in records))
    return path, records


async def _scored(layer: RewardLayer, answers: Sequence[dict[str, Any]]) -> list[ScoredGroup]:
    questions = [list(lines) for _, lines in groupby(answers, lambda line: line["ordinal"])]

    async def group(lines: Sequence[dict[str, Any]]) -> ScoredGroup:
        prompt, trajectories = prompt_of(lines[0]), tuple(map(trajectory_of, lines))
        scores = await asyncio.gather(*(layer.score(prompt, one) for one in trajectories))
        scored()
        return ScoredGroup(prompt, trajectories, tuple(scores))

    with progress("scores", len(questions), "question") as scored:
        return await asyncio.gather(*map(group, questions))


# -- the command line ------------------------------------------------------------------------------


def generate_command(args: argparse.Namespace) -> None:
    call = request(args.recipe, args.overrides, args.out, args.model, args.run)
    chosen, model = (
        call.config.actor_rollout_ref.rollout.val_kwargs,
        call.config.actor_rollout_ref.model.path,
    )
    questions = ", ".join(call.config.data.val_files)
    how = (
        f"temperature {chosen.temperature:g}, top_p {chosen.top_p:g}"
        if chosen.do_sample
        else "greedy"
    )
    would = "dry run: it would write " if is_dry_run() else ""
    print(
        f"{would}{chosen.n} answers a question of {questions} by {model}, {how}, into {call.out}",
        flush=True,
    )
    if not is_dry_run():
        worked = generate(call)
        print(
            f"{args.out}: all answers are there"
            + ("" if worked else " already; nothing was left to do")
        )


def score_command(args: argparse.Namespace) -> None:
    if is_dry_run():
        print(f"dry run: would score {args.answers}")
        return
    path, records = score(args.answers, args.overrides, args.name)
    lost = (
        f"; the scorer failed on {share:.1%} of the answers"
        if (share := failed_share(records))
        else ""
    )
    print(f"{path}: scores of {len(records)} questions{lost}")


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; ``command`` is the function to call."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m core.evaluate", description=__doc__, formatter_class=form
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", help="What to do.")
    make = commands.add_parser("generate", help="Write answers into a file.")
    make.add_argument(
        "recipe", metavar="RECIPE", help="The recipe whose configuration and episodes hold: grpo."
    )
    make.add_argument("--model", help="The Hugging Face folder or hub id of the model.")
    make.add_argument(
        "--run", help="The run folder (its newest checkpoint) or a global_step_N in it."
    )
    make.add_argument(
        "--out", type=written_here, required=True, help="The file to write, ending in .jsonl."
    )
    make.set_defaults(command=generate_command)
    grade = commands.add_parser("score", help="Score a complete file of answers.")
    grade.add_argument(
        "answers", type=Path, metavar="ANSWERS.jsonl", help="The file that generate wrote."
    )
    grade.add_argument("--name", help="What the file is called after (default: the scorer).")
    grade.set_defaults(command=score_command)
    # Keys stand anywhere between the options
    args, args.overrides = parser.parse_known_args(arguments)
    if unknown := [text for text in args.overrides if text.startswith("--") or "=" not in text]:
        parser.error(f"not understood: {' '.join(unknown)}; keys are key=value")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, 2 for bad input, 1 for a lost process, or 130 when it was
    interrupted."""
    args = parsed(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        args.command(args)
        return 0
    except (InputError, OSError) as error:
        print(printable(f"core.evaluate: {error}"), file=sys.stderr)
        return 2
    except (WorkersLost, OutOfMemory) as error:
        text = f"core.evaluate: {error}\nThe answers so far are kept; the same command goes on"
        print(printable(text), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("core.evaluate: stopped; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
