"""Rejection sampling: keep the answers that score well, as demonstrations.

    python -m core.evaluate generate RECIPE --model MODEL --out answers.jsonl \\
        data.val_files=TRAINING_QUESTIONS ...
    python -m core.evaluate score answers.jsonl
    python -m recipes.sft.rejection answers.scores-NAME.jsonl --out kept.parquet \\
        [--least 1.0] [--most 4]
    python -m recipes.sft.main_sft data.train_files=kept.parquet ...

Token ids are kept as the policy wrote them, with the mask that leaves out what tools wrote. So an
episode is trained on as it was played, and nothing is rendered or encoded again. The questions are
read anew from the files that the answers' manifest names; their hash there shows that they are the
same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from core.answers import (
    FORMAT,
    complete_answers,
    questions_hash,
    read_manifest,
    trajectory_of,
    write_manifest,
)
from core.config.composition import examine
from core.data.draw_order import permutation
from core.dry_run import is_dry_run
from core.errors import InputError
from core.files import file_sha256, replacing, written_here
from core.tracking import run_manifest
from core.tracking.validation import ValRecord
from core.types import Prompt, Stop


def kept_rows(
    scores: Path, least: float, most: int | None, variable: str, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each answer that is kept, in the order of the questions.

    An answer is kept where its ``variable`` is at least ``least`` and it was not cut short. Equal
    answers to a question count once; of more than ``most`` different ones a seeded choice is kept.

    Raises:
        InputError: files that do not belong together, or questions that have changed.
    """
    answers, records, prompts = _matched(scores)
    by_question = groupby(answers, lambda answer: answer["ordinal"])
    for (ordinal, group), record in zip(by_question, records, strict=True):
        if variable not in record.values:
            raise InputError(
                f"--by={variable}: {scores} has no such number; it has {', '.join(record.values)}"
            )
        samples = list(group)
        different = {}
        for answer, value in zip(samples, record.values[variable], strict=True):
            if value >= least and Stop(answer["stop"]) not in (Stop.LENGTH, Stop.ABORT):
                different.setdefault(tuple(answer["response_ids"]), (answer, value))
        good = list(different.values())
        if most is not None:
            good = [good[index] for index in sorted(permutation(len(good), seed, ordinal)[:most])]
        yield from (_row(prompts[ordinal], answer, value) for answer, value in good)


def _row(prompt: Prompt, answer: Mapping[str, Any], value: float) -> dict[str, Any]:
    trajectory = trajectory_of(answer)
    return {
        "data_source": answer["data_source"],
        "uid": answer["uid"],
        "sample": answer["sample"],
        "score": value,
        "prompt": answer["prompt"],
        "response": answer["response"],
        "prompt_ids": list(prompt.token_ids),
        "response_ids": trajectory.response_ids.tolist(),
        "response_mask": trajectory.response_mask.tolist(),
    }


def _matched(scores: Path) -> tuple[list[dict[str, Any]], list[ValRecord], dict[int, Prompt]]:
    """Return answers, a record of scores for each question, and the questions by their ordinals."""
    scored = read_manifest(scores, "scores")
    source = scores.with_name(scored["answers"])
    if not source.is_file() or file_sha256(source) != scored["answers_sha256"]:
        raise InputError(
            f"{source}: is not the file that {scores.name} scores; score it anew, or restore it"
        )
    manifest, answers = complete_answers(source)
    records = [
        ValRecord.from_json(json.loads(line))
        for line in scores.read_text(encoding="utf-8").splitlines()
    ]
    questions = groupby(answers, lambda answer: (answer["ordinal"], answer["uid"]))
    if [uid for (_, uid), _ in questions] != [record.uid for record in records]:
        raise InputError(f"{scores}: its questions are not those of {source.name}; score it anew")
    return answers, records, _prompts(source, manifest)


