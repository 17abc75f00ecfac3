"""Prompt number ``ordinal`` as a pure function of the seed and the ordinal: files checked and measured when loaded.

What an example must hold is in ``core/data/parquet.py``, how it becomes ids in ``core/data/encoder.py``, which one an
ordinal draws in ``core/data/draw_order.py``. Data that reward functions make up while training runs is not supported:
an example is a function of its ordinal, and that is what makes a resumed run equal to an uninterrupted one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from core.data.draw_order import DrawOrder, permutation
from core.data.encoder import Encoder, truncate
from core.data.parquet import Example, ExampleFile, Problems
from core.data.vocabulary import ChatError
from core.errors import InputError
from core.types import Prompt
from core.vision.pictures import TEXT, MediaError, Modality

log = logging.getLogger(__name__)
SUBSET, VALIDATION = -2, -3  # keep these permutations apart from those of the order
MEASURED_TOGETHER = 512  # examples; the tokenizer spreads a batch over the cores
CHAT_FIX = "mend the roles, or set another chat template"
CUT_FIX = "set data.filter_overlong_prompts=True or data.truncation=error, or raise the limit"
# (sizes of the files) -> the numbers of the examples to take of each one
Choose = Callable[[Sequence[int]], Sequence[np.ndarray]]
ToolsOf = Callable[[Example], Sequence[Any]]  # the schemas of tools of which an example's prompt tells the policy
# Of an example that can be drawn: its row in the file, tokens of its prompt before it is cut, hashes of the question's
# content and of its name in the data (of its content where it has none)
MEASURES = [("number", np.int64), ("length", np.int64), ("content", np.uint64), ("name", np.uint64)]
Unreadable = tuple[str, str, str]  # why a prompt cannot be read: the rule, the fix, and what breaks the rule


class PromptFiles:
    """Loads files, each one once, and makes prompts of their examples. ``config`` is the ``data`` section.

    An example's ``uid`` is the name that the data gives the question, ``source/split/index``, so that runs whose
    prompts are worded differently can still be paired. Where the data gives none, it is a hash of source, prompt
    and ground truth; where the loaded files give one name to different questions, the hash is added to the name.
    Copies of an example share their uid. Lengths are those of prompts with their tools.
    """

    def __init__(self, config: Any, tokenizer: Any, modality: Modality = TEXT, tools_of: ToolsOf | None = None):
        self.config, self.tools_of = config, tools_of or (lambda _: ())
        self.limited_by = "max_prompt_length" if config.max_start_length is None else "max_start_length"
        self.limit: int = getattr(config, self.limited_by)  # tokens of a prompt
        self.encoder = Encoder(tokenizer, config.apply_chat_template_kwargs, modality)
        self.files: dict[str, ExampleFile] = {}
        self.measured: dict[str, np.ndarray] = {}  # file -> MEASURES of the examples that can be drawn, in its order
        self.first: dict[str, Example] = {}  # data source -> its first example
        self._lengths: dict[Any, int | Unreadable] = {}  # by prompt and tools, so that copies are tokenised once
        self._ambiguous: frozenset[int] = frozenset()

    def load(self, paths: Iterable[str], choose: Choose | None = None) -> None:
        """Open, check and measure the files. Raises InputError with every problem of all of them."""
        errors: list[str] = []
        for path in dict.fromkeys(paths):
            try:
                keys = self.config.prompt_key, self.config.reward_fn_key, self.config.image_key
                self.files[path] = ExampleFile(path, *keys)
            except InputError as error:
                errors += error.problems
        if errors:
            raise InputError(errors)
        problems, sizes = Problems(), [len(file) for file in self.files.values()]
        for file, numbers in zip(self.files.values(), choose(sizes) if choose else [None] * len(sizes), strict=True):
            self.measured[file.path] = self._fitting(file, self._measure(file, numbers, problems), problems)
        problems.raise_if_any()
        self._lengths.clear()
        questions = np.unique(np.concatenate(list(self.measured.values()))[["name", "content"]])
        names, counts = np.unique(questions["name"], return_counts=True)
        self._ambiguous = frozenset(names[counts > 1].tolist())

    def prompt(self, path: str, index: int, ordinal: int) -> Prompt:
        """Return the prompt of a file's ``index``-th example that can be drawn."""
        example = self.files[path].example(int(self.measured[path]["number"][index]))
        media = self.encoder.modality.read_media(example.media)
        ids = self.encoder.encode(example.prompt, self.tools_of(example), media)
        # A plain string stands in messages as what it is to a reader: the user's words.
        chat = ({"role": "user", "content": example.prompt},) if isinstance(example.prompt, str) else example.prompt
        uid = example.name or example.content_hash
        if example.name is not None and int(example.name_hash, 16) in self._ambiguous:
            uid = f"{example.name}/{example.content_hash}"
        return Prompt(
            ordinal=ordinal,
            uid=uid,
            token_ids=tuple(truncate(ids, self.limit, self.config.truncation)),
            messages=chat,
            ground_truth=example.ground_truth,
            data_source=example.data_source,
            extra_info=example.extra_info,
            style=example.style,
            media=media or None,
            opened_tag=self.encoder.opened_tag(example.prompt, ids),
        )

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt that can be drawn, as it is cut."""
        return min(self.limit, max((int(rows["length"].max(initial=0)) for rows in self.measured.values()), default=0))

    def examples(self) -> Iterator[Example]:
        """Yield every example that can be drawn, file by file."""
        for path, rows in self.measured.items():
            yield from self.files[path].examples(Problems(), rows["number"])

    def _measure(self, file: ExampleFile, numbers: np.ndarray | None, problems: Problems) -> np.ndarray:
        """Return the measures of a file's examples."""
        cuts = not self.config.filter_overlong_prompts and self.config.truncation != "error"
        found, examples = [], file.examples(problems, numbers)
        while batch := list(islice(examples, MEASURED_TOGETHER)):
            self._add_lengths(batch)
            for example in batch:
                length = self._lengths[self._key(example)]
                if isinstance(length, tuple):
                    rule, fix, value = length
                    problems.add(file.path, rule, fix, example.number, value)
                elif length == 0:
                    problems.add(file.path, "a prompt has no tokens", "leave the row out", example.number)
                elif example.media and cuts and length > self.limit:
                    rule = "a prompt with media is longer than the limit of tokens, and data.truncation would cut it"
                    problems.add(file.path, rule, CUT_FIX, example.number, f"{length} of {self.limit} tokens")
                else:
                    self.first.setdefault(example.data_source, example)
                    hashes = int(example.content_hash, 16), int(example.name_hash, 16)
                    found.append((example.number, length, *hashes))
        return np.array(found, dtype=MEASURES)

    def _key(self, example: Example) -> Any:
        return example.prompt_hash, repr(self.tools_of(example))

    def _add_lengths(self, batch: Sequence[Example]) -> None:
        """Add the length of every new prompt, or why it has none."""
        texts: dict[bool, dict[Any, str]] = {True: {}, False: {}}  # plain or not -> key -> text
        for key, example in {self._key(example): example for example in batch}.items():
            if key in self._lengths:
                continue
            tools = self.tools_of(example)
            try:
                media = self.encoder.modality.read_media(example.media, decode=True)
                if media is None:
                    text, plain = self.encoder.text(example.prompt, tools)
                    texts[plain][key] = text
                else:
                    self._lengths[key] = len(self.encoder.encode(example.prompt, tools, media))
                if role := self.encoder.dropped_role(example.prompt):
                    rule = "the chat template leaves out the text of a message"
                    self._lengths[key] = rule, CHAT_FIX, f"role {role}"
            except ChatError as error:
                self._lengths[key] = "the chat template refuses a prompt", CHAT_FIX, str(error)
            except MediaError as error:
                self._lengths[key] = error.rule, error.fix, error.value
        for plain, found in texts.items():
            encoded = self.encoder.encode_texts(list(found.values()), plain)
            for key, ids in zip(found, encoded, strict=True):
                self._lengths.setdefault(key, len(ids))

    def _fitting(self, file: ExampleFile, rows: np.ndarray, problems: Problems) -> np.ndarray:
        """Leave out what is too long, or report it, as the configuration has it; log what became of the file."""
        fits, bound = rows["length"] <= self.limit, f"data.{self.limited_by}={self.limit} tokens"
        kept = rows[fits] if self.config.filter_overlong_prompts else rows
        if self.config.filter_overlong_prompts and len(rows) and not len(kept):
            rule = f"all {len(rows)} prompts are longer than {bound}"
            problems.add(file.path, rule, f"raise it: the shortest has {rows['length'].min()}")
        elif not self.config.filter_overlong_prompts and self.config.truncation == "error":
            rule = f"a prompt is longer than {bound}"
            fix = "raise it (tools' schemas count), or set data.filter_overlong_prompts=True or data.truncation=left"
            for row in rows[~fits]:
                problems.add(file.path, rule, fix, int(row["number"]), f"{row['length']} tokens")
        parts, different = [f"{len(kept)} of {len(file)} rows"], len(np.unique(kept["content"]))
        parts += [f"{different} different questions"] if different < len(kept) else []
        parts += [f"{len(rows) - len(kept)} left out, longer than {bound}"] if len(kept) < len(rows) else []
        cut = int((kept["length"] > self.limit).sum())
        parts += [f"{cut} cut to {self.limit} tokens (data.truncation={self.config.truncation})"] if cut else []
        log.info("%s: %s, longest prompt %d tokens", file.path, ", ".join(parts), kept["length"].max(initial=0))
        return kept


