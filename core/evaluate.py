"""Evaluate a model without training it: generate answers, score them, report accuracies with intervals.

    python -m core.evaluate generate RECIPE --model MODEL --out ANSWERS.jsonl key=value ...
    python -m core.evaluate generate RECIPE --run RUN_FOLDER --out ANSWERS.jsonl key=value ...
    python -m core.evaluate score ANSWERS.jsonl key=value ...
    python -m core.evaluate report ANSWERS.scores-NAME.jsonl ...

Keys are those of training: data.val_files, actor_rollout_ref.rollout.val_kwargs.*, reward_model.*. No learner and no
optimizer is made. DRY_RUN=1 only checks. python -m core.evaluate generate --help explains a command's arguments.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from core.command_line import is_dry_run
from core.config.locations import written_here
from core.errors import InputError, OutOfMemory, WorkersLost
from core.safe_text.printable import printable

INTERRUPTED = 130


def generate_command(arguments: Sequence[str]) -> int:
    parser = _parser("generate", "Write a model's answers to the questions of data.val_files into a file.")
    parser.add_argument("recipe", metavar="RECIPE", help="The recipe whose configuration and episodes hold: grpo.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Keys of the configuration, as a run's.")
    parser.add_argument("--model", help="The Hugging Face folder or hub id of the model.")
    parser.add_argument("--run", help="The run folder or checkpoint (global_step_N), whose settings hold then.")
    parser.add_argument("--step", type=int, help="The step of the run's checkpoint (default: the newest).")
    parser.add_argument(
        "--out", type=written_here, required=True, help="The file to write or to go on with, ending in .jsonl."
    )
    args = parser.parse_intermixed_args(arguments)
    from core.evaluation.generate import generate, request

    asked = request(args.recipe, args.overrides, args.out, model=args.model, run=args.run, step=args.step)
    print("\n".join([*(["dry run: it would generate"] if is_dry_run() else []), *asked.described()]), flush=True)
    if is_dry_run():
        return 0
    worked = generate(asked)
    print(f"{args.out}: all answers are there" + ("" if worked else " already; nothing was left to do"))
    return 0


def score_command(arguments: Sequence[str]) -> int:
    parser = _parser("score", "Score a complete file of answers, without a model, as training scores.")
    parser.add_argument("answers", type=Path, metavar="ANSWERS.jsonl", help="The file that generate wrote.")
    overrides_help = (
        "Keys of reward_model and custom_reward_function; data.val_files=[...] checks the answers against it."
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=overrides_help)
    parser.add_argument("--scorer", help="The scorer of reward_scores/ for all data sources (default: each its own).")
    parser.add_argument("--name", help="What the file is called after (default: the scorer and its options).")
    args = parser.parse_intermixed_args(arguments)
    if is_dry_run():
        beside = args.answers.with_name(f"{args.answers.stem}.scores-{args.name or args.scorer or 'SCORER'}.jsonl")
        return _would("score", [args.answers], [beside])
    from core.evaluation.score import score
    from core.tracking.validation import failed_share

    done = score(args.answers, args.overrides, args.scorer, args.name)
    failed = failed_share(done.records)
    lost = f"; the scorer failed on {failed:.1%} of the answers, which count as not right" if failed else ""
    print(f"{done.path}: scores of {len(done.records)} questions{lost}")
    return 0


def report_command(arguments: Sequence[str]) -> int:
    parser = _parser("report", "Print accuracies with 95 % intervals, by data source, and store them as JSON.")
    parser.add_argument("scores", nargs="+", type=Path, metavar="SCORES.jsonl", help="The files that score wrote.")
    parser.add_argument("--k", nargs="+", type=int, help="The k of pass@k (default: powers of two and all samples).")
    args = parser.parse_args(arguments)
    from core.evaluation.summary import report, report_path

    if is_dry_run():
        return _would("report", args.scores, [report_path(path) for path in args.scores])
    print(printable(report(args.scores, args.k)))
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "generate": generate_command,
    "score": score_command,
    "report": report_command,
}


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"python -m core.evaluate {command}", description=description)


def _would(what: str, read: Sequence[Path], written: Sequence[Path]) -> int:
    """Print what a dry run would read and write."""
    print(f"dry run: it would {what}")
    for path in read:
        print(f"read: {path}" + ("" if path.is_file() else " (not there yet)"))
    for path in written:
        print(f"written: {path}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, 2 for bad input, 1 for a lost process, or 130 when it was interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] not in COMMANDS:
        parser = argparse.ArgumentParser(prog="python -m core.evaluate", description=__doc__)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.add_argument("command", choices=list(COMMANDS), help="What to do; each has a --help of its own.")
        parser.parse_args(arguments[:1])
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    command, *rest = arguments
    try:
        return COMMANDS[command](rest)
    except (InputError, OSError) as error:
        print(printable(f"core.evaluate: {error}"), file=sys.stderr)
        return 2
    except (WorkersLost, OutOfMemory) as error:
        print(f"core.evaluate: {error}\nThe answers so far are kept; the same command goes on", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("core.evaluate: stopped; the same command goes on", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
