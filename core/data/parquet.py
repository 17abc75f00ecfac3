"""Examples of the one data schema (verl's), read and checked: rows of parquet or JSON lines.

=============  =====================================================================================
data_source    which scorer scores the answer (the column that ``data.reward_fn_key`` names)
prompt         a chat as a list of ``{role, content}``, or a plain string (``data.prompt_key``)
reward_model   ``{style: "rule" | "model", ground_truth: anything}``; a rule needs its ground truth
extra_info     optional: ``split`` and ``index`` name the question, the rest is for the scorer
images         optional: the prompt's pictures, a list (``data.image_key``)
=============  =====================================================================================

A parquet file stays a columnar Arrow table and JSON lines stay bytes; an example becomes Python
objects when it is drawn. Lines are parsed one by one, without types for a column: every value is
the one that stands in the file. Files are never concatenated, so one may hold strings as ground
truth and the next one structs.
"""

import codecs
import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from core.data.vocabulary import Message
from core.errors import InputError, Problems
from core.files import is_url, local_path
from core.vision.pictures import MediaError, StoredPicture, stored_picture

log = logging.getLogger(__name__)
MEDIA = ("images", "videos", "audios")  # columns of media in verl's schema
MAKE_ONE = (
    "python -m data_preprocess.gsm8k writes one, and pandas.read_csv(...).to_parquet(...) "
    "converts a table"
)
JSON_LINES = (".jsonl", ".ndjson", ".json")  # endings of files that hold an example a line
LINE_RULE = "a line is not one JSON object in UTF-8"
LINE_FIX = "mend the line, write one object a line, or convert the file to UTF-8"
LINE_ERRORS = (ValueError, RecursionError)
CHAT_AS_TEXT = re.compile(  # a list of messages, or one alone, as JSON or as Python writes it
    r"""\s*\[\s*\{(?:[^{}]{0,200},)?\s*["'](?:role|content)["']\s*:"""
    r"""|\s*\{(?:[^{}]{0,200},)?\s*["'](?:role|messages)["']\s*:.*\}\s*\Z""",
    re.DOTALL,
)
BATCH = 1024  # examples of a large file that are Python objects at a time


@dataclass(frozen=True)
class Example:
    """One line of a file, checked. ``number`` counts from 0 in its file."""

    file: str
    number: int
    data_source: str
    prompt: str | tuple[Message, ...]
    ground_truth: Any
    extra_info: Mapping[str, Any]
    style: str = "rule"
    media: tuple[StoredPicture, ...] = ()

    @property
    def where(self) -> str:
        return f"{self.file} row {self.number}"

    @property
    def name(self) -> str | None:
        """The question's name in the data: source, split, index; None where it gives no index."""
        index = self.extra_info.get("index")
        if isinstance(index, bool) or not isinstance(index, int | str) or index == "":
            return None
        return f"{self.data_source}/{self.extra_info.get('split') or '-'}/{index}"

    @cached_property
    def prompt_hash(self) -> str:
        """A hash of 16 hexadecimal digits; equal prompts with equal media share them."""
        media = []
        for data, bounds in self.media:
            media.append(hashlib.blake2b(data, digest_size=8).hexdigest() + str(bounds or ""))
        return _hash([self.prompt, *media] if media else self.prompt)

    @cached_property
    def content_hash(self) -> str:
        """A hash of 16 hexadecimal digits of the question's content: source, prompt and ground
        truth."""
        return _hash([self.data_source, self.prompt_hash, self.ground_truth])

    @property
    def name_hash(self) -> str:
        """A hash of the name, or of the content where there is no name."""
        return self.content_hash if self.name is None else _hash(self.name)


def _hash(value: Any) -> str:
    return hashlib.blake2b(
        json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8
    ).hexdigest()


