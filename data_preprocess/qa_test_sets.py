"""The seven test sets of Search-R1.

    python -m data_preprocess.qa_test_sets --local_dir ~/data/search_r1/test \\
        [--prompt r1] [--sets nq bamboogle] \\
        [--local_dataset_path FLASHRAG_FOLDER | nq=FILE triviaqa=FILE ...]

They are NQ, TriviaQA, PopQA, HotpotQA, 2WikiMultihopQA, MuSiQue and Bamboogle. Each has a file of
its own (``nq.parquet``, ...), so that ``data.val_max_samples`` counts for every set: validate on
128 questions of each while training, and on all 51,713 at the end. The test split is taken, else
dev, else train, as in the published script; no row is left out.
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

# Questions of the published sets.
SIZES = {
    "nq": 3610,
    "triviaqa": 11313,
    "popqa": 14267,
    "hotpotqa": 7405,
    "2wikimultihopqa": 12576,
    "musique": 2417,
    "bamboogle": 125,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 with a line on stderr."""
    parser = arguments("qa_test_sets", __doc__, "~/data/search_r1/test", tuple(SIZES))
    args = parser.parse_args(argv)
    files = [f"{name}.parquet" for name in args.sets]
    if announced(args.local_dataset_path, args.hub, args.local_dir, files):
        return 0
    local = local_files(args.local_dataset_path)
    try:
        for name in args.sets:
            split, examples = examples_of(name, ("test", "dev", "train"), local, args.hub)
            rows = [
                make_qa_row(name, example, split, index, PROMPTS[args.prompt])
                for index, example in enumerate(examples)
            ]
            print(write_rows(Path(args.local_dir) / f"{name}.parquet", rows))
            if len(rows) != SIZES[name]:
                print(
                    f"  note: the published set has {SIZES[name]} questions, this one {len(rows)}"
                )
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
