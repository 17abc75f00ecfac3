"""What the scripts share: arguments (verl's names), reading a data set from the hub or from local files, writing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.rows import DataError
from data_preprocess.schema import write_rows

SPLITS = ("train", "test")
Example = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """A public data set.

    Args:
        name: the command, ``python -m data_preprocess.<name>``.
        hub: its id on the Hugging Face hub, and ``config``, the name of the configuration there.
        folder: where the parquet files go unless told.
        make_row: ``(example, split, index) -> row``, or None for an example that has no gold answer.
    """

    name: str
    hub: str
    config: str | None
    folder: str
    make_row: Callable[[Example, str, int], dict[str, Any] | None]


def run(source: Source, argv: Sequence[str] | None = None) -> int:
    """The command: writes ``train.parquet`` and ``test.parquet``; 0, or 2 with the problem on stderr."""
    args = _parse(source, argv)
    try:
        if args.local_dataset_path:
            splits = read_local(args.local_dataset_path)
        else:
            splits = read_hub(args.hub, source.config)
        return _write(source, splits, Path(args.local_dir))
    except DataError as error:
        print(error, file=sys.stderr)
        return 2


def read_local(paths: Sequence[str]) -> dict[str, list[Example]]:
    """Split -> examples, from a folder or from files whose names begin with ``train`` or ``test``.

    Reads .jsonl, .json (a list) and .parquet. A folder may be a snapshot of the hub's repository.
    """
    files: dict[str, Path] = {}
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            files |= _files_of(path)
            continue
        split = next((split for split in SPLITS if path.name.startswith(split)), None)
        if split is None or not path.is_file():
            problem = "does not exist" if not path.is_file() else "is not named train* or test*"
            raise DataError([f"--local_dataset_path: {path} {problem}; give a folder, or train.jsonl and test.jsonl"])
        files[split] = path
    return {split: _read(files[split]) for split in SPLITS if split in files}


def read_hub(hub: str, config: str | None) -> dict[str, Iterable[Example]]:
    """Split -> examples, through ``datasets``."""
    import datasets

    advice = "check the id and the network, or give --local_dataset_path with downloaded files"
    try:
        loaded = datasets.load_dataset(hub, config) if config else datasets.load_dataset(hub)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError([f"--hub={hub}: it could not be loaded ({error}); {advice}"]) from error
    return {split: loaded[split] for split in SPLITS if split in loaded}


def _parse(source: Source, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m data_preprocess.{source.name}", description=f"{source.hub} -> train.parquet and test.parquet"
    )
    parser.add_argument("--local_dir", help=f"where to write (default {source.folder})")
    parser.add_argument("--local_save_dir", help="verl's newer name of --local_dir")
    parser.add_argument(
        "--local_dataset_path", nargs="+", metavar="PATH", help="a folder or files to read instead of the hub"
    )
    parser.add_argument("--hub", default=source.hub, help="another id on the hub (default %(default)s)")
    parser.add_argument("--hdfs_dir", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.hdfs_dir:
        parser.error("--hdfs_dir is not supported: write with --local_dir, then run hdfs dfs -put")
    if args.local_dir and args.local_save_dir and args.local_dir != args.local_save_dir:
        parser.error("--local_dir and --local_save_dir mean the same folder: give one of them")
    args.local_dir = args.local_dir or args.local_save_dir or source.folder
    return args


def _write(source: Source, splits: Mapping[str, Iterable[Example]], folder: Path) -> int:
    if not splits:
        raise DataError([f"{source.name}: neither a train nor a test split was found; give both, or one of them"])
    prompts: dict[str, set[str]] = {}
    for split, examples in splits.items():
        made = [_made(source, example, split, index) for index, example in enumerate(examples)]
        rows = [row for row in made if row is not None]
        print(write_rows(folder / f"{split}.parquet", rows))
        gone = [str(index) for index, row in enumerate(made) if row is None]
        if gone:
            more = ", ..." if len(gone) > 10 else ""
            print(f"  {len(gone)} of {len(made)} left out, no gold answer: {', '.join(gone[:10])}{more}")
        prompts[split] = {"".join(json.dumps(row["prompt"]).replace("\\n", "").split()) for row in rows}
    for split in SPLITS:
        if split not in splits:
            print(f"  no {split} split was found, so {split}.parquet was not written")
    shared = len(set.intersection(*prompts.values())) if len(prompts) > 1 else 0
    if shared:
        print(f"  note: {shared} questions are in both splits (white space aside); both keep them, as published")
    return 0


def _made(source: Source, example: Example, split: str, index: int) -> dict[str, Any] | None:
    try:
        return source.make_row(example, split, index)
    except KeyError as error:
        has = ", ".join(example)
        raise DataError(
            [f"example {index} of {split} has no field {error}, only {has}; is it {source.hub}?"]
        ) from error


def _files_of(folder: Path) -> dict[str, Path]:
    patterns = ("{}.jsonl", "{}.json", "{}.parquet", "{}_answers_only.json", "main/{}-*.parquet", "data/{}-*.parquet")
    files = {}
    for split in SPLITS:
        found = [path for pattern in patterns for path in sorted(folder.glob(pattern.format(split)))]
        if found:
            files[split] = found[0]
    if not files:
        looked = ", ".join(pattern.format("train") for pattern in patterns)
        raise DataError([f"--local_dataset_path: {folder} holds none of {looked} (or test); give the files by name"])
    return files


def _read(path: Path) -> list[Example]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path, partitioning=None).to_pylist()
    try:
        text = path.read_text(encoding="utf-8")
        # Lines end with \n alone: str.splitlines would also cut at separators inside a question.
        lines = [line for line in text.split("\n") if line.strip()]
        examples = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in lines]
    except ValueError as error:
        raise DataError([f"{path}: not readable as {path.suffix[1:]} ({error}); download it again"]) from error
    if not isinstance(examples, list):
        raise DataError([f"{path}: a list of examples is wanted, it holds a {type(examples).__name__}"])
    return examples
