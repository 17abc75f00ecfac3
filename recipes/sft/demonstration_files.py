"""Files of demonstrations, parquet or JSON lines, checked and tokenised when they are loaded.

A file has one of three forms, recognized by its columns, in this order:

* ``prompt_ids``, ``response_ids``, ``response_mask``: ids as a policy wrote them, from
  ``recipes.sft.rejection``;
* ``data.messages_key``: a chat, whose assistant turns are trained on;
* ``data.prompt_key`` and ``data.response_key``: a prompt (a chat or a plain string) and the answer
  to it.

A column ``data.tools_key`` (a list of schemas, or JSON) or ``data.enable_thinking_key`` is an
argument of the template. Which rows a step draws is decided in ``core/data/prompts.py``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from core.data import vocabulary
from core.data.parquet import (
    CHAT_AS_TEXT,
    JSON_LINES,
    LINE_ERRORS,
    LINE_FIX,
    LINE_RULE,
    ExampleFile,
    message_of,
    parse_line,
    read_lines,
    without_nulls,
)
from core.data.prompts import CHAT_FIX, Choose, question_hash
from core.errors import InputError, Problems
from core.files import local_path
from core.learner.models import resolve_path
from recipes.sft.demonstrations import ASSISTANT, IDS, Demonstration, DemonstrationError, Writer

if TYPE_CHECKING:
    from core.config.training_keys import ModelConfig
    from recipes.sft.config_schema import DemonstrationConfig

log = logging.getLogger(__name__)
PROMPT_TEXT = "prompt"  # column beside IDS: the text to which the ids of the prompt decode
FORMS = "recipes/sft/README.md has the forms of files"
LIMIT = "data.max_prompt_length + data.max_response_length"


def end_ids(tokenizer: Any, model: ModelConfig) -> frozenset[int]:
    """Return the ids at which an engine ends an answer of the model."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(resolve_path(model.path, weights=False))
    except OSError:  # not every model has one
        generation = None
    return vocabulary.end_ids(tokenizer, generation)


