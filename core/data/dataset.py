"""Files of rows as prompts: checked and measured when loaded, tokenised when drawn."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from core.data.parquet import Problems, Row, RowFile
from core.data.tokenization import ChatError, Encoder, truncate
from core.errors import InputError
from core.types import Prompt

MEASURED_TOGETHER = 512  # rows; the tokenizer spreads a batch over the cores
CHAT_FIX = "mend the roles, or set another chat template"

# (sizes of the files) -> the row numbers to take of each one, or None for all of them
Choose = Callable[[Sequence[int]], Sequence[np.ndarray | None]]


def all_rows(sizes: Sequence[int]) -> list[None]:
    return [None for _ in sizes]


@dataclass(frozen=True, eq=False)
class Measured:
    """What is known of a file's chosen rows (N of them), in file order.

    Shapes:
        number   [N] int64   row in the file
        length   [N] int64   tokens of the prompt before it is cut
        content  [N] uint64  hash of what is asked
        name     [N] uint64  hash of the question's name in the data, of its content where it has none
        source   [N] int64   index into ``sources``
    """

    number: np.ndarray
    length: np.ndarray
    content: np.ndarray
    name: np.ndarray
    source: np.ndarray
    sources: tuple[str, ...]

    def where(self, mask: np.ndarray) -> Measured:
        arrays = (self.number, self.length, self.content, self.name, self.source)
        return Measured(*(values[mask] for values in arrays), self.sources)

    def __len__(self) -> int:
        return len(self.number)


class PromptFiles:
    """Loads files, each one once, and makes prompts of their rows. ``config`` is the ``data`` section.

    A row's ``uid`` is the name that the data gives the question, ``source/split/index``, so that runs whose
    prompts are worded differently can still be paired. Where the data gives none, it is a hash of source, prompt
    and ground truth; where the loaded files give one name to different questions, the hash is added to the name.
    Copies of a row share their uid.
    """

    def __init__(self, config: Any, tokenizer: Any):
        self.config = config
        self.limited_by = "max_prompt_length" if config.max_start_length is None else "max_start_length"
        self.limit: int = getattr(config, self.limited_by)  # tokens of a prompt
        self.encoder = Encoder(tokenizer, config.apply_chat_template_kwargs)
        self.files: dict[str, RowFile] = {}
        self.measured: dict[str, Measured] = {}  # of the rows that can be drawn
        self._left_out: dict[str, int] = {}
        self._ambiguous: frozenset[int] = frozenset()

    def load(self, paths: Iterable[str], choose: Choose = all_rows) -> None:
        """Opens, checks and measures the files; InputError with every problem of all of them."""
        self._open(dict.fromkeys(paths))
        problems = Problems()
        lengths: dict[str, int | str] = {}  # by prompt, so that copies are tokenised once
        choices = choose([len(file) for file in self.files.values()])
        for file, numbers in zip(self.files.values(), choices, strict=True):
            measured = _measure(file, numbers, self.encoder, lengths, problems)
            self._keep(file, measured, problems)
        problems.raise_if_any()
        self._ambiguous = _ambiguous_names(self.measured.values())

    def prompt(self, path: str, index: int, ordinal: int) -> Prompt:
        """The prompt of a file's ``index``-th row that can be drawn."""
        row = self.files[path].row(int(self.measured[path].number[index]))
        (ids,) = self.encoder.encode([row.prompt])
        # A plain string stands in messages as what it is to a reader: the user's words.
        chat = ({"role": "user", "content": row.prompt},) if isinstance(row.prompt, str) else row.prompt
        return Prompt(
            ordinal=ordinal,
            uid=self.uid(row),
            token_ids=tuple(truncate(ids, self.limit, self.config.truncation)),
            messages=chat,
            ground_truth=row.ground_truth,
            data_source=row.data_source,
            extra_info=row.extra_info,
            style=row.style,
        )

    def uid(self, row: Row) -> str:
        if row.name is None:
            return row.content_hash
        return f"{row.name}/{row.content_hash}" if _number(row.name_hash) in self._ambiguous else row.name

    def rows(self) -> Iterator[Row]:
        """Every row that can be drawn, file by file."""
        for path, measured in self.measured.items():
            yield from self.files[path].rows(Problems(), measured.number)

    def sample_rows(self, each: int) -> list[Row]:
        """Up to ``each`` rows of each data source of each file, spread evenly over it."""
        chosen = []
        for path, measured in self.measured.items():
            for source in range(len(measured.sources)):
                numbers = measured.number[measured.source == source]
                spread = np.linspace(0, len(numbers) - 1, min(each, len(numbers))).astype(np.int64)
                chosen += [self.files[path].row(int(number)) for number in numbers[spread]]
        return chosen

    @property
    def data_sources(self) -> frozenset[str]:
        """Of the rows that can be drawn."""
        files = self.measured.values()
        return frozenset(measured.sources[source] for measured in files for source in np.unique(measured.source))

    def counts(self) -> list[str]:
        """A line a file: rows, what is left out or cut and why, different questions, longest prompt."""
        return [self._count(path, measured) for path, measured in self.measured.items()]

    def _count(self, path: str, measured: Measured) -> str:
        limit = self.limit
        parts = [f"{len(measured)} of {len(self.files[path])} rows"]
        different = len(np.unique(measured.content))
        if different < len(measured):
            parts.append(f"{different} different questions")
        if self._left_out[path]:
            parts.append(f"{self._left_out[path]} left out, longer than data.{self.limited_by}={limit} tokens")
        cut = int((measured.length > limit).sum())
        if cut:
            parts.append(f"{cut} cut to {limit} tokens (data.truncation={self.config.truncation})")
        longest = int(measured.length.max()) if len(measured) else 0
        return f"{path}: {', '.join(parts)}, longest prompt {longest} tokens"

    def _open(self, paths: Iterable[str]) -> None:
        errors: list[str] = []
        for path in paths:
            try:
                self.files[path] = RowFile(path, self.config.prompt_key, self.config.reward_fn_key)
            except InputError as error:
                errors += error.problems
        if errors:
            raise InputError(errors)

    def _keep(self, file: RowFile, measured: Measured, problems: Problems) -> None:
        """Leaves out what is too long, or reports it, as the configuration says."""
        limit = self.limit
        fits = measured.length <= limit
        self.measured[file.path] = measured
        self._left_out[file.path] = 0
        too_long = f"a prompt is longer than data.{self.limited_by}={limit} tokens"
        if not self.config.filter_overlong_prompts:
            if self.config.truncation == "error":
                fix = "raise it, or set data.filter_overlong_prompts=True or data.truncation=left|right|middle"
                for number, length in zip(measured.number[~fits], measured.length[~fits], strict=True):
                    problems.add(file.path, too_long, fix, int(number), f"{length} tokens")
        elif len(measured) and not fits.any():
            shortest = int(measured.length.min())
            rule = f"all {len(measured)} prompts are longer than data.{self.limited_by}={limit} tokens"
            problems.add(file.path, rule, f"raise it: the shortest has {shortest}")
        else:
            self._left_out[file.path] = int((~fits).sum())
            self.measured[file.path] = measured.where(fits)


