"""Evaluate a model without training it: generate answers to validation questions, and score them.

    python -m core.evaluate generate RECIPE --model MODEL --out ANSWERS.jsonl key=value ...
    python -m core.evaluate generate RECIPE --run RUN --out ANSWERS.jsonl key=value ...
    python -m core.evaluate score ANSWERS.jsonl key=value ...

Keys are those of training. A stopped generate is repeated to make the missing answers; score prints
the numbers, and python -m results.report SCORES [OTHERS ...] compares files of scores."""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.answers import (
    FORMAT,
    Key,
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
from core.config import composition, convert, recipes
from core.config.composition import examine
from core.config.paths import is_local
from core.config.schema import Config
from core.config.section import show
from core.dry_run import is_dry_run
from core.errors import InputError, OutOfMemory, WorkersLost, printable
from core.files import file_sha256, is_url, write_atomic, written_here
from core.secret_keys import remember
from core.tracking import run_manifest
from core.tracking.json_lines import json_line
from core.tracking.loggers import progress
from core.tracking.validation import (
    ValRecord,
    are_shares,
    failed_share,
    merge_by_question,
    variable_estimates,
)
from core.types import Prompt, ScoredGroup

if TYPE_CHECKING:
    from core.checkpoint.store import Checkpoint
    from core.rewards.layer import RewardLayer
    from core.trainer import Trainer

MODEL = "actor_rollout_ref.model."
PATH = f"{MODEL}path"
ROLLOUT = "actor_rollout_ref.rollout."
DATE = "data.chat_template_date"
# Keys that decide an answer, and beginnings of such keys. Model, data and prompts are compared by
# content. Keys of a recipe's own count too.
DECIDING = (
    "data.max_prompt_length",
    "data.max_response_length",
    f"{MODEL}override_config",
    f"{MODEL}custom_chat_template",
    f"{ROLLOUT}name",
    f"{ROLLOUT}dtype",
    f"{ROLLOUT}ignore_eos",
    f"{ROLLOUT}engine_kwargs",
    f"{ROLLOUT}agent_loop",
    f"{ROLLOUT}agent.",
    f"{ROLLOUT}val_kwargs.",
    f"{ROLLOUT}multi_turn.",
    "trainer.seed",
)
# Sections of which nothing is loaded while answers are generated
UNREAD = (
    "custom_reward_function.",
    "reward_model.",
    "algorithm.",
    "actor_rollout_ref.actor.",
    "critic.",
)
# Sections that decide scores
REWARDS = ("reward_model.", "custom_reward_function.")


# -- generate --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerateCall:
    """A checked call of ``generate``, of which nothing is loaded yet."""

    recipe: str
    config: Config
    out: Path
    checkpoint: Checkpoint | None = None  # that of --run


def request(
    recipe: str, overrides: Sequence[str], out: Path, model: str | None, run: str | None
) -> GenerateCall:
    """Compose and check a call of generate.

    The settings of ``--run`` are those of its newest checkpoint, or of the checkpoint that it
    names. Raises InputError with the problems of the configuration, or the first problem of model
    and file.
    """
    from core.export import find_checkpoint

    if out.suffix != ".jsonl":
        raise InputError(f"--out={out}: must end in .jsonl")
    if model is None and run is None:
        model = examine(recipe, overrides).given.get(PATH)
    if bool(model) == bool(run):
        raise InputError(
            "model: give either --model (a folder or hub id) or --run (a run folder or a "
            "checkpoint)"
        )
    checkpoint = None
    settings = {PATH: model}
    if run is not None:
        checkpoint = find_checkpoint(run, "--run")
        if checkpoint.provenance:
            settings = dict(checkpoint.provenance.config)
        # The tokenizer of the training is beside the weights
        settings[PATH] = str((checkpoint.folder / "actor").resolve())
        settings[f"{MODEL}tokenizer_path"] = None
    settings["trainer.resume_mode"] = "disable"
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
    """Write the answers that the file lacks. Return whether any were missing.

    Lines are appended as answers end; the complete file is in the order of the questions. Raises
    InputError before a model loads for data, settings and files that do not go together.
    """
    from core.config.code_by_path import load_object

    out = call.out
    config = call.config
    begun = read_manifest(out, "answers") if out.exists() else None
    if begun is not None and config.data.chat_template_date is None:
        # A chat template that writes the date writes that of the first call
        date = begun["config"].get(DATE)
        config = config.replace(data=config.data.replace(chat_template_date=date))
    trainer_class = load_object(recipes.trainer_of(call.recipe))
    with trainer_class.for_answering(config) as trainer:
        manifest = _manifest(call, trainer)
        answers: dict[Key, dict[str, Any]] = {}
        if begun is not None:
            _refuse_changes(out, begun["settings"], manifest["settings"])
            manifest["sessions"] = [*begun["sessions"], *manifest["sessions"]]
            answers = read_answers(out)
        order = [
            (prompt, sample)
            for prompt in trainer.val_prompts
            for sample in range(manifest["samples"])
        ]
        missing = [(p, sample) for p, sample in order if (p.ordinal, sample) not in answers]
        if missing:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_manifest(out, manifest)
            write_atomic(out, "".join(map(json_line, answers.values())))  # without damaged lines
            with trainer.answering():
                asyncio.run(_answer(trainer, missing, out, answers))
        keys = [(prompt.ordinal, sample) for prompt, sample in order]
        if list(answers) != keys:
            write_atomic(out, "".join(json_line(answers[key]) for key in keys))
        return bool(missing)


def _refuse_changes(out: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise InputError if the file was begun with other settings."""
    changed = [
        f"{key} was {old.get(key)}, is {value}"
        for key, value in new.items()
        if old.get(key) != value
    ]
    if changed:
        raise InputError(
            f"{out}: was begun with other settings: {'; '.join(changed)}; give another --out"
        )


async def _answer(
    trainer: Trainer, missing: Sequence[tuple[Prompt, int]], out: Path, answers: dict
) -> None:
    """Make the missing answers; add each to ``answers`` and to the file."""

    async def answer(prompt: Prompt, sample: int) -> None:
        trajectory = await trainer.generate(prompt, sample, trainer.val_sampling)
        prompt_text = trainer.tokenizer.decode(trajectory.prompt_ids.tolist())
        line = answer_line(prompt, sample, trajectory, prompt_text)
        answers[prompt.ordinal, sample] = line
        file.write(json_line(line).encode())
        file.flush()
        answered()

    with open(out, "ab") as file, progress("answers", len(missing), "answer") as answered:
        await asyncio.gather(*(answer(prompt, sample) for prompt, sample in missing))


def _manifest(call: GenerateCall, trainer: Trainer) -> dict[str, Any]:
    """Return the manifest of the answers. Raises InputError without questions or weights."""
    from core.checkpoint.provenance import base_of

    config = trainer.config
    prompts = trainer.val_prompts
    if not prompts:
        raise InputError("data.val_files=[]: there are no questions; give parquet files")
    path = config.actor_rollout_ref.model.path
    weights = path  # the id on a hub
    if is_local(path) or is_url(path):
        try:
            weights = f"sha256:{base_of(path)}"
        except FileNotFoundError as error:
            raise InputError(
                f"--model={path}: {error}; give a folder that core.export wrote"
            ) from error
    model = {"path": path}
    if call.checkpoint is not None:
        model |= {"run": str(call.checkpoint.folder.parent), "step": call.checkpoint.step}
    data = run_manifest.data_hashes(config.data.val_files)
    return {
        "kind": "answers",
        "format": FORMAT,
        "recipe": call.recipe,
        "model": model,
        "questions": len(prompts),
        "samples": config.actor_rollout_ref.rollout.val_kwargs.n,
        "data": data,
        "settings": {
            "model": weights,
            "data": [entry["sha256"] for entry in data],
            "prompts": questions_hash(prompts),
            **deciding(config),
        },
        "config": convert.as_json(config),
        "sessions": [run_manifest.session()],
    }


def deciding(config: Config) -> dict[str, Any]:
    """Return flat key -> value of the keys that decide an answer."""
    core_keys = convert.all_keys(Config)

    def decides(key: str) -> bool:
        if key in core_keys:
            return key.startswith(DECIDING)
        return not key.endswith(".url")  # a recipe's key; a server may move

    return {key: value for key, value in convert.as_json(config).items() if decides(key)}


# -- score -----------------------------------------------------------------------------------------


def score(
    source: Path, overrides: Sequence[str] = (), name: str | None = None
) -> tuple[Path, list[ValRecord]]:
    """Score a complete file of answers; return the file of scores and its records.

    The file is ``<answers>.scores-<name>.jsonl``. It has a line a question, in the form of a run's
    ``validation/<step>.jsonl``. The settings of rewards are those of the call that generated, under
    ``overrides``. Raises InputError.
    """
    from core.rewards.layer import RewardError, RewardLayer
    from core.rewards.scorer_check import check_scorers

    manifest, answers = complete_answers(source)
    config = _scoring_config(source, manifest, overrides)
    layer = RewardLayer(config)
    try:
        check_scorers(layer, [prompt_of(line) for line in answers])
        groups = asyncio.run(_score_groups(layer, answers))
    except RewardError as error:  # on_error=raise
        raise InputError(f"{source}: {error}") from error
    finally:
        layer.close()
    records = [ValRecord.of(group) for group in groups]
    refuse_unscored(source, records, layer.failures.first)
    if function := config.custom_reward_function.path:
        scorers = [Path(function).stem]
    else:
        scorers = sorted({layer.scorers.scorer(line["data_source"]).name for line in answers})
    label = re.sub(r"[^\w.+=-]", "_", name or "+".join(scorers))
    path = source.with_name(f"{source.stem}.scores-{label}.jsonl")
    copied = ("recipe", "model", "questions", "samples", "data", "settings")
    rewards = {
        key: value for key, value in convert.as_json(config).items() if key.startswith(REWARDS)
    }
    if path.exists() and read_manifest(path, "scores")["rewards"] != rewards:
        raise InputError(
            f"{path}: holds scores of these answers by other options of the scorer; give another "
            f"--name, or remove it"
        )
    write_manifest(
        path,
        {
            "kind": "scores",
            "format": FORMAT,
            "scorer": label,
            "scorers": scorers,
            "answers": source.name,
            **{key: manifest[key] for key in copied},
            "rewards": rewards,
            "answers_sha256": file_sha256(source),
            "session": run_manifest.session(),
        },
    )
    write_atomic(path, "".join(json_line(record.to_json()) for record in records))
    return path, records


def _scoring_config(source: Path, manifest: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """Return the configuration of the answers under ``overrides``. Raises InputError."""
    recipe = manifest["recipe"]
    composed = examine(recipe, overrides, manifest["config"])
    config = composed.config
    problems = list(composed.problems)
    for key in composed.given:
        if not key.startswith(REWARDS):
            problems.append(
                f"{key}: decides answers, not their scores; leave it out, or generate with it"
            )
    if config.reward_model.enable:
        problems.append(
            "reward_model.enable=True: no model is loaded here; set it to False, or validate in a "
            "run"
        )
    if problems:
        raise InputError(problems)
    unread = tuple(key for key in convert.flat(config) if not key.startswith(REWARDS))
    composition.refuse_code(str(manifest_path(source)), config, recipe, overrides, unread)
    return config


async def _score_groups(layer: RewardLayer, answers: Sequence[dict[str, Any]]) -> list[ScoredGroup]:
    questions = [list(lines) for _, lines in groupby(answers, lambda line: line["ordinal"])]

    async def score_group(lines: Sequence[dict[str, Any]]) -> ScoredGroup:
        prompt = prompt_of(lines[0])
        trajectories = tuple(map(trajectory_of, lines))
        scores = await asyncio.gather(*(layer.score(prompt, t) for t in trajectories))
        scored()
        return ScoredGroup(prompt, trajectories, tuple(scores))

    with progress("scores", len(questions), "question") as scored:
        return await asyncio.gather(*map(score_group, questions))


# -- the command line ------------------------------------------------------------------------------


def generate_command(args: argparse.Namespace) -> None:
    call = request(args.recipe, args.overrides, args.out, args.model, args.run)
    roles = call.config.actor_rollout_ref
    sampling = roles.rollout.val_kwargs
    how = "greedy"
    if sampling.do_sample:
        how = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}"
    questions = ", ".join(call.config.data.val_files)
    text = f"{sampling.n} answers a question of {questions} by {roles.model.path}, {how}, into"
    if is_dry_run():
        print(f"dry run: it would write {text} {call.out}")
        return
    print(f"{text} {call.out}", flush=True)
    if generate(call):
        print(f"{args.out}: all answers are there")
    else:
        print(f"{args.out}: all answers are there already; nothing was left to do")


def score_command(args: argparse.Namespace) -> None:
    if is_dry_run():
        print(f"dry run: would score {args.answers}")
        return
    path, records = score(args.answers, args.overrides, args.name)
    share = failed_share(records)
    failures = f"; the scorer failed on {share:.1%} of the answers" if share else ""
    print(f"{path}: scores of {len(records)} questions{failures}")
    for line in score_lines(records):
        print(printable(line))
    print(f"next: python -m results.report {path} [OTHER.scores-NAME.jsonl ...]")


def score_lines(records: Sequence[ValRecord]) -> Iterator[str]:
    """Yield the numbers of each data source with their 95 % intervals over questions."""
    for source, rows in merge_by_question(records).items():
        samples = min(len(row.values["acc"]) for row in rows)
        is_share = are_shares(value for row in rows for value in row.values["acc"])
        shown = {"acc": is_share}
        if any(row.values["reward"] != row.values["acc"] for row in rows):
            shown["reward"] = False
        for variable, in_percent in shown.items():
            for name, estimate in variable_estimates(variable, rows, samples).items():
                ends = [estimate.value, estimate.low, estimate.high]
                value, *bounds = [
                    f"{100 * end:.1f}" if in_percent else f"{end:.4g}"
                    for end in ends
                    if end is not None
                ]
                interval = f" [{', '.join(bounds)}]" if bounds else ""
                unit = " %" if in_percent else ""
                questions = f"{estimate.n} question{'s' * (estimate.n > 1)}"
                yield f"  {source}, {variable} {name}: {value}{interval}{unit} ({questions})"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
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
    """Run the command.

    Return 0, 2 for bad input, 1 for a lost process, or 130 if it was interrupted.
    """
    args = parse(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        args.command(args)
        return 0
    except (InputError, OSError) as error:
        print(printable(f"core.evaluate: {error}"), file=sys.stderr)
        return 2
    except (WorkersLost, OutOfMemory) as error:
        text = f"{error}\nThe answers so far are kept; the same command continues"
        print(printable(f"core.evaluate: {text}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("core.evaluate: stopped; the same command continues", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
