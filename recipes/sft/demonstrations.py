"""Demonstrations: rows of parquet or JSON lines as token ids, and the mask of what is trained on.

A file has one of three forms, told by its columns, in this order:

* ``prompt_ids``, ``response_ids``, ``response_mask``: ids as a policy wrote them, from
  ``recipes.sft.rejection``;
* ``data.messages_key``: a chat, whose assistant turns are trained on;
* ``data.prompt_key`` and ``data.response_key``: a prompt (a chat or a plain string) and the answer
  to it.

A column ``data.tools_key`` (a list of schemas, or JSON) or ``data.enable_thinking_key`` is an
argument of the template.

A chat is rendered by the chat template and has the ids of the whole text: tokenizers with a leading
space (Llama 2) would put one before each stretch that is encoded alone. A seam that a token of the
whole reaches over stays one, as between a rollout's prompt and the policy's turn. The mask of a
turn ends with its end-of-sequence token: what the template writes behind it (a newline, mostly) no
policy ever writes. A turn whose message has ``weight`` or ``loss_mask`` 0 is not trained on. A
plain string and its answer need no template; the tokenizer's end-of-sequence token follows the
answer.

Which lines a step draws is decided in ``core/data/prompts.py``. Everything is tokenised when it is
loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from core.data import vocabulary
from core.data.encoder import Encoder
from core.data.parquet import (
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
from core.types import TrainBatch

if TYPE_CHECKING:
    from core.config.training_keys import ModelConfig
    from recipes.sft.config_schema import DemonstrationConfig

log = logging.getLogger(__name__)
IDS = ("prompt_ids", "response_ids", "response_mask")
TEXTS = "prompt"  # beside IDS: what the ids of the prompt decode to
ASSISTANT = "assistant"
FORMS = "recipes/sft/README.md has the forms of files"
# Keys by which a message is left out of the loss: OpenAI's, and those of ms-swift and axolotl
WEIGHTS = ("weight", "loss_mask", "loss", "train")


@dataclass(frozen=True, eq=False)
class Demonstration:
    """One sequence to train on.

    Shapes:
        ids   [T] int32
        mask  [T] bool   trained on; never the first token, which nothing predicts
    """

    ids: np.ndarray
    mask: np.ndarray

    @classmethod
    def of(cls, stretches: Iterable[tuple[Sequence[int], bool | Sequence[bool]]]) -> Demonstration:
        """Join stretches of ids, each trained on or not, or token by token."""
        ids, mask = [], []
        for part, trained in stretches:
            ids += part
            mask += [trained] * len(part) if isinstance(trained, bool) else trained
        return cls(np.array(ids, np.int32), np.array(mask, np.bool_))

    def cut(self, length: int, side: str = "right") -> Demonstration:
        """Return the ids cut at one side to a maximum; nothing predicts the first that is left."""
        if side != "left" or len(self) <= length:
            return Demonstration(self.ids[:length], self.mask[:length])
        return Demonstration(self.ids[-length:], np.r_[False, self.mask[-length:][1:]])

    def __len__(self) -> int:
        return len(self.ids)


def end_ids(tokenizer: Any, model: ModelConfig) -> frozenset[int]:
    """Return the ids at which an engine ends an answer of the model: the tokenizer's and its
    generation config's."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(resolve_path(model.path, weights=False))
    except OSError:  # not every model has one
        generation = None
    return vocabulary.end_ids(tokenizer, generation)


class DemonstrationError(ValueError):
    """A line that cannot be trained on; the arguments are the rule and what to do."""


