"""Report what a file of examples, parquet or JSON lines, holds, and what is wrong with it.

    python -m data_preprocess.check FILE... [--tokenizer PATH] [--max_prompt_length N]

Exit status: 0; 1 where a file has a problem (a note, such as copies of a question, is none); 2 for
wrong arguments.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from core.data.parquet import Example, ExampleFile
from core.data.prompts import Encoder
from core.data.vocabulary import ChatError
from core.errors import InputError, Problems, printable
from core.files import file_sha256, local_path


@dataclass
class Findings:
    """Counts and problems that one pass over a file found."""

    rows: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    characters: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompts: Counter[str] = field(default_factory=Counter)  # by prompt hash
    contents: dict[str, set[str]] = field(default_factory=dict)  # prompt hash -> content hashes
    names: dict[str, set[str]] = field(default_factory=dict)  # name -> content hashes
    problems: Problems = field(default_factory=Problems)
    # On ground truths that can be graded
    remarks: Problems = field(default_factory=lambda: Problems(shown=3))


def findings_of(
    path: str,
    encoder: Encoder | None = None,
    prompt_key: str = "prompt",
    reward_fn_key: str = "data_source",
    any_source: bool = False,
    method: str | None = None,
) -> Findings:
    """Count a file's rows and collect their problems.

    Raises InputError if it cannot be read at all.
    """
    file = ExampleFile(path, prompt_key, reward_fn_key)
    findings = Findings(rows=len(file))
    for row in file.examples(findings.problems):
        findings.sources[row.data_source] += 1
        findings.kinds["plain string" if isinstance(row.prompt, str) else "chat"] += 1
        findings.characters.append(_characters(row))
        findings.prompts[row.prompt_hash] += 1
        findings.contents.setdefault(row.prompt_hash, set()).add(row.content_hash)
        if row.name is not None:
            findings.names.setdefault(row.name, set()).add(row.content_hash)
        if encoder is not None:
            _count_tokens(row, encoder, findings)
        _check_answer(row, any_source, method, findings)
    return findings


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    try:
        encoder = _encoder(args.tokenizer) if args.tokenizer else None
    except (OSError, ValueError) as error:
        print(
            f"--tokenizer={args.tokenizer}: no tokenizer could be loaded from it ({error})",
            file=sys.stderr,
        )
        return 2
    any_problem = False
    prompts_of: dict[str, set[str]] = {}  # file -> hashes of its prompts
    for path in args.files:
        try:
            columns = (args.prompt_key, args.reward_fn_key)
            findings = findings_of(path, encoder, *columns, args.any_source, args.method)
            problems = findings.problems.lines()
            print(f"{path}\n  sha256        {file_sha256(Path(local_path(path)).expanduser())}")
            print(printable("\n".join(_report(findings, args.max_prompt_length))))
        except InputError as error:
            findings = Findings()
            problems = error.problems
            print(path)
        prompts = set(findings.prompts)
        for other, other_prompts in prompts_of.items():
            shared = len(other_prompts & prompts)
            if shared:
                print(f"  note          {shared} prompts are also in {other}")
        prompts_of[path] = prompts
        lines = "\n".join(f"  problem       {problem}" for problem in problems)
        print(printable(lines) or "  problems      none")
        any_problem = any_problem or bool(problems)
    return 1 if any_problem else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m data_preprocess.check",
        description="Check files of examples, parquet or JSON lines: counts, lengths, copies, "
        "problems.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="The files to check.")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="Count tokens too, with the chat template of this tokenizer.",
    )
    parser.add_argument(
        "--max_prompt_length",
        type=int,
        metavar="N",
        help="Count the prompts of more tokens than this.",
    )
    parser.add_argument(
        "--prompt_key",
        default="prompt",
        help="The column that data.prompt_key names (default %(default)s).",
    )
    parser.add_argument(
        "--reward_fn_key",
        default="data_source",
        help="The column that data.reward_fn_key names (default %(default)s).",
    )
    parser.add_argument(
        "--any_source",
        action="store_true",
        help="Accept any data_source, because a custom reward function scores.",
    )
    parser.add_argument(
        "--method",
        help="The scorers' method, as reward_model.reward_kwargs.<scorer>.method names it.",
    )
    args = parser.parse_args(argv)
    if args.max_prompt_length is not None and not args.tokenizer:
        parser.error("--max_prompt_length counts tokens: give --tokenizer too")
    return args


def _encoder(path: str) -> Encoder:
    from core.learner.models import read_tokenizer

    return Encoder(read_tokenizer(path, "--tokenizer"))


def _characters(row: Example) -> int:
    if isinstance(row.prompt, str):
        return len(row.prompt)
    return sum(len(message.get("content") or "") for message in row.prompt)


def _count_tokens(row: Example, encoder: Encoder, findings: Findings) -> None:
    try:
        findings.tokens.append(len(encoder.encode(row.prompt)))
    except ChatError as error:
        fix = "mend the roles, or set another chat template"
        findings.problems.add(
            row.file, "the chat template refuses a prompt", fix, row.number, str(error)
        )


def _check_answer(row: Example, any_source: bool, method: str | None, findings: Findings) -> None:
    """Collect problems of the ground truth, also those that the scorer of its source reports."""
    from reward_scores import UnknownDataSource, scorer_for

    gold = row.ground_truth
    problems = findings.problems
    if row.style == "model":  # a reward model reads no ground truth
        return
    if isinstance(gold, str):
        empty = not gold.strip()
    else:  # 0 and False are answers, and no ground truth is one for a user's function
        empty = not gold and gold not in (0, False, None)
    if empty:
        fix = "fill it or leave the row out"
        problems.add(row.file, "the ground truth is empty", fix, row.number)
        return
    if any_source:
        return
    try:
        scorer = scorer_for(row.data_source)
    except UnknownDataSource as error:
        fix = "correct the name, or check with --any_source if a custom reward function scores it"
        problems.add(row.file, str(error), fix, row.number)
        return
    takes_method = "method" in inspect.signature(scorer.score).parameters
    options = {"method": method} if method and takes_method else {}
    if complaint := scorer.problem(gold, **options):
        rule = f"reward_model.ground_truth: the scorer of {row.data_source} cannot grade a row"
        problems.add(row.file, rule, "correct the row or leave it out", row.number, complaint)
    elif remark := scorer.note_ground_truth(gold, **options):
        rule = "a gold answer is graded in a special way"
        fix = "look whether it is the intended answer"
        findings.remarks.add("reward_model.ground_truth", rule, fix, row.number, remark)


def _report(findings: Findings, limit: int | None) -> list[str]:
    lines = [
        f"  rows          {findings.rows}",
        f"  data sources  {_counted(findings.sources)}",
        f"  prompts       {_counted(findings.kinds)}; {len(findings.prompts)} different",
        f"  characters    {_spread(findings.characters)}",
    ]
    if findings.tokens:
        line = f"  tokens        {_spread(findings.tokens)}"
        if limit is not None:
            line += f"; {sum(n > limit for n in findings.tokens)} longer than {limit}"
        lines.append(line)
    copies = sum(findings.prompts.values()) - len(findings.prompts)
    disputed = sum(len(contents) > 1 for contents in findings.contents.values())
    reused = sum(len(contents) > 1 for contents in findings.names.values())
    notes = []
    if copies:
        notes.append(f"{copies} rows repeat an earlier prompt")
    if disputed:
        notes.append(f"{disputed} prompts have more than one ground truth or data source")
    if reused:
        notes.append(f"{reused} names (source/split/index) stand for different questions")
    notes += findings.remarks.lines()
    return lines + [f"  note          {text}" for text in notes]


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "none"


def _spread(values: Sequence[int]) -> str:
    if not values:
        return "none"
    names = ("min", "5%", "median", "95%", "max")
    quantiles = np.percentile(values, [0, 5, 50, 95, 100])
    return "  ".join(f"{name} {value:.0f}" for name, value in zip(names, quantiles, strict=True))


if __name__ == "__main__":
    sys.exit(main())
