"""Build an index that ``recipes/search_r1`` searches from a corpus of passages.

    python -m recipes.search_r1.index.cli --corpus wiki-18.jsonl --index DIR --backend bm25
    python -m recipes.search_r1.index.cli --corpus wiki-18.jsonl.gz --index DIR \\
        --backend flat hnsw --encoder intfloat/e5-base-v2 --device cuda

The corpus is a file of JSON lines ``{"id", "contents"}``, plain or gzip, and is read as a stream. A
second call goes on where the first was interrupted, and adds back ends to the folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from recipes.search_r1.index.build import build_index
from recipes.search_r1.index.corpus import Progress
from recipes.search_r1.index.encoder import add_encoder_arguments, make_encoder, settings_of
from recipes.search_r1.index.passages import DENSE, RetrievalError


def bar(what: str, rows: int) -> Progress:
    """Return a function that advances a progress bar of ``rows`` (0: unknown)."""
    from tqdm import tqdm

    return tqdm(desc=what, total=rows or None, unit="rows", unit_scale=True, file=sys.stderr).update


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 with a line on stderr."""
    args = _parse(argv)
    try:
        encoder = None
        if args.encoder:
            settings = settings_of(
                args.encoder,
                query_prefix=args.query_prefix,
                passage_prefix=args.passage_prefix,
                pooling=args.pooling,
                max_length=args.max_length,
            )
            encoder = make_encoder(settings, args.device, args.threads, args.dtype)
        built = build_index(args.corpus, args.index, args.backend, encoder, args.lists, bar)
    except (RetrievalError, OSError) as error:
        print(f"build_index: {error}", file=sys.stderr)
        return 2
    for backend in args.backend:
        print(f"{args.index}: {backend}, {built['backends'][backend]['seconds']} s")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.search_r1.index.cli", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--corpus", required=True, help="The corpus, JSON lines of {id, contents}, plain or .gz.")
    add("--index", required=True, help="The folder to write.")
    add(
        "--backend",
        nargs="+",
        default=["bm25"],
        choices=("bm25", *DENSE),
        help="The back ends to build (default: bm25).",
    )
    add_encoder_arguments(parser, "the model's own")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="The encoder's number format (default: float32 on a CPU, else float16).",
    )
    add(
        "--lists",
        type=int,
        help="The inverted lists of ivf (default: four times the root of the rows).",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
