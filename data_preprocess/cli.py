"""The shared part of the scripts: arguments with verl's names, reading a data set, writing rows.

A script describes its data set as a :class:`Source`, and has the code that only its data set needs.
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
    """A public data set."""

    name: str  # the command is python -m data_preprocess.<name>
    hub: str  # its id on the Hugging Face hub
    config: str | None  # the name of its configuration there
    folder: str  # where the parquet files go by default
    # (example, split, index) -> row, or None for an example without a gold answer
    make_row: Callable[[Example, str, int], dict[str, Any] | None]
    # The one split to write: every file and every split of the hub is part of it
    only: str | None = None
    # row -> text; of rows with the same text the first is kept. None: all rows are kept
    key: Callable[[dict[str, Any]], str] | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        return (self.only,) if self.only else SPLITS


def run(source: Source, argv: Sequence[str] | None = None) -> int:
    """Write ``train.parquet`` and ``test.parquet``, or the only split.

    Return 0, or 2 with a line on stderr. With DRY_RUN=1 in the environment nothing is read or
    written.
    """
    args = _parse(source, argv)
    files = [f"{split}.parquet" for split in source.splits]
    if announced(args.local_dataset_path, args.hub, args.local_dir, files):
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
    targets = ", ".join(f"{folder}/{name}" for name in files)
    print(f"dry run: would read {origin} and write {targets}")
    return True


def read_local(paths: Sequence[str], only: str | None = None) -> dict[str, Iterable[Example]]:
    """Return the examples of each split, from a folder or from files.

    Names of files begin with ``train`` or ``test``. They are .jsonl, .json (a list) or .parquet,
    which is not held in memory. A folder may be a snapshot of the hub's repository, and a split may
    have several files. With ``only``,
    every file belongs to that split, whatever its name.
    """
    if only:
        examples = [read_file(path) for path in _all_files(paths)]
        return {only: itertools.chain.from_iterable(examples)}
    files: dict[str, list[Path]] = {}
    for text in paths:
        path = Path(text).expanduser()
        if path.is_dir():
            files |= _files_of(path)
            continue
        split = next((split for split in SPLITS if path.name.startswith(split)), None)
        if split is None or not path.is_file():
            problem = "does not exist" if not path.is_file() else "is not named train* or test*"
            raise InputError(
                f"--local_dataset_path: {path} {problem}; give a folder, or train.jsonl and "
                "test.jsonl"
            )
        files.setdefault(split, []).append(path)
    return {
        split: itertools.chain.from_iterable([read_file(path) for path in files[split]])
        for split in SPLITS
        if split in files
    }


def read_hub(hub: str, config: str | None, only: str | None = None) -> dict[str, Iterable[Example]]:
    """Return the examples of each split, through ``datasets``."""
    import datasets

    try:
        loaded = datasets.load_dataset(hub, config) if config else datasets.load_dataset(hub)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"--hub={hub}: it could not be loaded ({error}); check the id and the network, or give "
            "--local_dataset_path with downloaded files"
        ) from error
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
            f"{source.name}: neither a train nor a test split was found; give both, or one of them"
        )
    # By split: the text without white space, and a hash of the pictures
    prompts: dict[str, set[tuple[str, int]]] = {}
    for split, examples in splits.items():
        made = _make_rows(source, examples, split)
        print(write_rows(folder / f"{split}.parquet", made.rows))
        print(made, end="")
        texts = (json.dumps(row["prompt"]).replace("\\n", "") for row in made.rows)
        pictures = (hash(str(row.get("images"))) for row in made.rows)
        prompts[split] = set(zip(("".join(text.split()) for text in texts), pictures, strict=True))
    for split in source.splits:
        if split not in splits:
            print(f"  no {split} split was found, so {split}.parquet was not written")
    shared = len(set.intersection(*prompts.values())) if len(prompts) > 1 else 0
    if shared:
        print(
            f"  note: {shared} questions are in both splits (white space aside); both keep them, "
            "as published"
        )
    return 0


@dataclass
class _Rows:
    """The rows of a split, and how many examples were left out, by reason."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    examples: int = 0
    unanswered: list[str] = field(default_factory=list)  # numbers of examples without gold answer
    repeated: int = 0
    contradicting: int = 0  # repeated with another gold answer

    def __str__(self) -> str:
        lines = []
        if self.unanswered:
            numbers = ", ".join(self.unanswered[:10])
            more = ", ..." if len(self.unanswered) > 10 else ""
            lines.append(
                f"  {len(self.unanswered)} of {self.examples} left out, no gold answer: "
                f"{numbers}{more}\n"
            )
        if self.repeated:
            lines.append(
                f"  {self.repeated} of {self.examples} left out, the same question as an earlier "
                "one\n"
            )
        if self.contradicting:
            lines.append(
                f"  {self.contradicting} of these have another answer than the one that was kept\n"
            )
        return "".join(lines)


def _make_rows(source: Source, examples: Iterable[Example], split: str) -> _Rows:
    made = _Rows()
    answers: dict[str | int, Any] = {}  # key -> gold answer
    for index, example in enumerate(examples):
        made.examples += 1
        try:
            row = source.make_row(example, split, index)
        except KeyError as error:
            fields = ", ".join(example)
            raise InputError(
                f"example {index} of {split} has no field {error}, only {fields}; is it "
                f"{source.hub}?"
            ) from error
        if row is None:
            made.unanswered.append(str(index))
            continue
        key = source.key(row) if source.key else index
        answer = row["reward_model"]["ground_truth"]
        if key in answers:
            made.repeated += 1
            made.contradicting += answers[key] != answer
        else:
            answers[key] = answer
            made.rows.append(row)
    return made


def _files_of(folder: Path) -> dict[str, list[Path]]:
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
        for pattern in patterns:
            matches = sorted(folder.glob(pattern.format(split)))
            if matches:
                files[split] = matches
                break
    if not files:
        names = ", ".join(pattern.format("train") for pattern in patterns)
        raise InputError(
            f"--local_dataset_path: {folder} holds none of {names} (or test); give the files by "
            "name"
        )
    return files


def _all_files(paths: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for path in (Path(text).expanduser() for text in paths):
        if path.is_file():
            files.append(path)
            continue
        inside = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        if not inside:
            problem = "does not exist"
            if path.is_dir():
                problem = f"holds no file that ends in {', '.join(SUFFIXES)}"
            raise InputError(f"--local_dataset_path: {path} {problem}")
        files += inside
    return files


def _read_parquet(path: Path) -> Iterator[Example]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=4096):
            yield from batch.to_pylist()


def read_file(path: Path) -> Iterable[Example]:
    """Return the examples of a .jsonl, .json or .parquet file.

    Raises InputError if it holds something else.
    """
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            examples = json.loads(text)
        else:
            # Lines end with \n alone: str.splitlines would also cut at separators in a question
            examples = [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise InputError(
            f"{path}: not readable as {path.suffix[1:]} ({error}); download it again"
        ) from error
    if not isinstance(examples, list):
        raise InputError(
            f"{path}: a list of examples is needed, and it holds a {type(examples).__name__}"
        )
    return examples