class Writer:
    """Turns lines into demonstrations with one tokenizer. ``ends`` are the ids with which a model
    ends its answer."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any], ends: Collection[int]):
        self.tokenizer, self.template_kwargs, self.ends = (
            tokenizer,
            template_kwargs,
            frozenset(ends),
        )
        whole = {"add_generation_prompt": False, "continue_final_message": False}
        self.prompts, self.chats = (
            Encoder(tokenizer, template_kwargs),
            Encoder(tokenizer, {**template_kwargs, **whole}),
        )

    def with_arguments(self, **more: Any) -> Writer:
        """Return a writer whose chat template gets these too; itself without any. Raises
        DemonstrationError."""
        template = self.template_kwargs.get("chat_template") or getattr(
            self.tokenizer, "chat_template", None
        )
        if "tools" in more and "tools" not in str(template):
            rule = "a row has tools (data.tools_key), and the chat template does not write them"
            raise DemonstrationError(rule, "leave the column out, or set another chat template")
        return Writer(self.tokenizer, {**self.template_kwargs, **more}, self.ends) if more else self

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Demonstration:
        """Return a chat whose assistant turns are trained on. Raises DemonstrationError, ChatError,
        InputError."""
        turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not turns:
            raise DemonstrationError(
                "a chat has no assistant turn", "leave the row out: nothing in it is trained on"
            )
        if turns[0] == 0:
            raise DemonstrationError("a chat begins with the assistant", "put the prompt before it")
        weights = [_is_trained(message) for message in messages]
        stretches, done = [], ""
        for number in turns:
            before, after = (
                self._before(messages[:number]),
                self.chats.render(messages[: number + 1]),
            )
            asked = self.chats.render(messages[:number])
            if after.startswith(asked) and not after.startswith(before):
                opening = before.removeprefix(asked)
                rule = (
                    f"the chat template begins an answer with {opening!r}, and writes a given "
                    f"answer without it"
                )
                raise DemonstrationError(
                    rule, "put it into the answers, or set another chat template"
                )
            if not (before.startswith(done) and after.startswith(before)):
                rule = (
                    "the chat template writes earlier turns anew once others follow, so no "
                    "policy wrote these tokens"
                )
                raise DemonstrationError(
                    rule, "make a row for each assistant turn, or set another chat template"
                )
            prompt, answer = self._behind(done, before), self._behind(before, after)
            trained = self._until_its_end(answer) if weights[number] else False
            stretches += [(prompt, False), (answer, trained)]
            done = after
        return Demonstration.of(stretches)

    def answer(self, prompt: str | Sequence[Mapping[str, Any]], response: str) -> Demonstration:
        """Return a prompt and the answer to it, which ends where a model would end it."""
        if not isinstance(prompt, str):
            return self.chat([*prompt, {"role": ASSISTANT, "content": response}])
        ids = self.prompts.encode(prompt)
        answer = [*self._behind(prompt, prompt + response), self.tokenizer.eos_token_id]
        return Demonstration.of([(ids, False), (answer, True)])

    def written(self, prompt_text: str, ids: Mapping[str, Sequence]) -> Demonstration:
        """Return what a policy wrote, by its ids. Raises DemonstrationError for those of another
        tokenizer."""
        prompt, response, mask = (list(ids[name]) for name in IDS)
        if len(response) != len(mask):
            raise DemonstrationError(
                "response_ids and response_mask differ in length", "write the file anew"
            )
        if self.tokenizer.decode(prompt) != prompt_text:
            rule = (
                "prompt_ids are not those of this tokenizer: they do not decode to the column "
                "prompt"
            )
            raise DemonstrationError(
                rule, "fine-tune the model that wrote the answers, or leave the ids out"
            )
        return Demonstration.of([(prompt, False), (response, mask)])

    def _before(self, messages: Sequence[Mapping[str, Any]]) -> str:
        # Two assistant turns in a row: the second one begins as after anybody else's.
        encoder = (
            self.prompts
            if messages[-1]["role"] != ASSISTANT
            else Encoder(self.tokenizer, self._begun())
        )
        return encoder.render(messages)

    def _begun(self) -> dict[str, Any]:
        return {
            **self.prompts.template_kwargs,
            "add_generation_prompt": True,
            "continue_final_message": False,
        }

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _behind(self, before: str, after: str) -> list[int]:
        """Return the ids of what ``after`` adds to the text ``before``, as they stand behind it."""
        added = after[len(before) :]
        # Behind a seam that a token reaches over, any other text keeps the leading space away.
        contexts = [before, *(["\n", "."] if self._adds_a_space() else [])]
        for context in contexts:
            start, whole = self._encode(context), self._encode(context + added)
            if whole[: len(start)] == start:
                return whole[len(start) :]
        return self._encode(added)

    def _adds_a_space(self) -> bool:
        first = self.tokenizer.convert_ids_to_tokens(self._encode("a"))[0]
        return first.startswith("\u2581")

    def _until_its_end(self, ids: Sequence[int]) -> list[bool]:
        """Return the mask of a turn: all of it up to its last end-of-sequence token, or all where
        it has none."""
        last = max(
            (number for number, one in enumerate(ids) if one in self.ends), default=len(ids) - 1
        )
        return [number <= last for number in range(len(ids))]


class DemonstrationFiles:
    """Files of demonstrations, each checked and tokenised once: what a stream draws from in place
    of prompts.

    A demonstration may have ``data.max_prompt_length + data.max_response_length`` tokens. Longer
    ones are left out with ``data.filter_overlong_prompts``, lose their end with
    ``data.truncation=right``, their beginning with ``left``, and are refused otherwise.
    """

    def __init__(self, config: DemonstrationConfig, tokenizer: Any, ends: Collection[int]):
        self.config, self.limit = config, config.max_prompt_length + config.max_response_length
        self.writer = Writer(tokenizer, vocabulary.template_arguments(config), ends)
        self.measured: list[Demonstration] = []  # that can be drawn
        # Path -> hashes of what its demonstrations answer
        self._questions: dict[str, list[int]] = {}

    def load(self, paths: Iterable[str], choose: Choose) -> None:
        """Read, check and tokenise the files. Raises InputError with every problem of all of
        them."""
        files: list[tuple[str, Rows]] = []
        errors: list[str] = []
        for path in paths:  # one that is listed twice counts twice
            try:
                files.append((path, _read(path, self.config)))
            except InputError as error:
                errors += error.problems
        if errors:
            raise InputError(errors)
        problems, sizes = Problems(), [len(rows) for _, rows in files]
        for (path, rows), numbers in zip(files, choose(sizes), strict=True):
            self.measured += self._fitting(path, rows, numbers, problems)
        problems.raise_if_any()
        if self.measured and not any(self._is_ended(one) for one in self.measured):
            names = ", ".join(path for path, _ in files)
            ends = ", ".join(
                repr(self.writer.tokenizer.decode([one])) for one in sorted(self.writer.ends)
            )
            log.warning(
                f"{names}: no turn that is trained on ends with a token that ends an answer "
                f"({ends}), so "
                "the model would not learn to stop: let the chat template write it behind an "
                "assistant's message"
            )

    def _is_ended(self, one: Demonstration) -> bool:
        # The last token of each stretch
        last = np.flatnonzero(one.mask & ~np.r_[one.mask[1:], False])
        return bool(np.isin(one.ids[last], sorted(self.writer.ends)).any())

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

    def _prompt(self, row: Mapping[str, Any]) -> str | Sequence[Mapping[str, Any]]:
        """Return what stands before the first answer of a row that was read as a demonstration."""
        if IDS[0] in row:
            return row[TEXTS]
        if self.config.messages_key not in row:
            return _value(row, self.config.prompt_key)
        messages = row[self.config.messages_key]
        return list(takewhile(lambda message: message["role"] != ASSISTANT, messages))

    def _fitting(
        self, path: str, rows: Rows, numbers: Sequence[int], problems: Problems
    ) -> Iterator[Demonstration]:
        """Yield a file's demonstrations, within the limit; log how many were cut or left out."""
        out, cut, longest = 0, 0, 0
        for number in numbers:
            row = rows[int(number)]
            nested = isinstance(rows, TableRows)
            one = self._demonstration(path, int(number), row, problems, nested=nested)
            if one is None:
                continue
            longest = max(longest, len(one))
            if (
                len(one) > self.limit
                and not self.config.filter_overlong_prompts
                and self.config.truncation == "error"
            ):
                rule = (
                    f"a demonstration is longer than data.max_prompt_length + "
                    f"data.max_response_length={self.limit}"
                )
                fix = (
                    "raise one of them, or set data.filter_overlong_prompts=True or "
                    "data.truncation=right"
                )
                problems.add(path, rule, fix, int(number), f"{len(one)} tokens")
                continue
            kept = one.cut(self.limit, self.config.truncation)
            if len(one) > self.limit and (
                self.config.filter_overlong_prompts or not kept.mask.any()
            ):
                out += 1
                continue
            cut += len(one) > self.limit
            self._questions.setdefault(path, []).append(question_hash(self._prompt(row)))
            yield kept
        told = f"{path}: {len(rows)} rows, longest demonstration {longest} tokens"
        log.info(f"{told}, {out} left out and {cut} cut, longer than {self.limit} tokens")
        if out and out == len(numbers):
            rule = (
                f"all {out} demonstrations are longer than data.max_prompt_length + "
                f"data.max_response_length"
            )
            problems.add(
                path, f"{rule}={self.limit}", f"raise one of them: the longest has {longest}"
            )

    def _demonstration(
        self, path: str, number: int, row: Mapping[str, Any], problems: Problems, *, nested: bool
    ) -> Demonstration | None:
        try:
            found = self._of(row, nested)
            if not found.mask.any():
                raise DemonstrationError("nothing of a row is trained on", "leave the row out")
            if found.mask[0]:
                raise DemonstrationError(
                    "a row has no prompt, so nothing predicts its first token", "give it one"
                )
            return found
        except vocabulary.ChatError as error:
            problems.add(path, "the chat template refuses a chat", CHAT_FIX, number, str(error))
        except DemonstrationError as error:
            problems.add(path, *error.args, number)
        return None

    def _of(self, row: Mapping[str, Any], nested: bool) -> Demonstration:
        """Read a row. ``nested`` tells that parquet added fields of other rows to it."""
        config, arguments = self.config, {}
        if IDS[0] in row:
            return self.writer.written(row[TEXTS], row)
        if row.get(config.tools_key):
            arguments["tools"] = _tools(row[config.tools_key], config.tools_key)
        if row.get(config.enable_thinking_key) is not None:
            arguments["enable_thinking"] = row[config.enable_thinking_key]
        writer = self.writer.with_arguments(**arguments)
        if config.messages_key in row:
            return writer.chat(_messages(row[config.messages_key], config.messages_key, nested))
        prompt, response = _value(row, config.prompt_key), _value(row, config.response_key)
        if not isinstance(prompt, str):
            prompt = _messages(prompt, config.prompt_key, nested)
        if not isinstance(response, str) or not response.strip():
            raise DemonstrationError(
                f"{config.response_key} must be text, and not empty", "fill it or leave the row out"
            )
        if arguments and isinstance(prompt, str):
            rule = (
                f"a plain prompt goes through no chat template, which would read "
                f"{', '.join(arguments)}"
            )
            raise DemonstrationError(
                rule, "write the prompt as a list of messages, or leave the column out"
            )
        return writer.answer(prompt, response)