class DemonstrationFiles:
    """The demonstrations that a stream draws from in place of prompts.

    A demonstration may have ``data.max_prompt_length + data.max_response_length`` tokens. Longer
    ones are left out with ``data.filter_overlong_prompts``, lose their end with
    ``data.truncation=right``, their beginning with ``left``, and are refused otherwise.
    """

    def __init__(self, config: DemonstrationConfig, tokenizer: Any, ends: Collection[int]):
        self.config = config
        self.limit = config.max_prompt_length + config.max_response_length
        self.writer = Writer(tokenizer, vocabulary.template_arguments(config), ends)
        self.measured: list[Demonstration] = []  # that can be drawn
        # Path -> hashes of what its demonstrations answer
        self._questions: dict[str, list[int]] = {}

    def load(self, paths: Iterable[str], choose: Choose) -> None:
        """Read, check and tokenise the files. Raises InputError with the problems of all."""
        files: list[tuple[str, Rows]] = []
        errors: list[str] = []
        for path in paths:  # one that is listed twice counts twice
            try:
                files.append((path, read_rows(path, self.config)))
            except InputError as error:
                errors += error.problems
        if errors:
            raise InputError(errors)
        problems = Problems()
        chosen = choose([len(rows) for _, rows in files])
        for (path, rows), numbers in zip(files, chosen, strict=True):
            self.measured += self._fitting(path, rows, numbers, problems)
        problems.raise_if_any()
        if self.measured and not any(map(self._is_ended, self.measured)):
            decode = self.writer.tokenizer.decode
            log.warning(
                "%s: no turn that is trained on ends with a token that ends an answer (%s), so the "
                "model would not learn to stop: let the chat template write it behind an "
                "assistant's message",
                ", ".join(path for path, _ in files),
                ", ".join(repr(decode([token_id])) for token_id in sorted(self.writer.ends)),
            )

    def _is_ended(self, demonstration: Demonstration) -> bool:
        """Return whether a stretch that is trained on ends with an end-of-sequence token."""
        mask = demonstration.mask
        last_of_stretches = np.flatnonzero(mask & ~np.r_[mask[1:], False])
        last_ids = demonstration.ids[last_of_stretches]
        return bool(np.isin(last_ids, sorted(self.writer.ends)).any())

    def __len__(self) -> int:
        """Return the number of demonstrations that can be drawn."""
        return len(self.measured)

    def prompt(self, index: int, ordinal: int) -> Demonstration:
        """Return the ``index``-th demonstration that can be drawn."""
        return self.measured[index]

    @property
    def longest(self) -> int:
        """The tokens of the longest demonstration that can be drawn."""
        return max(map(len, self.measured), default=0)

    def questions(self) -> Mapping[str, Sequence[int]]:
        """Return, by path, hashes of the prompts whose answers can be drawn."""
        return self._questions

    def _fitting(
        self, path: str, rows: Rows, numbers: Sequence[int], problems: Problems
    ) -> Iterator[Demonstration]:
        """Yield a file's demonstrations, within the limit; log how many were cut or left out."""
        left_out = 0
        cut = 0
        longest = 0
        for number in map(int, numbers):
            row = rows[number]
            demonstration = self._demonstration(path, number, row, problems, rows)
            if demonstration is None:
                continue
            tokens = len(demonstration)
            longest = max(longest, tokens)
            if tokens > self.limit and not self.config.filter_overlong_prompts:
                if self.config.truncation == "error":
                    rule = f"a demonstration is longer than {LIMIT}={self.limit}"
                    fix = "raise one, or set data.filter_overlong_prompts or data.truncation=right"
                    problems.add(path, rule, fix, number, f"{tokens} tokens")
                    continue
                demonstration = demonstration.cut(self.limit, self.config.truncation)
            if len(demonstration) > self.limit or not demonstration.mask.any():
                left_out += 1
                continue
            cut += len(demonstration) < tokens
            self._questions.setdefault(path, []).append(question_hash(self._prompt(row)))
            yield demonstration
        text = "%s: %d rows, longest demonstration %d tokens, %d left out and %d cut at %d tokens"
        log.info(text, path, len(rows), longest, left_out, cut, self.limit)
        if left_out and left_out == len(numbers):
            rule = f"all {left_out} demonstrations are longer than {LIMIT}={self.limit}"
            problems.add(path, rule, f"raise one of them: the longest has {longest}")

    def _demonstration(
        self, path: str, number: int, row: Mapping[str, Any], problems: Problems, rows: Rows
    ) -> Demonstration | None:
        """Return a row's demonstration; None where it has none, which ``problems`` then has."""
        try:
            demonstration = self._of(row, nested=isinstance(rows, TableRows))
            if not demonstration.mask.any():
                raise DemonstrationError("nothing of a row is trained on", "leave the row out")
            if demonstration.mask[0]:
                rule = "a row has no prompt, so nothing predicts its first token"
                raise DemonstrationError(rule, "give it one")
            return demonstration
        except vocabulary.ChatError as error:
            problems.add(path, "the chat template refuses a chat", CHAT_FIX, number, str(error))
        except DemonstrationError as error:
            problems.add(path, *error.args, number)
        return None

    def _of(self, row: Mapping[str, Any], *, nested: bool) -> Demonstration:
        """Read a row. With ``nested`` parquet has added fields of other rows to it."""
        config = self.config
        if IDS[0] in row:
            return self.writer.written(row[PROMPT_TEXT], row)
        arguments = {}
        if row.get(config.tools_key):
            arguments["tools"] = _tools(row[config.tools_key], config.tools_key)
        if (thinking := row.get(config.enable_thinking_key)) is not None:
            if not isinstance(thinking, bool):
                rule = f"{config.enable_thinking_key} must be true or false, not {thinking!r}"
                raise DemonstrationError(rule, "write a boolean, or leave the column out")
            arguments["enable_thinking"] = thinking
        writer = self.writer.with_arguments(**arguments)
        if config.messages_key in row:
            return writer.chat(_messages(row[config.messages_key], config.messages_key, nested))
        prompt = _value(row, config.prompt_key)
        response = _value(row, config.response_key)
        if not isinstance(prompt, str):
            prompt = _messages(prompt, config.prompt_key, nested)
        elif CHAT_AS_TEXT.match(prompt):
            rule = f"{config.prompt_key} must not be a chat that was written as text"
            raise DemonstrationError(rule, "write a list of messages")
        elif arguments:
            names = ", ".join(arguments)
            rule = f"a plain prompt goes through no chat template, which would read {names}"
            fix = "write the prompt as a list of messages, or leave the column out"
            raise DemonstrationError(rule, fix)
        if not isinstance(response, str) or not response.strip():
            rule = f"{config.response_key} must be text, and not empty"
            raise DemonstrationError(rule, "fill it or leave the row out")
        return writer.answer(prompt, response)

    def _prompt(self, row: Mapping[str, Any]) -> str | Sequence[Mapping[str, Any]]:
        """Return what stands before the first answer of a row that was read as a demonstration."""
        if IDS[0] in row:
            return row[PROMPT_TEXT]
        if self.config.messages_key not in row:
            return _value(row, self.config.prompt_key)
        messages = row[self.config.messages_key]
        return list(takewhile(lambda message: message["role"] != ASSISTANT, messages))


def _tools(value: Any, key: str) -> list[dict[str, Any]]:
    """Return schemas of tools without the fields that parquet added to them."""
    fix = "write a list of schemas, or its JSON"
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DemonstrationError(f"{key} is no JSON ({error})", fix) from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DemonstrationError(f"{key} must hold a list of schemas of tools", fix)
    return without_nulls(tools)