class PromptStream:
    """The training prompts, in the order of drawing, without end.

    ``config`` is the ``data`` section; its own ``seed`` goes before ``seed`` (``trainer.seed``). Every example is
    checked and measured here, so bad data ends the run before a model loads; a prompt is tokenised when drawn.
    ``data.train_max_samples`` keeps that many examples of all files together, a seeded choice if ``data.shuffle``.

    ``files`` load and hold what an ordinal draws: prompts, or what a recipe trains on in their place
    (``recipes/sft/demonstrations.py``). ``modality`` is how the model reads prompts.

    Raises InputError: every problem of every file, one line a rule; or no example has media for a model that reads
    them.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        seed: int,
        files: Any = None,
        *,
        modality: Modality = TEXT,
        tools_of: ToolsOf | None = None,
    ):
        self.seed = int(seed if config.seed is None else config.seed)
        self.files = PromptFiles(config, tokenizer, modality, tools_of) if files is None else files
        paths = _paths(config.train_files, "data.train_files")
        self.files.load(paths, _training_choice(config, self.seed))
        modality.check_examples(self.files.examples(), config)
        self._paths = [path for path in paths if len(self.files.measured[path])]
        sizes = [len(self.files.measured[path]) for path in self._paths]
        self._order = DrawOrder(sizes, self.seed, bool(config.shuffle))

    def __len__(self) -> int:
        """Return the prompts in an epoch."""
        return self._order.length

    def prompt(self, ordinal: int) -> Prompt:
        """Return the prompt that is drawn at this ordinal."""
        file, index = self._order.place(ordinal)
        return self.files.prompt(self._paths[file], index, ordinal)

    def epoch(self, ordinal: int) -> int:
        """Return the epoch in which the ordinal is drawn, from 0."""
        return ordinal // len(self)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the whole batches in an epoch, which is the number of steps verl counts.

        The tail is not lost: it begins the next epoch's first batch.
        """
        return len(self) // batch_size