def _tools(value: Any, key: str) -> list[dict[str, Any]]:
    """Return schemas of tools without the fields that parquet added to them."""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DemonstrationError(
            f"{key} is no JSON ({error})", "write a list of schemas, or its JSON"
        ) from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DemonstrationError(
            f"{key} must hold a list of schemas of tools", "write a list of schemas, or its JSON"
        )
    return without_nulls(tools)


def _messages(value: Any, key: str, nested: bool) -> list[dict[str, Any]]:
    """Return a checked chat. ``nested``: without the fields that parquet added to its messages."""
    if not isinstance(value, list) or not value:
        raise DemonstrationError(
            f"{key} must be a list of messages, and not empty", "write role and content of each"
        )
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DemonstrationError(
                f"{key} must hold messages with role and content", "write both"
            )
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise DemonstrationError(
                f"{key} must hold text (images are not supported)", "make content a string"
            )
    return [message_of(message, nested=nested) for message in value]


def _is_trained(message: Mapping[str, Any]) -> bool:
    """Return whether a turn is trained on: the assistant's are, unless a key of theirs is 0.

    Raises DemonstrationError for a key that would train on another role, or by a part.
    """
    by_assistant = message["role"] == ASSISTANT
    values = {key: message[key] for key in WEIGHTS if message.get(key) is not None}
    for key, value in values.items():
        if value not in (0, 1):
            rule = f"{key} of a message is {value!r}, and a turn is trained on or not"
            raise DemonstrationError(rule, "set 0 or 1, or leave the key out")
        if value and not by_assistant:
            rule = f"{key} of a message of role {message['role']} is {value!r}"
            fix = "set 0 or leave the key out: only the assistant's turns are trained on"
            raise DemonstrationError(rule, fix)
    return by_assistant and all(values.values())