class ExampleFile:
    """The examples of one file, a path or a URL, whose keys are those of the ``data`` section.

    Raises InputError if the file is missing, empty, not readable, or lacks a column.
    """

    def __init__(
        self,
        path: str | Path,
        prompt_key: str = "prompt",
        reward_fn_key: str = "data_source",
        image_key: str = "images",
    ):
        self.path = str(path)
        self.prompt_key = prompt_key
        self.reward_fn_key = reward_fn_key
        self.image_key = image_key
        local = Path(local_path(self.path, "data")).expanduser()
        where = self.path if is_url(self.path) else str(local)
        if not local.is_file():
            rule = "is a folder" if local.is_dir() else "does not exist"
            raise InputError([f"{where}: the file {rule}; {MAKE_ONE}"])
        required = {
            prompt_key: "data.prompt_key",
            reward_fn_key: "data.reward_fn_key",
            "reward_model": "the schema",
        }
        # A list of lines that are not parsed yet, or a columnar table
        if local.suffix.lower() in JSON_LINES:
            self._stored: Any = read_lines(where, local, required)
        else:
            optional = ("extra_info", image_key, *MEDIA)
            self._stored = _read_table(where, local, required, optional)
        if len(self) == 0:
            raise InputError([f"{where}: the file has no rows; {MAKE_ONE}"])

    def __len__(self) -> int:
        return len(self._stored)

    def example(self, number: int) -> Example:
        """Return the example of this number. Raises InputError if it breaks the schema."""
        problems = Problems()
        example = self._checked(self._rows(number, 1)[0], number, problems)
        problems.raise_if_any()
        return example

    def examples(self, problems: Problems, numbers: np.ndarray | None = None) -> Iterator[Example]:
        """Yield the examples of these (increasing) numbers, or all.

        Those that break the schema are left out and added to ``problems``.
        """
        wanted = None if numbers is None else set(numbers.tolist())
        for start in range(0, len(self), BATCH):
            for number, raw in enumerate(self._rows(start, BATCH), start):
                if wanted is None or number in wanted:
                    example = self._checked(raw, number, problems)
                    if example is not None:
                        yield example

    def _rows(self, start: int, count: int) -> list[Any]:
        """Return the rows from ``start`` on: dictionaries, or lines that are not parsed yet."""
        if isinstance(self._stored, list):
            return self._stored[start : start + count]
        return self._stored.slice(start, count).to_pylist()

    def _checked(
        self,
        raw: Mapping[str, Any] | bytes,  # bytes are a line that is not parsed yet
        number: int,
        problems: Problems,
    ) -> Example | None:
        """Return a row's example; None if it breaks the schema, which is added to ``problems``."""
        is_line = isinstance(raw, bytes)
        if is_line:
            try:
                raw = parse_line(raw)
            except LINE_ERRORS as error:
                problems.add(self.path, LINE_RULE, LINE_FIX, number, str(error))
                return None
        faults = list(_faults(raw, self.prompt_key, self.reward_fn_key))
        pictures: list[StoredPicture] = []
        try:
            pictures = self._stored_pictures(raw)
        except MediaError as error:
            faults.append((error.rule, error.fix, error.value))
        for rule, fix, value in faults:
            problems.add(self.path, rule, fix, number, value)
        if faults:
            return None
        prompt = raw[self.prompt_key]
        if not isinstance(prompt, str):
            prompt = tuple(message_of(stored, nested=not is_line) for stored in prompt)
        reward = raw["reward_model"]
        return Example(
            file=self.path,
            number=number,
            data_source=raw[self.reward_fn_key],
            prompt=prompt,
            ground_truth=reward.get("ground_truth"),
            extra_info=raw.get("extra_info") or {},
            style=reward.get("style") or "rule",
            media=tuple(pictures),
        )

    def _stored_pictures(self, raw: Mapping[str, Any]) -> list[StoredPicture]:
        """Return a row's pictures. Raises MediaError."""
        for name in MEDIA:
            if name != self.image_key and raw.get(name):
                rule = f"column {name!r} holds media, which nothing here reads"
                fix = "leave the column out, or name it in data.image_key if it holds pictures"
                raise MediaError(rule, fix)
        pictures = raw.get(self.image_key) or []
        if not isinstance(pictures, list):
            rule = f"{self.image_key} must be a list of pictures"
            fix = "write one for each <image> in the prompt"
            raise MediaError(rule, fix, type(pictures).__name__)
        return [stored_picture(cell) for cell in pictures]


def message_of(stored: Mapping[str, Any], *, nested: bool) -> Message:
    """Return a message without the empty fields that a chat template must not see.

    Parquet gives each message, and each struct inside one, all fields of its column.
    With ``nested`` the arguments of other rows' tool calls go too.
    """
    message = {key: value for key, value in stored.items() if value is not None or key == "content"}
    return {key: without_nulls(value) for key, value in message.items()} if nested else message


