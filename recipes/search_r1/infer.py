"""Answer one question and print the episode turn by turn: ``core.evaluate generate`` for a single question.

    python -m recipes.search_r1.infer "who wrote the score of Jaws?" actor_rollout_ref.model.path=MODEL [key=value ...]
    python -m recipes.search_r1.infer "who is the boss of bavu?" --prompt "Q: {question}" preset=lab \\
        actor_rollout_ref.model.path=outputs/lab/knowledge/base/current        # the model of the lab

Needs a retriever (``retriever.url``, or ``retriever.local`` in this process). Decoding is that of validation,
``actor_rollout_ref.rollout.val_kwargs``: greedy unless ``do_sample=True``. DRY_RUN=1 only checks the configuration.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from core.command_line import is_dry_run
from core.errors import InputError, printable

OVERRIDE = re.compile(r"[\w.+~]+=")


def answer(question: str, overrides: Sequence[str], prompt: str | None = None) -> Mapping[str, Any] | None:
    """Generate the answer and return its line (``core/answers.py``); None in a dry run.

    The prompt is that of the training data, with or without search as ``do_search`` has it, or ``prompt``, plain.
    """
    from core.evaluate import PATH, generate, request
    from data_preprocess.open_qa import make_qa_row
    from data_preprocess.schema import write_rows
    from data_preprocess.search_r1_prompts import PROMPTS

    if not any(text.startswith(f"{PATH}=") for text in overrides):
        raise InputError(f"{PATH}: is not set; add {PATH}=MODEL, a folder or a hub id")
    with TemporaryDirectory() as folder:
        questions, answers = Path(folder) / "question.parquet", Path(folder) / "answer.jsonl"
        call = request("search_r1", [*overrides, f"data.val_files=['{questions}']"], answers, None, None)
        if is_dry_run():
            return None
        text = prompt or PROMPTS["search" if call.config.do_search else "r1"]
        row = make_qa_row("question", {"question": question, "golden_answers": ["?"]}, "infer", 0, text)
        if prompt is not None:
            row["prompt"] = row["prompt"][0]["content"]
        write_rows(questions, [row])
        generate(call)
        return json.loads(answers.read_text(encoding="utf-8").splitlines()[0])


def show(line: Mapping[str, Any]) -> str:
    """Return the segments of an answer's line in order, each under its author."""
    segments = [f"[{segment['role']}]\n{segment['text'].strip()}" for segment in line["segments"]]
    end = f"[{line['turns']} turns, {line['tool_calls']} searches, ended by {line['stop']}]"
    return "\n\n".join([*segments, end])


def main(argv: list[str]) -> int:
    """Run the command. Returns 0, or 2 with a line on stderr for bad input."""
    if not argv or OVERRIDE.match(argv[0]):
        print(__doc__, file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="python -m recipes.search_r1.infer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("question", help="The question, as one quoted text.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Keys of the configuration, as a run's.")
    prompt_help = "A plain-text prompt with {question} in it (default: the prompt of the training data, as a chat)."
    parser.add_argument("--prompt", metavar="TEXT", help=prompt_help)
    args = parser.parse_intermixed_args(argv)
    try:
        line = answer(args.question, args.overrides, args.prompt)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    if line is not None:
        print(printable(show(line)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