def _value(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of a field inside one: ``extra_info.answer``."""
    for name in key.split("."):
        row = row.get(name) if isinstance(row, Mapping) else None
    return row


class TableRows:
    """The rows of a parquet table. Each becomes Python objects when it is read."""

    def __init__(self, table: Any):
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return self.table.slice(number, 1).to_pylist()[0]


Rows = TableRows | list[dict[str, Any]]


def _read(path: str, config: DemonstrationConfig) -> Rows:
    """Return the rows of a file, with the columns of its form. Raises InputError."""
    place = Path(local_path(path, "data")).expanduser()
    if not place.is_file():
        rule = "is a folder" if place.is_dir() else "does not exist"
        raise InputError(f"{path}: the file {rule}; {FORMS}")
    is_lines = place.suffix.lower() in JSON_LINES
    rows = _read_lines(path, place, config) if is_lines else _read_table(path, place, config)
    if len(rows) == 0:
        raise InputError(f"{path}: the file has no rows; {FORMS}")
    return rows


def _read_lines(path: str, place: Path, config: DemonstrationConfig) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, without columns that nothing reads."""
    problems = Problems()
    rows = []
    for line in read_lines(path, place, {}):
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


def _read_table(path: str, place: Path, config: DemonstrationConfig) -> TableRows:
    """Return the rows of a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(place)
        names = set(file.schema_arrow.names)
        columns = _columns(path, names, config)
        image = config.image_key
        if image in names and file.read(columns=[image])[0].null_count < file.metadata.num_rows:
            raise InputError(_pictures(path, config))
        return TableRows(file.read(columns=columns))
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: not a readable parquet file ({error}); {FORMS}") from error


def _columns(path: str, names: Collection[str], config: DemonstrationConfig) -> list[str]:
    """Return the columns of the form that a file has. Raises InputError if it has none."""
    answer = [config.prompt_key.partition(".")[0], config.response_key.partition(".")[0]]
    forms = ([*IDS, TEXTS], [config.messages_key], list(dict.fromkeys(answer)))
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
    """Raise InputError where a file of ``data.val_files`` holds demonstrations, as those of verl's
    lines do."""
    problems = []
    for path in config.val_files:
        if _is_file_of_questions(path, config) or not _is_file_of_demonstrations(path, config):
            continue  # what else is wrong with it is reported where it is loaded
        columns = f"{config.prompt_key} (data.prompt_key), {config.reward_fn_key}, reward_model"
        problems.append(
            f"data.val_files={path}: it holds demonstrations, whose loss verl's SFT trainers "
            f"measure, "
            f"and here a validation answers questions (columns {columns}); set data.val_files=[] "
            f"to "
            "train without a validation, or give files of questions"
        )
    if problems:
        raise InputError(problems)


def _is_file_of_questions(path: str, config: DemonstrationConfig) -> bool:
    try:
        ExampleFile(path, config.prompt_key, config.reward_fn_key, config.image_key)
    except InputError:
        return False
    return True


def _is_file_of_demonstrations(path: str, config: DemonstrationConfig) -> bool:
    try:
        _read(path, config)
    except InputError:
        return False
    return True


def demonstration_batch(demonstrations: Sequence[Demonstration], pad_id: int) -> TrainBatch:
    """Return the demonstrations as a batch of a step, each a group of its own with the advantage 1
    at every token."""
    lengths = torch.tensor([len(one) for one in demonstrations])
    mask = torch.from_numpy(np.concatenate([one.mask for one in demonstrations]))
    return TrainBatch(lengths, pad_id).adding(
        input_ids=torch.from_numpy(np.concatenate([one.ids for one in demonstrations])),
        response_mask=mask,
        loss_mask=mask,
        group=torch.arange(len(demonstrations)),
        advantages=mask.float(),
    )
