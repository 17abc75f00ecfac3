"""Search-R1's training data: the questions of NQ (79,168) and HotpotQA (90,447), without passages.

    python -m data_preprocess.nq_hotpotqa --local_dir ~/data/search_r1/nq_hotpotqa [--prompt r1]
        [--local_dataset_path FLASHRAG_FOLDER | nq=FILE hotpotqa=FILE]

Writes ``train.parquet``. The seven test sets are those of ``data_preprocess.qa_test_sets``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from core.errors import InputError
from data_preprocess.cli import announced
from data_preprocess.open_qa import arguments, examples_of, local_files, make_qa_row
from data_preprocess.schema import write_rows
from data_preprocess.search_r1_prompts import PROMPTS

SETS = ("nq", "hotpotqa")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 with a line on stderr."""
    args = arguments("nq_hotpotqa", __doc__, "~/data/search_r1/nq_hotpotqa", SETS).parse_args(argv)
    if announced(args.local_dataset_path, args.hub, args.local_dir, ["train.parquet"]):
        return 0
    rows = []
    try:
        for name in args.sets:
            split, examples = examples_of(
                name, ("train",), local_files(args.local_dataset_path), args.hub
            )
            made = [
                make_qa_row(name, e, split, index, PROMPTS[args.prompt])
                for index, e in enumerate(examples)
            ]
            print(f"{name}: {len(made)} questions")
            rows += made
        print(write_rows(Path(args.local_dir) / "train.parquet", rows))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