def _measure(
    file: RowFile, numbers: np.ndarray | None, encoder: Encoder, lengths: dict[str, int | str], problems: Problems
) -> Measured:
    signed = {key: array("q") for key in ("number", "length", "source")}
    hashed = {key: array("Q") for key in ("content", "name")}
    sources: dict[str, int] = {}
    rows = file.rows(problems, numbers)
    while batch := list(islice(rows, MEASURED_TOGETHER)):
        _add_lengths(batch, encoder, lengths)
        for row in batch:
            length = lengths[row.prompt_hash]
            if isinstance(length, str):
                problems.add(file.path, "the chat template refuses a prompt", CHAT_FIX, row.number, length)
            elif length == 0:
                problems.add(file.path, "a prompt has no tokens", "leave the row out", row.number)
            else:
                signed["number"].append(row.number)
                signed["length"].append(length)
                signed["source"].append(sources.setdefault(row.data_source, len(sources)))
                hashed["content"].append(_number(row.content_hash))
                hashed["name"].append(_number(row.name_hash))
    columns = {key: np.array(values, dtype=np.int64) for key, values in signed.items()}
    columns |= {key: np.array(values, dtype=np.uint64) for key, values in hashed.items()}
    return Measured(sources=tuple(sources), **columns)


def _add_lengths(rows: list[Row], encoder: Encoder, lengths: dict[str, int | str]) -> None:
    """The length of every new prompt, or the template's complaint about it."""
    new = {row.prompt_hash: row.prompt for row in rows if row.prompt_hash not in lengths}
    try:
        lengths.update(zip(new, map(len, encoder.encode(list(new.values()))), strict=True))
    except ChatError:
        for key, prompt in new.items():
            try:
                lengths[key] = len(encoder.encode([prompt])[0])
            except ChatError as error:
                lengths[key] = str(error)


def _number(digest: str) -> int:
    return int(digest, 16)


def _ambiguous_names(files: Iterable[Measured]) -> frozenset[int]:
    """Names that stand for more than one question."""
    files = list(files)
    name = np.concatenate([measured.name for measured in files])
    content = np.concatenate([measured.content for measured in files])
    order = np.lexsort((content, name))
    name, content = name[order], content[order]
    differs = (name[1:] == name[:-1]) & (content[1:] != content[:-1])
    return frozenset(int(value) for value in name[1:][differs])