def without_nulls(value: Any) -> Any:
    """Return a value without the empty fields of the structs inside it."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the object of one JSON line, its values as they stand there. Raises LINE_ERRORS."""
    text = line.decode("utf-8")
    try:
        row = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:  # whose message counts lines inside this one
        raise ValueError(f"{error.msg} at character {error.pos + 1}") from error
    if not isinstance(row, dict):
        raise ValueError(f"it holds a {type(row).__name__}")
    if "\\ud" in text.lower():  # half a surrogate pair is no text that a tokenizer reads
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    return row


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object of these pairs. Raises ValueError for a key that comes twice."""
    keys = [key for key, _ in pairs]
    for key in keys if len(set(keys)) < len(keys) else ():
        if keys.count(key) > 1:
            raise ValueError(f"the key {key!r} stands there twice")
    return dict(pairs)


def read_lines(where: str, path: Path, required: Mapping[str, str]) -> list[bytes]:
    """Return the lines of a file that are not blank. The first one must have the required keys."""
    try:
        stored = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise InputError([f"{where}: cannot be read ({error}); check its rights"]) from error
    lines = [line for line in stored.split(b"\n") if line.strip()]
    if lines:
        try:
            first = parse_line(lines[0])
        except LINE_ERRORS as error:
            raise InputError([f"{where}: {LINE_RULE} in 1 row (0: {error}); {LINE_FIX}"]) from error
        _check_columns(where, required, first)
    return lines


def _read_table(
    where: str,
    path: Path,
    required: Mapping[str, str],
    optional: Sequence[str],
) -> Any:
    """Return the columns of a parquet file that examples need."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        # Not read_table, which takes a folder named a=b for a column
        file = pa.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        _check_columns(where, required, names)
        return file.read([*required, *(name for name in dict.fromkeys(optional) if name in names)])
    except (pa.ArrowInvalid, OSError) as error:
        rule = f"not a readable parquet file ({error})"
        fix = f"name a file of JSON lines .jsonl; {MAKE_ONE}"
        raise InputError([f"{where}: {rule}; {fix}"]) from error


def _check_columns(where: str, required: Mapping[str, str], names: Collection[str]) -> None:
    if missing := [f"{name!r} ({key})" for name, key in required.items() if name not in names]:
        rule = f"no column {', '.join(missing)}; it has {', '.join(names) or 'no column'}"
        raise InputError([f"{where}: {rule}: rename a column or set the key"])


def _faults(
    raw: Mapping[str, Any], prompt_key: str, source_key: str
) -> Iterator[tuple[str, str, str]]:
    """Yield rule, fix and value of what breaks the schema, at most one fault a column."""
    source = raw.get(source_key)
    if not isinstance(source, str) or not source:
        rule = f"{source_key} must be a non-empty string"
        yield rule, "name the data set, its scorer is looked up by it", repr(source)
    if fault := _prompt_fault(raw.get(prompt_key)):
        rule, value = fault
        yield f"{prompt_key} {rule}", "see core/data/parquet.py, or leave the row out", value
    reward = raw.get("reward_model")
    if not isinstance(reward, dict):
        rule = "reward_model must be a mapping with ground_truth"
        yield rule, "the answer goes to reward_model.ground_truth", type(reward).__name__
    elif (truth := reward.get("ground_truth")) is None or truth != truth:  # NaN: pandas' missing
        style = reward.get("style") or "rule"
        if style != "model":
            rule = "reward_model.ground_truth must be given where the style is not 'model'"
            yield rule, "fill it or leave the row out", f"style {style!r}"
    extra = raw.get("extra_info")
    if extra is not None and not isinstance(extra, dict):
        rule = "extra_info must be a struct"
        yield rule, "make it one, or leave the column out", type(extra).__name__


def _prompt_fault(value: Any) -> tuple[str, str] | None:
    """Return what a prompt must be and what it is; None for a good one."""
    if not isinstance(value, str | list | None):
        return "must be a string or a list of messages", type(value).__name__
    messages = value if isinstance(value, list) else [{"role": "user", "content": value or ""}]
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return "must hold messages with role and content", repr(message)[:60]
        content = message.get("content")
        makes_calls = message["role"] == "assistant" and message.get("tool_calls")
        if not isinstance(content, str) and not (makes_calls and content is None):
            return "must hold text, with <image> for a picture", type(content).__name__
    if isinstance(value, str) and CHAT_AS_TEXT.match(value):
        return "must not be a chat that was written as text", value[:60]
    if not any((message.get("content") or "").strip() for message in messages):
        return "must not be empty", ""
    return None
