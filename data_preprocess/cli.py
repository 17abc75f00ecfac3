"""The shared part of the scripts: arguments (verl's names), reading a data set from the hub or
local files, writing.

A script describes its data set as a :class:`Source`. What one data set alone needs stays in its
script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.dry_run import is_dry_run
from core.errors import InputError
from core.files import written_here
from data_preprocess.schema import write_rows

SPLITS = ("train", "test")
SUFFIXES = (".jsonl", ".json", ".parquet")
Example = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """A public data set.

    Args:
        name: the command, ``python -m data_preprocess.<name>``.
        hub: its id on the Hugging Face hub, and ``config``, the name of the configuration there.
        folder: where the parquet files go unless told.
        make_row: ``(example, split, index) -> row``, or None for an example that has no gold
        answer. only: the one split to write, where the set has one: every file and every split of
        the hub is part of it. key: ``row -> text``; of rows with the same text the first is kept.
        None: all are.
    """

    name: str
    hub: str
    config: str | None
    folder: str
    make_row: Callable[[Example, str, int], dict[str, Any] | None]
    only: str | None = None
    key: Callable[[dict[str, Any]], str] | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        return (self.only,) if self.only else SPLITS


def run(source: Source, argv: Sequence[str] | None = None) -> int:
    """Write ``train.parquet`` and ``test.parquet``, or the only one. Returns 0, or 2 with a line on
    stderr.

    With DRY_RUN=1 in the environment nothing is read or written.
    """
    args = _parse(source, argv)
    if announced(
        args.local_dataset_path,
        args.hub,
        args.local_dir,
        [f"{split}.parquet" for split in source.splits],
    ):
        return 0
    try:
        if args.local_dataset_path:
            splits = read_local(args.local_dataset_path, source.only)
        else:
            splits = read_hub(args.hub, source.config, source.only)
        return _write(source, splits, Path(args.local_dir))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2


def announced(local: Sequence[str] | None, hub: str, folder: str, files: Sequence[str]) -> bool:
    """In a dry run, print what would be read and written; return whether it is one."""
    if not is_dry_run():
        return False
    origin = " ".join(local) if local else f"{hub} on the Hugging Face hub"
    print(
        f"dry run: would read {origin} and write {', '.join(f'{folder}/{name}' for name in files)}"
    )
    return True


def read_local(paths: Sequence[str], only: str | None = None) -> dict[str, Iterable[Example]]:
    """Return the examples of each split, from a folder or from files whose names begin with
    ``train`` or ``test``.

    Reads .jsonl, .json (a list) and .parquet, the last without holding it in memory. A folder may
    be a snapshot of the hub's repository. With ``only``, every file is of that split, whatever its
    name.
    """
    if only:
        return {
            only: itertools.chain.from_iterable([read_file(path) for path in _all_files(paths)])
        }
    files: dict[str, Path] = {}
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            files |= _files_of(path)
            continue
        split = next((split for split in SPLITS if path.name.startswith(split)), None)
        if split is None or not path.is_file():
            problem = "does not exist" if not path.is_file() else "is not named train* or test*"
            raise InputError(
                [
                    f"--local_dataset_path: {path} {problem}; give a folder, or "
                    f"train.jsonl and test.jsonl"
                ]
            )
        files[split] = path
    return {split: read_file(files[split]) for split in SPLITS if split in files}


def read_hub(hub: str, config: str | None, only: str | None = None) -> dict[str, Iterable[Example]]:
    """Return the examples of each split, through ``datasets``."""
    import datasets

    advice = "check the id and the network, or give --local_dataset_path with downloaded files"
    try:
        loaded = datasets.load_dataset(hub, config) if config else datasets.load_dataset(hub)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError([f"--hub={hub}: it could not be loaded ({error}); {advice}"]) from error
    if only:
        return {only: itertools.chain.from_iterable(loaded.values())}
    return {split: loaded[split] for split in SPLITS if split in loaded}


def _parse(source: Source, argv: Sequence[str] | None) -> argparse.Namespace:
    written = " and ".join(f"{split}.parquet" for split in source.splits)
    parser = argparse.ArgumentParser(
        prog=f"python -m data_preprocess.{source.name}",
        description=f"Write {written} from the data set {source.hub}, in verl's schema.",
    )
    parser.add_argument(
        "--local_dir", type=written_here, help=f"The folder to write (default {source.folder})."
    )
    parser.add_argument(
        "--local_save_dir",
        type=written_here,
        help="The same as --local_dir, under verl's newer name.",
    )
    parser.add_argument(
        "--local_dataset_path",
        nargs="+",
        metavar="PATH",
        help="A folder or files to read instead of the hub.",
    )
    parser.add_argument(
        "--hub", default=source.hub, help="The data set's id on the hub (default %(default)s)."
    )
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
        raise InputError(
            [
                f"{source.name}: neither a train nor a test split was found; give both, "
                f"or one of them"
            ]
        )
    prompts: dict[str, set[str]] = {}
    for split, examples in splits.items():
        made = _made_rows(source, examples, split)
        print(write_rows(folder / f"{split}.parquet", made.rows))
        print(made, end="")
        rows = made.rows
        prompts[split] = {
            "".join(json.dumps(row["prompt"]).replace("\\n", "").split()) for row in rows
        }
    for split in source.splits:
        if split not in splits:
            print(f"  no {split} split was found, so {split}.parquet was not written")
    shared = len(set.intersection(*prompts.values())) if len(prompts) > 1 else 0
    if shared:
        print(
            f"  note: {shared} questions are in both splits (white space aside); both keep "
            f"them, as published"
        )
    return 0


@dataclass
class _Made:
    """The rows of a split, and how many examples were left out, by reason."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    examples: int = 0
    gone: list[str] = field(default_factory=list)
    repeated: int = 0
    contradicting: int = 0  # repeated with another gold answer

    def __str__(self) -> str:
        lines = []
        if self.gone:
            more = ", ..." if len(self.gone) > 10 else ""
            lines.append(
                f"  {len(self.gone)} of {self.examples} left out, no gold answer: "
                f"{', '.join(self.gone[:10])}{more}\n"
            )
        if self.repeated:
            lines.append(
                f"  {self.repeated} of {self.examples} left out, the same question as an "
                f"earlier one\n"
            )
        if self.contradicting:
            lines.append(
                f"  {self.contradicting} of these have another answer than the one that was kept\n"
            )
        return "".join(lines)