def _messages(value: Any, key: str, nested: bool) -> list[dict[str, Any]]:
    """Return a checked chat. ``nested``: without the fields that parquet added to its messages."""
    if not isinstance(value, list) or not value:
        rule = f"{key} must be a list of messages, and not empty"
        raise DemonstrationError(rule, "write role and content of each")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DemonstrationError(
                f"{key} must hold messages with role and content", "write both"
            )
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            rule = f"{key} must hold text (images are not supported)"
            raise DemonstrationError(rule, "make content a string")
    return [message_of(message, nested=nested) for message in value]


def _value(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of a field inside one: ``extra_info.answer``."""
    for name in key.split("."):
        row = row.get(name) if isinstance(row, Mapping) else None
    return row


# -- reading ---------------------------------------------------------------------------------------


class TableRows:
    """The rows of a parquet table. Each becomes Python objects when it is read."""

    def __init__(self, table: Any):
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return self.table.slice(number, 1).to_pylist()[0]


Rows = TableRows | list[dict[str, Any]]


def read_rows(path: str, config: DemonstrationConfig) -> Rows:
    """Return the rows of a file, with the columns of its form. Raises InputError."""
    file = Path(local_path(path, "data")).expanduser()
    if not file.is_file():
        rule = "is a folder" if file.is_dir() else "does not exist"
        raise InputError(f"{path}: the file {rule}; {FORMS}")
    is_lines = file.suffix.lower() in JSON_LINES
    rows = _read_lines(path, file, config) if is_lines else _read_table(path, file, config)
    if len(rows) == 0:
        raise InputError(f"{path}: the file has no rows; {FORMS}")
    return rows


def _read_lines(path: str, file: Path, config: DemonstrationConfig) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, without columns that nothing reads."""
    problems = Problems()
    rows = []
    for line in read_lines(path, file, {}):
        try:
            rows.append(parse_line(line))
        except LINE_ERRORS as error:
            problems.add(path, LINE_RULE, LINE_FIX, len(rows), str(error))
            rows.append({})
    problems.raise_if_any()
    if any(row.get(config.image_key) for row in rows):
        raise InputError(_pictures(path, config))
    columns = _columns(path, set().union(*rows), config) if rows else []
    return [{name: row[name] for name in columns if name in row} for row in rows]


def _read_table(path: str, file: Path, config: DemonstrationConfig) -> TableRows:
    """Return the rows of a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        names = set(table.schema_arrow.names)
        columns = _columns(path, names, config)
        image = config.image_key
        if image in names and any(table.read(columns=[image])[0].to_pylist()):
            raise InputError(_pictures(path, config))
        return TableRows(table.read(columns=columns))
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: not a readable parquet file ({error}); {FORMS}") from error


def _columns(path: str, names: Collection[str], config: DemonstrationConfig) -> list[str]:
    """Return the columns of the form that a file has. Raises InputError if it has none."""
    answer = [config.prompt_key.partition(".")[0], config.response_key.partition(".")[0]]
    forms = ([*IDS, PROMPT_TEXT], [config.messages_key], list(dict.fromkeys(answer)))
    options = [config.tools_key, config.enable_thinking_key]
    for form in forms:
        if set(form) <= set(names):
            return [*form, *(name for name in options if name in names and name not in form)]
    keys = f"data.messages_key={config.messages_key}, data.response_key={config.response_key}"
    has = ", ".join(sorted(names)) or "no column"
    rule = f"has neither chats nor answers ({keys}), only {has}"
    raise InputError(f"{path}: {rule}; name the column by its key")


def _pictures(path: str, config: DemonstrationConfig) -> str:
    rule = f"column {config.image_key!r} (data.image_key) holds pictures"
    fix = "leave the column out, or name another one"
    return f"{path}: {rule}, and fine-tuning reads text alone; {fix}"


def check_questions(config: DemonstrationConfig) -> None:
    """Raise InputError where a file of ``data.val_files`` holds demonstrations, as verl's do.

    What else is wrong with such a file is reported where it is loaded.
    """
    problems = []
    for path in config.val_files:
        try:
            ExampleFile(path, config.prompt_key, config.reward_fn_key, config.image_key)
            continue  # it holds questions
        except InputError:
            pass
        try:
            read_rows(path, config)
        except InputError:
            continue
        columns = f"{config.prompt_key} (data.prompt_key), {config.reward_fn_key}, reward_model"
        problems.append(
            f"data.val_files={path}: it holds demonstrations, whose loss verl's SFT trainers "
            f"measure, and here a validation answers questions (columns {columns}); set "
            "data.val_files=[] to train without a validation, or give files of questions"
        )
    if problems:
        raise InputError(problems)