def load_val_prompts(
    config: Any, tokenizer: Any, modality: Modality = TEXT, tools_of: ToolsOf | None = None
) -> list[Prompt]:
    """Return the validation prompts, file by file.

    ``data.val_max_samples`` keeps that many examples of **each** file, so that a small benchmark beside a large one
    does not vanish. The choice, and the order under ``data.validation_shuffle``, follow from ``data.seed`` alone (0
    where it is null), not from ``trainer.seed``: runs with different seeds answer the same questions.

    The i-th example of the files has ordinal ``-1 - i``, whatever is left out, so its sampling seeds are those of no
    training prompt and stay the same from one validation to the next. Without ``data.val_files`` there are none.
    """
    seed, most = int(config.seed or 0), config.val_max_samples
    if not config.val_files:
        return []

    def choose(sizes: Sequence[int]) -> list[np.ndarray]:
        # Seeded by the size and not by the file's place, so a file keeps its choice when another is added.
        return [np.sort(permutation(size, seed, SUBSET, size)[:most]) for size in sizes]

    paths = dict.fromkeys(_paths(config.val_files, "data.val_files"))
    files = PromptFiles(config, tokenizer, modality, tools_of)
    files.load(paths, choose if most is not None and most > 0 else None)
    prompts, start = [], 0
    for path in paths:
        numbers = files.measured[path]["number"].tolist()
        prompts += [files.prompt(path, index, -1 - start - number) for index, number in enumerate(numbers)]
        start += len(files.files[path])
    if config.validation_shuffle:
        return [prompts[index] for index in permutation(len(prompts), seed, VALIDATION)]
    return prompts


def _training_choice(config: Any, seed: int) -> Choose | None:
    most = config.train_max_samples
    if most is None or most <= 0:
        return None

    def choose(sizes: Sequence[int]) -> list[np.ndarray]:
        total, ends = sum(sizes), np.cumsum(sizes)
        chosen = np.sort(permutation(total, seed, SUBSET)[:most] if config.shuffle else np.arange(min(most, total)))
        parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
        return [part - (end - size) for part, end, size in zip(parts, ends, sizes, strict=True)]

    return choose


def _paths(files: Any, key: str) -> tuple[str, ...]:
    paths = (files,) if isinstance(files, str) else tuple(files or ())
    if not paths:
        raise InputError([f"{key}: no file is given; give a parquet path or a list of them"])
    return tuple(str(path) for path in paths)