def _made_rows(source: Source, examples: Iterable[Example], split: str) -> _Made:
    made, answers = _Made(), {}
    for index, example in enumerate(examples):
        made.examples += 1
        row = _made(source, example, split, index)
        if row is None:
            made.gone.append(str(index))
            continue
        key, answer = source.key(row) if source.key else index, row["reward_model"]["ground_truth"]
        if key in answers:
            made.repeated += 1
            made.contradicting += answers[key] != answer
        else:
            answers[key] = answer
            made.rows.append(row)
    return made


def _made(source: Source, example: Example, split: str, index: int) -> dict[str, Any] | None:
    try:
        return source.make_row(example, split, index)
    except KeyError as error:
        has = ", ".join(example)
        raise InputError(
            [f"example {index} of {split} has no field {error}, only {has}; is it {source.hub}?"]
        ) from error


def _files_of(folder: Path) -> dict[str, Path]:
    patterns = (
        "{}.jsonl",
        "{}.json",
        "{}.parquet",
        "{}_answers_only.json",
        "main/{}-*.parquet",
        "data/{}-*.parquet",
    )
    files = {}
    for split in SPLITS:
        found = [
            path for pattern in patterns for path in sorted(folder.glob(pattern.format(split)))
        ]
        if found:
            files[split] = found[0]
    if not files:
        looked = ", ".join(pattern.format("train") for pattern in patterns)
        raise InputError(
            [
                f"--local_dataset_path: {folder} holds none of {looked} (or test); give "
                f"the files by name"
            ]
        )
    return files


def _all_files(paths: Sequence[str]) -> list[Path]:
    found = []
    for path in (Path(given).expanduser() for given in paths):
        inside = (
            [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES)
        )
        if not inside:
            problem = (
                f"holds no file that ends in {', '.join(SUFFIXES)}"
                if path.is_dir()
                else "does not exist"
            )
            raise InputError([f"--local_dataset_path: {path} {problem}"])
        found += inside
    return found


def _read_parquet(path: Path) -> Iterator[Example]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=4096):
            yield from batch.to_pylist()


def read_file(path: Path) -> Iterable[Example]:
    """Return the examples of a .jsonl, .json or .parquet file. Raises InputError where it holds
    something else."""
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        text = path.read_text(encoding="utf-8")
        # Lines end with \n alone: str.splitlines would also cut at separators inside a question.
        lines = [line for line in text.split("\n") if line.strip()]
        examples = (
            json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in lines]
        )
    except ValueError as error:
        raise InputError(
            [f"{path}: not readable as {path.suffix[1:]} ({error}); download it again"]
        ) from error
    if not isinstance(examples, list):
        raise InputError(
            [f"{path}: a list of examples is wanted, it holds a {type(examples).__name__}"]
        )
    return examples