def _prompts(source: Path, manifest: Mapping[str, Any]) -> dict[int, Prompt]:
    """Read the questions anew.

    Raises InputError where one of them has other ids than when it was answered.
    """
    # Imports torch and transformers, which no dry run needs
    from core.data.prompts import PromptFiles, load_val_prompts
    from core.learner.models import load_modality, load_tokenizer
    from core.rollout.agent_loop import make_agent_loop

    recipe = manifest["recipe"]
    composed = examine(recipe, [], manifest["config"])
    if composed.problems:
        raise InputError(composed.problems)
    config = composed.config
    data, model = config.data, config.actor_rollout_ref.model
    tokenizer = load_tokenizer(model)
    # Only tools are described in a prompt; another loop might want a server that is away now
    has_tools = config.actor_rollout_ref.rollout.multi_turn.enable
    loop = make_agent_loop(config, tokenizer) if has_tools else None
    modality, limit_key = load_modality(model, tokenizer), config.prompt_limit_key
    try:
        tools_of = loop and loop.tools_of
        files = PromptFiles(data, tokenizer, modality, tools_of, limit_key=limit_key)
        prompts = load_val_prompts(files)
    finally:
        if loop is not None:
            loop.close()
    if questions_hash(prompts) != manifest["settings"]["prompts"]:
        rule = "the questions or their tokenizer are others than those that were answered"
        files = ", ".join(data.val_files)
        raise InputError(f"data.val_files={files}: {rule} ({source}); restore them, or answer anew")
    return {prompt.ordinal: prompt for prompt in prompts}


def write(rows: Sequence[Mapping[str, Any]], path: Path, origin: Mapping[str, Any]) -> None:
    """Write the demonstrations and, beside them, the manifest of where they come from."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        pq.write_table(pa.Table.from_pylist(list(rows)), partial)
    head = {"kind": "demonstrations", "format": FORMAT, **origin, "sha256": file_sha256(path)}
    head["session"] = run_manifest.session()
    write_manifest(path, head)


def keep(args: argparse.Namespace) -> str:
    """Write what is kept and return a line about it.

    Raises InputError, also where nothing is kept.
    """
    rows = list(kept_rows(args.scores, args.least, args.most, args.by, args.seed))
    manifest = read_manifest(args.scores, "scores")
    questions = manifest["questions"]
    answers = questions * manifest["samples"]
    if not rows:
        rule = f"none of {answers} answers has {args.by} of at least {args.least:g} and ends"
        fix = "lower it, or draw more answers a question"
        raise InputError(f"--least={args.least:g}: {rule} by itself; {fix}")
    chosen = {name: getattr(args, name) for name in ("by", "least", "most", "seed")}
    copied = ("recipe", "model", "scorers", "answers", "answers_sha256", "data")
    source = {name: manifest[name] for name in copied}
    write(rows, args.out, {"chosen": chosen, **source, "rows": len(rows)})
    answered = len({row["uid"] for row in rows})
    kept = f"{len(rows)} of {answers} answers kept, to {answered} of {questions} questions"
    return f"{args.out}: {kept}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.sft.rejection",
        description="Keep the answers that score well, as demonstrations for recipes.sft.main_sft.",
    )
    add = parser.add_argument
    scores = "The file that python -m core.evaluate score wrote."
    add("scores", type=Path, metavar="SCORES.jsonl", help=scores)
    add("--out", type=written_here, required=True, help="The file to write, ending in .parquet.")
    by = "The number that decides (default %(default)s): acc, reward, or a part of it."
    add("--by", default="acc", help=by)
    least = "The least number that is kept (default %(default)s)."
    add("--least", type=float, default=1.0, help=least)
    most = "The most answers to keep of a question (default: all different ones)."
    add("--most", type=int, help=most)
    seed = "Decides which ones, where there are more (default %(default)s)."
    add("--seed", type=int, default=1, help=seed)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 for bad input."""
    args = _parse(arguments)
    try:
        if args.out.suffix != ".parquet":
            raise InputError(f"--out={args.out}: must end in .parquet")
        if args.most is not None and args.most < 1:
            fix = "leave it out to keep all different answers"
            raise InputError(f"--most={args.most}: must be at least 1; {fix}")
        if is_dry_run():
            source = f"{args.scores} and the answers beside it"
            print(f"dry run: it would read {source}, and write {args.out}")
            return 0
        print(keep(args))
        return 0
    except (InputError, OSError) as error:
        print(f"recipes.sft.rejection: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
